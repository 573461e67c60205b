"""Device time of a call, from CUDA graph replays.

Replays rotate over several input sets, so that inputs are never in cache.
If a call cannot be captured, medians of CUDA events are used.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Calls = Sequence[Callable[[], Any]]  # the same work on different input sets
SECONDS = 0.1  # duration of a measurement
GRAPH_US = 4000  # minimum graph length, which hides the gaps between replays


class Timing(NamedTuple):
    """Microseconds of one call.

    timer: "graph" (device time), or "events" if the call cannot be captured. launched_us: median of events around calls
    launched one by one, including host time.
    """

    us: float
    timer: str
    launched_us: float


def copy_rate() -> float:
    """Return the bytes per second, read and written, of a device-to-device copy of 2 GiB."""
    source = torch.randint(0, 255, (2 * 2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = _event_times([lambda: target.copy_(source)] * 20)
    return 2 * source.numel() / (statistics.median(times[5:]) * 1e-6)


def measure(calls: Calls) -> Timing:
    """Time calls in rotation; each must have run before."""
    kept: list[Any] = [None] * len(calls)
    once = statistics.median(_event_times(calls, kept))
    estimate = statistics.median(_event_times([*calls] * _repeats(once * len(calls)), kept))
    rounds = max(1, min(60 // len(calls), round(GRAPH_US / (estimate * len(calls)))))
    random = torch.cuda.default_generators[torch.cuda.current_device()]
    before = random.clone_state()
    try:
        graph = _capture(calls, rounds, kept)
    except RuntimeError:
        torch.cuda.synchronize()
        random.graphsafe_set_state(before)  # a failed capture leaves it in capture mode
        return Timing(estimate, "events", estimate)
    n = rounds * len(calls)
    times = _event_times([graph.replay] * (_repeats(estimate * n) + 1))[1:]
    return Timing(statistics.median(times) / n, "graph", estimate)


def timed_row(calls: Calls) -> dict[str, Any]:
    """Run each call once, and return its device time, timer and peak memory as keys of a row."""
    for each in calls:
        each()
    peak, timing = peak_mib(calls[0]), measure(calls)
    times = {"us": round(timing.us, 2), "timer": timing.timer, "peak_mib": round(peak, 1)}
    return times | {"launched_us": round(timing.launched_us, 2)}


def peak_mib(call: Callable[[], Any]) -> float:
    """Return the peak memory in MiB of a call beyond what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    del out
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _repeats(us: float) -> int:
    return max(2, min(30, int(SECONDS * 1e6 / us)))


def _capture(calls: Calls, rounds: int, kept: list[Any]) -> torch.cuda.CUDAGraph:
    """Capture a graph of `rounds` times all calls; results live until their set is used again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for place, call in enumerate(calls):
            kept[place] = call()
    torch.cuda.current_stream().wait_stream(side)
    kept[:] = [None] * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for place, call in enumerate(calls):
                kept[place] = call()
    kept[:] = [None] * len(calls)
    return graph


def _event_times(calls: Calls, kept: list[Any] | None = None) -> list[float]:
    """Return microseconds of each call, from events around it."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
    torch.cuda.synchronize()
    for place, (call, (start, end)) in enumerate(zip(calls, marks, strict=True)):
        start.record()
        out = call()
        end.record()
        if kept is not None:
            kept[place % len(kept)] = out
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in marks]
