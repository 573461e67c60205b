"""Checkpoint tags that name the mixer of each converted layer, checked when weights are loaded.

Mixers without parameters cannot be distinguished by checkpoint keys. Each converted layer except softmax therefore has
an integer buffer `mixer.tag`, the encoded JSON {"mixer": name, option: value, ...} with all options of the mixer (tags
of earlier files hold some of them). A checkpoint without any `.mixer.` key is a softmax checkpoint: its weights are
loaded and the mixers keep their values.
"""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from zoo.mixers import MixerConfig
from zoo.mixers.block_mixing import DIVIDING
from zoo.models.stored_options import restored_options

if TYPE_CHECKING:
    from zoo.models.timm.attention import Site

PROJECTIONS = ("proj.weight", "to_q.weight")  # keys of an attention layer of timm and of diffusers


def encode_tag(config: MixerConfig) -> Tensor:
    """Encode a mixer as uint8 [L]: doubled ASCII codes, since timm's EMA can truncate integers by one."""
    text = json.dumps({"mixer": config.name, **config.plain_options()})
    return torch.tensor([2 * byte for byte in text.encode("ascii")], dtype=torch.uint8)


def decode_tag(tag: Tensor) -> dict[str, Any]:
    """Decode a tag, also after averaging (float values). Raises ValueError for a damaged tag."""
    codes = [(round(x) + 1) // 2 for x in tag.flatten().tolist()]
    try:
        contents = json.loads(bytes(codes))
        return contents if contents["mixer"] else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("the checkpoint has a damaged mixer tag: its file was truncated or edited") from error


def sites_of(model: nn.Module) -> "Iterator[tuple[str, Site]]":
    """Yield (name, layer) for each attention layer of `model` with a mixer, softmax included."""
    return ((name, m) for name, m in model.named_modules() if hasattr(m, "mixer_name"))


def match_checkpoint(model: nn.Module, state_dict: dict[str, Tensor], prefix: str) -> bool:
    """Check a checkpoint against the mixers of `model` before loading; return whether it is a softmax checkpoint.

    The current values of the mixers are added to a softmax checkpoint, in place. Raises ValueError if a layer has
    another mixer; warns if it has the same mixer with other options.
    """
    sites = dict(sites_of(model))
    places = {name: f"{prefix}{name}." if name else prefix for name in sites}  # "": `model` is an attention layer
    own = {
        f"{places[name]}mixer.{key}": value
        for name, site in sites.items()
        for key, value in site.mixer.state_dict().items()
    }
    known = [name for name in sites if any(places[name] + first in state_dict for first in PROJECTIONS)]
    if not any(key.startswith(prefix) and ".mixer." in f".{key[len(prefix) :]}" for key in state_dict):
        state_dict.update(own)
        return bool(known)
    found = {name: state_dict.get(f"{places[name]}mixer.tag") for name in known}
    compare_tags(sites, found)
    for name, tag in found.items():
        if tag is not None:
            key = f"{places[name]}mixer.tag"
            state_dict[key] = own[key]  # the length of a tag varies with the options
    return False


def compare_tags(sites: "Mapping[str, Site]", tags: Mapping[str, Tensor | None], strict: bool = False) -> None:
    """Compare the tags of a checkpoint with the layers of the same names; a tag of None stands for softmax.

    Raises ValueError if a layer has another mixer. For the same mixer with other options: warns, or raises ValueError
    if `strict`, except for options that cannot be compared.
    """
    differing: dict[str, list[str]] = {}
    unknown: dict[str, list[str]] = {}
    for name, tag in tags.items():
        found = {"mixer": "softmax"} if tag is None else decode_tag(tag)
        differing[name], unknown[name] = _changed_options(name, found, sites[name])
    changes = {name: ", ".join(differing[name] if strict else differing[name] + unknown[name]) for name in tags}
    first = next((name for name in changes if changes[name]), None)
    if first is None:
        return
    kind = sites[first].mixer_name
    message = f"the checkpoint has other options of {kind!r} in {first or 'this layer'}: {changes[first]}"
    if strict:
        raise ValueError(f"{message}; build the model with the options of the checkpoint")
    warnings.warn(message, stacklevel=3)


def check_tags(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the tags in a full state dict of `model` have another mixer or other options."""
    sites = {name: site for name, site in sites_of(model) if f"{name}.mixer.tag" in weights}
    compare_tags(sites, {name: weights[f"{name}.mixer.tag"] for name in sites}, strict=True)


@contextlib.contextmanager
def temporary_tags(model: nn.Module, tags: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the layers of `model` the tags of a checkpoint, for loaders that compare shapes.

    The length of a tag varies with the options. On exit the tags are restored. Raises ValueError like `check_tags`.
    """
    check_tags(model, tags)
    sites = {name: site for name, site in sites_of(model) if f"{name}.mixer.tag" in tags}
    for name, site in sites.items():
        site.mixer.tag = tags[f"{name}.mixer.tag"].clone()
    yield
    for site in sites.values():
        site.mixer.tag = encode_tag(site.mixer.config).to(site.mixer.tag.device)


def _changed_options(layer: str, found: Mapping[str, Any], site: "Site") -> tuple[list[str], list[str]]:
    """Describe the options in which a tag differs from a layer, and those that cannot be compared.

    Raises ValueError for another mixer.
    """
    name = site.mixer_name
    if found["mixer"] != name:
        raise ValueError(
            f"the checkpoint was made with the mixer {found['mixer']!r} in {layer or 'this layer'}, but the model has "
            f"{name!r} there; build or convert the model with {found['mixer']!r}"
        )
    wanted = {} if name == "softmax" else {"mixer": name, **site.mixer.config.plain_options()}
    stored = {**restored_options(name, {}), "blocks": None, **found}
    differing = {n: f"{n}={stored[n]!r} (here {wanted[n]!r})" for n in wanted if stored.get(n, wanted[n]) != wanted[n]}
    unknown = [f"{n}={value!r} (unknown here)" for n, value in found.items() if wanted and n not in wanted]
    if stored["blocks"] in (None, DIVIDING) and "blocks" in differing:  # chosen for the grid, as in the layer
        unknown += [differing.pop("blocks")] * ("blocks" in found)
    return list(differing.values()), unknown


def no_torchscript(module: object) -> NoReturn:
    """Raise ValueError: converted models do not support torch.jit.script."""
    raise ValueError(
        "models with higher-order linear attention cannot be scripted by TorchScript; "
        "use torch.export.export(model, ...) instead"
    )
