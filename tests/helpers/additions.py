"""Additions of a how-to page (a file and a row), tried in a copy of zoo."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def try_addition(folder: Path, page: str, file: str, table: str, start: str, child: Path) -> None:
    """Add what docs/howto/`page` says to a copy of zoo in `folder`, and run the program `child` with it.

    file: where the page's file goes.  table: the file that gets the import, and the row right behind `start`.
    """
    new, row = re.findall(r"```(?:python|text)\n(.*?)```", (ROOT / "docs" / "howto" / page).read_text(), re.DOTALL)
    shutil.copytree(ROOT / "zoo", folder / "zoo", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / file).write_text(new)
    line, entry = row.splitlines()
    text = (folder / table).read_text()
    assert text.count(start) == 1
    (folder / table).write_text(text.replace(start, f"{line}\n\n{start}{entry}\n"))
    path = os.pathsep.join(map(str, (folder, ROOT / "kernels", ROOT)))
    words = [sys.executable, str(child), str(folder)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
