"""`zoo.Attention`: the attention layer of conversion, on its own."""

import copy

import pytest
import torch
from timm.layers import Attention, RmsNorm
from timm.models.vision_transformer import VisionTransformer

import zoo
from tests.helpers.tiny_models import MIXERS, image
from zoo.mixers import MIXERS as CLASSES

DIM, HEADS, GRID = 32, 2, (4, 4)
NEEDY = [name for name in MIXERS if CLASSES[name].defaults.needs_grid]


def tokens(batch: int = 2, count: int = 17, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, count, DIM, generator=torch.Generator().manual_seed(1), dtype=dtype)


@pytest.mark.parametrize("words", [{}, {"qkv_bias": True, "qk_norm": True, "norm_layer": RmsNorm}])
def test_softmax_is_timms_attention(words):
    theirs = Attention(DIM, HEADS, **words)
    ours = zoo.Attention(DIM, HEADS, mixer="softmax", **words)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(tokens()), theirs(tokens()))


def test_linear_attention_is_its_definition():
    ours = zoo.Attention(DIM, HEADS, mixer="la", feature_map="elu1", qkv_bias=True, dtype=torch.float64)
    x = tokens(dtype=torch.float64)
    q, k, v = ours.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    weights = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).transpose(-2, -1)
    expected = ours.proj(((weights / weights.sum(-1, keepdim=True)) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mixer", MIXERS)
def test_weights_of_timms_attention_load_and_all_parameters_train(mixer):
    theirs = Attention(DIM, HEADS, qkv_bias=True)
    ours = zoo.Attention(DIM, HEADS, mixer=mixer, grid=GRID, prefix=1, qkv_bias=True, lepe=3)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.qkv.weight, theirs.qkv.weight)
    with torch.no_grad():  # a gate or filter that begins at zero hides what lies behind it
        for parameter in ours.mixer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    ours(tokens()).square().sum().backward()
    assert not [name for name, p in ours.named_parameters() if p.grad is None]
    again = copy.deepcopy(ours)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(tokens()), ours(tokens()))


def test_layers_lie_in_networks_and_keep_to_their_mixer():
    def network(mixer: str) -> torch.nn.Module:
        return torch.nn.ModuleDict({"a": zoo.Attention(DIM, HEADS, mixer=mixer), "b": torch.nn.Linear(DIM, DIM)})

    one, two = network("hla2"), network("hla2")
    two.load_state_dict(one.state_dict())
    assert torch.equal(one["a"](tokens()), two["a"](tokens()))
    plain = torch.nn.ModuleDict({"a": Attention(DIM, HEADS), "b": torch.nn.Linear(DIM, DIM)})
    two.load_state_dict(plain.state_dict())
    assert torch.equal(two["a"].proj.weight, plain["a"].proj.weight)
    with pytest.raises(ValueError, match=r"mixer 'hla2'.*'la'"):
        network("la").load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="mixer 'hla2' in this layer"):
        zoo.Attention(DIM, HEADS, mixer="la").load_state_dict(one["a"].state_dict())


class BlockAttention(zoo.Attention):
    """What a network gets that asks for a class."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, mixer="mhla", grid=GRID, prefix=1, **kwargs)


def test_it_is_a_layer_for_timms_network():
    words = {"img_size": 64, "embed_dim": DIM, "num_heads": HEADS, "depth": 2, "num_classes": 5}
    torch.manual_seed(0)
    host = VisionTransformer(**words)
    model = VisionTransformer(**words, attn_layer=BlockAttention)
    model.load_state_dict(host.state_dict())
    zoo.convert(host, "mhla")
    assert torch.equal(model(image()), host(image()))


def test_the_grid_may_change_between_calls():
    layer = zoo.Attention(DIM, HEADS, mixer="mhla", grid=GRID, prefix=1, lepe=3)
    with pytest.raises(ValueError, match="needs 17 tokens, got 25"):
        layer(tokens(count=25))
    layer.grid = (4, 6)
    assert layer(tokens(count=25)).shape == (2, 25, DIM)


@pytest.mark.parametrize("mixer", NEEDY)
def test_the_grid_may_be_that_of_a_video(mixer):
    layer = zoo.Attention(DIM, HEADS, mixer=mixer, grid=(2, *GRID), lepe=3)
    assert layer(tokens(count=32)).shape == (2, 32, DIM)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"mixer": "mla"}, "Did you mean 'mhla'"),
        ({"feature_mp": "relu"}, "Did you mean 'feature_map'"),
        ({"num_heads": 5}, "dim=32 is not divisible by num_heads=5"),
        ({"num_head": 4}, "Did you mean 'num_heads'"),
        ({"attn_drop": 0.1}, "never forms"),
        ({"grid": 4}, r"grid is a tuple such as \(4, 4\), got 4"),
        ({"mixer_options": {"lepe": 3}}, "pass options of the mixer as keywords"),
        *(({"mixer": mixer}, "needs the grid") for mixer in NEEDY),
    ],
)
def test_bad_arguments(words, message):
    with pytest.raises(ValueError, match=message):
        zoo.Attention(DIM, **{"num_heads": HEADS, **words})


def test_masks_are_honoured_or_refused():
    x, mask = tokens(), torch.ones(17, 17, dtype=torch.bool).tril()
    theirs = Attention(DIM, HEADS)
    softmax = zoo.Attention(DIM, HEADS, mixer="softmax")
    softmax.load_state_dict(theirs.state_dict())
    assert torch.equal(softmax(x, attn_mask=mask), theirs(x, attn_mask=mask))
    with pytest.raises(ValueError, match="attention mask"):
        zoo.Attention(DIM, HEADS, mixer="la")(x, attn_mask=mask)
