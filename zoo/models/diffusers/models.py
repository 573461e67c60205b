"""diffusers models that know where their tokens lie, and that diffusers saves and loads with their mixers.

A converted model is of a subclass of its host's class with a mixin in front. Its config has one more entry,
`conversions`, from which `from_config` and `from_pretrained` build the mixers again. The classes are found by their
names in the module `zoo`, which is where `model_index.json` says that they are.

Before each forward pass the sites are told the grid. Gradient checkpointing gives each block the grid of its own
forward pass again before it recomputes, so that two resolutions in one backward pass give exact gradients.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.grid import Grid
from zoo.models.checkpoint_tags import lent_tags, match_checkpoint
from zoo.models.convert import replay
from zoo.models.diffusers.attention import DiffusionSite
from zoo.models.diffusers.parallel import check_parallelism, share_tokens
from zoo.models.model_card import write_card
from zoo.models.stored_options import restored_conversions
from zoo.models.timm.attention import Host

HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def set_layout(module: nn.Module, grid: Grid | None, prefix: int = 0) -> None:
    """Tell each site in `module` where its tokens lie: `prefix` text tokens, then those of `grid` (None: unknown).

    Only sites whose mixer needs it get the grid, so that compiled blocks of the others serve every resolution.
    """
    for site in module.modules():
        if isinstance(site, DiffusionSite):
            site.grid, site.prefix = (grid if site.needs_grid else None), prefix


def checkpoint_block(block: Callable[..., Any], *args: Any) -> Any:
    """Run `block(*args)` and recompute it in the backward pass."""
    return checkpoint(block, *args, use_reentrant=False)


def checkpoint_with_grid(run: Callable[..., Any], block: nn.Module, *args: Any) -> Any:
    """`run(block, *args)`, a checkpointing function, in which recomputing sees the layout of this call."""
    if torch.compiler.is_compiling():  # the graph holds the layout already, and may not write attributes here
        return run(block, *args)
    layouts = [(m, m.grid, m.prefix) for m in block.modules() if isinstance(m, DiffusionSite)]

    def again(*args: Any) -> Any:
        for site, grid, prefix in layouts:
            site.grid, site.prefix = grid, prefix
        return block(*args)

    return run(again, *args)


class HLADiffusionModel(Host):
    """Mixin of a converted model: grid, checkpointing, configuration, loading. The host does everything else.

    `hla_config` lists the conversions that made it, each as the arguments of `zoo.convert`; `config.conversions` is
    the shortest list with the same result. `from_softmax` says if the last `load_state_dict` had the host's weights.
    """

    host: ClassVar[Any]
    grid_dims: ClassVar[int] = 2
    splits_tokens: ClassVar[bool] = False  # whether the host's context parallelism splits the image tokens alone
    argument_names: ClassVar[tuple[str, ...]]  # of a forward pass
    hla_config: list[dict[str, Any]]
    from_softmax: bool = False
    _skip_layerwise_casting_patterns: ClassVar[Any]
    _repeated_blocks: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__module__ = "zoo"
        cls.argument_names = tuple(inspect.signature(cls.host.forward).parameters)[1:]
        cls._skip_layerwise_casting_patterns = [*(cls.host._skip_layerwise_casting_patterns or ()), "mixer"]
        initialise, forward = cls.__init__, cls.forward

        @functools.wraps(cls.host.__init__)
        def __init__(self: Any, *args: Any, conversions: Any = (), **kwargs: Any) -> None:
            initialise(self, *args, conversions=conversions, **kwargs)

        own = inspect.Parameter("conversions", inspect.Parameter.KEYWORD_ONLY, default=())
        names = inspect.signature(cls.host.__init__)
        __init__.__signature__ = names.replace(parameters=[*names.parameters.values(), own])  # type: ignore[attr-defined]

        @functools.wraps(cls.host.forward)
        def host_signature(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        cls.__init__, cls.forward = __init__, host_signature  # type: ignore[method-assign]

    def __init__(self, *args: Any, conversions: Any = (), **kwargs: Any) -> None:
        """The host's arguments, and `conversions`: dicts with the arguments of `zoo.convert`. Raises ValueError."""
        super().__init__(*args, **kwargs)
        self.hla_config = []
        self.register_to_config(conversions=[])
        if conversions:
            replay(self, conversions)

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """A stored configuration, see diffusers; conversions with the options that earlier files left out."""
        found = super().load_config(*args, **kwargs)
        config = found[0] if isinstance(found, tuple) else found
        if isinstance(config, dict) and "conversions" in config:
            config["conversions"] = restored_conversions(config["conversions"])
        return found

    @classmethod
    def from_pretrained(cls, path: Any, *, conversions: Any = None, **kwargs: Any) -> Any:
        """Load a converted model; with `conversions`, load a model of the host's class and convert it.

        Raises ValueError for a folder of the host without `conversions`, and for a converted one with them.
        """
        config = cls.load_config(path, **{k: v for k, v in kwargs.items() if k in HUB})
        if "conversions" in config:
            if conversions is not None:
                raise ValueError(f"{path} is converted already; load it as it is and call zoo.convert on the model")
            return super().from_pretrained(path, **kwargs)
        if not conversions:
            raise ValueError(
                f"{path} holds a {config.get('_class_name')} without mixers: say which it shall get, such as "
                'conversions=[{"mixer": "multipole"}]'
            )
        model = cls.host.from_pretrained(path, **kwargs)
        replay(model, conversions)
        return model

    @functools.wraps(ModelMixin.save_pretrained)
    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        caller = sys._getframe(1).f_locals.get("self")
        if isinstance(caller, DiffusionPipeline):  # it noted the host's class if the model was converted inside it
            caller.register_modules(**{name: part for name, part in caller.components.items() if part is self})
        super().save_pretrained(save_directory, is_main_process, **kwargs)
        if is_main_process:
            base = self.config.get("_name_or_path") or self.host.__name__
            write_card(self, Path(save_directory), type(self).__name__, base, "diffusers")

    def layout(self, arguments: dict[str, Any]) -> tuple[Grid | None, int]:
        """(grid, number of leading text tokens) of a forward pass with these arguments."""
        size = arguments["hidden_states"].shape[2:]
        patch = self.config.patch_size
        patch = (patch,) * len(size) if isinstance(patch, int) else patch
        return tuple(n // p for n, p in zip(size, patch, strict=True)), 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        set_layout(self, *self.layout({**dict(zip(self.argument_names, args, strict=False)), **kwargs}))
        return super().forward(*args, **kwargs)

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Callable[..., Any] | None = None) -> None:
        """Recompute each block in the backward pass, through `gradient_checkpointing_func(block, *args)` if given."""
        run = gradient_checkpointing_func or checkpoint_block
        super().enable_gradient_checkpointing(functools.partial(checkpoint_with_grid, run))

    def enable_parallelism(self, *, config: Any, cp_plan: Any = None) -> None:
        """Spread the model over several devices as diffusers does; ValueError where a mixer would not be exact."""
        check_parallelism(self, config, self.splits_tokens and cp_plan is None)
        super().enable_parallelism(config=config, cp_plan=cp_plan)
        share_tokens(self)

    @classmethod
    def _load_pretrained_model(cls, model: Any, state_dict: Any, files: Any, *args: Any, **kwargs: Any) -> Any:
        """diffusers compares the shapes of all tensors, and a tag has the length of the options of its time."""
        with lent_tags(model, _tags(files) if state_dict is None else state_dict):
            return super()._load_pretrained_model(model, state_dict, files, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        self.from_softmax = match_checkpoint(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _tags(files: list[str]) -> dict[str, Tensor]:
    """The tags of sites in files of safetensors."""
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= {k: opened.get_tensor(k) for k in opened.keys() if k.endswith(".mixer.tag")}  # noqa: SIM118
    return found


def conversions_of(live: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`live` conversions without empty entries, as they go into config.json."""
    return [{k: copy.deepcopy(v) for k, v in step.items() if v} for step in live]


def patch_of(config: Any) -> Any:
    """The sides of a patch as the configuration of a transformer has them: a number (images), or one per dimension."""
    space, time = config["patch_size"], config.get("patch_size_t")
    return space if time is None else (time, space, space)  # LTX-Video names both
