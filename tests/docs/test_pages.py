"""The documentation: its commands are valid command lines, its examples run, and its links have targets."""

import re
import shlex

import pytest

from tests.helpers.runs import ROOT
from zoo import cli, config
from zoo.cli.convert import ConvertSettings
from zoo.data.latents.settings import ExtractSettings
from zoo.eval.attention.probes import ProbeSettings
from zoo.eval.fid.settings import FidSettings
from zoo.eval.sample_settings import SampleSettings
from zoo.eval.settings import EvalSettings
from zoo.recipes.settings import RecipeSettings, from_words
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.settings import TrainSettings

DOCS = ROOT / "docs"
PAGES = ("quickstart", "concepts", "adaptive_multipole")
WRITTEN = [*(DOCS / f"{name}.md" for name in PAGES), *sorted(DOCS.glob("howto/*.md"))]
ALL = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")})
SCHEMAS = {
    "train-classifier": TrainSettings,
    "finetune-diffusion": DiffusionSettings,
    "convert": ConvertSettings,
    "convert recipe": RecipeSettings,
    "evaluate": EvalSettings,
    "evaluate attention": ProbeSettings,
    "sample": SampleSettings,
    "fid": FidSettings,
    "extract-latents": ExtractSettings,
}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of the fenced blocks of a language."""
    found = []
    for page in WRITTEN:
        parts = re.split(r"^```", page.read_text(), flags=re.MULTILINE)[1::2]  # what lies between pairs of fences
        found += [(page.stem, text) for head, _, text in (part.partition("\n") for part in parts) if head == language]
    return found


def commands() -> list[str]:
    """The words after `zoo` in every line of the blocks without a language."""
    lines = [line for _, text in blocks("") for line in text.replace("\\\n", " ").splitlines()]
    calls = [re.search(r"(?:^|; do |-m )zoo(?:\.cli)? (.*?)(?:; done)?$", line) for line in lines]
    return [found.group(1) for found in calls if found]


def test_there_are_commands_of_every_kind():
    used = {shlex.split(line, comments=True)[0] for line in commands()}
    assert used >= {name for name in cli.COMMANDS if name != "benchmark"}


@pytest.mark.parametrize("line", commands())
def test_commands_are_valid(line):
    words = [word for word in shlex.split(line, comments=True) if word != "--dry-run"]
    if words[0] in ("--version", "--completion", "list"):
        return
    assert words[0] in cli.COMMANDS
    name = " ".join(words[:2]) if " ".join(words[:2]) in SCHEMAS else words[0]
    rest = words[len(name.split()) :]
    if name == "convert recipe":
        from_words(rest)
    else:
        config.from_command_line(SCHEMAS[name], rest)


@pytest.mark.parametrize("page", ["quickstart", "own_network", "evaluate"])
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # without runs and tuned tables
    names: dict = {}
    for text in (text for name, text in blocks("python") if name == page and "tune(" not in text):
        exec("\n".join(line for line in text.splitlines() if "runs/" not in line), names)
    assert "zoo" in names


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = ROOT / "README.md" if path == "index.md" else (page.parent / path if path else page)
        if "://" in target:
            continue
        assert file.exists(), target
        titles = re.findall(r"^#+ (.*)$", file.read_text() if anchor else "", re.MULTILINE)  # it may be a picture
        anchors = [re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles]
        assert not anchor or anchor in anchors, target


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_a_commit(page):
    words = re.findall(r"(?<![\w-])[0-9a-f]{7,40}(?![\w-])", page.read_text())
    assert not [word for word in words if re.search("[a-f]", word) and re.search("[0-9]", word)]
