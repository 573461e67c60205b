"""The command line of tools/sample.py, and the configurations that are shipped for it."""

import shlex

import pytest

from tests.helpers.runs import ROOT
from zoo import config
from zoo.cli.convert import ConvertSettings
from zoo.eval.sample_settings import SampleSettings
from zoo.mixers import build_mixer


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "missing required options sample.model"),
        (["sample.model=a", "out=a.zip"], "out must be an .npz file or a folder"),
        (["sample.labels=evenly", "out=a"], "unknown sample.labels 'evenly'; allowed: balanced, random"),
        (["sample.labels=[]"], "is an empty list"),
        (["sample.step=3"], "Did you mean 'sample.steps'"),
    ],
)
def test_words_that_the_tool_refuses(words, sentence):
    import sample

    with pytest.raises(ValueError, match=sentence):
        sample.main(words)


def test_help(capsys):
    import sample

    assert sample.main(["--help"]) == 0
    assert "sample.guidance_channels (int or none, default None)" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "generation").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_configurations(path):
    """Also the conversion that a comment names: it has the model's name, and layers whose density can be scheduled."""
    settings, text = config.load(SampleSettings, path), path.read_text()
    assert settings.sample.model and text.startswith("#")
    commands = [line for line in text.splitlines() if line.startswith("#   zoo convert ")]
    assert len(commands) == bool(settings.sample.density)
    for command in commands:
        conversion = config.from_command_line(ConvertSettings, shlex.split(command)[3:])
        mixer = build_mixer(conversion.model.mixer, 128, 2, 64, **conversion.model.mixer_options)
        assert conversion.out == settings.sample.model and mixer.options.select == "error"
