"""A new mixer is one file and one row: the example of docs/howto/new_mixer.md, added to a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "howto" / "new_mixer.md"
TABLE = "MIXERS: dict[str, type[Mixer]] = {\n"


def with_the_new_mixer(folder: Path) -> None:
    """A copy of zoo in `folder` with the file and the row of the document."""
    file, row = re.findall(r"```(?:python|text)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    shutil.copytree(ROOT / "zoo", folder / "zoo", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "zoo" / "mixers" / "landmark.py").write_text(file)
    table = folder / "zoo" / "mixers" / "__init__.py"
    line, entry = row.splitlines()
    text = table.read_text()
    assert text.count(TABLE) == 1
    table.write_text(text.replace(TABLE, f"{line}\n\n{TABLE}{entry}\n"))


def test_one_file_and_one_row(tmp_path):
    with_the_new_mixer(tmp_path)
    child = Path(__file__).with_name("new_mixer.py")
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "kernels", ROOT)))
    words = [sys.executable, str(child), str(tmp_path)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
