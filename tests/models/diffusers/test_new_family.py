"""A new family is one file and one row: the example of docs/howto/new_family.md, added to a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from zoo.models.diffusers.families import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
DOCUMENT = ROOT / "docs" / "howto" / "new_family.md"
LIST = "FAMILIES: tuple[Family, ...] = ("


def with_the_new_family(folder: Path) -> None:
    """A copy of zoo in `folder` with the file and the row of the document."""
    file, row = re.findall(r"```(?:python|text)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    shutil.copytree(ROOT / "zoo", folder / "zoo", ignore=shutil.ignore_patterns("__pycache__"))
    place = folder / "zoo" / "models" / "diffusers"
    (place / "latte.py").write_text(file)
    line, entry = row.splitlines()
    text = (place / "families.py").read_text()
    assert text.count(LIST) == 1
    (place / "families.py").write_text(text.replace(LIST, f"{line}\n\n{LIST}{entry} "))


def test_one_file_and_one_row(tmp_path):
    with_the_new_family(tmp_path)
    child = Path(__file__).with_name("new_family.py")
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "kernels", ROOT)))
    words = [sys.executable, str(child), str(tmp_path)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_families_are_named_in_their_own_files_only():
    names = [name for f in FAMILIES for name in (f.host.__name__, *f.pipelines)]
    for path in (ROOT / "zoo").rglob("*.py"):
        if path.parent != ROOT / "zoo" / "models" / "diffusers" and path != ROOT / "zoo" / "__init__.py":
            found = [name for name in names if name in path.read_text()]
            assert not found, f"{path.relative_to(ROOT)} names {found}"
