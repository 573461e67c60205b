"""A new mixer is one file and one row: the example of docs/howto/new_mixer.md in a copy of zoo."""

from pathlib import Path

from tests.helpers.additions import try_addition


def test_one_file_and_one_row(tmp_path):
    files = "zoo/mixers/landmark.py", "zoo/mixers/__init__.py"
    start = "MIXERS: dict[str, type[Mixer]] = {\n"
    try_addition(tmp_path, "new_mixer.md", *files, start, Path(__file__).with_name("new_mixer.py"))
