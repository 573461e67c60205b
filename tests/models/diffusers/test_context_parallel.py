"""Context parallelism of Wan under `enable_parallelism` on two ranks equals one rank."""

import pytest
import torch
from diffusers import ContextParallelConfig, TensorParallelConfig

from tests.helpers.tiny_diffusers import converted, gradients, inputs, run
from tests.ops.ranks.processes import Found, on_ranks

RANKS = 2
SHARED = ("la", "ahla", "hla2", "hla3", "poly", "mala", "rala", "inline", "mesa", "taylor2", "softmax")
SHARED += ("strassen", "efficient", "performer", "flare")
BLOCKED = ("mhla", "mhla2", "multipole")
MODELS = {  # name: mixer and options; first every mixer as it is by default
    **{mixer: (mixer, {}) for mixer in SHARED},
    **{mixer: (mixer, {"blocks": [3, 2, 1]}) for mixer in BLOCKED},  # shares cut the second frame
    "some softmax": ("ahla", {"keep_softmax": [1], "post_norm": True, "gate": True}),
    "hedgehog": ("hla2", {"feature_map": "hedgehog"}),
    "centred": ("hla3", {"feature_map": "identity", "normalize": False, "center": "qk", "mean_path": True}),
    "gains": ("la", {"gains": True}),
    "causal": ("ahla", {"causal": True}),
    "frames": ("la", {"causal": "frame"}),
    "adaptive": ("multipole", {"select": "error", "density": 0.5, "q_tile": 8, "k_tile": 4, "branch": "la"}),
    "branch of blocks": ("multipole", {"branch": "mhla", "blocks": [3, 2, 1], "density": 0.5, "k_tile": 4}),
}


def video(name: str, device: str = "cpu", spread: bool = False) -> dict[str, torch.Tensor]:
    """Output and gradients of a tiny Wan."""
    mixer, options = MODELS[name]
    model = converted("wan", mixer, **options).to(device)
    if spread:
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=RANKS))
    o = run(model, {k: v.to(device) for k, v in inputs("wan").items()})
    o.square().mean().backward()
    return {"o": o.detach(), **gradients(model)}


def work(device: str) -> Found:
    """Results of all models; of one that fails, the error as a name, so that the others run."""
    found = {}
    for name in MODELS:
        try:
            found[name] = video(name, device, spread=True)
        except (RuntimeError, ValueError) as error:
            found[name] = {f"failed: {error}"[:500]: torch.empty(0)}
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_ranks(work, RANKS, tmp_path_factory.mktemp("ranks"), "cpu")


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    return on_ranks(work, RANKS, tmp_path_factory.mktemp("gpus"), "cuda", device="cuda")


def same_video(ranks, case: str, wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    parts = [rank[case] for rank in ranks]
    for part in parts:
        assert "o" in part, next(iter(part))
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
@pytest.mark.parametrize("name", MODELS)
def test_wan_on_two_gpus(gpus, name):
    wanted = {key: t.cpu() for key, t in video(name, "cuda").items()}
    same_video(gpus, name, wanted, 5e-5)  # on two H200: outputs 5e-7 apart, gradients 2e-5 (poly)


@pytest.mark.parametrize(
    ("name", "mixer", "options", "config", "message"),
    [
        ("wan", "la", {"depthwise": "v"}, ContextParallelConfig(ulysses_degree=2), "convolves neighbouring tokens"),
        ("wan", "softmax", {"lepe": 3}, ContextParallelConfig(ring_degree=2), "convolves neighbouring tokens"),
        (
            "wan",
            "la",
            {"causal": True, "scan": "both"},
            ContextParallelConfig(ring_degree=2),
            "scans the tokens back",
        ),
        ("wan", "mhla", {"causal": True}, ContextParallelConfig(ring_degree=2), r"orders the tokens inside blocks"),
        ("wan", "gdn", {"depthwise": ""}, ContextParallelConfig(ring_degree=2), "passes a state along its own order"),
        ("wan", "mega", {}, ContextParallelConfig(ring_degree=2), "averages tokens along the grid"),
        ("wan", "nystrom", {}, ContextParallelConfig(ring_degree=2), "pools tokens by their position"),
        ("flux", "ahla", {}, ContextParallelConfig(ulysses_degree=2), "exact for converted Wan models only"),
        ("dit", "ahla", {}, ContextParallelConfig(ulysses_degree=2), "exact for converted Wan models only"),
        ("flux", "ahla", {}, TensorParallelConfig(tp_degree=2), "splits heads"),
    ],
)
def test_what_is_not_exact_is_refused(name, mixer, options, config, message):
    with pytest.raises(ValueError, match=message):
        converted(name, mixer, **options).enable_parallelism(config=config)
