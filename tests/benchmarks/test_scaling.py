"""The scaling table, measured by two processes on tiny models."""

import json
from pathlib import Path

import benchmark
import pytest
import torch
import torch.distributed as dist

from benchmarks import plots, report, scaling
from benchmarks.profile import Traffic
from zoo.models.convert import swap

LAYERS = 2
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(warm_processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling")
    files = [f"json={folder}/scaling.json", f"picture={folder}/scaling.png"]
    methods = "methods=[softmax ulysses,la,mhla]"
    words = ["scaling", "tiny=true", f"layers={LAYERS}", "steps=1", "models=[vit_small]", "compiled=[false]", *files]
    benchmark.main([*words, methods])
    benchmark.main([*words, "methods=[]", "gpus=[1]", "samples=8"])  # as many as two processes have
    assert (folder / "scaling.png").stat().st_size > 1000
    return json.loads((folder / "scaling.json").read_text())


def row(result, **key):
    (found,) = (r for r in result["rows"] if all(r[name] == value for name, value in key.items()))
    return found


def test_all_cases_are_measured(result):
    found = {(r["model"], r["tokens"], r["mode"], r["method"], r["gpus"]) for r in result["rows"]}
    context = {
        ("wan_1.3b", tokens, mode, method, gpus)
        for tokens, mode in ((12, "infer"), (24, "infer"), (12, "train"))
        for method, gpus in (("softmax", 1), ("la", 1), ("mhla", 1), ("softmax ulysses", 2), ("la", 2), ("mhla", 2))
    }
    assert found == context | {("vit_small", 5, "train", "one GPU", 1), ("vit_small", 5, "train", "ddp", 2)}
    assert [r["samples"] for r in result["rows"] if r["model"] == "vit_small"] == [4, 8, 8]
    assert [(r["method"], r["reason"]) for r in result["failed"]] == [
        ("fsdp2", "ValueError: accelerate shards weights on GPUs only")
    ]


def test_losses_equal_those_of_one_process(result):
    for r in result["rows"]:
        if r["gpus"] == 2:
            _, apart = report.efficiency(result["rows"], r)
            assert apart < (1e-6 if r["model"] == "vit_small" else 3e-3), r  # Wan: bfloat16, and Adam's first steps


def test_bytes_of_linear_attention_are_its_moments(result):
    # per layer K'V and a count, and for the denominator the moment of the norms of 8 pairs with 16 ones; float32
    heads, width, pairs, ones = 4, 16, 8, 16
    moments = 4 * LAYERS * (heads * width * width + 1 + heads * pairs * ones + 1)  # 2 (n - 1) / n of them
    for tokens in (12, 24):
        output = tokens * 64 * 2  # 16 channels of 4 pixels in bfloat16, of which each process sends its half
        sent = row(result, model="wan_1.3b", method="la", gpus=2, tokens=tokens, mode="infer")["sent_mib"] * 2**20
        assert sent == pytest.approx(moments + output / 2, abs=2)


def test_bytes_of_ahla_are_its_moments():
    """Closed form of a forward pass, for the published model: 12 heads of 128 channels, 30 layers."""
    heads, width, pairs, ones = 12, 128, 64, 16
    layer = 4 * (heads * (2 * width * width + pairs * pairs + pairs * ones) + 2)
    rows = json.loads((ROOT / "docs/results/scaling-h200.json").read_text())["rows"]
    found = [r for r in rows if (r["method"], r.get("layers"), r["mode"]) == ("ahla", 30, "infer") and r["gpus"] > 1]
    assert len(found) == 6
    for r in found:
        n, output = r["gpus"], r["tokens"] * 64 * 2
        assert r["sent_mib"] * 2**20 == pytest.approx((n - 1) / n * (2 * 30 * layer + output), abs=2)


def test_bytes_inside_custom_operators_are_counted(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda x, **options: None)
    library = torch.library.Library("hla_kernels", "FRAGMENT")
    library.define("sends(Tensor x) -> Tensor")
    library.impl("sends", lambda x: (dist.all_reduce(x, group=None), x + 1)[1], "CPU")
    replaced = dist.all_reduce
    with Traffic(4) as traffic:
        torch.ops.hla_kernels.sends(torch.zeros(10))
    assert traffic.bytes == 2 * 3 / 4 * 10 * 4
    assert dist.all_reduce is replaced


def test_bytes_of_ddp_are_the_gradients(result):
    model = scaling.DATA_MODELS["vit_small"].build(32, True)
    swap(model, "la")
    size = 4 * sum(p.numel() for p in model.parameters())
    sent = row(result, method="ddp")["sent_mib"] * 2**20
    assert 0 <= sent - size < 400  # 2 (n - 1) / n of them, the loss, and the tags that DDP broadcasts


def test_efficiency():
    shared = {"model": "wan_1.3b", "tokens": 12, "mode": "infer", "layers": 2}
    one = {**shared, "method": "softmax", "gpus": 1, "ms": 8.0, "results": [2.0, 4.0]}
    four = {**shared, "method": "softmax ring", "gpus": 4, "ms": 2.5, "results": [2.0, 4.1]}
    assert report.efficiency([one, four], four) == pytest.approx((0.8, 0.025))
    assert report.efficiency([four], four) is None
    assert report.efficiency([{**one, "layers": 30}, four], four) is None


def test_figure_of_the_rows_with_the_most_layers(tmp_path, monkeypatch):
    """Cases without a row of one GPU have no panel."""
    shared = {"model": "wan_1.3b", "tokens": 12, "mode": "infer", "method": "la", "results": [2.0]}
    rows = [
        {**shared, "layers": n, "gpus": g, "ms": ms}
        for n, g, ms in ((2, 1, 8.0), (2, 2, 4.0), (8, 1, 9.0), (8, 2, 6.0))
    ]
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, file, **options: figures.append(figure))
    plots.draw_scaling({"hardware": "", "rows": [*rows, {**rows[3], "mode": "train"}]}, tmp_path / "a.png")
    (panel,) = figures[0].axes
    assert [list(line.get_ydata()) for line in panel.lines] == [[1.0, 0.75]]
    plots.draw_scaling({"hardware": "", "rows": rows[:1]}, tmp_path / "a.png")
    assert len(figures) == 1


def test_efficiency_of_a_fixed_batch_per_gpu():
    """Twice the samples in 1.25 times the time; losses are compared with one GPU that has all samples."""
    shared = {"model": "dit_xl2", "tokens": 256, "mode": "train", "mixer": "la", "compiled": True}
    one = {
        **shared,
        "method": "one GPU",
        "gpus": 1,
        "samples": 4,
        "ms": 8.0,
        "results": [2.0],
        "sent_mib": 0.0,
        "peak_mib": 2,
    }
    all_samples = {**one, "samples": 8, "ms": 16.0, "results": [4.0]}
    two = {
        **shared,
        "method": "ddp",
        "gpus": 2,
        "samples": 8,
        "ms": 10.0,
        "results": [4.2],
        "sent_mib": 1.0,
        "peak_mib": 2,
    }
    assert report.efficiency([one, two], two) == (0.8, None)
    assert report.efficiency([all_samples, one, two], two) == (0.8, pytest.approx(0.05))
    assert report.efficiency([all_samples, two], {**two, "ms": 20.0}) == (0.4, pytest.approx(0.05))
    line = report.TEXT["scaling"]({"rows": [one, two], "failed": []}).splitlines()[-1]
    assert line.startswith("| dit_xl2 | all | 256 | train | ddp | yes | 2 | 4 | 10.0 | - | 0.800 |")


def test_several_gpus_are_asked_for():
    with pytest.raises(ValueError, match="Did you mean 'softmax ring'"):
        scaling.ScalingSettings(methods=["softmax rings"])
    with pytest.raises(ValueError, match="sizes must be among"):
        scaling.ScalingSettings(sizes=[1080])
    if torch.cuda.device_count() < 64:
        with pytest.raises(ValueError, match=r"torch sees none here|this machine has"):
            scaling.run(scaling.ScalingSettings(gpus=[64]), "")
