"""A diffusion run: class-conditional or text-to-image, from scratch or from a checkpoint, on the training core."""

from collections.abc import Iterator
from typing import Any

import torch
from timm.scheduler.scheduler import Scheduler
from torch import Tensor

from zoo.data import BatchPlan
from zoo.data.classes import same_classes
from zoo.data.latents.reading import LABELS, Clean
from zoo.data.samples import seed_everything
from zoo.data.video.files import write_video
from zoo.diffusion.call import manner_of, predict
from zoo.diffusion.loading import compile_blocks
from zoo.diffusion.objectives import ALL, create_objective, each
from zoo.diffusion.preview import fixed_noise, grid_video, sample, save_grid, save_sheet
from zoo.diffusion.schedulers import scheduler_to_save
from zoo.io import write_json
from zoo.models.digests import digest_header
from zoo.models.timm.model_files import save_tensors
from zoo.train.denoising import model as models
from zoo.train.denoising.data import Samples, open_samples
from zoo.train.denoising.model import AVERAGE, PART, Wanted
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.denoising.teacher import Teacher
from zoo.train.loop import Run
from zoo.train.optim import create_schedule
from zoo.train.processes import place_of, placed
from zoo.train.settings import ScheduleSettings
from zoo.train.sharding import in_step

SAMPLES = "samples"
ADAPTERS = "adapters.safetensors"


class DiffusionRun(Run):
    """One run of `DiffusionSettings`; see `Run`. The folder gets the model and its average as folders of diffusers,
    the scheduler that samples from them, the grids and the record."""

    settings: DiffusionSettings
    metric = ("val_loss", "validation loss")
    most_clips: int | None = None  # of a data set of videos, to decode

    def set_up(self) -> None:
        settings, accelerator = self.settings, self.accelerator
        data = settings.data
        self.samples: Samples = open_samples(data, settings.run.seed, accelerator.device, self.most_clips)
        self.times = models.times_of(settings.model)
        if self.times != ALL and settings.sample.every:
            raise ValueError(
                f"the model denoises only the times {self.times[0]} to {self.times[1]}, so that it draws no samples "
                "alone: set sample.every=0, and sample both transformers with tools/sample.py"
            )
        self.objective = create_objective(settings.objective, self.times)
        self.plan = BatchPlan(
            n_images=self.samples.n_train,
            batch_size=data.batch_size,
            seed=settings.run.seed,
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            parts=settings.optim.accumulate,
        )
        self.last_step = settings.schedule.steps
        channels, *size = self.samples.shape
        classes = len(self.samples.classes) or None
        given = self.samples.beside, self.samples.sees
        wanted = Wanted(channels, channels * self.objective.outputs, tuple(size), classes, *given)
        self._check_source()
        seed_everything(settings.run.seed)
        model, host = models.start(self.model_settings, wanted)
        if settings.lora.rank:
            models.add_adapters(model, settings.lora.rank, settings.lora.alpha, settings.lora.targets)
        if settings.model.checkpointing:
            model.enable_gradient_checkpointing()
        self.model: Any = model.to(place_of(accelerator))
        self.teacher = self._teacher(host, wanted)
        self.manner = manner_of(model, self.samples.shape, self.samples.about)
        self.header = {"format": "pt"}

    def begin(self) -> None:
        times = {} if self.times == ALL else {"times": self.times}
        write_json(self.samples.about | times, self.folder / models.ABOUT)

    def _check_source(self) -> None:
        """A checkpoint of a run must have been trained on the same kind of data."""
        source, ours = self.settings.model.checkpoint, self.samples.about
        theirs = models.notes_of(source)
        if not theirs:
            return
        for key, what in (("space", "space"), ("vae", "VAE"), ("classes", "classes")):
            there, here = theirs.get(key), ours.get(key)
            if there != here and not (key == "classes" and there and here and same_classes(here, there)):
                raise ValueError(f"{source} was trained with another {what}: {there!r}, the data has {here!r}")

    def _teacher(self, host: Any, wanted: Wanted) -> Teacher | None:
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
            host = models.load_transformer(name, settings.model.part)
            models.check(host, wanted, f"the teacher {name}")
        host = placed(self.accelerator, host.eval().requires_grad_(False))
        return Teacher(host, self.model, settings.distill)

    def create_schedule(self, optimizer: torch.optim.Optimizer) -> Scheduler:
        given = self.settings.schedule
        rates = {"warmup_lr": given.warmup_lr, "min_lr": given.min_lr}
        one_step_an_epoch = ScheduleSettings(given.name, given.steps, given.warmup_steps, **rates)
        return create_schedule(optimizer, one_step_an_epoch, 1)

    def compiled(self) -> Any:
        """Block by block: one compilation serves all blocks, and grids and validation go on uncompiled."""
        all_models: list[Any] = [self.model] + ([self.teacher.model] if self.teacher else [])
        for model in all_models:
            compile_blocks(model)
        return self.wrapped

    def batches(self, first: int, last: int) -> Iterator[Clean]:
        return self.samples.train(self.plan, first, last)

    def draw(self, batch: Clean) -> tuple[Any, tuple[Tensor, Tensor]]:
        """(what `predict` takes after the model, (noise, t)) of a batch, with some conditions dropped."""
        x0, n = batch.x0, len(batch.x0)
        noise, t = torch.randn_like(x0), self.objective.draw(n, x0.device)
        condition = self._dropped(batch.condition, torch.rand(n, device=x0.device) < self.settings.data.drop)
        return (self.objective.noised(x0, noise, t), self.objective.timestep(t), condition, self.manner), (noise, t)

    def loss(self, batch: Clean) -> Tensor:
        x0, n = batch.x0, len(batch.x0)
        inputs, (noise, t) = self.draw(batch)
        with self.autocast():
            if self.teacher is None:
                output = predict(self.forward, *inputs)
            else:
                with self.teacher.listen():
                    output = predict(self.forward, *inputs)
                added = self.teacher.losses(output, x0.shape[1], lambda model: predict(model, *inputs))
        losses = self.objective.losses(output, x0, noise, t)
        total = losses.loss.mean()
        self.note("loss", losses.mse.mean(), n)
        if losses.loss is not losses.mse:
            self.note("bound", (losses.loss - losses.mse).mean(), n)
        if self.teacher is not None:
            for name, (weight, value) in added.items():
                self.note(name, value, n)
                total = total + weight * value
        return total

    def _dropped(self, condition: dict[str, Tensor], where: Tensor) -> dict[str, Tensor]:
        """The conditions with those of the samples in `where` [B] replaced by none."""
        null = self.samples.null
        dropped = {k: torch.where(each(where, v), null[k].to(v), v) for k, v in condition.items() if k in null}
        return {**condition, **dropped}

    def due(self, what: str) -> bool:
        run, sample = self.settings.run, self.settings.sample
        every = {"eval": run.eval_steps, "samples": sample.every, "checkpoint": run.checkpoint_steps}[what]
        return every > 0 and (self.step % every == 0 or self.step == self.last_step)

    @torch.no_grad()
    @torch.compiler.set_stance("force_eager")  # now and then, of other sizes: not worth a compilation
    def evaluate(self) -> dict[str, Any]:
        """The squared error of noise or velocity on validation samples, of the model and of its average, at times and
        with noise that depend on the sample's number only."""
        accelerator = self.accelerator
        row: dict[str, Any] = {}
        n = min(self.settings.data.val_images or self.samples.n_val, self.samples.n_val)
        totals = {prefix: torch.zeros(2, device=accelerator.device, dtype=torch.float64) for prefix in self._models()}
        where = accelerator.process_index, accelerator.num_processes
        share = -(-n // accelerator.num_processes)  # the largest
        before = None
        for batch in in_step(self.samples.evaluation(self.plan.part_size, *where), -(-share // self.plan.part_size)):
            new, before = batch is not before, batch
            keep = ((batch.index < n) & new).to(batch.x0.device)
            found = self._validation_errors(batch)
            for prefix, errors in found.items():
                totals[prefix] += torch.stack([errors[keep].double().sum(), keep.sum()])
        for prefix, total in totals.items():
            summed = accelerator.reduce(total, "sum")
            row[f"{prefix}val_loss"] = float(summed[0] / summed[1])
        return {**row, "val_images": n}

    def _models(self) -> dict[str, Any]:
        return {"": self.model} if self.ema is None else {"": self.model, "ema_": self.ema.module}

    def _validation_errors(self, batch: Clean) -> dict[str, Tensor]:
        x0, seed = batch.x0, self.settings.run.seed
        noise = torch.cat([fixed_noise(1, x0.shape[1:], int(i) + (seed + 1) * 10**7) for i in batch.index]).to(x0)
        # the golden ratio spreads the times of any first n samples evenly
        t = self.objective.spread((batch.index.double() * 0.6180339887498949 % 1).float()).to(x0.device)
        inputs = self.objective.noised(x0, noise, t), self.objective.timestep(t), batch.condition, self.manner
        out = {}
        for prefix, model in self._models().items():
            training = model.training
            model.eval()
            with self.autocast():
                output = predict(model, *inputs)
            model.train(training)
            out[prefix] = self.objective.losses(output, x0, noise, t).mse
        return out

    def show(self) -> None:
        """Write the grid of this step, and show it to the trackers."""
        images = self.generate(self.settings.sample.count)
        if not self.main:
            return
        file = self.folder / SAMPLES / f"step-{self.step:08d}.png"
        if images.ndim == 5:
            write_video(grid_video(images), file.with_suffix(".mp4"), self.samples.about["fps"])
            grid = save_sheet(images, file)
        else:
            grid = save_grid(images, file)
        for tracker in self.accelerator.trackers:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}  # it expects NCHW, wandb NHWC
            tracker.log_images({"samples": grid[None]}, step=self.step, **layout)

    @torch.compiler.set_stance("force_eager")
    def generate(self, n: int) -> Tensor:
        """n uint8 images [n, 3, H, W] or clips [n, 3, T, H, W] of the average of the weights, or the model if there is
        none; always the same noise and conditions."""
        settings = self.settings.sample
        device = self.accelerator.device
        model: Any = self.ema.module if self.ema else self.model
        noise = fixed_noise(n, self.samples.shape, self.settings.run.seed).to(device)
        condition = self._fixed_conditions(n)
        training = model.training
        model.eval()
        with self.autocast():
            scheduler, null = self.objective.scheduler(), self.samples.null
            x = sample(model, self.manner, scheduler, noise, condition, null, settings.steps, settings.guidance)
        model.train(training)
        return self.samples.pictures(torch.nan_to_num(x))  # a model that diverges is shown, not refused

    def _fixed_conditions(self, n: int) -> dict[str, Tensor]:
        """Every class in turn, or the prompts of the first validation samples, from the start again if they end."""
        if self.samples.classes:
            return {LABELS: torch.arange(n, device=self.accelerator.device) % len(self.samples.classes)}
        parts: list[dict[str, Tensor]] = []
        for batch in self.samples.evaluation(1, 0, 1):
            parts.append(batch.condition)
            if len(parts) == n:
                break
        turn = torch.arange(n) % len(parts)
        return {k: torch.cat([part[k] for part in parts])[turn.to(v.device)] for k, v in parts[0].items()}

    def save(self) -> str:
        settings = self.settings
        scheduler = scheduler_to_save(settings.model.checkpoint, self.objective, settings.objective)
        parts = {PART: self.model} | ({AVERAGE: self.ema.module} if self.ema else {})
        for part, model in parts.items():
            found = self.whole(model)
            if self.main:
                models.save_transformer(models.merged(found), self.folder / part, scheduler, self.step)
            if self.main and settings.lora.rank and part == PART:
                adapters = models.adapter_weights(found)
                save_tensors(adapters, digest_header(adapters, self.step), self.folder / ADAPTERS)
        mixer, name = settings.model.mixer, type(found).__name__
        return f"{name} with the mixer {mixer}" if mixer else name
