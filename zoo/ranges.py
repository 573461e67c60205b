"""Ranges of the numbers in settings, and their checks."""

import math
import re

import torch

POSITIVE = "(0, inf)"
PIXELS = "[1, 65536]"  # side of an image; Pillow fails for much larger ones
SEED = "[0, 4294967295]"  # accepted by all random generators
LARGEST = 1e18  # largest magnitude of any number, within int64 and float32


def check_ranges(section: str, settings: object, **ranges: str) -> None:
    """Raise ValueError for the first number of `settings` outside its range.

    section: prefix of the key in messages, "" for none. ranges: key -> interval such as "(0, inf)", "[0, 1)" or
    "[1, inf)", where inf stands for LARGEST. All numbers of a list must lie in the interval; None is always allowed.
    """
    for key, interval in ranges.items():
        value, name = getattr(settings, key), f"{section}.{key}" if section else key
        numbers = value if isinstance(value, list) else [value]
        for i, number in enumerate(numbers):
            if number is not None and not _inside(number, interval):
                place = f"{name}[{i}]" if isinstance(value, list) else name
                huge = LARGEST < abs(number) < math.inf
                allowed = f"at most {LARGEST:g} in size" if huge else _in_words(interval)
                raise ValueError(f"{place} must be {allowed}, got {number}")


def check_shorter(section: str, settings: object, part: str, whole: str) -> None:
    """Raise ValueError unless the number `part` of the settings is below the number `whole`."""
    low, high = getattr(settings, part), getattr(settings, whole)
    if low >= high:
        raise ValueError(f"{section}.{part} must be below {section}.{whole}, which is {high}, got {low}; set both")


def _inside(number: float, interval: str) -> bool:
    first, low, high, last = _parts(interval)
    above = number > low or (first == "[" and number == low)
    below = number < high or (last == "]" and number == high)
    return abs(number) <= LARGEST and above and below


def _in_words(interval: str) -> str:
    first, low, high, _ = _parts(interval)
    if high < math.inf:
        return f"in {interval}"
    if low == -math.inf:
        return "finite"
    if low == 0 and first == "(":
        return "a positive number"
    return f"{low:g} or more"


def _parts(interval: str) -> tuple[str, float, float, str]:
    match = re.fullmatch(r"([\[(])(\S+), (\S+)([\])])", interval)
    assert match is not None, interval
    return match[1], float(match[2]), float(match[3]), match[4]


def check_device(name: str, value: str) -> None:
    """Raise ValueError unless `value` is empty or a torch device of this machine."""
    try:
        device = torch.device(value or "cpu")
    except RuntimeError as error:
        raise ValueError(f"{name} must be a torch device such as cpu, cuda or cuda:1, got {value!r}") from error
    if device.type == "meta":
        raise ValueError(f"{name}=meta holds no values; use a device such as cpu or cuda")
    count = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type)
    if count is not None and (device.index or 0) >= count:
        raise ValueError(f"{name}={value} does not exist: this machine has {torch.cuda.device_count()} CUDA devices")
