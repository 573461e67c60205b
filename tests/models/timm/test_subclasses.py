"""Subclasses of timm's models and blocks: additions are kept, other token layouts raise errors."""

import copy
import io
import pickle

import pytest
import torch
from timm.layers import Attention
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

import zoo
from tests.helpers.tiny_models import NARROW, gradients, image, sites

SIZES = {"img_size": 64, "class_token": False, "global_pool": "avg", **NARROW}


class Plain(VisionTransformer):
    pass


class Own(VisionTransformer):
    """An extra layer, an extra method and another forward."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.extra = nn.Linear(5, 5)

    def forward(self, x):
        return self.twice(super().forward(x))

    def twice(self, x):
        return 2 * self.extra(x)


class OwnEva(Eva):
    pass


class OwnBlock(Block):
    def forward(self, x, **kwargs):
        return x + super().forward(x, **kwargs)


class Foreign(nn.Module):
    """A block that is none of timm's, with an attention of timm's under another name."""

    def __init__(self, dim, num_heads, **kwargs):
        super().__init__()
        self.norm, self.a = nn.LayerNorm(dim), Attention(dim, num_heads)

    def forward(self, x):
        return x + self.a(self.norm(x))


class Without(nn.Module):
    def __init__(self, dim, num_heads, **kwargs):
        super().__init__()
        self.mlp = nn.Linear(dim, dim)

    def forward(self, x):
        return self.mlp(x)


class Elsewhere(VisionTransformer):
    def _pos_embed(self, x):
        return super()._pos_embed(x).flip(1)


def made(kind, **changes):
    torch.manual_seed(0)
    return kind(**{**SIZES, **changes})


MAKERS = {
    "plain": lambda: made(Plain),
    "own": lambda: made(Own),
    "eva": lambda: made(OwnEva, use_rot_pos_emb=True),
    "block": lambda: made(VisionTransformer, block_fn=OwnBlock),
    "foreign": lambda: made(VisionTransformer, block_fn=Foreign),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_subclass_with_softmax_is_the_host_bit_for_bit(name):
    host, model = MAKERS[name](), MAKERS[name]()
    zoo.convert(model, "softmax")
    assert isinstance(model, type(host)) and len(sites(model)) == 2
    for each in (host, model):
        each(image()).square().mean().backward()
    assert torch.equal(host(image()), model(image()))
    theirs = gradients(host)
    assert all(torch.equal(g, theirs[n]) for n, g in gradients(model).items())


@pytest.mark.parametrize("name", MAKERS)
def test_a_subclass_with_a_mixer_is_copied_pickled_and_checkpointed(name):
    model = MAKERS[name]()
    zoo.convert(model, "mhla", depthwise="v")
    wanted = model(image())
    wanted.square().mean().backward()
    theirs = gradients(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert type(other) is type(model) and torch.equal(other(image()), wanted)
    model.zero_grad()
    model.set_grad_checkpointing()
    model(image()).square().mean().backward()
    for n, g in gradients(model).items():
        torch.testing.assert_close(g, theirs[n])
    assert zoo.convert(model, "la").swapped  # again


def test_what_leads_mixers_astray_is_refused_with_a_way_out():
    sentence = r"Elsewhere, a subclass of VisionTransformer that overrides _pos_embed: .*and wrap it"
    with pytest.raises(ValueError, match=sentence):
        zoo.convert(made(Elsewhere), "ahla")
    with pytest.raises(ValueError, match=r"blocks of type Without \(blocks.0\): there is no attention module to swap"):
        zoo.convert(made(VisionTransformer, block_fn=Without), "ahla")
