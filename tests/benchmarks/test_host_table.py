"""Table of host times: its calls on a CPU, its rows and printed tables."""

import json

import pytest

from benchmarks import host
from zoo.errors import unknown_name


@pytest.mark.parametrize("options", host.OPTIONS.values(), ids=host.OPTIONS)
@pytest.mark.parametrize("op", host.HostSettings().ops)
def test_calls_return_output_and_gradients(op, options):
    if op == "softmax":
        options = {}
    forward, backward = host.calls(op, (2, 3, 17, 8), options, "cpu")
    o = forward()
    assert o.shape == (2, 17, 3, 8)
    found = backward(o)
    assert [x.shape for x in found] == [(2, 17, 3, 3, 8), *([(3, 4)] if op == "polynomial" else [])]
    assert all(x.isfinite().all() and x.any() for x in found)


def test_rows_and_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "need_gpu", lambda what: None)
    monkeypatch.setattr(host, "eager", lambda op, options: dict(zip(host.PASSES, (31.0, 42.0, 97.0), strict=True)))
    monkeypatch.setattr(
        host, "in_new_process",
        lambda op, options, verify: {"reason": "died"} if options else {"forward_s": 1 + verify, "backward_s": 0.5},
    )  # fmt: skip
    file = tmp_path / "host.json"
    settings = host.HostSettings(ops=["hla2", "softmax"], json=str(file))
    content = host.run(settings, "command")
    assert json.loads(file.read_text())["rows"] == content["rows"]
    assert [row["options"]["normalize"] for row in content["failed"]] == [True, True]
    eager, first = (
        [line for line in host.text(content).splitlines() if word in line] for word in ("| 97 |", "| 0.50 |")
    )
    assert len(eager) == 3 and len(first) == 2
    assert "| off | 1.00 | 0.50 | 1.50 |" in first[0] and "| on | 2.00 | 0.50 | 2.50 |" in first[1]


def test_unknown_operator():
    with pytest.raises(ValueError, match=str(unknown_name("op", "hla", (*host.OPS, "softmax")))):
        host.HostSettings(ops=["hla"])
