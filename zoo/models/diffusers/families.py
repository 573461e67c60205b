"""List of the families of diffusion transformers. A new family needs one file and one entry in `FAMILIES`."""

from diffusers import DiffusionPipeline, ModelMixin
from torch import nn
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
ANY_MODEL = DIT.host  # every diffusers model class can read the configurations of all others


def family_of(model: nn.Module | DiffusionPipeline) -> Family | None:
    """Return the family of a model, converted or not; None if unknown."""
    kind = type(model)
    if isinstance(model, FSDPModule):  # FSDP inserts its class before the class of the model
        kind = kind.__mro__[kind.__mro__.index(FSDPModule) + 1]
    return next((f for f in FAMILIES if kind in (f.host, f.converted)), None)


def known_family(model: nn.Module) -> Family:
    """Return the family of a model of a known class."""
    family = family_of(model)
    assert family is not None, type(model)
    return family


def class_named(name: str) -> type[ModelMixin] | None:
    """Return the transformer class `name`, of diffusers or converted; None if unknown."""
    classes = (cls for f in FAMILIES for cls in (f.host, f.converted))
    return next((cls for cls in classes if cls.__name__ == name), None)


def family_of_pipeline(name: str) -> Family | None:
    """Return the family of the diffusers pipeline `name`; None unless it is in `Family.pipelines`."""
    return next((f for f in FAMILIES if name in f.pipelines), None)


def video_vae(vae: ModelMixin) -> VideoVae | None:
    """Return the description of a video VAE; None for an image VAE."""
    return next((f.vae for f in FAMILIES if f.vae is not None and f.vae.name == type(vae).__name__), None)


def video_pipelines() -> list[str]:
    """Return the names of the video pipelines that can be sampled."""
    return [name for f in FAMILIES if f.grid_dims == 3 for name in f.pipelines]
