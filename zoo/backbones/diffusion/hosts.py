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
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from diffusers import DiTTransformer2DModel, ModelMixin  # noqa: F401  ModelMixin: see `zoo.__getattr__`
from diffusers.loaders import PeftAdapterMixin
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.backbones.checkpoints import match_checkpoint
from zoo.backbones.diffusion.sites import DiffusionSite, SelfAttentionSite
from zoo.backbones.sites import Host
from zoo.grid import Grid

HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def set_layout(module: nn.Module, grid: Grid | None, prefix: int = 0) -> None:
    """Tell each site in `module` where its tokens lie: `prefix` text tokens, then those of `grid` (None: unknown).

    Only sites whose mixer needs it get the grid, so that compiled blocks of the others serve every resolution.
    """
    for site in module.modules():
        if isinstance(site, DiffusionSite):
            needs_grid = getattr(getattr(site.mixer, "options", None), "needs_grid", False)
            site.grid, site.prefix = (grid if needs_grid else None), prefix


def checkpoint_block(block: Callable[..., Any], *args: Any) -> Any:
    """Run `block(*args)` and recompute it in the backward pass."""
    return checkpoint(block, *args, use_reentrant=False)


def on_its_layout(run: Callable[..., Any], block: nn.Module, *args: Any) -> Any:
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
    hla_config: list[dict[str, Any]]
    from_softmax: bool = False
    _skip_layerwise_casting_patterns: ClassVar[Any]
    _repeated_blocks: ClassVar[Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__module__ = "zoo"
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
        from zoo.convert import replay

        super().__init__(*args, **kwargs)
        self.hla_config = []
        self.register_to_config(conversions=[])
        if conversions:
            replay(self, conversions)

    @classmethod
    def from_pretrained(cls, path: Any, *, conversions: Any = None, **kwargs: Any) -> Any:
        """Load a converted model; with `conversions`, load a model of the host's class and convert it.

        Raises ValueError for a folder of the host without `conversions`, and for a converted one with them.
        """
        from zoo.convert import replay

        config = cls.load_config(path, **{k: v for k, v in kwargs.items() if k in HUB})
        if "conversions" in config:
            if conversions is not None:
                raise ValueError(f"{path} is converted already; load it as it is and call zoo.convert on the model")
            return super().from_pretrained(path, **kwargs)
        if not conversions:
            raise ValueError(
                f"{path} holds a {config.get('_class_name')} without mixers: say which it shall get, such as "
                'conversions=[{"mixer": "ahla"}]'
            )
        model = cls.host.from_pretrained(path, **kwargs)
        replay(model, conversions)
        return model

    def layout(self, arguments: dict[str, Any]) -> tuple[Grid | None, int]:
        """(grid, number of leading text tokens) of a forward pass with these arguments."""
        size = arguments["hidden_states"].shape[2:]
        patch = self.config.patch_size
        patch = (patch,) * len(size) if isinstance(patch, int) else patch
        return tuple(n // p for n, p in zip(size, patch, strict=True)), 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = list(inspect.signature(self.host.forward).parameters)[1:]
        set_layout(self, *self.layout({**dict(zip(names, args, strict=False)), **kwargs}))
        return super().forward(*args, **kwargs)

    def enable_gradient_checkpointing(self, gradient_checkpointing_func: Callable[..., Any] | None = None) -> None:
        """Recompute each block in the backward pass, through `gradient_checkpointing_func(block, *args)` if given."""
        run = gradient_checkpointing_func or checkpoint_block
        super().enable_gradient_checkpointing(functools.partial(on_its_layout, run))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        self.from_softmax = match_checkpoint(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


class HLADiTTransformer2DModel(HLADiffusionModel, PeftAdapterMixin, DiTTransformer2DModel):
    """DiT: class-conditional images."""

    host = DiTTransformer2DModel
    _repeated_blocks: ClassVar = ["BasicTransformerBlock"]


class Family(NamedTuple):
    """A family of models: its converted class, and its attention: pattern of module names -> class of the site."""

    converted: type
    sites: dict[str, type]
    left: str = ""  # pattern of the attention modules that stay
    mixer: str = "softmax"  # what the host has


FAMILIES: dict[type, Family] = {
    DiTTransformer2DModel: Family(HLADiTTransformer2DModel, {"transformer_blocks.*.attn1": SelfAttentionSite}),
}


def adopt(model: Any) -> None:
    """Make a live model of a known class a converted one (its sites come after)."""
    model.__class__ = FAMILIES[type(model)].converted
    model.hla_config = []
    if model.is_gradient_checkpointing:
        model.enable_gradient_checkpointing(model._gradient_checkpointing_func)


def conversions_of(live: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`live` conversions without empty entries, as they go into config.json."""
    return [{k: copy.deepcopy(v) for k, v in step.items() if v} for step in live]
