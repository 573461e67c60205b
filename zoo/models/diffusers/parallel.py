"""Context parallelism of converted models: the tokens of a sample are shared by several devices.

diffusers splits the tokens before the first block and gathers them after the last. Mixers exchange moments, states or
heads (`hla_kernels.sharded`); softmax layers use the implementation of diffusers.
"""

from typing import TYPE_CHECKING

from diffusers import ModelMixin

from zoo.mixers import Mixer
from zoo.models.diffusers.attention import DiffusionSite

if TYPE_CHECKING:
    from diffusers import ContextParallelConfig, ParallelConfig


def check_parallelism(
    model: ModelMixin, config: "ParallelConfig | ContextParallelConfig", splits_tokens: bool
) -> None:
    """Raise ValueError unless every mixer of `model` is exact under `config`.

    config: argument of `enable_parallelism`. splits_tokens: whether only image tokens are split.
    """
    names = [n for n, m in model.named_modules() if isinstance(m, DiffusionSite)]
    if names and _part(config, "TensorParallelConfig", "tensor_parallel_config") is not None:
        raise ValueError(f"tensor parallelism splits heads, but the parameters of {names[0]}.mixer cannot be split")
    if names and not splits_tokens:
        raise ValueError(
            f"context parallelism is exact for converted Wan models only; {type(model).__name__} has no plan that "
            "splits only the image tokens"
        )
    for name in names:
        mixer = model.get_submodule(name).mixer
        if reason := mixer.why_not_shared():
            raise ValueError(f"context parallelism is not supported: the mixer {mixer.name!r} of {name} {reason}")


def share_tokens(model: ModelMixin) -> None:
    """Share the tokens of the mixers of `model` among the devices of its configuration."""
    parallel = model._parallel_config.context_parallel_config
    if parallel is None:
        return
    group = parallel._flattened_mesh.get_group()
    for mixer in model.modules():
        if isinstance(mixer, Mixer):
            mixer.share(group)


def _part(config: "ParallelConfig | ContextParallelConfig", kind: str, name: str) -> object:
    """Return the configuration of class `kind`: `config` itself or its attribute `name`."""
    return config if type(config).__name__ == kind else getattr(config, name, None)
