"""Samplers of images. Image i depends only on seed + i, not on the batch in which it is generated."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from diffusers import DiffusionPipeline, ModelMixin, SchedulerMixin
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from zoo.config import Tree
from zoo.diffusion.loading import config_of
from zoo.io import weights_hash
from zoo.models.diffusers.families import family_of
from zoo.precision import evaluating

DISABLED = (  # arguments of pipelines that are set to False, since they change the requested size or the prompts
    "use_resolution_binning",
    "clean_caption",
)
LEARNED = ("learned", "learned_range")


class Sampler(Protocol):
    """Sampler of numbered images or videos.

    fps: frame rate of videos, 0 for images.  column: kind of `labels`, "label" for classes or "text" for prompts.
    """

    fps: float
    column: str

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """Generate the samples with these numbers: uint8 images [B, 3, H, W] or videos [B, 3, T, H, W], on the CPU."""

    def labels(self, numbers: Sequence[int]) -> list[int] | list[str]:
        """Return the classes or prompts of the samples with these numbers."""

    def metadata(self) -> Tree:
        """Return everything that the samples depend on, for the metadata file."""


def batches(sampler: Sampler, count: int, size: int, rank: int = 0, world: int = 1) -> Iterator[Tensor]:
    """Generate images for `zoo.eval.fid.score`: every world-th batch of the images 0 to count - 1, for process `rank`.

    size: images per batch.
    """
    for start in list(range(0, count, size))[rank::world]:
        yield sampler(range(start, min(start + size, count)))


class ClassSampler:
    """Sampler of a class-conditional transformer (DiT) with classifier-free guidance, in pixels or in latents of a VAE.

    transformer: model of diffusers, converted or not, from x [B, C, H, W], timestep [B] and class_labels [B] to
    [B, C or 2 C, H, W].  vae: None for a model of pixels.  steps: sampling steps.  guidance: s in u + s (c - u); 1
    disables guidance.  guidance_channels: number of channels that are guided (3 of 4 in DiT's own scripts); None for
    all.  labels: random, balanced, or a list of classes that is repeated.  size: side in pixels; None for the size of
    the model.

    Raises ValueError for a resolution not divisible by the patch size and for labels that the model does not have.
    """

    fps, column = 0.0, "label"

    def __init__(
        self,
        transformer: ModelMixin,
        scheduler: SchedulerMixin,
        vae: ModelMixin | None = None,
        *,
        steps: int = 50,
        guidance: float = 1.0,
        guidance_channels: int | None = None,
        labels: str | list[int] = "random",
        seed: int = 0,
        size: int | None = None,
    ) -> None:
        self.transformer, self.scheduler, self.vae = transformer, scheduler, vae
        self.steps, self.guidance, self.seed, self.choice = steps, guidance, seed, labels
        config = transformer.config
        self.classes, self.channels = config.num_embeds_ada_norm, config.in_channels
        self.guided = self.channels if guidance_channels is None else guidance_channels
        if not 1 <= self.guided <= self.channels:
            raise ValueError(f"guidance_channels must be in [1, {self.channels}], got {guidance_channels}")
        self.check_labels()
        factor = 1 if vae is None else 2 ** (len(vae.config.block_out_channels) - 1)
        self.size = config.sample_size * factor if size is None else size
        check_resolution(self.size, config.patch_size, factor)
        self.shape: tuple[int, ...] = (self.channels, self.size // factor, self.size // factor)
        self.learned = scheduler.config.get("variance_type") in LEARNED
        if self.learned and transformer.out_channels != 2 * self.channels:
            raise ValueError(f"the model learned no variance, but the scheduler has {scheduler.config.variance_type!r}")

    def check_labels(self) -> None:
        """Raise ValueError for labels that the model does not have."""
        wrong = [x for x in self.choice if not 0 <= x < self.classes] if isinstance(self.choice, list) else []
        if wrong:
            raise ValueError(f"the model has the classes 0 to {self.classes - 1}, got the label {wrong[0]}")

    def labels(self, numbers: Sequence[int]) -> list[int]:
        if isinstance(self.choice, list):
            return [self.choice[i % len(self.choice)] for i in numbers]
        if self.choice == "balanced":
            return [i % self.classes for i in numbers]
        return [int(np.random.default_rng((self.seed, i)).integers(self.classes)) for i in numbers]

    @torch.no_grad()
    def __call__(self, numbers: Sequence[int]) -> Tensor:
        model = self.transformer
        generators = seeded(self.seed, numbers)
        shape = (len(numbers), *self.shape)
        with evaluating(model), only_own_noise(type(self.scheduler).__name__, model.device):
            x = randn_tensor(shape, generators, model.device, torch.float32)
            labels = torch.tensor(self.labels(numbers), device=model.device)
            x = self._denoise(x, lambda x, t: self._predict(x, t, labels), generators)
            return to_uint8(self._decode(x))

    def _denoise(
        self, x: Tensor, predict: Callable[[Tensor, Tensor], Tensor], generators: list[torch.Generator]
    ) -> Tensor:
        """Denoise x; arguments as in `denoise`."""
        return denoise(self.scheduler, x, self.steps, predict, generators)

    def _predict(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Compute the model output that the scheduler expects (noise or velocity), [B, C, H, W], or [B, 2 C, H, W] with
        a learned variance."""
        x = x.to(self.transformer.dtype)
        if self.guidance != 1:
            x, labels = torch.cat([x, x]), torch.cat([labels, torch.full_like(labels, self.classes)])
        found = self.transformer(x, timestep=t.expand(len(x)), **self._condition(labels)).sample.float()
        if self.guidance != 1:
            given, free = found.chunk(2)
            found = guide(given, free, self.guidance, self.guided)
        return found if self.learned else found[:, : self.channels]

    def _condition(self, labels: Tensor) -> dict[str, Tensor]:
        return {"class_labels": labels}

    def _decode(self, x: Tensor) -> Tensor:
        """Decode latents to pixels in [-1, 1]; pixels are returned unchanged."""
        if self.vae is None:
            return x
        latents = x / self.vae.config.scaling_factor + (self.vae.config.get("shift_factor") or 0.0)
        return self.vae.decode(latents.to(self.vae.dtype)).sample

    def metadata(self) -> Tree:
        return self.metadata_without_size() | {"size": self.size}

    def metadata_without_size(self) -> Tree:
        """Return everything that the images depend on except the size."""
        return {
            **describe_denoiser(self.transformer, self.scheduler),
            "vae_sha256": None if self.vae is None else weights_hash(self.vae),
            "steps": self.steps,
            "guidance": self.guidance,
            "guided_channels": f"the first {self.guided} of {self.channels}",
            "learned_variance": self.learned,
            "labels": self.choice,
        }


def guide(given: Tensor, free: Tensor, guidance: float, channels: int) -> Tensor:
    """Apply classifier-free guidance, u + s (c - u), to the first `channels` channels; the others are copied from
    `given`.

    given: c, the conditional output [B, C, ...].  free: u, the unconditional output.  guidance: s.
    """
    c, u = given[:, :channels], free[:, :channels]
    return torch.cat([u + guidance * (c - u), given[:, channels:]], dim=1)


def denoise(
    scheduler: SchedulerMixin,
    x: Tensor,
    steps: int,
    predict: Callable[[Tensor, Tensor], Tensor],
    generators: list[torch.Generator] | None = None,
) -> Tensor:
    """Denoise x [B, C, ...], drawn from a standard normal distribution, by a scheduler of diffusers.

    steps: sampling steps.  predict: function of (input, scalar timestep) that returns the model output.
    generators: one per sample, for stochastic schedulers.
    """
    scheduler.set_timesteps(steps, device=x.device)
    x = x * getattr(scheduler, "init_noise_sigma", 1.0)  # flow matching has neither this nor a scaled input
    scaled = getattr(scheduler, "scale_model_input", lambda x, t: x)
    draws = generators is not None and "generator" in inspect.signature(scheduler.step).parameters
    noise = {"generator": generators} if draws else {}
    for t in scheduler.timesteps:
        x = scheduler.step(predict(scaled(x, t), t), t, x, **noise).prev_sample
    return x


class TextSampler:
    """Sampler of a text-to-image pipeline of diffusers, converted or not. Image i has the prompt i % n.

    guidance: scale of classifier-free guidance; None for the default of the pipeline.  size: side in pixels; None for
    the default of the pipeline. Raises ValueError without prompts, for a prompt that is too long for every text
    encoder, and for a resolution that the model cannot generate.
    """

    fps, column = 0.0, "text"

    def __init__(
        self,
        pipeline: DiffusionPipeline,
        prompts: list[str],
        *,
        steps: int = 50,
        guidance: float | None = None,
        seed: int = 0,
        size: int | None = None,
    ) -> None:
        self.parameters = parameters = inspect.signature(pipeline.__call__).parameters
        if not prompts:
            raise ValueError(f"{type(pipeline).__name__} needs prompts: sample.prompts=FILE with one prompt per line")
        self.pipeline, self.prompts, self.steps, self.seed, self.size = pipeline, prompts, steps, seed, size
        self.denoiser = getattr(pipeline, "transformer", None) or pipeline.unet
        self.guidance = parameters["guidance_scale"].default if guidance is None else guidance
        self.fixed = {name: False for name in DISABLED if name in parameters}
        if size is not None:
            family = family_of(self.denoiser)
            packed = family.latent_patch if family else 1
            patch = self.denoiser.config.get("patch_size") or 1
            check_resolution(size, packed * patch, pipeline.vae_scale_factor)
        longest = parameters.get("max_sequence_length")
        check_prompts(pipeline, prompts, longest.default if longest else None)

    def labels(self, numbers: Sequence[int]) -> list[str]:
        return [self.prompts[i % len(self.prompts)] for i in numbers]

    @torch.no_grad()
    def __call__(self, numbers: Sequence[int]) -> Tensor:
        pipe = self.pipeline
        with only_own_noise(type(pipe.scheduler).__name__, pipe.device):
            found = pipe(
                prompt=self.labels(numbers),
                generator=seeded(self.seed, numbers),
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                height=self.size,
                width=self.size,
                output_type="np",
                **self.fixed,
            ).images
        return to_uint8(torch.from_numpy(np.asarray(found)).permute(0, 3, 1, 2) * 2 - 1)

    def metadata(self) -> Tree:
        return {
            **describe_denoiser(self.denoiser, self.pipeline.scheduler),
            "pipeline": type(self.pipeline).__name__,
            "steps": self.steps,
            "guidance": self.guidance,
            "fixed": self.fixed,
            "prompts": len(self.prompts),
            "prompts_sha256": hashlib.sha256("\n".join(self.prompts).encode()).hexdigest(),
            "size": self.size,
        }


def seeded(seed: int, numbers: Sequence[int]) -> list[torch.Generator]:
    """Create one CPU generator per image, so that the noise depends neither on the device nor on the batch."""
    return [torch.Generator().manual_seed(seed + int(i)) for i in numbers]


def to_uint8(x: Tensor) -> Tensor:
    """Convert pixels in [-1, 1], [B, 1 or 3, ...], to uint8 [B, 3, ...] on the CPU, rounded as in ADM.

    Raises ValueError for pixels that are infinite or not a number.
    """
    if not torch.isfinite(x).all():
        raise ValueError("the model made images that are infinite or not a number: try another precision or more steps")
    x = (x.float() * 127.5 + 128).clamp(0, 255).to(torch.uint8).cpu()
    return x.expand(-1, 3, *x.shape[2:])


def check_resolution(size: int, patch: int, factor: int = 1) -> None:
    """Raise ValueError unless `size` pixels, divided by the factor of the VAE, are a multiple of the patch size."""
    unit = patch * factor
    if size < unit or size % unit:
        why = f"the patch {patch}" + (f" of latents {factor} times smaller" if factor > 1 else "")
        raise ValueError(f"sample.size must be a positive multiple of {unit} ({why}), got {size}")


def check_prompts(pipeline: DiffusionPipeline, prompts: list[str], longest: int | None) -> None:
    """Raise ValueError for a prompt that is too long for every text encoder of the pipeline.

    longest: maximum number of tokens of text encoders other than CLIP; None for the limits of the tokenizers.
    """
    tokenizers = {n: t for n, t in pipeline.components.items() if n.startswith("tokenizer") and t is not None}
    limits = {
        name: t.model_max_length if longest is None or "CLIP" in type(t).__name__ else min(longest, t.model_max_length)
        for name, t in tokenizers.items()
    }
    for line, prompt in enumerate(prompts, start=1):
        over = {limit: len(tokenizers[n](prompt).input_ids) for n, limit in limits.items()}
        if over and all(length > limit for limit, length in over.items()):
            limit, length = max(over.items())
            raise ValueError(f"line {line} of the prompts has {length} tokens, the model reads at most {limit}")


def describe_denoiser(transformer: ModelMixin, scheduler: SchedulerMixin) -> Tree:
    """Return metadata of a transformer and its scheduler: classes, configurations, hash of the weights."""
    return {
        "model": type(transformer).__name__,
        "config": config_of(transformer),
        "sha256": weights_hash(transformer),
        "dtype": str(transformer.dtype).removeprefix("torch."),
        "scheduler": type(scheduler).__name__,
        "scheduler_config": config_of(scheduler),
    }


@contextmanager
def only_own_noise(name: str, device: torch.device) -> Iterator[None]:
    """Context that raises ValueError when noise is drawn from the global random generator."""
    states = [torch.get_rng_state]
    if device.type == "cuda":
        states.append(lambda: torch.cuda.get_rng_state(device))
    before = [state() for state in states]
    yield
    if not all(torch.equal(old, state()) for old, state in zip(before, states, strict=True)):
        raise ValueError(f"{name} uses the global random generator; results would depend on the batch size")
