"""The Triton form of tokens shared by ranks: equal to the definition in float64 on all tokens."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hla_kernels as hk
from hla_kernels import op as front
from hla_kernels.blockmix import call as block_call
from hla_kernels.dispatch import trial, verify
from tests.helpers.error_rule import LIMITS
from tests.ops.cases import Constant
from tests.ops.fused.children import OLD_INTERPRETER
from tests.ops.ranks.processes import Found, every_case, gathered, noise, on_ranks

pytest.importorskip("triton")

HALF, FULL = torch.float16, torch.float32
RATIO: dict[str, Any] = {"feature_map": "elu1", "normalize": True}
PAIR: dict[str, Any] = {"feature_map": "softmax_pair", "normalize": True}
MEANS: dict[str, Any] = {"center": "qk", "mean_path": True, "ridge": 0.3}
BLOCKS: dict[str, Any] = {"grid": (4, 3, 3), "blocks": (2, 1, 2), "prefix": 1}  # shares cut blocks and frames
N, SHARES = 37, {"both": (21, 16), "one": (37, 0)}
# operator, options, dtype, heads of queries and keys, channels of queries and values
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype, tuple[int, int], tuple[int, int]]] = {
    "la": ("linear_attention", {}, FULL, (2, 2), (16, 16)),
    "ratio of la": ("linear_attention", RATIO, HALF, (2, 2), (16, 16)),
    "ratio of la with groups": ("linear_attention", {**RATIO, "feature_map": "relu"}, HALF, (4, 2), (40, 24)),
    "la of a softmax pair": ("linear_attention", PAIR, FULL, (2, 2), (16, 16)),
    "hla2 with means": ("hla2", {**MEANS, "feature_map": "elu1"}, HALF, (2, 1), (16, 16)),
    "ratio of hla2": ("hla2", RATIO, FULL, (2, 2), (16, 16)),
    "ratio of ahla": ("ahla", RATIO, FULL, (2, 2), (16, 16)),
    "ahla": ("ahla", {"q_scale": 0.3, "feature_map": "relu"}, HALF, (2, 2), (16, 24)),
    "hla3": ("hla3", {"center": "k", "mean_path": True, "scale": 0.05}, FULL, (2, 2), (16, 16)),
    "polynomial": ("polynomial", {"center": "k"}, HALF, (2, 2), (16, 16)),
    "mhla": ("mhla", {**BLOCKS, "normalize": False}, FULL, (2, 2), (16, 16)),
    "ratio of mhla": ("mhla", {**BLOCKS, "feature_map": "elu1"}, FULL, (4, 2), (16, 24)),
    "mhla with rotation": ("mhla", {**BLOCKS, "rotary": True}, HALF, (2, 2), (16, 16)),
    "mhla of order ahla": ("mhla", {**BLOCKS, "order": "ahla", "normalize": False}, FULL, (2, 1), (16, 16)),
    "ratio of mhla of order hla2": ("mhla", {**BLOCKS, "order": "hla2"}, FULL, (2, 2), (16, 16)),
}  # fmt: skip

COMPILED = ("la", "ratio of la", "hla2 with means", "mhla", "ratio of mhla")
ON_GPUS = [name for name, (op, _, dtype, *_) in CASES.items() if op != "polynomial" or dtype == HALF]


def operate(case: str, share: tuple[int, ...] | None = None, device: str = "cpu") -> dict[str, torch.Tensor]:
    """o and the gradients: of the definition in float64, or with `share` of the Triton form for this rank's tokens.

    On a GPU, float16 is replaced by bfloat16, and there are more tokens."""
    op, options, dtype, (h, hk_), (d, dv) = CASES[case]
    times, dtype = (1, dtype) if device == "cpu" else (64, torch.bfloat16 if dtype == HALF else dtype)
    if op == "mhla":  # of a grid
        times, options = 1, dict(options)
    shapes = {"q": (h, d), "k": (hk_, d), "v": (hk_, dv), "grad": (h, dv)}
    tokens = {name: noise(1, times * N, *shape, seed=i).to(dtype) for i, (name, shape) in enumerate(shapes.items())}
    learned = {"coefficients": noise(h, 4, seed=5).float()} if op == "polynomial" else {}
    if op == "mhla":
        learned = {"mixing": noise(5, 5, seed=6).softmax(-1).float()}
    angles = noise(N, d // 2, seed=7)
    if share is None:
        tokens, learned = ({name: t.double() for name, t in x.items()} for x in (tokens, learned))
    else:
        cuts, rank = [times * n for n in share], dist.get_rank()
        tokens = {name: t.split(cuts, 1)[rank] for name, t in tokens.items()}
        angles = angles.split(cuts)[rank].float() if op == "mhla" else angles
    if "rotary" in options:
        options["rotary"] = (angles.cos().to(device), angles.sin().to(device))
    grad = tokens.pop("grad").to(device)
    leaves = {name: t.to(device).requires_grad_() for name, t in (tokens | learned).items()}
    if share is None:
        o = getattr(hk, op)(*leaves.values(), **options, impl="reference")
    else:
        more = {name: leaves[name] for name in learned}
        o = hk.sharded(op, *(leaves[name] for name in "qkv"), group=dist.group.WORLD, **more, **options)
    return {"o": o.detach(), **dict(zip(leaves, torch.autograd.grad(o, list(leaves.values()), grad), strict=True))}


def work() -> Found:
    """All cases in Triton, which calls of float16 ratios and on a CPU do not choose, with short parts."""
    from hla_kernels.hla.fused import Spec, plan
    from hla_kernels.ranks import blocks, two_sided
    from tests.ops.fused.children.quicker import interpret_quicker

    assert os.environ["TRITON_INTERPRET"] == "1"
    interpret_quicker()
    two_sided.choose = blocks.choose = lambda *_, **__: "triton"
    Spec.in_range = lambda self, n: self
    plan.reduce_parts = lambda heads, n, bn: (-(-n // bn), bn)
    return every_case(operate, list(CASES), SHARES) | compiled("aot_eager") | without_gradient() | first_use()


def first_use() -> Found:
    """What the first-use check finds wrong with the kernels of a rank, as numbers: nothing; on the first rank alone."""
    trial.DEVICE, trial.N = "cpu", 12
    x, found = noise(1, N, 2, 16, seed=1).float(), {}
    mixing = noise(5, 5, seed=6).softmax(-1).float()
    for name in COMPILED if dist.get_rank() == 0 else ():
        op, options, *_ = CASES[name]
        blocks = op == "mhla"
        call = block_call.prepare(x, x, x, mixing, **options) if blocks else front.prepare(op, x, x, x, **options)
        wrong = [verify.failure(run) for run in trial.runs(trial.shared_trial(trial.trial_of(call)))]
        found[f"check of {name}"] = {str(why): torch.tensor(why is not None) for why in wrong}
    return found


def without_gradient() -> Found:
    """Gradients of the tokens, where the outputs of the first rank have none: the other waits for it."""
    found = {}
    for case in COMPILED:
        op, options, *_ = CASES[case]
        more = {"mixing": noise(5, 5, seed=6).softmax(-1).float()} if op == "mhla" else {}
        qkv = [noise(1, N, 2, 16, seed=i).float() for i in range(3)]
        shares = [x.split(SHARES["both"], 1)[dist.get_rank()].requires_grad_() for x in qkv]
        o = hk.sharded(op, *shares, group=dist.group.WORLD, **more, **options)
        o = o if dist.get_rank() else Constant.apply(o)
        grads = torch.autograd.grad(o.sum() + sum(x.sum() for x in shares), shares)
        found[f"no gradient of {case}"] = {str(i): g - 1 for i, g in enumerate(grads)}
    return found


def compiled(backend: str, device: str = "cpu") -> Found:
    """Return compiled minus eager results, o and the gradients of the tokens, relative to the eager ones; a graph
    break raises."""
    found = {}
    for case in COMPILED:
        op, options, *_ = CASES[case]
        more = {"mixing": noise(5, 5, seed=6).softmax(-1).float().to(device)} if op == "mhla" else {}
        qkv = [noise(1, N, 2, 16, seed=i).float().to(device).requires_grad_() for i in range(3)]
        shares = [x.split(SHARES["both"] if dist.get_world_size() == 2 else (N,), 1)[dist.get_rank()] for x in qkv]

        def work(*tokens, op=op, more=more | options):
            return 2 * hk.sharded(op, *(x + 1 for x in tokens), group=dist.group.WORLD, **more)

        torch._dynamo.reset()
        pairs = []
        for run in (work, torch.compile(work, backend=backend, fullgraph=True)):
            o = run(*shares)
            pairs.append([o.detach(), *torch.autograd.grad(o.square().sum(), qkv)])
        found[f"compiled {case}"] = {str(i): (a - b) / a.norm() for i, (a, b) in enumerate(zip(*pairs, strict=True))}
    return found


def on_gpus() -> Found:
    """All cases on one or two GPUs, launched, recorded and replayed."""
    ranks, found = dist.get_world_size(), {}
    for share in SHARES.values():
        share = share if ranks == 2 else (N,)
        for case in ON_GPUS:
            for _ in range(3):
                found[f"{case}, {share}"] = operate(case, share, "cuda")
    return found | compiled("inductor", "cuda")


def check(case: str, share: object, ranks: list[Found], device: str = "cpu") -> None:
    """Compare o and the gradients of all ranks with the definition."""
    for name, truth in operate(case, device=device).items():
        parts = [rank[f"{case}, {share}"][name] for rank in ranks]
        error = (gathered([x.double() for x in parts], truth.cpu()) - truth.cpu()).norm() / truth.norm().cpu()
        assert error < 1.5 * LIMITS[ranks[0][f"{case}, {share}"]["o"].dtype], (share, name, error)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            return on_ranks(work, 2, tmp_path_factory.mktemp("ranks"))
        except torch.multiprocessing.ProcessRaisedException as error:
            if OLD_INTERPRETER in str(error):
                pytest.skip("the interpreter of these versions of Triton and NumPy cannot run loops")
            raise


@pytest.mark.kernels
@pytest.mark.parametrize("case", CASES)
def test_the_kernels_see_the_tokens_of_all_ranks(ranks, case):
    for share in SHARES:
        check(case, share, ranks)


@pytest.mark.kernels
@pytest.mark.parametrize("case", COMPILED)
def test_a_compiled_call_is_one_graph(ranks, case):
    check_compiled(case, ranks)


@pytest.mark.kernels
@pytest.mark.parametrize("case", COMPILED)
def test_a_rank_without_a_gradient(ranks, case):
    op, options, *_ = CASES[case]
    more = {"mixing": noise(5, 5, seed=6).softmax(-1)} if op == "mhla" else {}
    qkv = [noise(1, N, 2, 16, seed=i).requires_grad_() for i in range(3)]
    y = getattr(hk, op)(*qkv, impl="reference", **more, **options)
    for i, truth in enumerate(torch.autograd.grad(y[:, SHARES["both"][0] :].sum(), qkv)):
        found = torch.cat([rank[f"no gradient of {case}"][str(i)] for rank in ranks], 1)
        assert (found - truth).norm() < 1e-5 * truth.norm()


@pytest.mark.kernels
@pytest.mark.parametrize("case", COMPILED)
def test_the_check_on_first_use_passes(ranks, case):
    assert ranks[0][f"check of {case}"] == {"None": torch.tensor(False)}


def check_compiled(case: str, ranks: list[Found]) -> None:
    """Compare compiled with eager code; graph breaks raise."""
    for rank in ranks:
        for apart in rank[f"compiled {case}"].values():
            assert apart.norm() < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the Triton forms need a CUDA device: none here")
def test_on_gpus(tmp_path):
    n = min(2, torch.cuda.device_count())
    found = on_ranks(on_gpus, n, tmp_path, device="cuda")
    for share in SHARES.values() if n == 2 else [(N,)]:
        for case in ON_GPUS:
            check(case, share, found, "cuda")
    for case in COMPILED:
        check_compiled(case, found)
