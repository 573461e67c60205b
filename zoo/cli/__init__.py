"""The command `zoo` for training, conversion, evaluation and sampling.

    zoo COMMAND [CONFIG] [section.key=value ...]

CONFIG is a YAML file or the name of a shipped configuration (`zoo list configs`), such as vit/digits_softmax. For
several processes, start it with `accelerate launch -m zoo.cli COMMAND ...`. `zoo --completion bash > FILE` writes a
script for tab completion; add `source FILE` to ~/.bashrc.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import zoo
from zoo import config
from zoo.errors import unknown_name


class Command(NamedTuple):
    """A command: the module with its function `main`, and a summary for the help."""

    module: str
    summary: str


COMMANDS = {
    "train-classifier": Command("zoo.cli.train_classifier", "Train or fine-tune an image classifier."),
    "finetune-diffusion": Command("zoo.cli.finetune_diffusion", "Train or fine-tune a diffusion transformer."),
    "convert": Command("zoo.cli.convert", "Convert a softmax model; `convert recipe` runs all stages."),
    "evaluate": Command("zoo.cli.evaluate", "Accuracy of image classifiers; `evaluate attention` looks inside."),
    "sample": Command("zoo.cli.sample", "Generate images or videos."),
    "fid": Command("zoo.cli.fid", "FID and other scores of generated images."),
    "extract-latents": Command("zoo.cli.extract_latents", "Encode images, videos and prompts once, for training."),
    "benchmark": Command("zoo.cli.benchmark", "Speed and quality tables (needs a checkout of the project)."),
    "list": Command("zoo.cli.listing", "Names of mixers and their options, models, families, configurations."),
}


def main(words: list[str]) -> Any:
    """Run the command named by the first word, with the other words as arguments. Returns the result of the command;
    raises ValueError."""
    try:
        return _run(words)
    except ModuleNotFoundError as error:
        if error.name not in ("diffusers", "transformers"):
            raise
        raise ValueError(f"this command needs the package {error.name}: pip install 'hla-zoo[diffusion]'") from error


def command(name: str) -> Callable[[list[str]], Any]:
    """Return the function that runs a command with the words behind its name."""
    return lambda words: main([name, *words])


def _run(words: list[str]) -> Any:
    if not words or words[0] in ("-h", "--help"):
        print(f"{__doc__.rstrip()}\n\n{_table()}\n\n`zoo COMMAND --help` lists the keys of a command.")
        return None
    name, *rest = words
    if name == "--version":
        versions = [f"{package} {importlib.metadata.version(package)}" for package in ("torch", "timm")]
        print(f"hla-zoo {zoo.__version__} ({', '.join(versions)}, python {sys.version.split()[0]})")
        return None
    if name == "--completion":
        from zoo.cli.completion import script

        print(script(" ".join(rest), {name: command.module for name, command in COMMANDS.items()}))
        return None
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    return importlib.import_module(COMMANDS[name].module).main(rest)


def _table() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items())


def entry() -> None:
    """Entry point of the console script `zoo`."""
    config.command_line(main)
