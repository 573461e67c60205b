"""The page of all mixers: winners of given experiments, sizes of states, complete rows."""

import sys

import pytest
import torch

from tests.helpers.runs import ROOT
from zoo.mixers import MIXERS, Mixer


@pytest.fixture(scope="module")
def page():
    sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tools")]
    import mixer_page

    yield mixer_page
    del sys.path[:2]


def test_winners(page):
    """Contests of one mixer have no winner; bold only above softmax."""
    scores = {
        "a": {"softmax": 3.0, "la": 2.0, "mhla": 2.5},
        "b": {"softmax": -0.5, "la": -0.4, "mhla": -0.6},
        "c": {"softmax": 1.0, "la": 2.0},
        "d": {"la": 1.0, "mhla": 2.0},
    }
    assert page.winners(scores) == {"mhla": ["a", "d"], "la": ["**b**"]}


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"source": "floor"}, False),
        ({"data": "cifar10, 5000 held out"}, False),
        ({"options": {"keep_softmax": "every:4"}}, False),
        ({"metric": "top1 after conversion"}, False),
        ({"mixer": "ahla every:3"}, False),
    ],
)
def test_runs_that_count(page, changes, taken):
    run = {"metric": "top1", "source": "scratch", "data": "cifar10", "mixer": "la", "options": {}}
    assert page.counts({**run, **changes}) == taken


@pytest.mark.parametrize("name", ["la", "ahla", "hla2", "hla3"])
def test_states_are_counted(page, name):
    """The numbers of the state of the operator, in units of D x D; vectors are left out."""
    d = 64
    q, k, v = torch.randn(3, 1, 5, 1, d)
    _, state = MIXERS[name].operator(q, k, v, causal=True, return_state=True)
    squares = sum(t.numel() // d**2 for t in state.tensors.values())
    assert page.of_class(page.STATES, MIXERS[name]) == ("D^2" if squares == 1 else f"{squares} D^2")


def test_a_new_mixer_runs_in_torch(page):
    """Triton forms are those of operators, around which a `LinearMixer` is built."""
    assert page.of_class(page.FORMS, type("New", (Mixer,), {})) == "torch"


def test_rows_are_complete(page):
    for name, kind in MIXERS.items():
        cells = page.row(name, kind, [])
        assert len(cells) == len(page.COLUMNS)
        assert all(cells[i] and cells[i] != "-" for i in (1, 2, 3, 4, 5, 8, 10)), name
