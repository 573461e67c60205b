"""Context parallelism on two ranks equals one rank: operators, and Wan under `enable_parallelism`."""

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diffusers import ContextParallelConfig, TensorParallelConfig

import hla_kernels as hk
from tests.helpers.tiny_diffusers import converted, gradients, inputs, noise, run

RANKS = 2
OPERATORS = {
    "linear_attention": {"feature_map": "elu1", "normalize": True},
    "hla2": {"center": "qk", "mean_path": True, "ridge": 0.1},
    "ahla": {"feature_map": "relu", "normalize": True, "ridge": 0.2},
    "hla3": {"center": "k", "q_scale": 0.5},
    "polynomial": {"center": "k", "mean_path": True},
}
MODELS = {  # name: mixer and options; first every mixer as it is by default
    **{mixer: (mixer, {}) for mixer in ("la", "ahla", "hla2", "hla3", "poly", "mala", "mesa", "softmax")},
    "some softmax": ("ahla", {"keep_softmax": [1], "post_norm": True, "gate": True}),
    "hedgehog": ("hla2", {"feature_map": "hedgehog"}),
    "centred": ("hla3", {"feature_map": "identity", "normalize": False, "center": "qk", "mean_path": True}),
}


def tokens() -> list[torch.Tensor]:
    """q, k, v with two query heads a key head, and the gradient of o."""
    shapes = ((2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 6), (2, 12, 4, 6))
    return [noise(*shape, seed=seed).double() for seed, shape in enumerate(shapes)]


def operate(op: str, group: Any = None, shares: tuple[int, int] = (7, 5)) -> dict[str, torch.Tensor]:
    """o and the gradients of one operator, of this rank's tokens (the rank's share) if there is a group."""
    q, k, v, grad = tokens()
    if group is not None:
        q, k, v, grad = (t.split(shares, dim=1)[dist.get_rank()] for t in (q, k, v, grad))
    leaves = {n: t.clone().requires_grad_() for n, t in zip("qkv", (q, k, v), strict=True)}
    if op == "polynomial":
        leaves["coefficients"] = noise(4, 4, seed=5).double().requires_grad_()
    if group is None:
        o = getattr(hk, op)(**leaves, **OPERATORS[op])
    else:
        o = hk.sharded(op, **leaves, group=group, **OPERATORS[op])
    o.backward(grad)
    return {"o": o.detach(), **{n: t.grad for n, t in leaves.items()}}


def video(name: str, device: str = "cpu", spread: bool = False) -> dict[str, torch.Tensor]:
    """Output and gradients of a tiny Wan."""
    mixer, options = MODELS[name]
    model = converted("wan", mixer, **options).to(device)
    if spread:
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=RANKS))
    o = run(model, {k: v.to(device) for k, v in inputs("wan").items()})
    o.square().mean().backward()
    return {"o": o.detach(), **gradients(model)}


def work(rank: int, port: int, device: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch._C._get_accelerator = lambda: torch.device("cpu")  # diffusers asks which kind of device to use
        torch.accelerator.device_count = lambda: RANKS
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=RANKS)
    found = {f"video {name}": video(name, device, spread=True) for name in MODELS}
    if device == "cpu":
        found |= {op: operate(op, dist.group.WORLD) for op in OPERATORS}
        found |= {f"{op} on one": operate(op, dist.group.WORLD, (12, 0)) for op in OPERATORS}
    torch.save({name: {n: t.cpu() for n, t in tensors.items()} for name, tensors in found.items()}, f"{folder}/{rank}")
    dist.destroy_process_group()


def on_two_ranks(device: str, folder: Any) -> list[dict[str, dict[str, torch.Tensor]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port, device, str(folder)), nprocs=RANKS)
    return [torch.load(f"{folder}/{rank}", weights_only=True) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_two_ranks("cpu", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("where", ["", " on one"], ids=["both have tokens", "one has none"])
@pytest.mark.parametrize("op", OPERATORS)
def test_an_operator_sees_the_tokens_of_all_ranks(ranks, op, where):
    wanted = operate(op)
    for name, whole in wanted.items():
        parts = [rank[op + where][name] for rank in ranks]
        found = sum(parts) if name == "coefficients" else torch.cat(parts, dim=1)
        torch.testing.assert_close(found, whole)


def same_video(ranks, case: str, wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    parts = [rank[f"video {case}"] for rank in ranks]
    for part in parts:
        torch.testing.assert_close(part["o"], wanted["o"], rtol=tolerance, atol=tolerance)
    for name, whole in wanted.items():
        if name != "o":  # each rank has the gradients from its tokens
            error = (sum(part[name] for part in parts) - whole).norm()
            assert error <= tolerance * max(whole.norm(), 1e-3), name


@pytest.mark.parametrize("name", MODELS)
def test_wan_on_two_ranks(ranks, name):
    same_video(ranks, name, video(name), 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
def test_wan_on_two_gpus(tmp_path):
    found = on_two_ranks("cuda", tmp_path)
    for case in MODELS:
        wanted = {name: t.cpu() for name, t in video(case, "cuda").items()}
        same_video(found, case, wanted, 5e-5)  # on two H200: outputs 5e-7 apart, gradients 2e-5 (poly)


@pytest.mark.parametrize(
    ("name", "options", "config", "message"),
    [
        ("wan", {"depthwise": "v"}, ContextParallelConfig(ulysses_degree=2), "needs the positions of tokens"),
        ("wan", {"lepe": 3}, ContextParallelConfig(ring_degree=2), "needs the positions of tokens"),
        ("wan", {"causal": True}, ContextParallelConfig(ring_degree=2), "needs the positions of tokens"),
        ("flux", {}, ContextParallelConfig(ulysses_degree=2), "exact for converted Wan models only"),
        ("dit", {}, ContextParallelConfig(ulysses_degree=2), "exact for converted Wan models only"),
        ("flux", {}, TensorParallelConfig(tp_degree=2), "splits heads"),
    ],
)
def test_what_is_not_exact_is_refused(name, options, config, message):
    with pytest.raises(ValueError, match=message):
        converted(name, "ahla", **options).enable_parallelism(config=config)


@pytest.mark.parametrize("mixer", ["rala", "taylor2"])
def test_mixers_that_sum_over_tokens_themselves_are_refused(mixer):
    with pytest.raises(ValueError, match=f"the mixer '{mixer}' of .* reads the tokens of other devices itself"):
        converted("wan", mixer).enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))


@pytest.mark.parametrize("options", [{"causal": True}, {"key_padding_mask": torch.ones(2, 12, dtype=torch.bool)}])
def test_calls_that_are_no_sums_are_refused(options):
    q, k, v, _ = tokens()
    with pytest.raises(ValueError, match="tokens can be spread over ranks for two-sided linear operators"):
        hk.sharded("ahla", q, k, v, group=None, **options)
