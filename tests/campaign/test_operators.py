"""The campaign of operators finds what is wrong, and only that; a few of its calls."""

import random
from dataclasses import replace

import pytest
import torch

from hla_kernels.blockmix import operator
from hla_kernels.dispatch import verify
from tests.campaign import dense, operators
from tests.campaign.calls import LINEAR, OPS, Call, draw, tensors


def test_some_calls():
    """Of every operator, all as the dense definitions have them."""
    figures = operators.attack(seed=1, calls=110, seconds=90.0, device="cpu")
    assert figures.failures == [] and set(figures.kinds) == set(OPS)
    assert figures.refused < figures.calls / 4 and max(figures.worst.values()) < 1


def test_calls_are_those_of_their_seed():
    assert all(draw(random.Random(i), gpu) == draw(random.Random(i), gpu) for i in range(50) for gpu in (False, True))


CALL = Call(
    "mhla", "float64", 2, 9, 4, 2, 6, 5, seed=3, layout="heads first", mean=0.5,
    options={"grid": (9,), "blocks": (3,), "feature_map": "relu", "order": "ahla"},
    extra={"mixing": "shared", "rotary": "own"},
)  # fmt: skip


TILES = {"grid": (4, 4), "prefix": 1, "suffix": 1, "q_tile": 4, "k_tile": 4, "q_scale": 0.5}
DELTA = Call("delta", "float64", 2, 9, 2, 2, 4, 5, 0, pieces=(4, 5), extra={"rank": 1, "removed": 2, "log_f": "token"})


@pytest.mark.parametrize(
    ("call", "changes"),
    [
        (Call("softmax_attention", "float64", 1, 9, 2, 1, 4, 5, 0), {"scale": 0.51}),
        (
            Call("adaptive_multipole", "float64", 1, 18, 2, 1, 4, 5, 0,
                 options=TILES | {"select": "error", "far": "first", "density": 0.1}),
            {"select": "mass"},
        ),
    ],
    ids=lambda x: getattr(x, "op", ""),
)  # fmt: skip
def test_another_option_of_the_definition_is_found(call, changes, monkeypatch):
    assert operators.check(call, "cpu") == ""
    truth = operators.truth
    monkeypatch.setattr(operators, "truth", lambda *given, **more: truth(*given, **changes, **more))
    assert operators.check(call, "cpu").startswith("o is off")


def test_another_decay_of_the_definition_is_found(monkeypatch):
    assert operators.check(DELTA, "cpu") == ""
    delta = dense.delta
    monkeypatch.setattr(dense, "delta", lambda q, k, v, log_f, *more: delta(q, k, v, 1.01 * log_f, *more))
    assert operators.check(DELTA, "cpu").startswith("o is off")


@pytest.mark.parametrize("dtype", ("float64", "float32", "float16", "bfloat16"))
@pytest.mark.parametrize("fault", ("o is off", "dq is off", "1 is off"))
def test_another_power_of_the_definition_is_found(fault, dtype, monkeypatch):
    """Of its features, of the gradients of tokens, and of the gradient of the exponents of q."""
    options = {"feature_map": "identity", "normalize": True}
    call = Call("ahla", dtype, 2, 40, 4, 2, 8, 5, seed=0, options=options, extra={"power": True})
    assert operators.check(call, "cpu") == ""
    power, scale = dense.power, {"o is off": (1, 1), "dq is off": (1.1, 1), "1 is off": (1, -1)}[fault]

    def other(x, exponent, *more):
        if fault == "o is off":
            return power(x, 1.1 * exponent, *more)
        given = ((1 - s) * t.detach() + s * t for s, t in zip(scale, (x, exponent), strict=True))
        return power(*given, *more)

    monkeypatch.setattr(dense, "power", other)
    assert operators.check(call, "cpu").startswith(fault)


def test_a_fault_is_found_and_reduced(monkeypatch):
    """The gradient of queries turned the wrong way, with rotary tables of each head."""
    assert operators.check(CALL, "cpu") == ""
    right = operator.gradient

    def wrong(*given):
        *rest, rotary = given
        if rotary is None or rotary[0].dim() == 2:
            return right(*given)
        return right(*rest, (rotary[0], -rotary[1]))[0], *right(*given)[1:]

    monkeypatch.setattr(operator, "gradient", wrong)
    complaint = operators.check(CALL, "cpu")
    assert complaint.startswith("dq is off")
    small = operators.reduced(CALL, complaint, "cpu")
    assert (small.b, small.layout, small.extra["rotary"]) == (1, "plain", "own") and "order" not in small.options


CANCELLING = Call(
    "mhla", "float64", 2, 2, 3, 3, 8, 8, seed=3371394, pieces=(1, 1),
    options={"grid": (1, 5), "blocks": (1, 1), "order": "hla2", "causal": True, "rotary_half": True},
    extra={"mixing": "shared", "rotary": "shared"},
)  # fmt: skip


def test_rounding_of_terms_that_cancel(monkeypatch):
    """Of one token q and k have no channel in common: q.k is 0, divided by eps, and q (k k') is as large as q and k."""
    assert operators.check(CANCELLING, "cpu") == ""
    monkeypatch.setattr(operators, "LIKELY", operators.LIKELY / 1e4)
    assert " is off by " in operators.check(CANCELLING, "cpu")  # without the bound of what cancels


@pytest.mark.parametrize("padding", (0, 3))
@pytest.mark.parametrize("n", (1, 2))
def test_rounding_of_gradients_of_few_tokens(n, padding, monkeypatch):
    """A ratio of alike keys is the mean value: gradients of its numerator and denominator cancel, but not what a matrix
    in bfloat16 leaves of them."""
    options = {"feature_map": "relu", "normalize": True}
    call = Call("linear_attention", "bfloat16", 1, n + padding, 1, 1, 16, 16, 0, options=options)
    x = tensors(call, "cpu")
    x.q, x.k = x.q.abs(), x.k[:, :1].abs().expand(-1, n + padding, -1, -1)
    x.mask = torch.arange(n + padding)[None] < n
    q, k, v, grad = (t[0, :n, 0].double().requires_grad_() for t in (x.q, x.k, x.v, x.grad))
    moment = k.mT @ v / n
    moment = moment + (moment.bfloat16() - moment).detach()
    y = q @ moment / (q @ k.mT.mean(1, keepdim=True) + 1e-6)
    error = torch.autograd.grad((y * grad).sum(), q)[0].norm()
    exact = operators.truth(call, x, torch.float64)
    assert exact[1].norm() < error / 100 and error <= operators.allowed(call, x, exact, True)[1]
    monkeypatch.setattr(operators, "FEW", 0)
    assert error > operators.allowed(call, x, exact, True)[1]


PRODUCTS = [call for seed in range(60) if (call := draw(random.Random(seed), False)).op in (*LINEAR, "mhla")]


@pytest.mark.parametrize("call", PRODUCTS, ids=lambda call: f"{call.op}-{call.seed}")
def test_magnitudes_are_no_smaller_than_what_they_bound(call):
    x = tensors(replace(call, dtype="float64"), "cpu")
    terms = operators.truth(call, replace(x, grad=x.grad.abs()), torch.float64, magnitudes=True)
    for exact, most in zip(operators.truth(call, x, torch.float64), terms, strict=True):
        assert float(exact.norm()) <= 1.5 * float(most.norm()) + 1e-12  # rotations: sqrt(2)


FAILED = [
    Call("hla3", "float16", 1, 2, 2, 2, 64, 64, seed=1233934628, layout="packed", mean=0.5,
         options={"feature_map": "identity", "scale": 1 / 64, "q_scale": 1 / 8}, extra={"lengths": [1, 0, 1]}),
    Call("polynomial", "bfloat16", 1, 197, 1, 1, 128, 96, seed=1539185450, options={"center": "qk"}),
    Call("hla3", "float16", 8, 1, 4, 4, 40, 96, seed=1,
         options={"feature_map": "relu", "mean_path": True, "ridge": 0.1}),
    Call("hla2", "bfloat16", 3, 257, 4, 4, 40, 96, seed=2, options={"feature_map": "elu1", "normalize": True}),
    Call("ahla", "float16", 2, 698, 4, 4, 72, 96, seed=3, options={"feature_map": "elu1", "normalize": True}),
    Call("polynomial", "bfloat16", 32, 249, 12, 6, 64, 32, seed=4,
         options={"feature_map": "softmax_pair", "normalize": True, "eps": 1e-12}),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton forms need a CUDA device: none here")
@pytest.mark.parametrize("call", FAILED, ids=lambda call: f"{call.op}-{call.seed}")
def test_calls_that_failed_on_a_gpu(call):
    """Of hla3: its operator, of numbers below 2**-18, was rounded to float16. Of polynomial: a kernel with tiles of
    values that were narrower than tiles of keys did not compile. Of the others: three did not compile, and two runs of
    the last one differed."""
    assert operators.check(call, "cuda") == ""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton forms need a CUDA device: none here")
@pytest.mark.parametrize("seed", range(5001, 5021))
def test_random_calls_on_a_gpu(seed):
    """2,000 in all; a failure that is found becomes one of FAILED."""
    figures = operators.attack(seed, 100, 900.0, "cuda")
    assert figures.failures == [] and figures.calls == 100


def test_a_failed_first_use_check_is_a_failure(monkeypatch):
    def run(call, x):
        verify.VERDICTS["form"] = verify.Fault("two runs differ")
        return []

    monkeypatch.setattr(verify, "VERDICTS", {"another": verify.Fault("it was there before"), "good": None})
    monkeypatch.setattr(operators, "run", run)
    assert operators.check(CALL, "cpu") == "two runs differ"


@pytest.mark.parametrize("changes", [{"options": CALL.options | {"feature_map": "rleu"}}, {"impl": "triton"}])
def test_refusals_are_no_failures(changes):
    with pytest.raises(operators.Refused):
        operators.check(replace(CALL, **changes), "cpu")


def test_buffers_start_as_nan_on_a_gpu():
    with operators.poisoned("cuda"):
        assert bool(torch.empty(3).isnan().all())
    with operators.poisoned("cpu"):
        assert torch.empty(0).numel() == 0
