"""Images from diffusion models, numbered: image i depends on the seed base + i alone, whatever is sampled beside it."""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from zoo.diffusion.loading import config_of
from zoo.io import weights_hash
from zoo.models.diffusers.families import family_of

UNWANTED = (  # in pipelines: another size than was asked for; prompts changed by packages that may be there or not
    "use_resolution_binning",
    "clean_caption",
)
LEARNED = ("learned", "learned_range")


class Sampler(Protocol):
    """Makes the images, or videos, of any list of numbers. fps: frames a second of videos, 0 for images.  column: what
    `labels` returns, "label" or "text"."""

    fps: float
    column: str

    def __call__(self, numbers: Sequence[int]) -> Tensor:
        """uint8 [B, 3, H, W], videos [B, 3, T, H, W], on the CPU."""
        ...

    def labels(self, numbers: Sequence[int]) -> list[int] | list[str]:
        """The classes of these images, or their prompts."""
        ...

    def about(self) -> dict[str, Any]:
        """What the images depend on, for the card."""
        ...


def batches(sampler: Sampler, count: int, size: int, rank: int = 0, world: int = 1) -> Iterator[Tensor]:
    """The live images 0 ... count - 1, in batches of `size`: the share of one process, as `score` wants it."""
    for start in list(range(0, count, size))[rank::world]:
        yield sampler(range(start, min(start + size, count)))


class ClassSampler:
    """Samples a class-conditional transformer (DiT), in pixels or in the latents of a VAE, with guidance as in DiT.

    transformer: of diffusers, converted or not: x [B, C, H, W], timestep [B], class_labels [B] -> [B, C or 2 C, H, W].
    scheduler: of diffusers.  steps: of the scheduler.  guidance: s in u + s (c - u), 1 for none.  guidance_channels:
    only these first channels are guided (DiT's own scripts: 3 of 4); None for all.  labels: random, balanced, or a list
    that is repeated.  size: pixels; None takes that of the model.

    Raises ValueError for a resolution that the patches do not divide and for labels that the model does not have.
    """

    fps, column = 0.0, "label"

    def __init__(
        self,
        transformer: Any,
        scheduler: Any,
        vae: Any = None,
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
        with _evaluating(model), only_own_noise(type(self.scheduler).__name__, model.device):
            x = randn_tensor(shape, generators, model.device, torch.float32)
            labels = torch.tensor(self.labels(numbers), device=model.device)
            x = denoise(self.scheduler, x, self.steps, lambda x, t: self._predict(x, t, labels), generators)
            return to_uint8(self._decode(x))

    def _predict(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Noise, velocity or what else the scheduler wants, [B, C, H, W]; [B, 2 C, H, W] with a learned variance."""
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
        """Pixels in -1 to 1."""
        if self.vae is None:
            return x
        latents = x / self.vae.config.scaling_factor + (self.vae.config.get("shift_factor") or 0.0)
        return self.vae.decode(latents.to(self.vae.dtype)).sample

    def about(self) -> dict[str, Any]:
        return self.described() | {"size": self.size}

    def described(self) -> dict[str, Any]:
        """What the images depend on, but the size."""
        return {
            **describe(self.transformer, self.scheduler),
            "vae_sha256": None if self.vae is None else weights_hash(self.vae),
            "steps": self.steps,
            "guidance": self.guidance,
            "guided_channels": f"the first {self.guided} of {self.channels}",
            "learned_variance": self.learned,
            "labels": self.choice,
        }


def guide(given: Tensor, free: Tensor, guidance: float, channels: int) -> Tensor:
    """Classifier-free guidance u + s (c - u) of the first `channels` of [B, C, H, W]; the others are those of `given`.

    given: c, with the condition.  free: u, without.
    """
    c, u = given[:, :channels], free[:, :channels]
    return torch.cat([u + guidance * (c - u), given[:, channels:]], dim=1)


def denoise(
    scheduler: Any,
    x: Tensor,
    steps: int,
    predict: Callable[[Tensor, Tensor], Tensor],
    generators: list[torch.Generator] | None = None,
) -> Tensor:
    """From noise x [B, C, ...] to a sample: `steps` steps of a scheduler of diffusers.

    predict: (input, time, a scalar) -> what the scheduler wants.  generators: one a sample, for schedulers that draw.
    """
    scheduler.set_timesteps(steps, device=x.device)
    x = x * getattr(scheduler, "init_noise_sigma", 1.0)  # flow matching has none, and no scaled input
    scaled = getattr(scheduler, "scale_model_input", lambda x, t: x)
    draws = generators is not None and "generator" in inspect.signature(scheduler.step).parameters
    noise = {"generator": generators} if draws else {}
    for t in scheduler.timesteps:
        x = scheduler.step(predict(scaled(x, t), t), t, x, **noise).prev_sample
    return x


class TextSampler:
    """Samples a text-to-image pipeline of diffusers, with a converted transformer or not. Prompt i % n makes image i.

    Raises ValueError for no prompts, text longer than every text encoder reads, or a resolution that does not fit.
    """

    fps, column = 0.0, "text"

    def __init__(
        self,
        pipeline: Any,
        prompts: list[str],
        *,
        steps: int = 50,
        guidance: float | None = None,
        seed: int = 0,
        size: int | None = None,
    ) -> None:
        self.parameters = parameters = inspect.signature(pipeline.__call__).parameters
        if not prompts:
            raise ValueError(f"{type(pipeline).__name__} needs prompts: sample.prompts=FILE with one a line")
        self.pipeline, self.prompts, self.steps, self.seed, self.size = pipeline, prompts, steps, seed, size
        self.denoiser = denoiser_of(pipeline)
        self.guidance = parameters["guidance_scale"].default if guidance is None else guidance
        self.fixed = {name: False for name in UNWANTED if name in parameters}
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

    def about(self) -> dict[str, Any]:
        return {
            **describe(self.denoiser, self.pipeline.scheduler),
            "pipeline": type(self.pipeline).__name__,
            "steps": self.steps,
            "guidance": self.guidance,
            "fixed": self.fixed,
            "prompts": len(self.prompts),
            "prompts_sha256": hashlib.sha256("\n".join(self.prompts).encode()).hexdigest(),
            "size": self.size,
        }


def denoiser_of(pipeline: Any) -> Any:
    """The transformer or U-Net of a pipeline of diffusers."""
    return getattr(pipeline, "transformer", None) or pipeline.unet


def seeded(seed: int, numbers: Sequence[int]) -> list[torch.Generator]:
    """One generator an image, on the CPU, so that no device and no batch changes what it gives."""
    return [torch.Generator().manual_seed(seed + int(i)) for i in numbers]


def to_uint8(x: Tensor) -> Tensor:
    """[B, 3, ...] uint8 on the CPU of pixels in -1 to 1 [B, 1 or 3, ...], rounded as in ADM.

    Raises ValueError for pixels that are infinite or not a number.
    """
    if not torch.isfinite(x).all():
        raise ValueError("the model made images that are infinite or not a number: try another precision or more steps")
    x = (x.float() * 127.5 + 128).clamp(0, 255).to(torch.uint8).cpu()
    return x.expand(-1, 3, *x.shape[2:])


def check_resolution(size: int, patch: int, factor: int = 1) -> None:
    """Raise ValueError unless images of `size` pixels are whole patches, of latents `factor` times smaller."""
    unit = patch * factor
    if size < unit or size % unit:
        why = f"the patch {patch}" + (f" of latents {factor} times smaller" if factor > 1 else "")
        raise ValueError(f"sample.size must be a positive multiple of {unit} ({why}), got {size}")


def check_prompts(pipeline: Any, prompts: list[str], longest: int | None) -> None:
    """Raise ValueError for the first text that no text encoder of the pipeline reads to its end."""
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


def describe(transformer: Any, scheduler: Any) -> dict[str, Any]:
    """Class, configuration and hash of the weights of a transformer, and the scheduler."""
    return {
        "model": type(transformer).__name__,
        "config": config_of(transformer),
        "sha256": weights_hash(transformer),
        "dtype": str(transformer.dtype).removeprefix("torch."),
        "scheduler": type(scheduler).__name__,
        "scheduler_config": config_of(scheduler),
    }


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def only_own_noise(name: str, device: torch.device) -> Iterator[None]:
    """Raise ValueError when noise is drawn inside from a generator that all images share."""
    states = [torch.get_rng_state]
    if device.type == "cuda":
        states.append(lambda: torch.cuda.get_rng_state(device))
    before = [state() for state in states]
    yield
    if not all(torch.equal(old, state()) for old, state in zip(before, states, strict=True)):
        raise ValueError(f"{name} draws noise that is not seeded an image, so that results would depend on the batch")
