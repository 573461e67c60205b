"""Models that mixers go into, and their conversion (`convert.py`).

`timm`: attention layers, the models that tell them their grid, registered names, one file per family
(`vision_transformer.py`, `deit.py`: timm takes the family from the file name) and one name for all others
(`converted.py`), and model files. `diffusers`: likewise, imported when first needed. `zoo.convert` knows both kinds
through one `Backbone` each. Shared: which layers are converted (`layer_selection.py`), what is not (`unsupported.py`),
and what a saved model says of its mixers (`checkpoint_tags.py`, `stored_options.py`, `saved_config.py`).
"""

from typing import Any, NamedTuple, Protocol

from zoo.mixers import LayerSpec, Mixer, MixerConfig

CONVERTED = "hla_converted"  # the registered name of models that have no name of their own


class Swap(NamedTuple):
    """An attention module `attn` that gets `mixer`."""

    attn: Any
    mixer: Mixer


class Backbone(Protocol):
    """What `zoo.convert` has to know about a kind of models (timm, diffusers)."""

    def submodels(self, model: Any) -> dict[str, Any]:
        """The models to convert by name, "" for `model` itself. Raises ValueError for what cannot be converted."""

    def name(self, model: Any) -> str:
        """What reports call `model`."""

    def layers(self, model: Any) -> dict[str, Any]:
        """The attention modules that are sites or can become one, by name, in order."""

    def blocks(self, model: Any) -> dict[str, int]:
        """The number of the block in which each of these layers lies."""

    def current_mixer(self, model: Any, attn: Any) -> str:
        """The name of the mixer that `attn` has now."""

    def grid_dims(self, model: Any) -> int:
        """2 for a model of images, 3 for one of video."""

    def layer_spec(self, model: Any, attn: Any) -> LayerSpec:
        """What a mixer takes from `attn`. Raises ValueError for a layer that no mixer can be built for."""

    def check_options(self, model: Any, attn: Any, config: MixerConfig) -> None:
        """Raise ValueError for a mixer, with its options filled in, that `model` cannot serve in `attn`."""

    def skipped_layers(self, model: Any) -> dict[str, str]:
        """Attention that is never swapped: the names of the modules and why."""

    def install(self, model: Any, swaps: list[Swap]) -> None:
        """Make `model` a converted one and put the mixers of `swaps` in."""

    def revert(self, model: Any) -> None:
        """Undo `install`: the host's classes and configuration, no mixers. Raises ValueError for a model that is not
        converted."""

    def update_saved_config(self, model: Any) -> None:
        """Write down what `model` is now where saving looks for it."""


def hla_name(base: str, mixer: str) -> str:
    """The registered name of timm's `base` with `mixer`: "vit_tiny_patch16_224" -> "vit_mhla_tiny_patch16_224"."""
    family, _, rest = base.partition("_")
    return f"{family}_{mixer}_{rest}"
