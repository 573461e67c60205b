"""Full disks: files that may not grow; one sentence, and bit-identical once there is room."""

from __future__ import annotations

import random
import resource
from pathlib import Path

from tests.campaign.harness import Case, call, judge, shown, succeed
from tests.campaign.runs import TOOL, files_below, resume, same_file, start, whole_run

SIZES = 20  # file size limits per command
TOOLS = {  # what writes files in the end, beside runs
    "sample": "sample.model={f}/dit/transformer_ema sample.count=40 sample.steps=1 sample.batch_size=20 out=out/a.npz",
    "convert": "model.checkpoint={f}/vit model.mixer=la out=out",
    "evaluate_imagenet": "data.source=digits data.workers=0 eval.models=[{f}/vit] out=out",
}
SOFTMAX = {"vit": {"model": {"mixer": ""}}}  # a classifier that can be converted


def cases(folder: Path, seed: int) -> list[Case]:
    """Limits drawn between nothing and the largest file of each output."""
    rng, found = random.Random(seed), []
    for kind in TOOL:
        file = whole_run(kind, folder, kind, SOFTMAX.get(kind))
        found += [limited(kind, file, folder / kind, limit) for limit in limits(rng, folder / kind)]
    for tool, text in TOOLS.items():
        words, whole = text.format(f=folder).split(), folder / tool
        whole.mkdir()
        succeed(call(tool, words, cwd=whole))
        found += [limited_tool(tool, words, whole, limit) for limit in limits(rng, whole)]
    return found


def limits(rng: random.Random, folder: Path) -> list[int]:
    """Random sizes up to the largest file below a folder, mostly small."""
    largest = max(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return [int(rng.uniform(0, 1.05) ** 2 * largest) for _ in range(SIZES)]


def limit_files(size: int) -> None:
    """No file of this process grows beyond `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def limited(kind: str, file: Path, whole: Path, size: int) -> Case:
    """A run none of whose files may be larger than `size` bytes, continued without that limit."""

    def check(place: Path) -> str:
        ended = start(kind, file, place / "run", before=lambda: limit_files(size))
        return judge(ended) or resume(kind, file, place / "run", whole)

    return Case(f"{kind} files of {size}", check, f"prlimit --fsize={size} {kind}")


def limited_tool(tool: str, words: list[str], whole: Path, size: int) -> Case:
    """Another tool under a limit, run again without it: what it writes is what it wrote without."""

    def check(place: Path) -> str:
        if complaint := judge(call(tool, words, cwd=place, before=lambda: limit_files(size))):
            return complaint
        if (again := call(tool, words, cwd=place)).code:
            return f"not repeated, exit {again.code}: {again.err[-300:]}"
        names = files_below(whole)
        if other := names ^ files_below(place):
            return f"files: {sorted(other)[:3]}"
        compared = sorted(name for name in names if name.endswith((".npz", ".safetensors", ".csv")))
        return "; ".join(f"{name} differs" for name in compared if not same_file(whole / name, place / name))

    return Case(f"{tool} files of {size}", check, f"prlimit --fsize={size} {shown(tool, words)}")
