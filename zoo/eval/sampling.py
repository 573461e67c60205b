"""Sampling runs, which generate the missing images of an output on one or several processes."""

from dataclasses import asdict
from pathlib import Path

import torch
from diffusers import SchedulerMixin

from zoo.config import Tree
from zoo.diffusion.density import DensitySchedule, ScheduledSampler
from zoo.diffusion.loading import LoadedModel, compile_blocks, open_model, open_scheduler
from zoo.diffusion.samplers import ClassSampler, Sampler, TextSampler
from zoo.diffusion.video_samplers import ClassVideoSampler, VideoSampler
from zoo.eval.fid.features import processes
from zoo.eval.sample_settings import SampleOptions, SampleSettings
from zoo.eval.sample_writers import Mp4Folder, open_output
from zoo.eval.timer import Timer
from zoo.io import environment
from zoo.progress import progress

IRRELEVANT_KEYS = ("count", "batch_size", "device")  # options that do not change images


def open_sampler(options: SampleOptions, device: torch.device | str) -> Sampler:
    """Create the sampler of a model. Raises ValueError for options that do not fit the model."""
    found = open_model(options.model, options.base, options.precision, device, options.transformer_2)
    scheduler = open_scheduler(options.scheduler, options.scheduler_options, found.scheduler)
    if options.compile:
        for model in found.denoisers():
            compile_blocks(model)
    sampler = _create_sampler(options, found, scheduler)
    if options.density:
        return ScheduledSampler(sampler, DensitySchedule(found.denoisers(), scheduler, options.density))
    return sampler


def _create_sampler(options: SampleOptions, found: LoadedModel, scheduler: SchedulerMixin) -> Sampler:
    shared: Tree = {"steps": options.steps, "seed": options.seed, "size": options.size}
    if options.guidance is not None:
        shared["guidance"] = options.guidance
    sides = {"width": options.width, "frames": options.frames}
    if found.video:
        shared |= {**sides, "stream": options.stream}
        if found.pipeline is not None:
            found.pipeline.scheduler = scheduler
            return VideoSampler(found.pipeline, read_prompts(options.prompts), images=options.images, **shared)
        return ClassVideoSampler(found.transformer, scheduler, found.video, labels=options.labels, **shared)
    for key, value in {**sides, "images": options.images, "stream": options.stream}.items():
        if value:
            raise ValueError(f"sample.{key} is for videos, but {found.name} makes images")
    if found.pipeline is None:
        if options.prompts:
            raise ValueError(f"{found.name} is class-conditional: sample.prompts is for text-to-image pipelines")
        shared |= {"labels": options.labels, "guidance_channels": options.guidance_channels}
        return ClassSampler(found.transformer, scheduler, found.vae, **shared)
    if options.guidance_channels is not None:
        raise ValueError(f"sample.guidance_channels is for class-conditional models, {found.name} is none")
    found.pipeline.scheduler = scheduler
    return TextSampler(found.pipeline, read_prompts(options.prompts), **shared)


def read_prompts(file: str) -> list[str]:
    """Read the non-empty lines of a text file; none for an empty name. Raises ValueError for a missing file."""
    if not file:
        return []
    if not Path(file).is_file():
        raise ValueError(f"there is no file of prompts {file!r}")
    return [line.strip() for line in Path(file).read_text().splitlines() if line.strip()]


def run_sampling(settings: SampleSettings, command: str) -> int:
    """Generate the missing samples of `settings.out`. Returns the number of samples made by this process.

    command: command line, for the metadata. Raises ValueError for missing options, and for an existing output with
    other metadata.
    """
    options, state = settings.sample, processes()
    if not options.model or not settings.out:
        raise ValueError("missing required options sample.model=FOLDER out=SAMPLES.npz")
    output = open_output(settings.out)
    sampler = open_sampler(options, options.device or state.device)
    if sampler.fps:
        output = Mp4Folder(settings.out, sampler.fps)
    left_out = {*IRRELEVANT_KEYS, "model", "base", "transformer_2"}
    left_out |= {key for key in ("density", "stream") if not getattr(options, key)}  # earlier outputs have no such keys
    chosen = {k: v for k, v in asdict(options).items() if k not in left_out}
    more = {"model": options.model, "count": options.count, "command": command}
    metadata = {"sampling": chosen | sampler.metadata(), **more}
    output.check(metadata)
    missing = output.missing(options.count)
    state.wait_for_everyone()
    if missing and state.is_main_process:
        output.start(metadata | environment())
    state.wait_for_everyone()
    starts = range(0, len(missing), options.batch_size)
    shares = [missing[i : i + options.batch_size] for i in starts][state.process_index :: state.num_processes]
    timer = Timer(torch.device(options.device or state.device), 0)
    for numbers in progress(shares, "sampling"):
        output.write(numbers, sampler(numbers))
    made, seconds, memory = timer.interval(sum(len(numbers) for numbers in shares))
    state.wait_for_everyone()
    if state.is_main_process:
        if made:
            most = "".join(f", at most {mib} MiB of the GPU's memory" for mib in memory.values())
            print(f"{made} samples in {seconds:.1f} s, {seconds / made:.3f} s each{most}", flush=True)
        output.finish(sampler.labels(range(options.count)), sampler.column)
    return made
