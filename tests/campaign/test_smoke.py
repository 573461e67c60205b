"""The campaign judges, reduces and reports as it says; a few of its attacks, in seconds."""

import json
import os
import sys
import time

import pytest
import yaml

from tests.campaign import __main__ as campaign
from tests.campaign import commands, folders
from tests.campaign.attacks import OPTIONS
from tests.campaign.harness import ENVIRONMENT, TOOLS, Case, Result, call, fork, judge, prepare, shrink
from tests.campaign.runs import TOOL

TRACE = "Traceback (most recent call last):\n  File x\nKeyError: 'a'\n"


def ended(code: int, err: str = "") -> Result:
    return Result(code, "", err, 1.0)


@pytest.mark.parametrize(
    ("result", "allowed", "complaint"),
    [
        (ended(0), (0, 2), ""),
        (ended(2, "a warning\nerror: x must be 1, got 2\n"), (2,), ""),
        (ended(0), (2,), "exit 0 instead of 2"),
        (ended(1, TRACE), (0, 2), "traceback, exit 1: KeyError: 'a'"),
        (ended(2, TRACE + "error: x\n"), (0, 2), "traceback"),
        (ended(139), (0, 2), "exit 139"),
        (ended(2, "error: one\nerror: two\n"), (0, 2), "without one sentence"),
        (ended(2, "error: one\nmore\n"), (0, 2), "without one sentence"),
        (ended(2, f"error: {'x' * 700}\n"), (0, 2), "a message of 707 characters"),
        (Result(137, "", "", 9.0, timed_out=True), (0, 2), "still running"),
    ],
)
def test_the_rule(result, allowed, complaint):
    found = judge(result, allowed)
    assert complaint in found and bool(found) == bool(complaint)


def test_a_tool_in_a_child_ends_as_its_own_process_would(tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)  # so that `prepare` leaves nothing behind for other tests
    monkeypatch.setattr(sys, "path", list(sys.path))
    prepare()
    result = call("train_vit", ["optim.lrr=1"], cwd=tmp_path)
    assert judge(result, (2,), "did you mean 'optim.lr'") == ""
    assert "the message lacks" in judge(result, (2,), "banana")
    assert call("train_vit", ["--help"], cwd=tmp_path).code == 0


@pytest.mark.parametrize(
    ("action", "code"),
    [(lambda: 1 / 0, 1), (lambda: os.kill(os.getpid(), 11), 139), (lambda: exit(3), 3), (lambda: os._exit(4), 4)],
)
def test_exit_codes(action, code, tmp_path):
    assert fork(action, cwd=tmp_path).code == code


def test_a_child_is_stopped_at_its_limit(tmp_path):
    assert fork(lambda: time.sleep(60), cwd=tmp_path, limit=0.2).timed_out


def test_reduction(tmp_path):
    def check(kept, place):
        return "bad: x" if {"b", "d"} <= set(kept) and place.is_dir() else ""

    assert shrink(list("abcd"), "bad: y", tmp_path, check) == ["b", "d"]


def test_figures_ledger_and_exit_code(tmp_path, capsys):
    cases = [Case(name, lambda place, name=name: name, f"run {name}") for name in ("", "bad", "known")]
    row = campaign.carry_out("kills", cases, tmp_path, 10.0, 0, {("kills", "known")})
    assert [row[name] for name in campaign.FIGURES] == [3, 3, 1, 1, 1]
    out = tmp_path / "campaign.json"
    assert campaign.report([row], out, 0) == 1 and "run bad" in capsys.readouterr().out
    assert [failure["name"] for failure in json.loads(out.read_text())["parts"][0]["failures"]] == ["bad"]


def test_the_ledger_needs_reasons(tmp_path):
    file = tmp_path / "ledger.yaml"
    file.write_text("[{part: kills, name: a}]")
    with pytest.raises(ValueError, match="needs part, name and reason"):
        campaign.read_ledger(file)
    assert campaign.read_ledger(campaign.LEDGER) == set()


def test_the_tables_name_what_exists():
    sections = yaml.safe_load(commands.TABLE.read_text())
    assert sum(len(section.get(e) or {}) for section in sections.values() for e in commands.ALLOWED) > 404
    for title, section in sections.items():
        assert (TOOLS / f"{title.split()[0]}.py").is_file()
        assert list(commands.generated(section)) if "schema" in section else True
    kinds = folders.of_unfinished() | folders.of_classifier() | folders.of_pipeline()
    assert len(kinds) > 200 and all(len(OPTIONS[kind]) > 15 for kind in TOOL)
