"""Families of kernels that are not checked on first use are those whose GPU tests passed as they are."""

import ast
import hashlib
import io
import json
import tokenize
from pathlib import Path

import pytest

import hla_kernels
from hla_kernels.dispatch import verify

# family -> (folders of its kernels and plans, digest of the code that passed all of its GPU tests, or of code with
# other names that Triton compiles to the same)
TESTED = {
    "two-sided": (("hla/fused", "features"), "9f1d14d34aff6ed6"),
    "causal": (("hla/stages", "features"), "67f1d170f2eb6ae3"),
    "mhla": (("blockmix/fused", "hla/fused", "features"), "b89ab346f68c02e7"),
    "delta": (("delta_rule",), "81824976d9f71c2c"),
    "adaptive_multipole": (("softmax/adaptive/fused",), "7fdba15482ecd7fb"),
    "features": (("features",), "1834217643d5f111"),
}


def without_prose(text: str) -> str:
    """The code of a module without comments, docstrings and empty lines, in any version of Python."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            prose = node.body[0]
            lines[prose.lineno - 1 : prose.end_lineno] = [""] * (prose.end_lineno - prose.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def digest(folders: tuple[str, ...]) -> str:
    root, found = Path(hla_kernels.__file__).parent, hashlib.sha256()
    for file in sorted(file for folder in folders for file in (root / folder).rglob("*.py")):
        found.update(without_prose(file.read_text()).encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize("family", verify.SHIPPED)
def test_shipped_kernels_are_those_that_passed_on_a_gpu(family):
    folders, tested = TESTED[family]
    assert digest(folders) == tested, (
        f"{family} changed: remove it from verify.SHIPPED until its GPU tests passed, then write the new digest here"
    )


def test_prose_does_not_count():
    assert without_prose('def f():\n    """A."""\n    return 1  # one') == without_prose("def f():\n    return 1")
    assert without_prose("def f():\n    return 1") != without_prose("def f():\n    return 2")


def test_kernels_are_named_after_their_family():
    """All kernels that were compiled offline."""
    families = ("hla", "causal", "blockmix", "delta_rule", "adaptive", "map", "power", "norm")
    lines = (Path(__file__).parent / "offline" / "verdicts.jsonl").read_text().splitlines()
    names = {json.loads(line)["result"]["kernel"] for line in lines}
    assert names and [name for name in names if not name.startswith(tuple(f"{x}_" for x in families))] == []
