"""Damaged folders of runs: one sentence, or harmless and bit-identical; never other weights without a word."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.campaign import damages
from tests.campaign.harness import Case, Result, call, judge, shown, succeed
from tests.campaign.runs import differences, start, whole_run, words
from zoo.config import merge

KEEP_ALL = {"run": {"keep_checkpoints": 10}}
OTHERS = {
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
    damages.evil(folder / "evil.pth")
    found = [resumed(name, damage, folder, file) for name, damage in damages.of_unfinished().items()]
    for kind, damage in (("whole", damages.of_classifier()), ("dit", damages.of_pipeline())):
        truth = folder / f"{kind}-truth"
        succeed(read(kind, folder / kind, truth))
        found += [loaded(kind, name, one, folder, truth) for name, one in damage.items()]
    return found


def resumed(name: str, damage: damages.Damage, folder: Path, file: Path) -> Case:
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


def read(kind: str, source: Path, place: Path, damage: damages.Damage = lambda run, others: None) -> Result:
    """What a tool makes of a finished run, or part of one, in `place`."""
    inside, tool, text, _ = READERS[kind]
    run = Path(shutil.copytree(source / inside, place / "run"))
    (place / "out").mkdir()
    damage(run, source.parent)
    return call(tool, text.split(), cwd=place)


def loaded(kind: str, name: str, damage: damages.Damage, folder: Path, truth: Path) -> Case:
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
