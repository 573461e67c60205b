"""Diffusion runs: training of a class-conditional or text-conditional transformer on images or videos."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.conversion.distill import AttentionDistillation
from zoo.data.latents.reading import LABELS, DiffusionBatch
from zoo.data.plan import seed_everything
from zoo.data.sources import same_classes
from zoo.data.video.files import write_video
from zoo.diffusion.call import CallSpec, call_denoiser, call_spec
from zoo.diffusion.loading import AVERAGE, NOTES, TRANSFORMER, compile_blocks, notes_of
from zoo.diffusion.objectives import ALL, create_objective, expand_to
from zoo.diffusion.preview import fixed_noise, grid_video, sample, save_grid, save_sheet
from zoo.diffusion.schedulers import scheduler_to_save
from zoo.io import write_json
from zoo.models.digests import digest_header
from zoo.models.timm.model_files import save_tensors
from zoo.precision import evaluating
from zoo.train.denoising import model as models
from zoo.train.denoising.data import Samples, open_samples
from zoo.train.denoising.model import ModelRequirements
from zoo.train.denoising.settings import DenoiserSettings, DiffusionSettings, TeacherSettings
from zoo.train.distributed import build_device, pad_batches, place, plan_batches
from zoo.train.dry_run import VALIDATED, DryRun
from zoo.train.loop import TrainingRun
from zoo.train.metrics_log import Row
from zoo.train.settings import ScheduleSettings

SAMPLES = "samples"
ADAPTERS = "adapters.safetensors"


class Teacher:
    """Distillation losses against a frozen teacher: MSE of outputs and variances, distance of attention outputs.

    Both models get the same x_t, t and conditions. `AttentionDistillation` compares attention outputs; it raises
    ValueError if the student has no converted layer.
    """

    def __init__(self, model: nn.Module, student: nn.Module, settings: TeacherSettings) -> None:
        self.model, self.settings = model, settings
        self.match = AttentionDistillation(student, model) if settings.attention else None

    def record_outputs(self, which: str = "student") -> AbstractContextManager[object]:
        """Context of the forward pass of the student (or teacher), which records the attention outputs."""
        return self.match.record_outputs(which) if self.match else nullcontext()

    def losses(
        self, output: Tensor, channels: int, run: Callable[[nn.Module], Tensor]
    ) -> dict[str, tuple[float, Tensor]]:
        """Compute the losses by name, as (weight, loss), for the student's output [B, C, ...].

        channels: number of output channels of noise or velocity; the others are the variance.  run: calls a model on
        the student's inputs.
        """
        with torch.no_grad(), self.record_outputs("teacher"):
            wanted = run(self.model).float()
        output, weights = output.float(), self.settings
        found = {"distill": (weights.output, F.mse_loss(output[:, :channels], wanted[:, :channels]))}
        if output.shape[1] > channels:
            found["variance"] = weights.variance, F.mse_loss(output[:, channels:], wanted[:, channels:])
        if self.match:
            found["attention"] = weights.attention, self.match.loss()
        return {name: pair for name, pair in found.items() if pair[0]}


class ModelInputs(NamedTuple):
    """Arguments of `call_denoiser` after the model."""

    x: Tensor
    timestep: Tensor
    condition: dict[str, Tensor]
    spec: CallSpec


class DiffusionRun(TrainingRun[DiffusionBatch]):
    """A run of `DiffusionSettings`; see `TrainingRun`. Its result has val_loss.

    Writes the model and its EMA as folders of diffusers, each with a scheduler for sampling, and grids of samples.
    """

    settings: DiffusionSettings
    model_settings: DenoiserSettings
    metric = ("val_loss", "validation loss")
    most_clips: int | None = None  # maximum number of validation clips, and of training clips, to decode

    def set_up(self) -> None:
        settings, accelerator = self.settings, self.accelerator
        data = settings.data
        self.samples: Samples = open_samples(data, settings.run.seed, accelerator.device, self.most_clips)
        self.times = models.times_of(settings.model)
        if self.times != ALL and settings.sample.every:
            raise ValueError(
                f"the model denoises only the times {self.times[0]} to {self.times[1]}, so that it draws no samples "
                "alone: set sample.every=0, and sample both transformers with `zoo sample`"
            )
        self.objective = create_objective(settings.objective, self.times)
        self.plan = plan_batches(settings, accelerator, self.samples.n_train)
        rates, run = settings.schedule, settings.run
        self.last_step, self.rate_steps = rates.steps, 1  # an epoch of the schedule is a step
        limits = {"min_lr": rates.min_lr, "warmup_lr": rates.warmup_lr}
        self.rates = ScheduleSettings(rates.name, rates.steps, rates.warmup_steps, **limits)
        every = {"eval": run.eval_steps, "samples": settings.sample.every, "checkpoint": run.checkpoint_steps}
        self.every = {kind: [n] for kind, n in every.items()}
        channels, *size = self.samples.shape
        classes = len(self.samples.classes) or None
        given = self.samples.extra_channels, self.samples.image_tokens
        wanted = ModelRequirements(channels, channels * self.objective.outputs, tuple(size), classes, *given)
        self._check_source()
        seed_everything(settings.run.seed)
        model, host = models.start_transformer(self.model_settings, wanted)
        if settings.lora.rank:
            models.add_adapters(model, settings.lora.rank, settings.lora.alpha, settings.lora.targets)
        if settings.model.gradient_checkpointing:
            model.enable_gradient_checkpointing()
        self.model = model.to(build_device(accelerator))
        self.teacher = self._teacher(host, wanted)
        self.spec = call_spec(model, self.samples.shape, self.samples.metadata)
        self.header = {"format": "pt"}

    def begin(self) -> None:
        times = {} if self.times == ALL else {"times": self.times}
        write_json(self.samples.metadata | times, self.folder / NOTES)

    def _check_source(self) -> None:
        """Raise ValueError for the checkpoint of a run on another space, VAE or classes."""
        source, ours = self.settings.model.checkpoint, self.samples.metadata
        theirs = notes_of(source)
        if not theirs:
            return
        for key, what in (("space", "a different space"), ("vae", "a different VAE"), ("classes", "different classes")):
            there, here = theirs.get(key), ours.get(key)
            if there != here and not (key == "classes" and there and here and same_classes(here, there)):
                raise ValueError(f"{source} was trained with {what}: {there!r}, the data has {here!r}")

    def _teacher(self, host: nn.Module | None, wanted: ModelRequirements) -> Teacher | None:
        settings = self.settings
        name = settings.distill.teacher
        if not name:
            return None
        if name == "source":
            if not settings.model.checkpoint:
                raise ValueError("distill.teacher=source has no trained source: the run starts from random weights")
            if host is None:
                raise ValueError(
                    f"distill.teacher=source has no softmax source: {settings.model.checkpoint} is converted already; "
                    "name the teacher's run folder instead"
                )
        else:
            host = models.load_trainable(name, settings.model.subfolder)
            models.check(host, wanted, f"the teacher {name}")
        host = place(self.accelerator, host.eval().requires_grad_(False))
        return Teacher(host, self.model, settings.distill)

    def compile_blocks(self) -> None:
        """Compile block by block: one compilation serves all blocks. Sample grids and validation run uncompiled."""
        for model in [self.model] + ([self.teacher.model] if self.teacher else []):
            compile_blocks(model)

    def batches(self, first: int, last: int) -> Iterator[DiffusionBatch]:
        return self.samples.train(self.plan, first, last)

    def draw(self, batch: DiffusionBatch) -> tuple[ModelInputs, tuple[Tensor, Tensor]]:
        """Draw noise, times and dropped conditions for a batch: (inputs of the model, (noise, t))."""
        x0, n = batch.x0, len(batch.x0)
        noise, t = torch.randn_like(x0), self.objective.draw(n, x0.device)
        condition = self._dropped(batch.condition, torch.rand(n, device=x0.device) < self.settings.data.cond_dropout)
        x, timestep = self.objective.noised(x0, noise, t), self.objective.timestep(t)
        return ModelInputs(x, timestep, condition, self.spec), (noise, t)

    def loss(self, batch: DiffusionBatch) -> Tensor:
        x0, n = batch.x0, len(batch.x0)
        inputs, (noise, t) = self.draw(batch)
        with self.autocast():
            if self.teacher is None:
                output = call_denoiser(self.wrapped, *inputs)
            else:
                with self.teacher.record_outputs():
                    output = call_denoiser(self.wrapped, *inputs)
                added = self.teacher.losses(output, x0.shape[1], lambda model: call_denoiser(model, *inputs))
        losses = self.objective.losses(output, x0, noise, t)
        total = losses.loss.mean()
        self.metrics.add("loss", losses.mse.mean(), n)
        if losses.loss is not losses.mse:
            self.metrics.add("bound", (losses.loss - losses.mse).mean(), n)
        if self.teacher is not None:
            for name, (weight, value) in added.items():
                self.metrics.add(name, value, n)
                total = total + weight * value
        return total

    def _dropped(self, condition: dict[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """Replace the conditions of the samples in `where` (bool [B]) with the unconditional ones."""
        null = self.samples.unconditional
        dropped = {k: torch.where(expand_to(where, v), null[k].to(v), v) for k, v in condition.items() if k in null}
        return {**condition, **dropped}

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # rare, and with other batch sizes: not worth compiling
    def evaluate(self) -> Row:
        """Compute the MSE of noise or velocity on validation samples, for the model and its EMA. Time and noise of a
        sample depend only on its number and the seed of the run."""
        accelerator = self.accelerator
        row: Row = {}
        n = min(self.settings.data.val_images or self.samples.n_val, self.samples.n_val)
        totals = {prefix: torch.zeros(2, device=accelerator.device, dtype=torch.float64) for prefix in self._models()}
        where = accelerator.process_index, accelerator.num_processes
        share = -(-n // accelerator.num_processes)  # the largest number of samples per process
        before = None
        size = self.plan.micro_batch_size
        for batch in pad_batches(self.samples.evaluation(size, *where), -(-share // size)):
            new, before = batch is not before, batch
            keep = ((batch.index < n) & new).to(batch.x0.device)
            found = self._validation_errors(batch)
            for prefix, errors in found.items():
                totals[prefix] += torch.stack([errors[keep].double().sum(), keep.sum()])
        for prefix, total in totals.items():
            summed = accelerator.reduce(total, "sum")
            row[f"{prefix}val_loss"] = float(summed[0] / summed[1])
        return {**row, "val_images": n}

    def _models(self) -> dict[str, nn.Module]:
        return {"": self.model} if self.ema is None else {"": self.model, "ema_": self.ema.module}

    def _validation_errors(self, batch: DiffusionBatch) -> dict[str, Tensor]:
        x0, seed = batch.x0, self.settings.run.seed
        noise = torch.cat([fixed_noise(1, x0.shape[1:], int(i) + (seed + 1) * 10**7) for i in batch.index]).to(x0)
        # multiples of the golden ratio, modulo 1: the times of the first n samples are even for any n
        t = self.objective.times_at((batch.index.double() * 0.6180339887498949 % 1).float()).to(x0.device)
        x, timestep = self.objective.noised(x0, noise, t), self.objective.timestep(t)
        inputs = ModelInputs(x, timestep, batch.condition, self.spec)
        out = {}
        for prefix, model in self._models().items():
            with evaluating(model), self.autocast():
                output = call_denoiser(model, *inputs)
            out[prefix] = self.objective.losses(output, x0, noise, t).mse
        return out

    def log_samples(self) -> None:
        """Write a grid of samples of the current step, and send it to the trackers. Every process."""
        images = self.generate(self.settings.sample.count)
        if not self.main:
            return
        file = self.folder / SAMPLES / f"step-{self.step:08d}.png"
        if images.ndim == 5:
            write_video(grid_video(images), file.with_suffix(".mp4"), self.samples.metadata["fps"])
            grid = save_sheet(images, file)
        else:
            grid = save_grid(images, file)
        for tracker in self.accelerator.trackers:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}  # its default: NCHW; wandb: NHWC
            tracker.log_images({"samples": grid[None]}, step=self.step, **layout)

    @torch.compiler.set_stance("force_eager")
    def generate(self, n: int) -> Tensor:
        """Generate n uint8 images [n, 3, H, W] or clips [n, 3, T, H, W] with the weights of the EMA, or of the model if
        there is no EMA, always from the same noise and conditions."""
        settings = self.settings.sample
        device = self.accelerator.device
        model = self.ema.module if self.ema else self.model
        noise = fixed_noise(n, self.samples.shape, self.settings.run.seed).to(device)
        condition = self._fixed_conditions(n)
        with evaluating(model), self.autocast():
            scheduler, null = self.objective.scheduler(), self.samples.unconditional
            x = sample(model, self.spec, scheduler, noise, condition, null, settings.steps, settings.guidance)
        return self.samples.to_images(torch.nan_to_num(x))  # a diverging model makes NaN, which cannot be converted

    def _fixed_conditions(self, n: int) -> dict[str, Tensor]:
        """Return the conditions of n samples, which cycle over all classes or over the prompts of the first validation
        samples."""
        if self.samples.classes:
            return {LABELS: torch.arange(n, device=self.accelerator.device) % len(self.samples.classes)}
        parts = [batch.condition for batch in itertools.islice(self.samples.evaluation(1, 0, 1), n)]
        turn = torch.arange(n) % len(parts)
        return {k: torch.cat([part[k] for part in parts])[turn.to(v.device)] for k, v in parts[0].items()}

    def save(self) -> str:
        settings = self.settings
        scheduler = scheduler_to_save(settings.model.checkpoint, self.objective, settings.objective)
        parts = {TRANSFORMER: self.model} | ({AVERAGE: self.ema.module} if self.ema else {})
        for part, model in parts.items():
            found = self.unsharded(model)
            if self.main:
                models.save_transformer(models.merged(found), self.folder / part, scheduler, self.step)
            if self.main and settings.lora.rank and part == TRANSFORMER:
                adapters = models.adapter_weights(found)
                save_tensors(adapters, digest_header(adapters, self.step), self.folder / ADAPTERS)
        mixer, name = settings.model.mixer, type(found).__name__
        return f"{name} with the mixer {mixer}" if mixer else name


class DryDiffusionRun(DryRun, DiffusionRun):
    """A dry run of a diffusion run."""

    @classmethod
    def shortened(cls, settings: DiffusionSettings) -> DiffusionSettings:
        sample, alone = settings.sample, models.times_of(settings.model) == ALL
        preview = replace(sample, every=int(alone), count=min(sample.count, VALIDATED), steps=2)
        short: DiffusionSettings = super().shortened(settings)
        return replace(short, sample=preview, data=replace(short.data, val_images=VALIDATED))

    def set_up(self) -> None:
        self.most_clips = max(self.most_images(), VALIDATED)
        DiffusionRun.set_up(self)
        self.shorten()
