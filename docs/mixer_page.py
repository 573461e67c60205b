"""Page with all mixers, from their classes: formula, cost, order of the tokens, layout, implementation and source."""

import re

from zoo.io import markdown_table
from zoo.mixers import MIXERS, Mixer, MixerConfig

FORMS = {  # class or base class -> what computes it on CUDA in 16 bits
    "Softmax": "torch SDPA",
    "Flare": "torch SDPA",
    "Linformer": "torch SDPA",
    "Nystrom": "torch SDPA",
    "Performer": "torch, Triton",
    "Mega": "torch SDPA",
    "TwoSidedMixer": "torch",
    "MomentMixer": "torch",
    "DeltaMixer": "Triton",
    "Simplex2": "torch",
    "Taylor2": "torch",
    "Mixer": "Triton",
}
COST = re.compile(r"(?:^|[;:.] )((?:(?![;:.] ).)*?) multiplications per head")
SOURCE = re.compile(r"arXiv (\d{4}\.\d{5})")
HEAD = """# All mixers

Written by `docs/readme_tables.py` from the classes in `zoo/mixers`, whose docstrings have more. N tokens, D channels
per head, ' the transpose, phi the feature map, A = phi(Q) phi(K)'.

- Order: causal is `causal=True`, frames `causal="frame"`.
- Points: whether sets of tokens without a grid can be mixed. Shared: whether devices can share the tokens.
- Implementation: for usual two-sided calls on CUDA in 16 bits ([details](mixers.md#triton-kernels)).

Options: [mixers and hosts](mixers.md). Quality: [measurements](measurements.md).
"""


def page() -> str:
    """Make the page."""
    head = [
        "name",
        "what",
        "multiplications per head",
        "order",
        "points",
        "rotary",
        "shared",
        "implementation",
        "source",
    ]
    return f"{HEAD}\n" + "\n".join(markdown_table(head, [row(name, kind) for name, kind in MIXERS.items()])) + "\n"


def row(name: str, kind: type[Mixer]) -> list[str]:
    """Make the row of a mixer."""
    title = " ".join((kind.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")
    first = re.sub(r"([|*])", r"\\\1", title)
    links = [f"[{number}](https://arxiv.org/abs/{number})" for number in found(SOURCE, kind)]
    flags = [
        "-" if flag is False else "yes"
        for flag in (not kind.defaults.needs_grid, kind.takes_rotations, kind.shares_tokens or name == "softmax")
    ]
    form = next(FORMS[base.__name__] for base in kind.__mro__ if base.__name__ in FORMS)
    cost = found(COST, kind)[:1] or ["-"]
    return [f"`{name}`", first, *cost, order(name, kind), *flags, form, ", ".join(links) or "-"]


def text(kind: type) -> str:
    """Return the docstring on one line."""
    return " ".join((kind.__doc__ or "").split())


def found(pattern: re.Pattern[str], kind: type[Mixer]) -> list[str]:
    """Return the matches in the docstring of the class, or of its nearest base class with any."""
    everything = (
        [m.strip() for m in pattern.findall(text(base))] for base in kind.__mro__[: kind.__mro__.index(Mixer)]
    )
    return list(dict.fromkeys(next((matches for matches in everything if matches), [])))


def order(name: str, kind: type[Mixer]) -> str:
    """Return which orders of the tokens the mixer has."""
    if hasattr(kind.defaults, "activation"):  # delta rules
        return "scans, causal"
    causal = ["causal"] * (name == "softmax" or takes(name, True)) + ["frames"] * takes(name, "frame")
    return ", ".join(["two-sided", *causal])


def takes(name: str, causal: bool | str) -> bool:
    """Whether a mixer takes this value of the option `causal`."""
    try:
        MixerConfig.parse(name, {"causal": causal, "post_norm": True})
    except ValueError:
        return False
    return True
