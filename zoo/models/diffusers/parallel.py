"""Context parallelism of converted models: the tokens of a sample shared by several devices.

diffusers splits the tokens before the first block and gathers them after the last. A two-sided mixer needs nothing of
the other devices but the sum of its moments (`hla_kernels.sharded`); layers with softmax work as diffusers does it.
"""

from typing import Any

from zoo.mixers import Mixer
from zoo.models.diffusers.attention import DiffusionSite


def check_parallelism(model: Any, config: Any, splits_tokens: bool) -> None:
    """Raise ValueError unless every mixer of `model` is exact under `config`.

    config: what `enable_parallelism` takes. splits_tokens: whether a device gets tokens of the image alone.
    """
    names = [n for n, m in model.named_modules() if isinstance(m, DiffusionSite)]
    if names and _part(config, "TensorParallelConfig", "tensor_parallel_config") is not None:
        raise ValueError(f"tensor parallelism would split the heads, but the parameters of {names[0]}.mixer are whole")
    if names and not splits_tokens:
        raise ValueError(
            f"context parallelism is exact for converted models of Wan only; {type(model).__name__} has no plan that "
            "splits the image tokens and nothing else"
        )
    for name in names:
        mixer = model.get_submodule(name).mixer
        if reason := mixer.why_not_shared():
            raise ValueError(
                f"the mixer {mixer.name!r} of {name} {reason}; context parallelism is exact for two-sided mixers that "
                "sum over tokens"
            )


def share_tokens(model: Any) -> None:
    """Let the mixers of `model` add their moments over the devices that share its tokens."""
    parallel = model._parallel_config.context_parallel_config
    if parallel is None:
        return
    group = parallel._flattened_mesh.get_group()
    for mixer in model.modules():
        if isinstance(mixer, Mixer):
            mixer.share(group)


def _part(config: Any, kind: str, name: str) -> Any:
    """The part of a parallel configuration that is given alone or under `name`."""
    return config if type(config).__name__ == kind else getattr(config, name, None)
