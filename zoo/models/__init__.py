"""Models with mixers, and their conversion (`convert.py`).

`timm`: attention layers, models that set the token grid, registered names (one file per family, since timm derives the
family from the file name, and `converted.py` for all others) and model files. `diffusers`: the same for diffusers,
imported on first use. `zoo.convert` uses one `Backbone` for each library. Shared by both: selection of layers
(`layer_selection.py`), unsupported models (`unsupported.py`) and the mixers of saved models (`checkpoint_tags.py`,
`stored_options.py`, `saved_config.py`).
"""

from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, Protocol, TypedDict

from torch import nn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

from zoo.mixers import LayerSpec, Mixer, MixerConfig
from zoo.models.layer_selection import PlainLayers

CONVERTED = "hla_converted"  # registered name of models without a name of their own


class Conversion(TypedDict):
    """Arguments of one call of `zoo.convert`, as saved with a model (JSON values)."""

    mixer: str
    layers: NotRequired[PlainLayers]
    keep_softmax: NotRequired[PlainLayers]
    options: NotRequired[dict[str, Any]]


class Swap(NamedTuple):
    """Attention module and the mixer to install in it."""

    attn: nn.Module
    mixer: Mixer


class Backbone(Protocol):
    """Interface of `zoo.convert` to the models of one library (timm, diffusers)."""

    def submodels(self, model: object) -> dict[str, nn.Module]:
        """Return the models to convert by name, "" for `model` itself. Raises ValueError for unsupported models."""

    def name(self, model: "nn.Module | DiffusionPipeline") -> str:
        """Return the name of `model` in reports."""

    def layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the attention modules that are or can be converted, by name, in order."""

    def blocks(self, model: nn.Module) -> dict[str, int]:
        """Return the block index of each of these layers."""

    def current_mixer(self, model: nn.Module, attn: nn.Module) -> str:
        """Return the name of the current mixer of `attn`."""

    def grid_dims(self, model: nn.Module) -> int:
        """Return 2 for image models, 3 for video models."""

    def layer_spec(self, model: nn.Module, attn: nn.Module) -> LayerSpec:
        """Return the layer for which a mixer is built. Raises ValueError for an unsupported layer."""

    def check_options(self, model: nn.Module, attn: nn.Module, config: MixerConfig) -> None:
        """Raise ValueError for a mixer with resolved options that `attn` in `model` does not support."""

    def skipped_layers(self, model: nn.Module) -> dict[str, str]:
        """Return the attention layers that are never converted, with the reasons."""

    def note(self, model: nn.Module) -> str:
        """Return a phrase for the report about parts without attention, which are not converted; "" if none."""

    def install(self, model: nn.Module, swaps: list[Swap], conversion: Conversion) -> None:
        """Give `model` its converted class, install the mixers, and append `conversion` to its `hla_config`."""

    def revert(self, model: nn.Module) -> None:
        """Restore the classes and configuration of the host, without mixers.

        Raises ValueError for a model that is not converted.
        """

    def update_saved_config(self, model: "nn.Module | DiffusionPipeline") -> None:
        """Update the saved configuration of `model` after a conversion."""


def hla_name(base: str, mixer: str) -> str:
    """Return the registered name of timm's `base` with `mixer`, such as "vit_mhla_tiny_patch16_224"."""
    family, _, rest = base.partition("_")
    return f"{family}_{mixer}_{rest}"
