"""The command `zoo`, its configurations by name, and the package that it is installed from."""

import os
import shlex
import signal
import subprocess
import sys
import zipfile

import pytest

import zoo
from tests.helpers.runs import ROOT
from zoo import cli
from zoo.config import find_config, from_command_line, shipped_configs
from zoo.train.settings import TrainSettings


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name not in ("benchmark",)])
def test_each_command_has_help(name, capsys):
    cli.main([name, "--help"])
    assert f"usage: zoo {name}" in capsys.readouterr().out


def test_help_and_version(capsys):
    cli.main([])
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    cli.main(["--version"])
    assert f"hla-zoo {zoo.__version__} (torch " in capsys.readouterr().out
    with pytest.raises(ValueError, match="Did you mean 'train-classifier'"):
        cli.main(["train-clasifier"])


@pytest.mark.parametrize("words", ["list families", "sample --help", "--completion bash"])
def test_a_command_without_its_package_names_the_extra(words):
    program = "import sys; sys.modules['diffusers'] = None; from zoo.cli import entry; entry()"
    done = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True)
    message = "error: this command needs the package diffusers: pip install 'hla-zoo[diffusion]'\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_mixers_are_listed_without_diffusers():
    program = "import sys; sys.modules['diffusers'] = None; from zoo import cli; cli.main(['list', 'mixers', 'mhla'])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def test_lists(capsys):
    assert any(line.startswith("mhla ") for line in cli.main(["list", "mixers"]))
    assert "vit_mhla_tiny_patch16_224" in cli.main(["list", "models", "mhla", "tiny"])
    assert cli.main(["list", "models", "vit_mhla_*tiny*"]) == cli.main(["list", "models", "vit_mhla_", "tiny"])
    assert "vit/digits_softmax" in cli.main(["list", "configs", "digits"])
    with pytest.raises(ValueError, match="none of the models contains mhla and banana"):
        cli.main(["list", "models", "mhla", "banana"])
    assert "wan     WanTransformer3DModel" in cli.main(["list", "families"])
    lines = cli.main(["list", "options", "flare"])
    assert "  rank (int, default 64)" in lines and "number of learned latents per head" in "".join(lines)
    assert len(cli.main(["list", "options"])) > len(lines)
    names = {line.split()[0] for line in cli.main(["list", "options", "mhla"]) if line.startswith("  ")}
    assert "post_norm" in names and not names & {"center", "decay"}  # which it refuses
    with pytest.raises(ValueError, match="Did you mean 'flare'"):
        cli.main(["list", "options", "flar"])
    with pytest.raises(ValueError, match="Did you mean 'configs'"):
        cli.main(["list", "config"])


@pytest.mark.parametrize("name", ["vit/digits_softmax", "digits_softmax", "configs/vit/digits_softmax.yaml"])
def test_configurations_are_found_by_name_from_any_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name).samefile(ROOT / "configs" / "vit" / "digits_softmax.yaml")
    settings = from_command_line(TrainSettings, [name, "schedule.epochs=7"])
    assert settings.schedule.epochs == 7 and settings.data.source == "digits"


def test_a_file_comes_before_a_shipped_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits_softmax").write_text("schedule: {epochs: 3}")
    assert from_command_line(TrainSettings, ["digits_softmax"]).schedule.epochs == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digits_finetune"], "dit/digits_finetune, vit/digits_finetune: name its folder"),
        (["vit/digits_sotfmax"], "did you mean vit/digits_softmax"),
        (["nothing_of_the_kind"], "zoo list configs"),
        (["--epochs", "3"], r"unknown option '--epochs'.*such as schedule\.epochs=VALUE"),
        (["--epochs=3"], r"unknown option '--epochs=3'"),
    ],
)
def test_other_words_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        from_command_line(TrainSettings, words)


def test_an_installed_package_runs_from_any_folder_and_its_reader_may_leave(tmp_path):
    """A wheel, unpacked where no checkout is: its command finds its own configurations. One process does all, then
    prints the models to a reader of one line."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    names = zipfile.ZipFile(wheel).namelist()
    (entry,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "zoo = zoo.cli:entry" in zipfile.ZipFile(wheel).read(entry).decode()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *filter(None, sys.path[1:])])}
    code = (
        "import contextlib, io, zoo, zoo.cli; assert '/site/' in zoo.__file__, zoo.__file__\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    assert zoo.cli.main(['list', 'configs']) == LISTED\n"
        "    try: zoo.cli.main(['benchmark'])\n"
        "    except ValueError as error: assert 'clone of the project' in str(error)\n"
        "    else: raise SystemExit('benchmarks ran')\n"
        "zoo.cli.entry()\n"
    ).replace("LISTED", repr(list(shipped_configs())))
    command = f"{shlex.join([sys.executable, '-c', code, 'list', 'models'])} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 128 + signal.SIGPIPE), done.stderr  # 0: the reader left after the last line
    assert done.stdout.count("\n") == 1 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def complete(script: str, line: str) -> list[str]:
    """What bash offers after `line`."""
    words = line.split(" ")
    lines = [script, f"COMP_WORDS=({' '.join(map(repr, words))})", f"COMP_CWORD={len(words) - 1}", "_zoo"]
    lines = ["compopt() { :; }", *lines, 'printf "%s\\n" "${COMPREPLY[@]}"']
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_completion_of_commands_configurations_and_keys(capsys):
    cli.main(["--completion", "bash"])
    script = capsys.readouterr().out
    assert complete(script, "zoo ev") == ["evaluate"]
    assert complete(script, "zoo list ") == ["mixers", "models", "families", "configs"]
    assert complete(script, "zoo train-classifier vit/digits_s") == ["vit/digits_softmax"]
    assert complete(script, "zoo train-classifier model.mixer") == ["model.mixer=", "model.mixer_options="]
    assert complete(script, "zoo convert transfer_") == ["transfer_lr="]  # a key of `convert recipe`
    assert complete(script, "zoo sample vit") == complete(script, "zoo train-classifier vit")
    with pytest.raises(ValueError, match="unknown shell 'fish'; allowed: bash"):
        cli.main(["--completion", "fish"])
