"""Loading of pipelines, transformers and schedulers from folders or the Hugging Face hub.

Both models of diffusers and converted models are supported.
"""

import difflib
import inspect
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

import diffusers
import torch
from diffusers import ConfigMixin, DiffusionPipeline, ModelMixin, SchedulerMixin
from torch import nn

from zoo.config import Tree, check_arguments
from zoo.errors import unknown_name
from zoo.models.compiling import compile_block
from zoo.models.diffusers.families import ANY_MODEL, class_named, family_of, family_of_pipeline, video_pipelines
from zoo.models.diffusers.reading import IN_A_RUN, in_run, read_config, read_folder
from zoo.precision import DTYPES

SCHEDULER_FOLDER = "scheduler"
AVERAGE, TRANSFORMER = IN_A_RUN  # folders of the EMA and of the model in a run; a pipeline has the second one, too
NOTES = "input.json"  # file in a run folder with metadata of the training data
DENOISERS = ("transformer", "transformer_2", "unet")


@dataclass
class LoadedModel:
    """A model loaded for sampling: a class-conditional transformer, or a text-conditional pipeline.

    vae: None for a model that generates pixels.  scheduler: None if unknown.  pipeline: None for a class-conditional
    model.  video: empty for image models; for a video transformer without a pipeline, the metadata of its training
    data; for a video pipeline, its class name.
    """

    name: str
    transformer: ModelMixin | None
    vae: ModelMixin | None = None
    scheduler: SchedulerMixin | None = None
    pipeline: DiffusionPipeline | None = None
    video: Tree = field(default_factory=dict)

    def denoisers(self) -> list[ModelMixin]:
        """Return the transformer (or U-Net), and the second transformer if there is one."""
        parts = self.pipeline.components if self.pipeline else {"transformer": self.transformer}
        return [parts[name] for name in DENOISERS if parts.get(name) is not None]


def open_model(
    where: str, base: str = "", precision: str = "fp32", device: torch.device | str = "cpu", second: str = ""
) -> LoadedModel:
    """Load a pipeline, a run folder or a transformer for sampling.

    base: the pipeline with the other components, for a run folder or a transformer.  second: a transformer that
    replaces the second, low-noise transformer of the pipeline (Wan 2.2 A14B).

    If a scheduler was saved with the transformer, it is used instead of the scheduler of `base`, which may belong to
    another diffusion process. Raises ValueError for models that cannot be sampled: an unknown pipeline class, a
    transformer that needs a text encoder or a VAE, a video transformer without the metadata of its run.
    """
    dtype, where = DTYPES[precision], in_run(where)
    whole = _config(where, DiffusionPipeline) is not None
    if second and boundary_of(where if whole else base) is None:
        place = where if whole else base or where
        raise ValueError(f"{place} has no second transformer: leave sample.transformer_2 out")
    parts = {"transformer_2": load_transformer(second, dtype)} if second else {}
    if whole:
        if base:
            raise ValueError(f"{where} is a pipeline; sample.base is for transformers")
        return _load_pipeline(where, dtype, device, parts)
    if _config(where, ANY_MODEL) is None:
        raise ValueError(
            f"there is no diffusion model {where!r}: expected the run folder of one, a folder of diffusers, or a hub "
            "name that can be reached"
        )
    transformer = load_transformer(where, dtype)
    if base:
        found = _load_pipeline(base, dtype, device, {"transformer": transformer} | parts)
        return replace(found, scheduler=stored_scheduler(where) or found.scheduler)
    name, family = type(transformer).__name__, family_of(transformer)
    if family is not None and family.class_tokens:
        video = _notes(where, name)
        return LoadedModel(name, transformer.to(device), scheduler=stored_scheduler(where), video=video)
    if family is None or not family.classes:
        raise ValueError(f"{name} needs the rest of its pipeline: give it with sample.base=PIPELINE")
    if transformer.config["in_channels"] not in (1, 3):
        channels = transformer.config["in_channels"]
        raise ValueError(f"{where} makes latents of {channels} channels: give the pipeline with its VAE as sample.base")
    return LoadedModel(name, transformer.to(device), scheduler=stored_scheduler(where))


def load_transformer(
    where: str | Path, dtype: torch.dtype = torch.float32, part: str = TRANSFORMER
) -> ModelMixin:
    """Load a transformer from a folder (of the transformer, a run or a pipeline) or from the Hugging Face hub.

    part: component of a pipeline. The EMA weights of a run are loaded if there are any, and a line is printed. Raises
    ValueError if there is no transformer, and for a class that is neither of diffusers nor converted.
    """
    place, config = str(where), None
    inside: dict[str, str] = {}
    if os.path.isdir(place):
        own = in_run(place) if part == TRANSFORMER else place
        place = own if os.path.isfile(os.path.join(own, "config.json")) else os.path.join(own, part)
        if not os.path.isfile(os.path.join(place, "config.json")):
            raise ValueError(f"{where} holds no transformer: expected config.json of diffusers or a folder {part}")
    config = _config(place, ANY_MODEL)
    if config is None and not os.path.isdir(place):  # a pipeline on the hub
        inside = {"subfolder": part}
        config = _config(place, ANY_MODEL, **inside)
    if config is None:
        raise ValueError(f"there is no checkpoint {where}: expected a folder of diffusers or a hub name in reach")
    name = config.get("_class_name", "")
    kind = class_named(name) or getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ModelMixin)):
        raise unknown_name("model class", name, _classes(ModelMixin, "Transformer2DModel"))
    if "3D" in name and class_named(name) is None:
        raise _unknown_video_model(name)
    return read_folder(kind, place, **inside, dtype=dtype)


def notes_of(checkpoint: str) -> Tree:
    """Read the metadata of the training data of a run folder, or of the folder of a transformer in it; empty for other
    checkpoints."""
    source = Path(checkpoint)
    file = next((f / NOTES for f in (source, source.parent) if checkpoint and (f / NOTES).is_file()), None)
    return json.loads(file.read_text()) if file else {}


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of a transformer in place. Blocks of the same class share a compilation.

    Raises ValueError for a model without lists of blocks.
    """
    blocks = [block for part in model.children() if isinstance(part, nn.ModuleList) for block in part]
    if not blocks:
        raise ValueError(f"sample.compile compiles blocks, and {type(model).__name__} has no list of them")
    for block in blocks:
        compile_block(block)


def _load_pipeline(
    where: str, dtype: torch.dtype, device: torch.device | str, parts: dict[str, ModelMixin]
) -> LoadedModel:
    config = _config(where, DiffusionPipeline)
    if config is None:
        raise ValueError(f"there is no pipeline {where!r}: expected a folder (or hub name) with model_index.json")
    name = config.get("_class_name", "")
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, DiffusionPipeline)):
        raise unknown_name("pipeline class", name, _classes(DiffusionPipeline, "Pipeline", near=name))
    _check_kind(kind)
    video = "num_frames" in inspect.signature(kind.__call__).parameters
    # not DiffusionPipeline, which in diffusers 0.42 ignores given components that are optional (Wan's transformer)
    family = family_of_pipeline(name)
    dtypes = {"vae": family.vae_dtype, "default": dtype} if family and family.vae_dtype else dtype
    pipe = read_folder(kind, where, dtype=dtypes, **parts).to(device)
    pipe.set_progress_bar_config(disable=True)
    if not {"transformer", "unet"} & set(pipe.components):
        raise ValueError(f"{name} has neither a transformer nor a U-Net, so it cannot be sampled here")
    classes = "class_labels" in inspect.signature(kind.__call__).parameters
    transformer = getattr(pipe, "transformer", None)
    notes = {"pipeline": name} if video else {}
    return LoadedModel(name, transformer, getattr(pipe, "vae", None), pipe.scheduler, None if classes else pipe, notes)


def _notes(where: str, name: str) -> Tree:
    """Read the metadata of a video transformer without a pipeline. Raises ValueError if it was not trained on
    classes."""
    notes = notes_of(where)
    if not notes.get("classes"):
        file = Path(where).parent / NOTES
        why = "it was trained on prompts" if notes else f"there is no {file} of the run that trained it on classes"
        raise ValueError(f"{name} needs the rest of its pipeline ({why}): give it with sample.base=PIPELINE")
    return notes


def _check_kind(kind: type[DiffusionPipeline]) -> None:
    """Raise ValueError for a pipeline class that cannot be sampled."""
    wanted, family = inspect.signature(kind.__call__).parameters, family_of_pipeline(kind.__name__)
    if family is None and {"video_length", "num_frames"} & set(wanted):
        raise _unknown_video_model(kind.__name__)
    if not {"class_labels", "prompt"} & set(wanted):
        raise ValueError(f"{kind.__name__} takes neither class labels nor a prompt, so it cannot be sampled here")
    if "image" in wanted and (family is None or kind.__name__ != family.first_frame):
        raise ValueError(f"{kind.__name__} changes an image that it is given, so it cannot be sampled here")


def _unknown_video_model(name: str) -> ValueError:
    return ValueError(f"{name} makes videos, and only {', '.join(video_pipelines())} can be sampled here")


def _config(where: str, kind: type[ConfigMixin], **place: str) -> Tree | None:
    """Read the configuration of a pipeline, model or scheduler in a folder or on the hub; None if there is none."""
    if not os.path.isdir(where) and (where.count("/") != 1 or where.startswith((".", "/"))):
        return None
    return read_config(kind, where, **place)


def _classes(base: type, ending: str, near: str = "") -> list[str]:
    """Return the names of diffusers' classes with this ending. near: return only the five names most similar to this
    one."""
    names = [n for n in dir(diffusers) if n.endswith(ending)]
    return difflib.get_close_matches(near, names, n=5, cutoff=0) if near else names


def boundary_of(where: str) -> float | None:
    """Return the time, between 0 (data) and 1 (noise), below which a two-expert pipeline (Wan 2.2 A14B) uses
    `transformer_2`; None for other models."""
    config = _config(where, DiffusionPipeline) or {}
    two = (config.get("transformer_2") or [None])[0] is not None
    return config.get("boundary_ratio") if two else None


# Schedulers


def stored_scheduler(where: str) -> SchedulerMixin | None:
    """Load the scheduler from the folder (or hub repository) of a model or pipeline; None if there is none. Raises
    ValueError for a class that diffusers does not have."""
    config = _config(where, diffusers.DDPMScheduler, subfolder=SCHEDULER_FOLDER)
    return None if config is None else _scheduler_class(config["_class_name"]).from_config(config)


def _scheduler_class(name: str) -> type[SchedulerMixin]:
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, SchedulerMixin) and hasattr(kind, "step")):
        raise unknown_name("scheduler", name, [n for n in dir(diffusers) if n.endswith("Scheduler")])
    return kind


def open_scheduler(name: str, options: Tree, own: SchedulerMixin | None) -> SchedulerMixin:
    """Create a scheduler for sampling.

    name: class name of diffusers; empty for the model's own scheduler.  options: changes of its configuration.
    own: the model's own scheduler, None if unknown. Raises ValueError for unknown names and options, and for a
    scheduler that diffusers does not list as compatible with `own`.
    """
    if not name and own is None:
        raise ValueError("the model has no scheduler: set sample.scheduler to the one it was trained with")
    kind: type[SchedulerMixin] = _scheduler_class(name) if name else type(own)
    known = [p for p in inspect.signature(kind.__init__).parameters if p != "self"]
    for key in options:
        if key not in known:
            raise unknown_name(f"option of {kind.__name__}", key, known)
    check_arguments(kind.__init__, options, "sample.scheduler_options")
    if own is None:
        return kind(**options)
    fitting = {type(own).__name__, *(c.__name__ for c in own.compatibles)}
    if type(own).__name__.startswith("FlowMatch"):
        fitting |= {n for n in dir(diffusers) if n.startswith("FlowMatch") and n.endswith("Scheduler")}
    if kind.__name__ not in fitting:
        raise ValueError(
            f"{kind.__name__} cannot sample a model of {type(own).__name__}; allowed: {', '.join(sorted(fitting))}"
        )
    return kind.from_config(own.config, **options)


def config_of(part: ConfigMixin) -> Tree:
    """Return the configuration of a diffusers object as JSON values, without private entries."""
    found = {k: v for k, v in dict(part.config).items() if not k.startswith("_")}
    return json.loads(json.dumps(found, default=str))
