"""Checkpoints of sites: a tag that names the mixer, and one clear sentence when a checkpoint is of another mixer.

Mixers without parameters cannot be told apart by their keys. Each site other than softmax therefore stores a small
integer buffer `mixer.tag`, the text of {"mixer": name, option: value, ...} with every option of the mixer (tags of
earlier files have some of them). A checkpoint with no `.mixer.` key at all is one of the softmax model: its weights are
inherited, the mixers keep their values.
"""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.mixers import MixerConfig

PROJECTIONS = ("proj.weight", "to_q.weight")  # of timm, of diffusers: a checkpoint with one of them holds the layer


def encode_tag(config: MixerConfig) -> Tensor:
    """The tag of a mixer, uint8 [L]: ASCII codes, doubled, since timm EMA of decay 0.9999 truncates integers by one."""
    text = json.dumps({"mixer": config.name, **config.plain_options()})
    return torch.tensor([2 * byte for byte in text.encode("ascii")], dtype=torch.uint8)


def decode_tag(tag: Tensor) -> dict[str, Any]:
    """The contents of a tag, also after averaging (float values). Raises ValueError when it is not a tag."""
    codes = [(round(x) + 1) // 2 for x in tag.flatten().tolist()]
    try:
        found = json.loads(bytes(codes))
        return found if found["mixer"] else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError("the checkpoint has a damaged mixer tag: its file was truncated or edited") from error


def sites_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, site) for each site of `model`."""
    return ((name, m) for name, m in model.named_modules() if hasattr(m, "mixer_name"))


def match_checkpoint(model: nn.Module, state_dict: dict[str, Tensor], prefix: str) -> bool:
    """Compare the mixers of a checkpoint with those of `model`, before it is loaded; True if it is a softmax one.

    A softmax checkpoint is completed in place with the mixers' present values. Raises ValueError for another mixer in
    any layer; warns when the mixer is the same with other options.
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
            state_dict[key] = own[key]  # same mixer: the length may still differ by an option
    return False


def compare_tags(sites: Mapping[str, Any], tags: Mapping[str, Tensor | None]) -> None:
    """Compare the tags of a checkpoint, by name of the site, with the sites; None: softmax. Raises ValueError for
    another mixer in any layer; warns when the mixer is the same with other options."""
    changes = {}
    for name, tag in tags.items():
        found = {"mixer": "softmax"} if tag is None else decode_tag(tag)
        changes[name] = _changed_options(name, found, sites[name])
    first = next((name for name in changes if changes[name]), None)
    if first is not None:
        kind = sites[first].mixer_name
        warnings.warn(
            f"the checkpoint has other options of {kind!r} in {first or 'this layer'}: {changes[first]}", stacklevel=3
        )


@contextlib.contextmanager
def lent_tags(model: nn.Module, tags: Mapping[str, Tensor]) -> Iterator[None]:
    """Around a loader that compares shapes: the sites have the tags of the checkpoint, by key, which may be of another
    length, until the block ends. Raises and warns as `compare_tags`."""
    sites = {name: site for name, site in sites_of(model) if f"{name}.mixer.tag" in tags}
    compare_tags(sites, {name: tags[f"{name}.mixer.tag"] for name in sites})
    for name, site in sites.items():
        site.mixer.tag = tags[f"{name}.mixer.tag"].clone()
    yield
    for site in sites.values():
        site.mixer.tag = encode_tag(site.mixer.config).to(site.mixer.tag.device)


def _changed_options(layer: str, found: Mapping[str, Any], site: Any) -> str:
    """The options in which a tag differs from a site with the same mixer, in words; ValueError for another mixer."""
    name = site.mixer_name
    if found["mixer"] != name:
        raise ValueError(
            f"the checkpoint was made with the mixer {found['mixer']!r} in {layer or 'this layer'}, but the model has "
            f"{name!r} there; build or convert the model with {found['mixer']!r}"
        )
    wanted = {} if name == "softmax" else {"mixer": name, **site.mixer.config.plain_options()}
    unknown = [f"{n}={value!r} (unknown here)" for n, value in found.items() if wanted and n not in wanted]
    differing = [n for n in wanted if n in found and found[n] != wanted[n]]
    return ", ".join([*(f"{n}={found[n]!r} (here {wanted[n]!r})" for n in differing), *unknown])


def no_torchscript(module: object) -> None:
    """Refuse torch.jit.script with one sentence: always raises ValueError."""
    raise ValueError(
        "models with higher-order linear attention cannot be scripted by TorchScript; "
        "use torch.export.export(model, ...) instead"
    )
