"""A call of a few kernels is planned once. Its first run notes what it allocates and launches; every further call of
the same kind (sizes, strides, dtypes, options) repeats that for its own tensors: some allocations and one launch after
the other, with nothing computed in between.

A work function that is repeated depends on the form of its tensors alone, never on values, launches by `launch`, makes
tensors by torch.empty and takes views. What it does otherwise (a copy, a fill) is noticed: it runs as it is every time.
Alignment is part of a form up to 16 bytes, what Triton specialises on. No tensor outlives its call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNED = 16  # bytes of an address that a plan may depend on
ROOM = 512  # bytes that every buffer of the scratch memory starts on a multiple of, as torch.empty has it
MOST = 1024  # forms that are remembered
EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided)

Work = Callable[[], tuple[Tensor, ...]]
LOCAL = threading.local()


class Launch(NamedTuple):
    """One kernel: `run` with args, where places = (argument, tensor, bytes from its start) say what is an address."""

    run: Callable[..., None]
    args: list[Any]
    places: list[tuple[int, int, int]]


class Recording(NamedTuple):
    """What a call does. Its tensors are counted: inputs, then outputs, then the buffers at `offsets` of the scratch."""

    outputs: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]
    device: torch.device
    scratch: int
    offsets: list[int]
    launches: list[Launch]

    def play(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """The outputs for these inputs."""
        at = [0 if x is None else x.data_ptr() for x in inputs]
        device = self.device
        outputs = tuple(torch.empty_strided(n, s, dtype=dtype, device=device) for n, s, dtype in self.outputs)
        at += [x.data_ptr() for x in outputs]
        if self.scratch:
            scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
            start = scratch.data_ptr()
            at += [start + offset for offset in self.offsets]
        for run, args, places in self.launches:
            given = args.copy()
            for i, tensor, offset in places:
                given[i] = at[tensor] + offset
            run(*given)
        return outputs


RECORDINGS: dict[tuple, Recording | None] = {}  # None: not to be repeated


def launch(kernel: Any, programs: int | tuple[int, int], *args: Any, **options: Any) -> None:
    """Run a Triton kernel with so many programs along one axis or two, and note it where a call is recorded."""
    grid = programs if isinstance(programs, tuple) else (programs,)
    compiled = kernel[grid](*args, **options)
    recorder = getattr(LOCAL, "recorder", None)
    if recorder is not None:
        recorder.launched(kernel, compiled, grid, args, options)


def repeated(form: tuple, inputs: Sequence[Tensor | None], work: Work) -> tuple[Tensor, ...]:
    """work(), a function of `inputs` (the first is no None) that returns new tensors; `form` has all that it depends on
    beside them."""
    key = (form, *_signature(inputs))
    if key not in RECORDINGS:
        if len(RECORDINGS) >= MOST:
            RECORDINGS.clear()
        outputs, RECORDINGS[key] = _record(inputs, work)
        return outputs
    recording = RECORDINGS[key]
    return work() if recording is None else recording.play(inputs)


def _signature(inputs: Sequence[Tensor | None]) -> list:
    """What a plan may depend on, and how far inputs lie apart that share memory."""
    found: list[Any] = []
    homes: dict[int, int] = {}
    for x in inputs:
        if x is None:
            found.append(None)
            continue
        at = x.data_ptr()
        found.append((x.shape, x.stride(), x.dtype, at % ALIGNED))
        home = _home(x)
        if home in homes:
            found.append(at - homes[home])
        homes.setdefault(home, at)
    found.append(inputs[0].device)  # type: ignore[union-attr]
    return found


def _record(inputs: Sequence[Tensor | None], work: Work) -> tuple[tuple[Tensor, ...], Recording | None]:
    recorder = Recorder(inputs)
    LOCAL.recorder = recorder
    try:
        with recorder:
            outputs = work()
    finally:
        LOCAL.recorder = None
    return outputs, recorder.recording(outputs)


class Recorder(TorchDispatchMode):
    """Sees the torch operators of a work function, and the launches."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.inputs = inputs
        self.made: list[Tensor] = []  # all of them, or freed memory could come back as another tensor
        self.homes: dict[int, tuple[int, int]] = {}  # start of a memory -> (tensor, its address), of the first there
        self.launches: list[Launch] = []
        self.repeatable = True
        for i, x in enumerate(inputs):
            if x is not None:
                self.homes.setdefault(_home(x), (i, x.data_ptr()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        if func.overloadpacket in EMPTY:
            self.homes.setdefault(_home(out), (len(self.inputs) + len(self.made), out.data_ptr()))
            self.made.append(out)
        elif func._schema.is_mutable or not all(_home(x) in self.homes for x in found):
            self.repeatable = False
        return out

    def launched(
        self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]
    ) -> None:
        """Note one launch of a compiled kernel."""
        if compiled is None or not self.repeatable:
            self.repeatable = False
            return
        own = {name: value for name, value in options.items() if name in kernel.arg_names}
        bound = kernel.signature.bind(*args, **own)
        bound.apply_defaults()
        given, places = list(bound.arguments.values()), []
        for i, x in enumerate(given):
            if isinstance(x, Tensor):
                tensor, start = self.homes[_home(x)]
                places.append((i, tensor, x.data_ptr() - start))
                given[i] = 0
            elif isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x):
                self.repeatable = False
        self.launches.append(Launch(compiled[(*grid, 1, 1)[:3]], given, places))

    def recording(self, outputs: tuple[Tensor, ...]) -> Recording | None:
        """All that was noted, or None if there was something else."""
        n = len(self.inputs)
        # an output without elements has no memory to be known by, and none to be written
        numbers = [self.homes.get(_home(x), (-1, 0))[0] - n if x.numel() else None for x in outputs]
        pairs = zip(numbers, outputs, strict=True)
        own = all(i is None or (i >= 0 and x.nbytes == self.made[i].nbytes) for i, x in pairs)
        if not self.repeatable or not own:
            return None
        place = {n + i: n + j for j, i in enumerate(numbers) if i is not None}
        offsets: list[int] = []
        scratch = 0
        for i, x in enumerate(self.made):
            if i not in numbers:
                place[n + i] = n + len(outputs) + len(offsets)
                offsets.append(scratch)
                scratch += -(-x.nbytes // ROOM) * ROOM
        launches = [
            x._replace(places=[(i, place.get(tensor, tensor), offset) for i, tensor, offset in x.places])
            for x in self.launches
        ]
        made = [(x.shape, x.stride(), x.dtype) for x in outputs]
        return Recording(made, outputs[0].device, scratch, offsets, launches)


def _home(x: Tensor) -> int:
    """Where the memory of a tensor starts."""
    return x.untyped_storage().data_ptr()
