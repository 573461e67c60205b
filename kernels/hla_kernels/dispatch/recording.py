"""Recording and replay of the allocations and kernel launches of a call.

The first two calls of a form (sizes, strides, dtypes, options) run the work function; the second one is recorded. All
later calls replay the recording with their own tensors: allocations and launches, with nothing computed in between.
Recording takes three times as long as a plain run, so forms that occur once are not recorded.

Requirements on a work function: it depends on the form of its tensors, never on their values; it launches kernels by
`launch`, allocates by torch.empty or torch.zeros and takes views. A work function with other operators (a copy, a fill)
is detected and always runs as it is. The alignment of addresses up to 16 bytes is part of the form, since Triton
specialises on it. A recording holds no tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Work = Callable[[], tuple[Tensor, ...]]
ALIGNED = 16  # bytes; the alignment of addresses that is part of a form
ROOM = 512  # bytes; the alignment of buffers in the scratch memory, as in torch.empty
MOST = 1024  # maximum number of recordings
EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided)
ZEROS = (torch.ops.aten.zeros, torch.ops.aten.zeros_like)

Place = tuple[int, int, int]
LOCAL = threading.local()


class Launch(NamedTuple):
    """Launch of one kernel: `run` with args.

    places: (argument, tensor, offset in bytes) for each argument that is an address. tuples: (argument, its elements,
    their places) for each tuple that contains addresses.
    """

    run: Callable[..., None]
    args: list[Any]
    places: list[Place]
    tuples: list[tuple[int, list[Any], list[Place]]]

    def given(self, at: Sequence[int]) -> list[Any]:
        """Return the arguments for tensors that start at these addresses."""
        found = _put(self.args, self.places, at)
        for i, elements, places in self.tuples:
            found[i] = tuple(_put(elements, places, at))
        return found


class Recording(NamedTuple):
    """Recorded call. Tensors are numbered: inputs, then outputs, then buffers at `offsets` of the scratch memory."""

    outputs: list[tuple[torch.Size, tuple[int, ...], torch.dtype, bool]]  # size, strides, dtype, filled with zeros
    device: torch.device
    scratch: int
    offsets: list[int]
    launches: list[Launch]

    def play(self, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Replay the call for these inputs and return its outputs."""
        at = [0 if x is None else x.data_ptr() for x in inputs]
        outputs = []
        for size, strides, dtype, zero in self.outputs:
            x = torch.empty_strided(size, strides, dtype=dtype, device=self.device)
            outputs.append(x.zero_() if zero else x)
            at.append(x.data_ptr())
        if self.scratch:
            scratch = torch.empty(self.scratch, dtype=torch.uint8, device=self.device)
            start = scratch.data_ptr()
            at += [start + offset for offset in self.offsets]
        for one in self.launches:
            one.run(*one.given(at))
        return tuple(outputs)


def _put(args: list[Any], places: list[Place], at: Sequence[int]) -> list[Any]:
    found = args.copy()
    for i, tensor, offset in places:
        found[i] = at[tensor] + offset
    return found


RECORDINGS: dict[tuple, Recording | None] = {}  # None: cannot be replayed
ONCE: set[tuple] = set()  # forms that occurred once


def launch(kernel: Any, programs: int | torch.SymInt | tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a Triton kernel on a grid of programs (int, or a tuple for several axes), and record the launch while a
    call is recorded. Multiply-adds are fused by default, independently of the Triton version."""
    grid = programs if isinstance(programs, tuple) else (programs,)
    options = {"enable_fp_fusion": True, **options}
    compiled = kernel[grid](*args, **options)
    recorder = getattr(LOCAL, "recorder", None)
    if recorder is not None:
        recorder.launched(kernel, compiled, grid, args, options)


def repeated(form: tuple, inputs: Sequence[Tensor | None], work: Work) -> tuple[Tensor, ...]:
    """Return work(), replayed from a recording from the third call of a form on.

    work: a function of `inputs` (the first one must not be None) that returns new tensors. form: everything else that
    work depends on.
    """
    key = (form, *_signature(inputs))
    recording: Recording | Literal[False] | None = RECORDINGS.get(key, False)
    if recording is not False:
        return work() if recording is None else recording.play(inputs)
    if key not in ONCE:
        if len(ONCE) >= MOST:
            ONCE.clear()
        ONCE.add(key)
        return work()
    ONCE.discard(key)
    if len(RECORDINGS) >= MOST:
        RECORDINGS.clear()
    outputs, RECORDINGS[key] = _record(inputs, work)
    return outputs


def _signature(inputs: Sequence[Tensor | None]) -> list:
    """Return everything about the inputs that a plan may depend on, including which ones share memory, and their
    distance in it."""
    found: list[Any] = []
    homes: dict[int, tuple[int, int]] = {}
    for i, x in enumerate(inputs):
        if x is None:
            found.append(None)
            continue
        at = x.data_ptr()
        found.append((x.shape, x.stride(), x.dtype, at % ALIGNED))
        if _placed(x):
            other, start = homes.setdefault(_home(x), (i, at))
            if other != i:
                found.append((other, at - start))
    first = inputs[0]
    assert first is not None
    found.append(first.device)
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
    """Records the torch operators and kernel launches of a work function."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.inputs = inputs
        self.made: list[Tensor] = []  # keeps all tensors alive, so that no address is used twice
        self.homes: dict[int, tuple[int, int]] = {}  # storage address -> (first tensor in it, its address)
        self.zeros: set[int] = set()
        self.launches: list[Launch] = []
        self.repeatable = True
        for i, x in enumerate(inputs):
            if _placed(x):
                self.homes.setdefault(_home(x), (i, x.data_ptr()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)]
        if func.overloadpacket in EMPTY or func.overloadpacket in ZEROS:
            if func.overloadpacket in ZEROS:
                self.zeros.add(len(self.made))
            if _placed(out):
                self.homes.setdefault(_home(out), (len(self.inputs) + len(self.made), out.data_ptr()))
            self.made.append(out)
        elif func._schema.is_mutable or not all(_home(x) in self.homes for x in found if _placed(x)):
            self.repeatable = False
        return out

    def launched(
        self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: tuple, options: dict[str, Any]
    ) -> None:
        """Record one launch of a compiled kernel."""
        if compiled is None or not self.repeatable:
            self.repeatable = False
            return
        own = {name: value for name, value in options.items() if name in kernel.arg_names}
        bound = kernel.signature.bind(*args, **own)
        bound.apply_defaults()
        given, tuples = list(bound.arguments.values()), []
        for i, x in enumerate(given):
            if isinstance(x, tuple) and any(isinstance(y, Tensor) for y in x):
                tuples.append((i, *self.addresses(list(x))))
                given[i] = None
        self.launches.append(Launch(compiled[(*grid, 1, 1)[:3]], *self.addresses(given), tuples))

    def addresses(self, args: list[Any]) -> tuple[list[Any], list[Place]]:
        """Return the arguments with 0 for tensors, and the places of the tensors."""
        places = []
        for i, x in enumerate(args):
            if isinstance(x, Tensor) and _placed(x):
                tensor, start = self.homes[_home(x)]
                places.append((i, tensor, x.data_ptr() - start))
        return [0 if isinstance(x, Tensor) else x for x in args], places

    def recording(self, outputs: tuple[Tensor, ...]) -> Recording | None:
        """Return the recording, or None if the call cannot be replayed."""
        n = len(self.inputs)
        numbers = [self.homes.get(_home(x), (-1, 0))[0] - n if _placed(x) else None for x in outputs]
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
        if any(i not in numbers for i in self.zeros):
            return None
        moved = [
            x._replace(places=_moved(x.places, place), tuples=[(i, xs, _moved(at, place)) for i, xs, at in x.tuples])
            for x in self.launches
        ]
        made = [(x.shape, x.stride(), x.dtype, i in self.zeros) for i, x in zip(numbers, outputs, strict=True)]
        first = self.inputs[0]
        assert first is not None
        return Recording(made, first.device, scratch, offsets, moved)


def _moved(places: list[Place], to: dict[int, int]) -> list[Place]:
    """Renumber the tensors of places for a recording."""
    return [(i, to.get(tensor, tensor), offset) for i, tensor, offset in places]


def _placed(x: Tensor | None) -> TypeGuard[Tensor]:
    """Whether there is a tensor with an address; the data_ptr of a tensor without elements is 0."""
    return x is not None and x.numel() > 0


def _home(x: Tensor) -> int:
    """Return the storage address of a tensor."""
    return x.untyped_storage().data_ptr()
