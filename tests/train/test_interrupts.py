"""Runs that are asked to stop, share a folder, meet a full disk, or find what others left."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file

from tests.forks import Fork, finish, run_fork, start_two
from tests.helpers.runs import TINY, tiny, wait_for_step
from zoo import config
from zoo.files import LOCK, FolderLock, naming, replacing, replacing_folder, sweep
from zoo.train.checkpoint import list_checkpoints
from zoo.train.classification import ClassificationRun
from zoo.train.metrics_log import read_rows

GONE = 2**22 + 1  # no process has this number: Linux numbers them up to 2^22


def write_config(folder: Path, **sections) -> Path:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config.merge(TINY, sections)))
    return file


def same_weights(*runs: Path) -> bool:
    one, other = (load_file(run / "model.safetensors") for run in runs)
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


# Signals


def test_a_run_that_is_asked_to_stop_writes_a_checkpoint_and_goes_on_bit_identically(tmp_path):
    file = write_config(tmp_path, schedule={"epochs": 3}, data={"cache": False, "workers": 1}, log={"every": 1})
    assert run_fork("tools/train_vit.py", str(file), f"run.folder={tmp_path}/whole")[0] == 0
    words = (str(file), f"run.folder={tmp_path}/cut", "run.resume=true", "run.checkpoint_epochs=1000")
    for number, after in ((signal.SIGTERM, 3), (signal.SIGINT, 12)):
        process = Fork("tools/train_vit.py", *words)
        wait_for_step(tmp_path / "cut", after, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 128 + number and "Traceback" not in err, err
        step = read_rows(tmp_path / "cut" / "metrics.jsonl")[-1]["step"]
        assert [line for line in out.splitlines() if line.startswith("stopped")] == [
            f"stopped by {number.name} at step {step} of 30: run.resume=true continues at step {step}"
        ]
        assert list_checkpoints(tmp_path / "cut" / "checkpoints")[-1].name == f"step-{step:08d}"
        assert not (tmp_path / "cut" / LOCK).exists()
    assert run_fork("tools/train_vit.py", *words)[0] == 0
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    losses = [
        [(r["step"], r.get("loss")) for r in read_rows(tmp_path / run / "metrics.jsonl") if r["kind"] != "checkpoint"]
        for run in ("whole", "cut")
    ]
    assert losses[0] == losses[1]


def test_ctrl_c_before_the_first_step_is_one_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from zoo import config\ndef main(_): raise KeyboardInterrupt\nconfig.command_line(main)")
    assert run_fork(script) == (130, "", "interrupted\n")


AGREE = """
import os, signal, sys, time
from accelerate import Accelerator
from zoo.train.stop import Stop
accelerator = Accelerator(cpu=True)
with Stop(accelerator) as stop:
    for step in range(1, 40):
        if step == 5 and accelerator.process_index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        if number := stop.requested():
            os.write(1, f"{step} {number}\\n".encode())  # one write: print makes two, which processes interleave
            break
"""


def test_several_processes_stop_at_the_same_step(tmp_path):
    (tmp_path / "agree.py").write_text(AGREE)
    status, out, err = finish(start_two(tmp_path / "agree.py"))
    assert (status, out.splitlines()) == (0, ["6 15", "6 15"]), err


# Locks

HOLD = """
import signal, sys
from pathlib import Path
from zoo.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
Path(sys.argv[2]).touch()
signal.pause()
"""


def test_a_folder_in_use_is_refused_until_its_process_is_gone(tmp_path):
    (tmp_path / "hold.py").write_text(HOLD)
    holder, held = Fork(tmp_path / "hold.py", str(tmp_path / "run"), str(tmp_path / "held")), tmp_path / "held"
    while not held.exists():
        assert holder.poll() is None, holder.communicate()
        time.sleep(0.005)
    with pytest.raises(ValueError, match=rf"run is in use by process {holder.pid} on .*choose another folder"):
        ClassificationRun(tiny(tmp_path / "run"))
    holder.kill()
    holder.join()
    assert (tmp_path / "run" / LOCK).exists()  # what a killed process leaves does not hold anybody up
    ClassificationRun(tiny(tmp_path / "run")).train()
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match=r"not the name of|unknown"):
        ClassificationRun(tiny(tmp_path / "runs" / "run", model={"name": "vit_nothing"}))
    assert not (tmp_path / "runs").exists()


def test_the_lock_is_taken_before_anything_else(tmp_path, monkeypatch):
    """Reading the data may take minutes, in which a second run would pass all checks."""
    seen = []
    lock = tmp_path / "run" / LOCK
    monkeypatch.setattr(ClassificationRun, "set_up", lambda self: seen.append(lock.read_text()) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ClassificationRun(tiny(tmp_path / "run"))
    assert seen[0].startswith(f"process {os.getpid()} on ") and not (tmp_path / "run").exists()


def test_a_lock_is_no_longer_held_once_it_was_given_back(tmp_path):
    lock = FolderLock(tmp_path)
    lock.release()
    lock.release()
    with (tmp_path / LOCK).open("w") as opened:
        fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


# Full disks


@pytest.mark.parametrize("limit", [1000, 20_000, 60_000])
def test_a_disk_that_is_full_is_one_sentence_and_nothing_is_lost(tmp_path, limit):
    """In metrics.jsonl or config.yaml, in the weights, in the state of the optimiser."""
    file = write_config(tmp_path, run={"checkpoint_steps": 4})
    words = (str(file), f"run.folder={tmp_path}/run", "run.resume=true")
    status, _, err = run_fork("tools/train_vit.py", *words, limit=limit)
    assert status == 2 and "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith("error: ") and "File too large" in err
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_failed_writes_name_the_file(error, tmp_path):
    with pytest.raises(OSError, match=r"No space left|quota") as caught, naming(tmp_path / "x"):
        raise error
    assert caught.value.filename == str(tmp_path / "x")


# What killed processes leave


def test_new_files_have_the_permissions_of_the_user(tmp_path):
    before = os.umask(0o027)
    try:
        ClassificationRun(tiny(tmp_path)).train()
    finally:
        os.umask(before)
    found = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*")}
    assert found.pop("checkpoints") == 0o750 and found.pop("step-00000010") == 0o750
    assert set(found.values()) == {0o640} and {"model.safetensors", "state.pt", "config.yaml"} <= found.keys()


def left(folder: Path, kind: str, name: str, **files: str) -> Path:
    path = folder / kind
    for place, text in files.items():
        (path / place).mkdir(parents=True)
        (path / place / name).write_text(text)
    return path


@pytest.mark.parametrize("kind", [f".transformer.{GONE}", ".transformer-abc_d123"])
@pytest.mark.parametrize(
    ("there", "files", "expected"),
    [
        ("old", {"new": "half"}, "old"),  # killed while the new one was written
        ("", {"old": "old", "new": "new"}, "new"),  # between two renames: the new one was complete
        ("", {"old": "old"}, "old"),
        ("new", {"old": "old"}, "new"),
        ("", {"new": "half"}, ""),
    ],
)
def test_a_folder_that_was_being_replaced_is_put_back(tmp_path, kind, there, files, expected):
    if there:
        (tmp_path / "transformer").mkdir()
        (tmp_path / "transformer" / "weights").write_text(there)
    left(tmp_path, kind, "weights", **files)
    sweep(tmp_path, earlier=True)
    found = [(p.parent.name, p.read_text()) for p in tmp_path.rglob("*") if p.is_file()]
    assert found == ([("transformer", expected)] if expected else [])
    assert [p.name for p in tmp_path.iterdir()] == (["transformer"] if expected else [])


def test_leftovers_of_killed_processes_go_at_the_next_start(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        kept = tmp_path / f".result.json.{alive.pid}"
        kept.write_text("of a process that lives")
        for name in (f".model.safetensors.{GONE}", f".input.json.{GONE}"):
            (tmp_path / name).write_text("half")
        (tmp_path / "samples").mkdir()
        (tmp_path / "samples" / f".step-00000004.png.{GONE}").write_text("half")
        (tmp_path / ".notes").write_text("of the user")
        ClassificationRun(tiny(tmp_path)).train()
        assert sorted(p.name for p in tmp_path.glob("**/.*")) == sorted([".notes", kept.name])


def test_a_folder_is_put_back_when_replacing_it_fails(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("old")
    rename, calls = Path.rename, []

    def fails_at_the_second(self, target):
        calls.append(self.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_at_the_second)
    with pytest.raises(KeyboardInterrupt), replacing_folder(tmp_path / "model") as new:
        (new / "weights").write_text("new")
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_configuration_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    config.save(tiny(tmp_path), tmp_path / "config.yaml")
    assert any("config.yaml" in name for name in synced)
    with replacing(tmp_path / "x") as temporary:
        temporary.write_text(json.dumps(1))
    assert (tmp_path / "x").read_text() == "1"
