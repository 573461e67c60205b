"""What is shown while something runs."""

import io
import json
import time

import torch

from tests.helpers.runs import tiny
from zoo import progress as module
from zoo.data import BatchPlan
from zoo.progress import progress
from zoo.train.classification import ClassificationRun
from zoo.train.denoising.data import open_samples
from zoo.train.denoising.settings import DiffusionDataSettings


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_shows_the_status_on_a_terminal(monkeypatch):
    screen, seen = Terminal(), []
    monkeypatch.setattr("sys.stderr", screen)
    for item in progress(range(3), "work", status=lambda: f"loss {len(seen)}.5"):
        seen.append(item)
        time.sleep(0.2)  # a bar is drawn ten times a second at most
    assert seen == [0, 1, 2] and "loss 2.5" in screen.getvalue()


def test_lines_show_the_status_elsewhere(monkeypatch, capsys):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", -1.0)
    assert list(progress("ab", "work", first=3, total=5, status=lambda: "loss 1.5")) == ["a", "b"]
    lines = ["work: 4/5, loss 1.5, 00:00 left", "work: 5/5, loss 1.5, 00:00 left"]
    assert capsys.readouterr().err.splitlines() == lines
    list(progress(iter("a"), "work"))
    assert capsys.readouterr().err == "work: 1\n"


def test_a_run_shows_loss_speed_and_accuracy_and_ends_with_a_summary(tmp_path, capsys):
    run = ClassificationRun(tiny(tmp_path))
    assert run._status() == ""
    result = run.train()
    row = run.trained
    assert run._status() == (
        f"loss {row['loss']:.4g}, {row['images_per_second']:.0f} images/s, top1 {result['top1']:.4g}"
    )
    (summary,) = (line for line in capsys.readouterr().out.splitlines() if "; wrote " in line)
    assert summary.startswith(f"top-1 accuracy (%): {result['top1']:.4g}") and summary.endswith(str(tmp_path))
    assert json.loads((tmp_path / "result.json").read_text()) == result


def test_a_dry_run_decodes_no_more_clips_than_it_reads():
    data = DiffusionDataSettings(source="moving_digits", img_size=16, frames=2, clips=300, batch_size=4)
    few, all_of_them = (open_samples(data, 0, torch.device("cpu"), number) for number in (4, None))
    assert (few.n_train, few.n_val) == (300, 4) and (all_of_them.n_train, all_of_them.n_val) == (300, 60)
    assert torch.equal(few.train_clips, all_of_them.train_clips[:4])
    assert next(few.train(BatchPlan(300, 4, seed=0), 0, 1)).x0.shape == (4, 3, 2, 16, 16)
