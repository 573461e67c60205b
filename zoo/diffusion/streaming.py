"""Generation of videos chunk by chunk of frames, with states of constant size."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import ModelMixin, SchedulerMixin
from torch import Tensor

from zoo.conversion.hooks import layers_of
from zoo.diffusion.samplers import denoise
from zoo.mixers.protocol import Mixer
from zoo.models.diffusers.models import HLADiffusionModel, patch_of

States = dict[str, Any]  # states of the operators of one mixer, by name


class FrameStream:
    """Frame-causal denoiser that continues a video: a chunk of frames reads the states that earlier chunks left.

    In a model whose attention layers all have causal="frame", a denoising step of a frame depends on earlier frames at
    the same step only. Denoising the chunks one after the other is therefore the same as denoising all frames at once.
    One set of states is stored per call of the model; memory does not grow with the number of frames.

    Raises ValueError for a model with another attention layer, and for one whose positions cannot be shifted.
    """

    def __init__(self, model: ModelMixin) -> None:
        mixers = {name: getattr(m, "mixer", None) for name, m in layers_of(model).items()}
        wrong = [name for name, m in mixers.items() if m is None or getattr(m.options, "causal", False) != "frame"]
        if not isinstance(model, HLADiffusionModel) or wrong:
            raise ValueError(
                "a stream of frames needs a mixer with causal='frame' in every attention layer (scan='frame' for delta "
                f"rules); {wrong[0]} has none"
            )
        if not model.max_stream:
            raise ValueError(f"frames of {type(model).__name__} cannot be generated one after the other")
        self.model = model
        self.mixers = [m for m in mixers.values() if isinstance(m, Mixer)]
        self.steps: dict[int, list[States]] = {}

    @property
    def nbytes(self) -> int:
        """Size of all states in bytes."""
        return sum(state.nbytes for step in self.steps.values() for states in step for state in states.values())

    @contextmanager
    def chunk(self, frame: int) -> Iterator[None]:
        """Context in which the model continues after `frame` frames of tokens: its n-th call reads and updates the
        n-th set of states."""
        calls = itertools.count()

        def begin(*_: object) -> None:
            states = self.steps.setdefault(next(calls), [{} for _ in self.mixers])
            for mixer, own in zip(self.mixers, states, strict=True):
                mixer.states = own

        hooks = [self.model.register_forward_pre_hook(begin), self.model.start_at(frame)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for mixer in self.mixers:
                mixer.states = None

    def denoise(
        self,
        scheduler: SchedulerMixin,
        x: Tensor,
        steps: int,
        chunk: int,
        predict: Callable[[Tensor, Tensor], Tensor],
        generators: list[torch.Generator] | None = None,
    ) -> Iterator[Tensor]:
        """Denoise the noise x [B, C, T, H, W] in chunks of latent frames, [B, C, t, H, W] one by one.

        chunk: latent frames per chunk, a multiple of the model's patch in time. Other arguments as in
        `zoo.diffusion.samplers.denoise`. Raises ValueError for chunks that are no whole patches, and for more
        frames than the model has positions for.
        """
        patch = patch_of(self.model.config)[0]
        if chunk % patch or x.shape[2] % patch:
            raise ValueError(f"chunks of {chunk} of {x.shape[2]} frames are no whole patches of {patch} frames")
        if x.shape[2] > self.model.max_stream * patch:
            raise ValueError(f"the model has positions for {self.model.max_stream * patch} frames, got {x.shape[2]}")
        for start in range(0, x.shape[2], chunk):
            with self.chunk(start // patch):
                done = denoise(scheduler, x[:, :, start : start + chunk], steps, predict, generators)
            yield done
