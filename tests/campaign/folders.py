"""Damaged folders of runs: one sentence, or harmless and bit-identical; never other weights without a word."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.campaign import damages
from tests.campaign.harness import Case, Result, call, judge, shown
from tests.campaign.runs import command, differences, start, write_config

OTHERS = {"seed": {"run": {"seed": 7}}} | {
    name: {"model": {"kwargs": {"embed_dim": width}}} for name, width in (("wide", 32), ("narrow", 8))
}
KEEP_ALL = {"run": {"keep": 10}}
UNFINISHED = ("checkpoints/step-00000010", "model.safetensors", "model_ema.safetensors", "result.json", "curves.png")


def cases(folder: Path, seed: int, seconds: float) -> list[Case]:
    """A run that stopped after step 8 of 10, a finished classifier and a finished DiT, each damaged in every way."""
    from zoo.config import merge

    whole, stopped = folder / "whole", folder / "stopped"
    files = {
        name: write_config("vit", folder / f"{name}.yaml", merge(KEEP_ALL, OTHERS.get(name, {})))
        for name in ("whole", *OTHERS)
    }
    for name, file in files.items():
        finished(start("vit", file, folder / name))
    finished(start("dit", write_config("dit", folder / "dit.yaml"), folder / "dit"))
    shutil.copytree(whole, stopped)
    for name in UNFINISHED:
        path = stopped / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    damages.evil(folder / "evil.pth")
    kinds = damages.files() | damages.weights(*(f"{damages.LAST}/{name}" for name in damages.WEIGHTS))
    kinds |= damages.states() | damages.folders()
    found = [resumed(name, damage, folder, files["whole"]) for name, damage in kinds.items()]
    kinds = damages.weights("model_ema.safetensors") | damages.headers("model_ema.safetensors")
    kinds = {name: damage for name, damage in kinds.items() if "transposed" not in name}  # as good as other weights
    found += [evaluated(name, damage, folder) for name, damage in kinds.items()]
    return found + [sampled(name, damage, folder) for name, damage in damages.pipelines().items()]


def finished(result: Result) -> None:
    """Raise RuntimeError unless the tool succeeded."""
    if result.code:
        raise RuntimeError(f"a run without damage failed: {result.err}")


def resumed(name: str, damage: damages.Damage, folder: Path, file: Path) -> Case:
    """The stopped run, damaged and continued."""

    def check(place: Path) -> str:
        run = Path(shutil.copytree(folder / "stopped", place / "run", symlinks=True))
        damage(run, folder)
        result = start("vit", file, run)
        if complaint := judge(result) or executed(place):
            return complaint
        found = [d for d in differences(folder / "whole", run) if not harmless(name, d)] if not result.code else []
        return f"resumed, but {'; '.join(found)}" if found else ""

    return Case(f"resume {name}", check, shown("train_vit", command("vit", file, Path("DAMAGED"))))


def harmless(name: str, difference: str) -> bool:
    """Stray files and damaged checkpoints may stay, and rows of a damaged record are lost; weights may not differ."""
    return difference.startswith(("files", "checkpoints/")) or ("record" in name and difference.startswith("metrics"))


def evaluated(name: str, damage: damages.Damage, folder: Path) -> Case:
    """The finished classifier, damaged and evaluated."""
    words = ["data.source=digits", "data.workers=0", "eval.models=[run]", "out=out"]
    return loaded(f"evaluate {name}", damage, folder, "whole", "evaluate_imagenet", words, "predictions.csv")


def sampled(name: str, damage: damages.Damage, folder: Path) -> Case:
    """The finished DiT, damaged and sampled."""
    words = ["sample.model=run", "sample.count=4", "sample.batch_size=4", "sample.steps=2", "out=out/a.npz"]
    return loaded(f"sample {name}", damage, folder, "dit/transformer_ema", "sample", words, "a.npz")


def loaded(
    name: str, damage: damages.Damage, folder: Path, source: str, tool: str, words: list[str], file: str
) -> Case:
    """A finished model read by a tool, whose output `out/FILE` must be that of the undamaged one if it is accepted."""

    def output(place: Path, change: Callable[[Path, Path], object]) -> tuple[Result, str]:
        run = Path(shutil.copytree(folder / source, place / "run"))
        (place / "out").mkdir()
        change(run, folder)
        result = call(tool, words, cwd=place)
        found = place / "out" / file
        return result, hashlib.sha256(found.read_bytes()).hexdigest() if found.is_file() else ""

    def check(place: Path) -> str:
        result, found = output(place, damage)
        if complaint := judge(result) or executed(place):
            return complaint
        if result.code == 0 and found != truth(place.parent / f"truth-{tool}"):
            return "accepted, but the output differs"
        return ""

    def truth(place: Path) -> str:
        if not (place / "out" / file).exists():
            place.mkdir()
            return output(place, lambda run, others: None)[1]
        return hashlib.sha256((place / "out" / file).read_bytes()).hexdigest()

    return Case(name, check, shown(tool, words))


def executed(place: Path) -> str:
    """The complaint when a payload ran."""
    return "a payload was executed" if any(place.rglob("executed")) else ""
