"""The notebooks of the documentation run from top to bottom, without a network."""

import json

import pytest

from tests.helpers.runs import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SHOWN = {  # what the last cells print or hold
    "quickstart": "model = zoo.load",
    "convert_timm_vit": "reloaded exactly: True\nreverted exactly: True\n",
    "diffusers_transformer": "reloaded exactly: True\nreverted exactly: True\n",
    "own_network": "torch.Size([1, 1000])\n",
}


LONG = '"schedule.epochs=3", "schedule.warmup_epochs=1"'
SHORT = '"schedule.epochs=1", "schedule.warmup_epochs=0.1", "model.kwargs.depth=2", "model.kwargs.embed_dim=32"'


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebooks_run(file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    content = json.loads(file.read_text())
    assert content["nbformat"] == 4
    names: dict = {"__name__": "__main__"}
    for cell in (cell for cell in content["cells"] if cell["cell_type"] == "code"):
        assert cell["outputs"] == [] and cell["execution_count"] is None  # stored as written, without results
        source = "".join(cell["source"]).replace(LONG, SHORT)
        exec(compile(source, f"{file.name} {cell['id']}", "exec"), names)
    assert SHOWN[file.stem] in capsys.readouterr().out
    if file.stem == "own_network":
        assert min(names["found"].values()) > 0.5  # chance is 0.1
    if file.stem == "quickstart":
        assert [row["images"] for row in names["rows"]] == [797, 797]
