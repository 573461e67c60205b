"""Converted diffusers models, which set the token grid of their layers and are saved with mixers.

The class of a converted model is a subclass of the host's class. Its config has one more entry, `conversions`, from
which `from_config` and `from_pretrained` rebuild the mixers. The classes are attributes of the module `zoo`, which
`model_index.json` names.

The grid is set before each forward pass. Gradient checkpointing restores the grid of the forward pass before
recomputation, so that gradients are exact even if one backward pass covers several resolutions.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import FrozenDict
from diffusers.loaders import PeftAdapterMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from zoo.grid import Grid, integers
from zoo.models import Conversion
from zoo.models.checkpoint_tags import match_checkpoint, temporary_tags
from zoo.models.convert import apply_conversions
from zoo.models.diffusers.attention import DiffusionSite
from zoo.models.diffusers.parallel import check_parallelism, share_tokens
from zoo.models.model_card import write_card
from zoo.models.stored_options import restored_conversions
from zoo.models.timm.attention import Host

if TYPE_CHECKING:
    from diffusers import ContextParallelConfig, ParallelConfig

HUB_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def set_layout(module: nn.Module, grid: Grid | None, prefix: int = 0) -> None:
    """Set the token layout of each site in `module`: `prefix` text tokens, then the tokens of `grid` (None: unknown).

    Only sites whose mixer needs the grid get it, so that the other blocks are compiled once for all resolutions.
    """
    grid = grid and integers(grid)
    for site in module.modules():
        if isinstance(site, DiffusionSite):
            site.grid, site.prefix = (grid if site.needs_grid else None), prefix


Outputs = Tensor | tuple[Tensor, ...]  # outputs of a block
Checkpoint = Callable[..., Outputs]  # checkpoint(block, *args)


def checkpoint_block(block: Callable[..., Outputs], *args: object) -> Outputs:
    """Run `block(*args)` and recompute it in the backward pass."""
    return checkpoint(block, *args, use_reentrant=False)


def checkpoint_with_grid(run: Checkpoint, block: nn.Module, *args: object) -> Outputs:
    """Call the checkpointing function `run(block, *args)`; recomputation uses the token layout of this call."""
    if torch.compiler.is_compiling():  # the graph contains the layout and cannot set attributes here
        return run(block, *args)
    layouts = [(m, m.grid, m.prefix) for m in block.modules() if isinstance(m, DiffusionSite)]

    def with_layout(*args: object) -> Outputs:
        for site, grid, prefix in layouts:
            site.grid, site.prefix = grid, prefix
        return block(*args)

    return run(with_layout, *args)


class HLADiffusionModel(PeftAdapterMixin, Host):
    """Mixin of a converted model: token grid, gradient checkpointing, configuration, loading.

    hla_config: all conversions of the model, as arguments of `zoo.convert`; `config.conversions` is the shortest list
        with the same result.
    from_softmax: whether the last loaded state dict held weights of the host, without mixers.
    host: class in diffusers. splits_tokens: whether its context parallelism splits the image tokens only.
    argument_names: names of the arguments of a forward pass.
    max_stream: greatest number of frames of tokens that can be generated one after the other (`start_at`).
    """

    host: ClassVar[type[ModelMixin]]
    grid_dims: ClassVar[int] = 2
    splits_tokens: ClassVar[bool] = False
    argument_names: ClassVar[tuple[str, ...]]
    hla_config: list[Conversion]
    from_softmax: bool = False
    _skip_layerwise_casting_patterns: ClassVar[list[str]]
    _repeated_blocks: ClassVar[list[str]]

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        cls.__module__ = "zoo"
        cls.argument_names = tuple(inspect.signature(cls.host.forward).parameters)[1:]
        cls._skip_layerwise_casting_patterns = [*(cls.host._skip_layerwise_casting_patterns or ()), "mixer"]
        initialise, forward = cls.__init__, cls.forward

        @functools.wraps(cls.host.__init__)
        def __init__(self, *args: object, conversions: Sequence[Conversion] = (), **kwargs: object) -> None:
            initialise(self, *args, conversions=conversions, **kwargs)

        own = inspect.Parameter("conversions", inspect.Parameter.KEYWORD_ONLY, default=())
        names = inspect.signature(cls.host.__init__)
        __init__.__signature__ = names.replace(parameters=[*names.parameters.values(), own])  # type: ignore[attr-defined]

        @functools.wraps(cls.host.forward)
        def host_signature(self, *args: object, **kwargs: object) -> Any:
            return forward(self, *args, **kwargs)

        cls.__init__, cls.forward = __init__, host_signature  # type: ignore[method-assign]

    def __init__(self, *args: object, conversions: Sequence[Conversion] = (), **kwargs: object) -> None:
        """Build the host from its arguments and apply the conversions. Raises ValueError like `zoo.convert`."""
        super().__init__(*args, **kwargs)
        self.hla_config = []
        self.register_to_config(conversions=[])
        if conversions:
            apply_conversions(self, conversions)

    @classmethod
    def load_config(cls, *args: object, **kwargs: object) -> Any:
        """Load a stored configuration as diffusers does, and add the options that earlier versions did not store."""
        loaded = super().load_config(*args, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        if isinstance(config, dict) and "conversions" in config:
            config["conversions"] = restored_conversions(config["conversions"])
        return loaded

    @classmethod
    def from_pretrained(
        cls, path: str | PathLike, *, conversions: Sequence[Conversion] | None = None, **kwargs: object
    ) -> Self:
        """Load a converted model; with `conversions`, load a model of the host's class and convert it.

        Raises ValueError for a model of another class, an unconverted one without `conversions`, and a converted one
        with them.
        """
        config = cls.load_config(path, **{k: v for k, v in kwargs.items() if k in HUB_KEYWORDS})
        found = config.get("_class_name")
        if found not in (None, cls.__name__, cls.host.__name__):
            raise ValueError(f"{path} holds a {found}, which {cls.__name__} cannot load")
        if "conversions" in config:
            if conversions is not None:
                raise ValueError(f"{path} is converted already; load it as it is and call zoo.convert on the model")
            return super().from_pretrained(path, **kwargs)
        if not conversions:
            raise ValueError(
                f"{path} holds a {found} without mixers: give conversions, such as "
                'conversions=[{"mixer": "multipole"}]'
            )
        model = cls.host.from_pretrained(path, **kwargs)
        apply_conversions(model, conversions)
        return model

    @functools.wraps(ModelMixin.save_pretrained)
    def save_pretrained(
        self, save_directory: str | PathLike, is_main_process: bool = True, **kwargs: object
    ) -> None:
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, DiffusionPipeline):  # registered with the host's class if converted inside the pipeline
            caller.register_modules(**{name: model for name, model in caller.components.items() if model is self})
        super().save_pretrained(save_directory, is_main_process, **kwargs)
        if is_main_process:
            base = self.config.get("_name_or_path") or self.host.__name__
            write_card(self, Path(save_directory), type(self).__name__, base, "diffusers")

    def layout(self, arguments: dict[str, Any]) -> tuple[Grid | None, int]:
        """Return (token grid, number of leading text tokens) of a forward pass with these arguments."""
        size = arguments["hidden_states"].shape[2:]
        patch = self.config.patch_size
        patch = (patch,) * len(size) if isinstance(patch, int) else patch
        return tuple(n // p for n, p in zip(size, patch, strict=True)), 0

    @property
    def max_stream(self) -> float:
        return 0

    def start_at(self, frame: int) -> RemovableHandle:
        """Let the positions of tokens begin at frame `frame`, until the handle is removed."""
        raise NotImplementedError

    def forward(self, *args: object, **kwargs: object) -> Any:
        set_layout(self, *self.layout({**dict(zip(self.argument_names, args, strict=False)), **kwargs}))
        return super().forward(*args, **kwargs)

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Checkpoint | None = None) -> None:
        """Recompute each block in the backward pass, with `gradient_checkpointing_func(block, *args)` if given."""
        run = gradient_checkpointing_func or checkpoint_block
        super().enable_gradient_checkpointing(functools.partial(checkpoint_with_grid, run))

    def enable_parallelism(
        self, *, config: "ParallelConfig | ContextParallelConfig", cp_plan: dict[str, object] | None = None
    ) -> None:
        """Enable context parallelism of diffusers. Raises ValueError if a mixer would not be exact."""
        check_parallelism(self, config, self.splits_tokens and cp_plan is None)
        super().enable_parallelism(config=config, cp_plan=cp_plan)
        share_tokens(self)

    @classmethod
    def _load_pretrained_model(
        cls, model: Self, state_dict: dict[str, Tensor] | None, files: list[str], *args: object, **kwargs: object
    ) -> tuple[object, ...]:
        """Load weights; diffusers compares all shapes, but the length of a tag varies with the options.

        Raises ValueError for weights of mixers that the model does not have, which diffusers would leave out."""
        found = _mixer_weights(files) if state_dict is None else state_dict
        known = {*model.state_dict(), *dict(model.named_modules())}  # quantised weights have other names in a module
        if unknown := [n for n in found if ".mixer." in n and not known & {n, n.rpartition(".")[0]}]:
            raise ValueError(f"the weights {unknown[0]} and {len(unknown) - 1} more have no mixer in {cls.__name__}")
        with temporary_tags(model, {name: x for name, x in found.items() if name.endswith(".mixer.tag")}):
            return super()._load_pretrained_model(model, state_dict, files, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        self.from_softmax = match_checkpoint(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _mixer_weights(files: list[str]) -> dict[str, Tensor]:
    """Read the weights and tags of mixers in safetensors files."""
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {k: opened.get_tensor(k) for k in opened.keys() if ".mixer." in k}  # noqa: SIM118
    return found


def conversions_of(live: list[Conversion]) -> list[dict[str, object]]:
    """Copy `live` conversions without empty entries, as saved in config.json."""
    return [{k: copy.deepcopy(v) for k, v in step.items() if v} for step in live]


def patch_of(config: FrozenDict) -> tuple[int, ...]:
    """Return the patch size in the configuration of a transformer, one number per dimension of the token grid."""
    space, time = config["patch_size"], config.get("patch_size_t")
    if time is not None:
        return time, space, space  # LTX-Video
    return (space, space) if isinstance(space, int) else tuple(space)
