"""Data sets of the Hugging Face hub: a whole run against a local server in its place, and local folders by name."""

import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from tests.forks import CPU
from tests.helpers.hub import local_hub
from tests.helpers.runs import ROOT, TINY
from zoo import config
from zoo.data import open_source, open_sources
from zoo.data.settings import DataSettings

datasets = pytest.importorskip("datasets")
pytest.importorskip("pyarrow.parquet")
CLASSES = [f"digit {i}" for i in range(10)]
FORKS = """
import json, os, runpy, sys
import datasets, matplotlib.pyplot, torch._dynamo, zoo.cli.train_classifier
for words in json.loads(sys.argv[1]):
    sys.stderr.flush()
    if not os.fork():
        sys.argv = [TOOL, *words]
        runpy.run_path(TOOL, run_name="__main__")
        sys.exit()
    status = os.waitstatus_to_exitcode(os.wait()[1])
    print("status", status, file=sys.stderr)
""".replace("TOOL", repr(str(ROOT / "tools" / "train_vit.py")))


def parquet(first, last, classes=CLASSES):
    data = load_digits()
    images = [Image.fromarray((data.images[i] * 15).astype(np.uint8)) for i in range(first, last)]
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=list(classes)))
    rows = {"image": images, "label": data.target[first:last].tolist()}
    file = io.BytesIO()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(file)
    return file.getvalue()


def train(*calls, **environment):
    """(exit status, last line of errors) of each call of the tool: forks of a new process, whose imports read the
    environment."""
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "kernels"), *sys.path]))
    environment = {**os.environ, "PYTHONPATH": path, **CPU, **environment}
    command = [sys.executable, "-c", FORKS, json.dumps(calls)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = re.findall(r"(?:([^\n]*)\n)?status (\d+)\n", done.stderr)
    assert len(said) == len(calls), done.stderr
    return [(int(status), line) for line, status in said]


def test_a_run_on_a_data_set_of_the_hub(tmp_path):
    files = {"train-00000-of-00001.parquet": parquet(0, 200), "validation-00000-of-00001.parquet": parquet(200, 260)}
    settings = config.merge(TINY, {"data": {"source": "hf", "train": "zoo/digits", "val": "zoo/digits"}})
    (tmp_path / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
    cache = tmp_path / "cache"
    with local_hub("zoo/digits", files) as (endpoint, asked):
        where = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1"}
        file = str(tmp_path / "run.yaml")
        calls = [[file, f"run.folder={tmp_path}/{run}"] for run in ("first", "second")]
        refused = {"zoo/digits:test": "Unknown split", "zoo/none": "cannot be loaded"}
        calls += [[file, f"data.val={name}", f"run.folder={tmp_path}/third"] for name in refused]
        first, second, *others = train(*calls, **where)
        assert first[0] == second[0] == 0, (first, second)
        for (status, line), reason in zip(others, refused.values(), strict=True):
            assert status == 2 and reason in line, line
        downloads = [line for line in asked if line.startswith("GET") and line.endswith(".parquet")]
        assert len(downloads) == 2, "each file is downloaded once, the second run reads the cache"
    first, second = (json.loads((tmp_path / run / "result.json").read_text()) for run in ("first", "second"))
    assert first["images"] == 60 and first["top1"] == second["top1"]
    from zoo.models.timm.model_files import read_recipe

    assert read_recipe(tmp_path / "first").classes == CLASSES


def test_local_folders_splits_and_class_names(make_folder, tmp_path):
    root = tmp_path / "animals"
    root.mkdir()
    for split, counts in (("train", {"cat": 3, "dog": 2}), ("validation", {"cat": 1, "dog": 1})):
        make_folder(counts).rename(root / split)
    train, val = open_sources(DataSettings(source="hf", train=str(root), val=str(root)))
    assert (len(train), len(val), train.classes, val.classes) == (5, 2, ["cat", "dog"], ["cat", "dog"])
    assert [train.read(i)[1] for i in range(5)] == [0, 0, 0, 1, 1] and train.read(0)[0].size == (12, 12)
    part = open_source("hf", f"{root}:train[:40%]", train=False)
    assert len(part) == 2
    with pytest.raises(ValueError, match=r"cannot be loaded: Unknown split .*train.*validation"):
        open_source("hf", f"{root}:test", train=False)
    with pytest.raises(ValueError, match=r"nowhere cannot be loaded"):
        open_source("hf", str(tmp_path / "nowhere"), train=True)


def test_class_names_of_both_sets_must_be_the_same(tmp_path):
    for name, classes in (("train", CLASSES), ("val", CLASSES[::-1])):
        (tmp_path / f"{name}.parquet").write_bytes(parquet(0, 20, classes))
    with pytest.raises(ValueError, match=r"classes that are not the 10 of the training set"):
        open_sources(
            DataSettings(source="parquet", train=str(tmp_path / "train.parquet"), val=str(tmp_path / "val.parquet"))
        )
