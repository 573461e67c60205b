"""A new family is one file and one row: the example of docs/howto/new_family.md in a copy of zoo."""

from pathlib import Path

from tests.helpers.additions import ROOT, try_addition
from zoo.models.diffusers.families import FAMILIES


def test_one_file_and_one_row(tmp_path):
    files = "zoo/models/diffusers/latte.py", "zoo/models/diffusers/families.py"
    start = "FAMILIES: tuple[Family, ...] = ("
    try_addition(tmp_path, "new_family.md", *files, start, Path(__file__).with_name("new_family.py"))


def test_families_are_named_in_their_own_files_only():
    names = [name for f in FAMILIES for name in (f.host.__name__, *f.pipelines)]
    for path in (ROOT / "zoo").rglob("*.py"):
        if path.parent != ROOT / "zoo" / "models" / "diffusers" and path != ROOT / "zoo" / "__init__.py":
            found = [name for name in names if name in path.read_text()]
            assert not found, f"{path.relative_to(ROOT)} names {found}"
