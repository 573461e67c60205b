"""Damaged folders of runs: one sentence, or harmless and bit-identical; never other weights without a word.

A kind of damage is a function of the folder and of the folder with other runs.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.campaign.harness import TABLES, Case, Result, call, judge, shown, succeed
from tests.campaign.runs import differences, start, whole_run, words
from zoo.config import merge

Damage = Callable[[Path, Path], Any]
Tree = dict[str, Any]
TABLE: dict[str, Tree] = yaml.safe_load((TABLES / "damages.yaml").read_text())
CHECKPOINTS = "checkpoints"
LAST, BEFORE = f"{CHECKPOINTS}/step-00000008", f"{CHECKPOINTS}/step-00000006"
DIFFUSERS = "diffusion_pytorch_model.safetensors"
KEEP_ALL = {"run": {"keep_checkpoints": 10}}
OTHERS = {  # runs with another seed or width
    "seed": {"run": {"seed": 7}},
    "wide": {"model": {"kwargs": {"embed_dim": 32}}},
    "narrow": {"model": {"kwargs": {"embed_dim": 8}}},
}
UNFINISHED = ("checkpoints/step-00000010", "model.safetensors", "model_ema.safetensors", "result.json", "curves.png")
DIGITS, FOUR = "data.source=digits data.workers=0", "sample.count=4 sample.batch_size=4 sample.steps=2"
READERS = {  # kind of run: (what is damaged, the tool that reads it, its words, what it writes)
    "whole": ("", "evaluate_imagenet", f"{DIGITS} eval.models=[run] out=out", "predictions.csv"),
    "dit": ("transformer_ema", "sample", f"sample.model=run {FOUR} out=out/a.npz", "a.npz"),
}


def cases(folder: Path, seed: int) -> list[Case]:
    """A run that stopped after step 8 of 10, a finished classifier and a finished DiT, each damaged in every way."""
    file = whole_run("vit", folder, "whole", KEEP_ALL)
    for name, changes in OTHERS.items():
        whole_run("vit", folder, name, merge(KEEP_ALL, changes))
    whole_run("dit", folder, "dit")
    shutil.copytree(folder / "whole", folder / "stopped")
    for name in UNFINISHED:
        path = folder / "stopped" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    evil(folder / "evil.pth")
    found = [resumed(name, damage, folder, file) for name, damage in of_unfinished().items()]
    for kind, damage in (("whole", of_classifier()), ("dit", of_pipeline())):
        truth = folder / f"{kind}-truth"
        succeed(read(kind, folder / kind, truth))
        found += [loaded(kind, name, one, folder, truth) for name, one in damage.items()]
    return found


def resumed(name: str, damage: Damage, folder: Path, file: Path) -> Case:
    """The stopped run, damaged and continued."""

    def check(place: Path) -> str:
        run = Path(shutil.copytree(folder / "stopped", place / "run", symlinks=True))
        damage(run, folder)
        result = start("vit", file, run)
        if (complaint := judge(result) or executed(place)) or result.code:
            return complaint
        found = [d for d in differences(folder / "whole", run) if not harmless(name, d)]
        return f"resumed, but {'; '.join(found)}" if found else ""

    return Case(f"resume {name}", check, shown("train_vit", words(file, Path("DAMAGED"))))


def harmless(name: str, difference: str) -> bool:
    """Stray files and damaged checkpoints may stay, and rows of a damaged record are lost; weights may not differ."""
    record = name.startswith("metrics.jsonl") and difference.startswith("metrics.jsonl")
    return record or difference.startswith(("files", "checkpoints/"))


def read(kind: str, source: Path, place: Path, damage: Damage = lambda run, others: None) -> Result:
    """What a tool makes of a finished run, or part of one, in `place`."""
    inside, tool, text, _ = READERS[kind]
    run = Path(shutil.copytree(source / inside, place / "run"))
    (place / "out").mkdir()
    damage(run, source.parent)
    return call(tool, text.split(), cwd=place)


def loaded(kind: str, name: str, damage: Damage, folder: Path, truth: Path) -> Case:
    """A finished run read by a tool, whose output must be that of the undamaged one if it is accepted."""
    _, tool, text, output = READERS[kind]

    def check(place: Path) -> str:
        result = read(kind, folder / kind, place, damage)
        if (complaint := judge(result) or executed(place)) or result.code:
            return complaint
        same = (place / "out" / output).read_bytes() == (truth / "out" / output).read_bytes()
        return "" if same else "accepted, but the output differs"

    return Case(f"{tool} {name}", check, shown(tool, text.split()))


def executed(place: Path) -> str:
    """The complaint when a payload ran."""
    return "a payload was executed" if any(place.rglob("executed")) else ""


# Kinds of damage


class Payload:
    """Unpickled, it writes a file named `executed` into the working directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def evil(path: Path) -> None:
    """A pickle that executes a command."""
    torch.save(Payload(), path)


def flip(file: Path, part: float) -> None:
    """Change one byte, `part` of the way through the file."""
    content = bytearray(file.read_bytes())
    content[int(part * (len(content) - 1))] ^= 0x55
    file.write_bytes(content)


def put(path: Path, content: bytes | str | None) -> None:
    """A file (None: an empty folder) in the place of whatever is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if content is None:
        path.mkdir(parents=True)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def loop(path: Path) -> None:
    """A symbolic link to itself in the place of whatever is there."""
    put(path, "")
    path.unlink()
    path.symlink_to(path.name)


def copy(source: Path, target: Path) -> None:
    """A file or folder in the place of another."""
    if source.is_dir():
        shutil.rmtree(target)
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


FLIPS: dict[str, Callable[[Path], Any]] = {
    "a byte of the data": lambda file: flip(file, 0.7),
    "a byte of the header": lambda file: flip(file, 0.02),
    "the last byte": lambda file: flip(file, 1.0),
}
REPLACED: dict[str, Callable[[Path], Any]] = {
    "half": lambda file: put(file, file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: put(file, ""),
    "missing": lambda file: file.unlink(),
    "garbage": lambda file: put(file, b"\xff\xfe\x00" + os.urandom(3000)),
    "zeros": lambda file: put(file, b"\0" * 50),
    "a folder": lambda file: put(file, None),
    "a loop": loop,
    "a pickle": evil,
}
TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one NaN": lambda t: torch.where(torch.arange(t.numel()).view_as(t) == 3, torch.nan, t),
    "infinite": lambda t: t + torch.inf,
    "another type": lambda t: t.double(),
    "whole numbers": lambda t: t.long(),
    "another shape": lambda t: t[:-1],
    "a scalar": lambda t: t.sum(),
}
MOMENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a short moment": lambda t: t.flatten()[:3],
    "a moment of NaN": lambda t: t + torch.nan,
    "a moment in float64": lambda t: t.double(),
    "a moment that is text": lambda t: "x",
}


def of_file(name: str, kinds: dict[str, Callable[[Path], Any]]) -> dict[str, Damage]:
    """Kinds of damage to the file `name`, relative to the folder."""
    return {f"{name}: {kind}": lambda run, _, f=damage: f(run / name) for kind, damage in kinds.items()}


def exchanged(name: str) -> dict[str, Damage]:
    """The file or folder `name` of the last checkpoint, taken from another checkpoint or run."""
    target = f"{LAST}/{name}".rstrip("/")
    found: dict[str, Damage] = {
        f"{target}: of the run {other}": lambda run, others, o=other: copy(others / o / target, run / target)
        for other in OTHERS
    }
    return found | {f"{target}: of another step": lambda run, _: copy(run / BEFORE / name, run / target)}


def edited(tree: Tree, changes: Tree | str) -> Tree | str:
    """A tree with changes as in tables/damages.yaml."""
    if isinstance(changes, str):
        return changes
    for path, value in changes.items():
        *sections, key = path.removeprefix("-").split(".")
        inner = tree
        for section in sections:
            inner = inner[section]
        if path.startswith("-"):
            del inner[key]
        else:
            inner[key] = value
    return tree


def rewrite(file: Path, tensors: Callable[[Tree], Any] = dict, recipe: Callable[[Tree], Any] = dict) -> None:
    """Change the tensors and the recipe of a file of weights, without a digest that would tell."""
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    header.pop("sha256", None)
    found = load_file(file)
    found = tensors(found) or found
    changed = recipe(json.loads(header["hla_zoo"]))
    header["hla_zoo"] = changed if isinstance(changed, str) else json.dumps(changed)
    save_file(found, file, metadata=header)


def weights(name: str) -> dict[str, Damage]:
    """The file of weights `name` with other tensors."""

    def first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tree], Tree]:
        def edit(tensors: Tree) -> Tree:
            key = next(k for k in sorted(tensors) if tensors[k].ndim == 2)
            return {**tensors, key: change(tensors[key]).contiguous()}

        return edit

    edits: dict[str, Callable[[Tree], Any]] = {kind: first(change) for kind, change in TENSORS.items()}
    edits["a tensor less"] = lambda tensors: dict(sorted(tensors.items())[1:])
    edits["a tensor more"] = lambda tensors: {**tensors, "extra": torch.zeros(3)}
    edits["no tensors"] = lambda tensors: tensors.clear()
    return of_file(name, {kind: lambda file, e=edit: rewrite(file, tensors=e) for kind, edit in edits.items()})


def headers(name: str) -> dict[str, Damage]:
    """The file of weights `name` with another recipe."""
    table = TABLE["headers"].items()
    return of_file(name, {k: lambda file, c=c: rewrite(file, recipe=lambda r: edited(r, c)) for k, c in table})


def states() -> dict[str, Damage]:
    """state.pt with other contents."""

    def changed(change: Callable[[Tree], Any]) -> Callable[[Path], Any]:
        return lambda file: torch.save(change(torch.load(file, weights_only=True)), file)

    def moment(state: Tree, value: Callable[[torch.Tensor], Any]) -> Tree:
        first = next(iter(state["optimizer"]["state"].values()))
        first["exp_avg"] = value(first["exp_avg"])
        return state

    kinds = {name: changed(lambda s, c=c: edited(s, c)) for name, c in TABLE["states"].items()}
    kinds |= {name: changed(lambda s, m=m: moment(s, m)) for name, m in MOMENTS.items()}
    kinds |= {"a list": changed(lambda s: [1]), "a tensor": changed(lambda s: torch.zeros(3))}
    kinds["a parameter less"] = changed(lambda s: (s["optimizer"]["state"].popitem(), s)[1])
    return of_file(f"{LAST}/state.pt", kinds)


def stray(run: Path) -> dict[str, Callable[[], Any]]:
    """Files and folders that should not be there, or under another name."""
    last, before, there = run / LAST, run / BEFORE, run / CHECKPOINTS
    return {
        "checkpoints a file": lambda: put(there, "x"),
        "checkpoints empty": lambda: put(there, None),
        "last missing": lambda: shutil.rmtree(last),
        "last empty": lambda: put(last, None),
        "last a file": lambda: put(last, "x"),
        "last a loop": lambda: loop(last),
        "swapped": lambda: (last.rename(run / "x"), before.rename(last), (run / "x").rename(before)),
        "renamed": lambda: last.rename(there / "step-00000007"),
        "renamed past the end": lambda: last.rename(there / "step-00000123"),
        "a stray huge step": lambda: (there / "step-999999999999").mkdir(),
        "a stray empty step": lambda: (there / "step-00000009").mkdir(),
        "a stray file": lambda: (there / "step-00000009").touch(),
        "a stray name": lambda: (there / "step-x").mkdir(),
        "writing as a file": lambda: (there / "writing-x").touch(),
        "writing as a folder": lambda: (there / "writing-x").mkdir(),
        "a stray result": lambda: (run / "result.json").write_text("{"),
        "a stray picture": lambda: (run / "curves.png").mkdir(),
        "weights a folder": lambda: (run / "model.safetensors").mkdir(),
        "config.yaml newer": lambda: (run / "config.yaml").open("a").write("newer: {key: 1}\n"),
    }


def line(file: Path, text: str) -> None:
    """Another third line."""
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], text, *lines[3:]]) + "\n")


def of_unfinished() -> dict[str, Damage]:
    """Whatever may happen to the folder of a run that goes on."""
    found: dict[str, Damage] = {}
    for name in ("model.safetensors", "ema.safetensors", "state.pt", "manifest.json"):
        found |= of_file(f"{LAST}/{name}", FLIPS | REPLACED) | exchanged(name)
    for name in ("model.safetensors", "ema.safetensors"):
        found |= weights(f"{LAST}/{name}")
    found |= states() | exchanged("") | of_file("config.yaml", REPLACED) | of_file("metrics.jsonl", FLIPS | REPLACED)
    found["config.yaml of another run"] = lambda run, others: copy(others / "seed/config.yaml", run / "config.yaml")
    found |= of_file("metrics.jsonl", {k: lambda file, t=t: line(file, t) for k, t in TABLE["record"].items()})
    return found | {name: lambda run, _, n=name: stray(run)[n]() for name in stray(Path())}


def of_classifier() -> dict[str, Damage]:
    """Whatever may happen to the final weights of a classifier."""
    name = "model_ema.safetensors"
    kinds = FLIPS | REPLACED
    del kinds["missing"]  # as in a run without an average
    return weights(name) | headers(name) | of_file(name, kinds)


def of_pipeline() -> dict[str, Damage]:
    """Whatever may happen to a model of diffusers."""

    def config(file: Path, changes: Tree | str) -> None:
        content = edited(json.loads(file.read_text()), changes)
        file.write_text(content if isinstance(content, str) else json.dumps(content))

    table, scheduler = TABLE["pipelines"], "scheduler/scheduler_config.json"
    found = of_file("config.json", REPLACED | {k: lambda file, c=c: config(file, c) for k, c in table.items()})
    found |= of_file(DIFFUSERS, FLIPS | REPLACED)
    found["a pickle of weights"] = lambda model, _: (model / DIFFUSERS).unlink() or evil(
        model / "diffusion_pytorch_model.bin"
    )
    kinds = {"garbage": lambda f: put(f, "{"), "unknown": lambda f: put(f, '{"_class_name": "Banana"}')}
    return found | of_file("scheduler", {"missing": shutil.rmtree}) | of_file(scheduler, kinds)
