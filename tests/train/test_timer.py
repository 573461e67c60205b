"""The clock of a run: steps, and what is done beside them, each with its own time and memory."""

import pytest
import torch

from tests.helpers.runs import tiny
from zoo.eval import timer
from zoo.train.classification import ClassificationRun
from zoo.train.metrics_log import read_rows


class Machine:
    """Time and memory that a test sets."""

    def __init__(self, monkeypatch):
        self.now, self.peak, self.live = 0.0, 0, 0
        monkeypatch.setattr(timer.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.peak * 2**20)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.live))

    def work(self, seconds, peak, live):
        self.now, self.peak, self.live = self.now + seconds, max(self.peak, peak), live


def test_what_is_beside_the_training_has_its_own_time_and_memory(monkeypatch):
    machine = Machine(monkeypatch)
    found = timer.Timer(torch.device("cuda"), 4)
    machine.work(seconds=3, peak=50, live=10)
    with found.pause() as took:
        machine.work(seconds=7, peak=90, live=10)
    assert took == {"seconds": 7, "peak_mib": 90}
    machine.work(seconds=2, peak=40, live=20)
    assert found.interval(9) == (5, 5, {"peak_mib": 50})  # 3 and 2 seconds
    machine.work(seconds=1, peak=30, live=20)
    assert found.interval(10) == (1, 1, {"peak_mib": 30})
    without = timer.Timer(torch.device("cpu"), 0)
    machine.work(seconds=1, peak=99, live=0)
    assert without.interval(1) == (1, 1, {})


def test_a_record_says_how_long_steps_validation_and_checkpoints_took(tmp_path):
    result = ClassificationRun(tiny(tmp_path, log={"every": 1})).train()
    rows = read_rows(tmp_path / "metrics.jsonl")
    kinds = {row["kind"] for row in rows}
    assert kinds == {"train", "eval", "checkpoint"}
    times = [row["seconds_per_step"] if row["kind"] == "train" else row["seconds"] for row in rows]
    assert min(times) > 0 and result["seconds"] == pytest.approx(sum(times), rel=0.1)
    train = [row for row in rows if row["kind"] == "train"]
    images = train[0]["images_seen"]
    assert all(row["images_per_second"] * row["seconds_per_step"] == pytest.approx(images) for row in train)
