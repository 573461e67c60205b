"""A mixer that is given the tensor which holds q, k and v reads that one, with the same result."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zoo.mixers import Context, build_mixer

LINEAR = ("la", "ahla", "hla2", "hla3", "poly", "inline")  # one family of operators
DIM, HEADS, HEAD_DIM, GRID, PREFIX = 24, 3, 8, (4, 5), 1
ANCHORED = {"feature_map": "identity", "normalize": False, "center": "k", "mean_path": True}
PLAIN = {"center": None, "mean_path": False}
OPTIONS = {
    "ratio": {"feature_map": "elu1", "normalize": True, **PLAIN},
    "pair": {"feature_map": "softmax_pair", "normalize": True, **PLAIN},
    "anchored": ANCHORED,
    "scaled": {"feature_map": "identity", "normalize": False, "post_norm": True, "gate": True, **PLAIN},
}
CHANGED = {
    "depthwise": {"depthwise": "k", "feature_map": "elu1"},
    "hedgehog": {"feature_map": "hedgehog"},
    "power": {},
    "both": {"causal": True, "scan": "both", "feature_map": "elu1"},
}


class Recorder(TorchDispatchMode):
    """The names of all operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def ours(self) -> list[str]:
        return [name.removeprefix("hla_kernels.").removesuffix(".default") for name in self.names if "hla_" in name]


def setting(name: str, dtype: torch.dtype, **options):
    torch.manual_seed(0)
    mixer = build_mixer(name, DIM, HEADS, HEAD_DIM, scale=0.3, **options).to(dtype)
    for p in mixer.parameters():
        torch.nn.init.normal_(p)
    qkv = torch.randn(2, 21, 3, HEADS, HEAD_DIM).to(dtype)
    return mixer, qkv, torch.randn(2, 21, DIM).to(dtype)


def call(mixer, qkv, x, packed: bool):
    """Output, gradients of qkv and of the parameters, and the operators of `hla_kernels` in the forward."""
    qkv = qkv.clone().requires_grad_()
    mixer.zero_grad()
    with Recorder() as recorder:
        ctx = Context(x=x, grid=GRID, prefix=PREFIX, qkv=qkv if packed else None)
        o = mixer(*qkv.unbind(2), ctx)
    o.backward(o.detach().cos())
    return [o, qkv.grad, *(p.grad for p in mixer.parameters())], recorder.ours()


@pytest.mark.parametrize("name", ["mhla", "mhla2", "taylor2"])
def test_other_operators_read_the_packed_tensor(name):
    options = {} if name == "taylor2" else {"blocks": [2, 2], "prefix": PREFIX, "feature_map": "elu1"}
    setup = setting(name, torch.float64, **options)
    packed, ran = call(*setup, packed=True)
    separate, before = call(*setup, packed=False)
    # taylor2 has no kernels, so that one operator of q, k and v serves both
    assert (ran, before) == ((["taylor2"],) * 2 if name == "taylor2" else (["mhla_qkvpacked"], ["mhla"]))
    for a, b in zip(packed, separate, strict=True):
        torch.testing.assert_close(a, b)


def test_an_annealed_mixer_reads_the_packed_tensor_too():
    mixer, qkv, x = setting("ahla", torch.float64, feature_map="elu1")
    mixer.set_warmup(0.5, 8.0, torch.device("cpu"))
    (packed, ran), (separate, before) = (call(mixer, qkv, x, packed=p) for p in (True, False))
    assert len(ran) == len(before) == 1 and ran != before
    for a, b in zip(packed, separate, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", LINEAR)
def test_the_packed_call_is_the_separate_one(name, options, dtype):
    setup = setting(name, dtype, **options)
    packed, ran = call(*setup, packed=True)
    separate, before = call(*setup, packed=False)
    assert ran == ["two_sided_qkvpacked"] and before == ["two_sided"]
    assert len(packed) == len(separate)
    for a, b in zip(packed, separate, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("options", CHANGED.values(), ids=CHANGED)
def test_what_changes_q_k_or_v_reads_them_apart(options):
    setup = setting("ahla", torch.float64, **options)
    packed, ran = call(*setup, packed=True)
    separate, before = call(*setup, packed=False)
    assert ran == before and "two_sided_qkvpacked" not in ran
    for a, b in zip(packed, separate, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_narrow_pair_is_read_apart():
    _, ran = call(*setting("taylor2", torch.float64, width=3), packed=True)
    assert ran == ["taylor2"]


def test_a_rotated_call_reads_them_apart():
    mixer, qkv, x = setting("ahla", torch.float64)
    ctx = Context(x=x, grid=GRID, prefix=PREFIX, qkv=qkv, rotate=lambda t: t.roll(1, -1))
    with Recorder() as recorder:
        mixer(*qkv.unbind(2), ctx)
    assert recorder.ours() == ["two_sided", "two_sided"]
