"""Device time of a call: replays of a CUDA graph over several sets of inputs, so that a call never finds its own in
cache; medians of events where a call cannot be captured."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Calls = Sequence[Callable[[], Any]]  # the same work, each on its own set of inputs
SECONDS = 0.1  # of a measurement
GRAPH_US = 4000  # a graph this long hides the microseconds between replays


class Timing(NamedTuple):
    """Microseconds of one call. timer: "graph" (device time), or "events" where a call cannot be captured.

    launched_us: median of events around calls that the host launches one by one, waits for the host included.
    """

    us: float
    timer: str
    launched_us: float


def copy_rate() -> float:
    """Bytes per second, read and written, of a device-to-device copy of 2 GiB."""
    source = torch.randint(0, 255, (2 * 2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = _event_times([lambda: target.copy_(source)] * 20)
    return 2 * source.numel() / (statistics.median(times[5:]) * 1e-6)


def measure(calls: Calls) -> Timing:
    """The time of a call in a rotation over `calls`, which must have run before."""
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
        random.graphsafe_set_state(before)  # the failed capture leaves it waiting for its end
        return Timing(estimate, "events", estimate)
    n = rounds * len(calls)
    times = _event_times([graph.replay] * (_repeats(estimate * n) + 1))[1:]
    return Timing(statistics.median(times) / n, "graph", estimate)


def peak_mib(call: Callable[[], Any]) -> float:
    """Most memory, in MiB, that a call holds beyond what was allocated before."""
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
    """A graph of `rounds` times all calls; results live until their set comes round again, in memory of their own."""
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
    """Microseconds of each call by events around it."""
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
