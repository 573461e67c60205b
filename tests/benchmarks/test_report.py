"""Speed: the tables and pictures that are made of result files."""

import json

import pytest
from PIL import Image

from benchmarks import models, peers, plots, report
from benchmarks.shapes import OPS, SHAPES
from tests.helpers.runs import ROOT

MULTIPOLE = {"grid": [1, 1], "blocks": [8, 8], "radius": 2, "degree": 1}


def kernel_fixture() -> dict:
    """Rows with round made-up numbers; no measurement."""
    made = []
    for shape in SHAPES.values():
        head = {"shape": shape.sizes, "rel_err": 0.001, "first_s": 1.0, "copy_tb_s": 4.0, "timer": "graph"}
        for which, us in (("forward", 10.0), ("forward_backward", 20.0)):
            tail = {**head, "pass": which, "floor_us": us / 2, "peak_mib": 1.0}
            for name, slower in (("identity", 1), ("elu1_ratio", 1.1), ("center_mean", 1.5)):
                for op in OPS:
                    made.append({"op": op, "impl": "ours", "options": peers.OPTIONS[name], "us": us * slower, **tail})
            for impl, slower in (("ours", 2), ("eager", 5)):
                for name, factor in (("pair_ratio", 1.0), ("power_ratio", 0.75)):
                    case = {"op": "hla2", "impl": impl, "options": peers.OPTIONS[name]}
                    made.append({**case, "us": us * slower * factor, **tail})
            fixed = {"op": "polynomial", "impl": "ours", "options": peers.FIXED["fixed"], "us": us / 2, **tail}
            made.append({**fixed, "first_s": 3.0})
            made.append({"op": "softmax_attention", "impl": "sdpa_cudnn", "options": {}, "us": us * 6, **tail})
            for impl, slower in (("ours", 1.5), ("eager", 15)):
                case = {"op": "multipole", "impl": impl, "ran": "triton", "options": MULTIPOLE}
                made.append({**case, "us": us * slower, **tail})
    return {"hardware": "made up", "versions": {}, "date": "2000-01-01", "command": "none", "rows": made, "failed": []}


def model_fixture() -> dict:
    """Rows with round made-up numbers; no measurement."""
    made = []
    for setup in models.setups(models.ModelSettings()):
        speed = {"softmax": 100, "ahla": 150, "hla2": 90}[setup.mixer] * (2 if setup.compiled else 1)
        speed *= 3 if (setup.mode, setup.weights, setup.mixer) == ("train", "bfloat16", "ahla") else 1
        rest = {"tokens": 10, "batch": 4, "per_second": speed, "ms": 1.0, "peak_mib": 7, "device_ms": 1.0}
        made.append({**setup._asdict(), **rest, "shares": {"attention": 0.25, "matmul": 0.5, "rest": 0.25}})
    return {"hardware": "made up", "versions": {}, "date": "2000-01-01", "command": "none", "rows": made, "failed": []}


def test_kernel_table():
    lines = report.kernels(kernel_fixture()).splitlines()
    (line,) = (line for line in lines if line.startswith("| ViT-S 224 | ahla"))
    # half the floor is less than 0.70 and 0.60; six times cuDNN's is more than 4.5
    wanted = ["10 (0.50 miss 0.7)", "20 (0.50 miss 0.6)", "6.00 pass 4.5", "x 1.10 pass", "x 1.50 miss"]
    assert [cell.strip() for cell in line.split("|")[3:8]] == wanted
    cells = [[cell.strip() for cell in line.split("|")[2:-1]] for line in lines if "| ViT-S 224 | poly" in line]
    assert [row[0] for row in cells] == ["polynomial", "polynomial, fixed coefficients"]
    assert cells[0][4:6] == ["x 1.10 pass", "x 1.50 miss"] and cells[0][-1] == "1.0"
    assert cells[1][1:6] == ["5 (1.00 pass 0.7)", "10 (1.00 pass 0.6)", "12.00 pass 4.5", "-", "-"]
    assert cells[1][-1] == "3.0"
    assert "| sdpa_cudnn softmax_attention | 60 / 120 |" in "\n".join(lines)
    for title, cells in (("softmax pair", "20 | 2.5 | 40 | 2.5"), ("power", "15 | 2.5 | 30 | 2.5")):
        (head,) = (place for place, line in enumerate(lines) if f"| {title} + ratio |" in line)
        assert f"| DiT-XL 256 | hla2 | {cells} | 1.0e-03 / 1.0e-03 | 1 |" in lines[head : head + 8]
    (line,) = (line for line in report.multipole(kernel_fixture()).splitlines() if line.startswith("| ViT-S 224 | 8x8"))
    assert [cell.strip() for cell in line.split("|")[5:11]] == ["15", "4.00", "30", "4.00", "10.00", "triton"]


def test_model_table():
    text = report.models(model_fixture())
    (line,) = (line for line in text.splitlines() if line.startswith("| vit_small | 512 | 10 | 4 | train | float32"))
    cells = [cell.strip() for cell in line.split("|")[7:10]]
    assert cells[0] == "200, 7, 25 % (without attention x 1.33), compiled"
    assert cells[1] == "300 (x 1.50 pass 1.3), 7, 25 %, compiled"
    assert cells[2] == "180 (x 0.90 miss 1.3), 7, 25 %, compiled"
    lines = [line for line in text.splitlines() if line.startswith("| vit_small | 512 |")]
    assert [line.split("|")[5:7] for line in lines] == [
        [" infer ", " bfloat16 "],
        [" train ", " float32 "],
        [" train ", " bfloat16 "],
    ]
    assert "900 (x 4.50 pass 1.3)" in lines[2]


def video_fixture() -> dict:
    """Rows with round made-up numbers; no measurement."""
    made = []
    for setup in models.setups(models.VideoSettings(modes=["infer", "train"])):
        ms = {"softmax": 480.0, "ahla every:3": 300.0, "ahla": 200.0, "la": 160.0}.get(setup.mixer, 150.0)
        rest = {"tokens": 32760, "batch": 1, "per_second": 1000 / ms, "ms": ms, "peak_mib": 7, "device_ms": ms}
        made.append({**setup._asdict(), **rest, "shares": {"attention": 0.25, "matmul": 0.5, "rest": 0.25}})
    return {**model_fixture(), "rows": made}


def test_video_table():
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.video(video_fixture()).splitlines()]
    times = {(line[0], line[4], line[5]): line[7] for line in lines[2:]}
    assert times["wan_1.3b", "infer", "ahla"] == "2.40 pass 2.4"
    assert times["wan_1.3b", "infer", "ahla every:3"] == "1.60 miss 1.7"
    assert times["wan_1.3b", "infer", "la"] == "3.00" and times["wan_1.3b", "train", "ahla"] == "2.40"
    assert times["wan_1.3b", "infer", "mhla every:3"] == "3.20 pass 1.7"
    assert times["wan_1.3b", "infer", "softmax"] == ""
    assert {line[1] for line in lines[2:]} == {"480", "1024", "2048"}


@pytest.mark.parametrize(
    ("draw", "made"),
    [("draw_kernels", kernel_fixture), ("draw_models", model_fixture), ("draw_video", video_fixture)],
)
def test_pictures(draw, made, tmp_path):
    result = made()
    if draw == "draw_models":  # a model without rows of a type of weights has no panel there
        result["rows"].append(result["rows"][0] | {"model": "dit_xl2", "mode": "train", "weights": "float32"})
    getattr(plots, draw)(result, tmp_path / "docs" / "a.png")
    assert min(Image.open(tmp_path / "docs" / "a.png").size) > 400


def test_tables_of_the_readme(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import readme_tables

    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "kernels-h200.json").write_text(json.dumps(kernel_fixture()))
    marks = "<!-- results:kernels-h200 -->\n<!-- /results -->\n<!-- results:models-h200 -->\n<!-- /results -->\n"
    (tmp_path / "README.md").write_text(marks)
    monkeypatch.setattr(readme_tables, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["readme_tables.py"])
    assert readme_tables.main() == 0
    text = (tmp_path / "README.md").read_text()
    assert "\n| ahla | " in text and "`python tools/benchmark.py models` was not run yet." in text
    assert "| ViT-S 224 | ahla |" in (tmp_path / "docs" / "results" / "kernels-h200.md").read_text()
    assert "[Operators](kernels-h200.md)" in (tmp_path / "docs" / "results" / "index.md").read_text()
