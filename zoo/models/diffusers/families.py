"""The families of diffusion transformers, one row each, and how one is found. A new family is one file and one row."""

from typing import Any

from torch.distributed.fsdp import FSDPModule

from zoo.models.diffusers.dit import DIT
from zoo.models.diffusers.family import Family, VideoVae
from zoo.models.diffusers.flux import FLUX
from zoo.models.diffusers.ltx import LTX
from zoo.models.diffusers.pixart import PIXART
from zoo.models.diffusers.sana import SANA
from zoo.models.diffusers.sd3 import SD3
from zoo.models.diffusers.wan import WAN

FAMILIES: tuple[Family, ...] = (DIT, PIXART, SANA, SD3, FLUX, WAN, LTX)
ANY_MODEL: Any = DIT.host  # every model class of diffusers reads the configurations of all others


def family_of(model: Any) -> Family | None:
    """The family of a model, converted or not; None for a model that is not known here."""
    kind = type(model)
    if isinstance(model, FSDPModule):  # whose class lies before the model's own
        kind = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    return next((f for f in FAMILIES if kind in (f.host, f.converted)), None)


def known_family(model: Any) -> Family:
    """The family of a model that is known here."""
    family = family_of(model)
    assert family is not None, type(model)
    return family


def class_named(name: str) -> Any:
    """The class of a transformer, of diffusers or converted, by the name that its configuration has; None for a name
    that is not known here."""
    classes = (cls for f in FAMILIES for cls in (f.host, f.converted))
    return next((cls for cls in classes if cls.__name__ == name), None)


def family_of_pipeline(name: str) -> Family | None:
    """The family of a pipeline of diffusers by its name; None for others than those in `Family.pipelines`."""
    return next((f for f in FAMILIES if name in f.pipelines), None)


def video_vae(vae: Any) -> VideoVae | None:
    """What is known of a VAE of videos; None for one of images."""
    known = (f.vae for f in FAMILIES if f.vae is not None)
    return next((found for found in known if found.name == type(vae).__name__), None)


def video_pipelines() -> list[str]:
    """The pipelines of videos that can be sampled."""
    return [name for f in FAMILIES if f.grid_dims == 3 for name in f.pipelines]
