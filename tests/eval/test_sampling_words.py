"""The command line of tools/sample.py, and the configurations that are shipped for it."""

import pytest

from tests.helpers.runs import ROOT
from zoo import config
from zoo.eval.sample_settings import SampleSettings


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
    assert config.load(SampleSettings, path).sample.model and path.read_text().startswith("#")
