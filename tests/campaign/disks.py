"""Full disks: files that may not grow and small file systems; one sentence, and bit-identical once there is room."""

from __future__ import annotations

import random
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file

from tests.campaign.harness import Case, call, digest, judge, shown
from tests.campaign.runs import RUNS, differences, same_bits, start, write_config

SIZES, VOLUMES = 12, 8  # file size limits per command, file systems per run
TOOLS = {  # what writes files in the end, beside runs
    "sample": ["sample.model=dit/transformer_ema", "sample.count=40", "sample.steps=1", "sample.batch_size=20"],
    "convert": ["model.checkpoint=vit", "model.mixer=la"],
    "evaluate_imagenet": ["data.source=digits", "data.workers=0", "eval.models=[vit]"],
}
OUT = {"sample": "out=out/a.npz", "convert": "out=out", "evaluate_imagenet": "out=out"}
KEEP = {"vit": {"model": {"mixer": ""}}}  # a classifier that can be converted


def cases(folder: Path, seed: int, seconds: float) -> list[Case]:
    """Limits drawn between nothing and the largest file of each output."""
    rng = random.Random(seed)
    found = []
    for kind in RUNS:
        file = write_config(kind, folder / f"{kind}.yaml", KEEP.get(kind))
        if (result := start(kind, file, folder / kind)).code:
            raise RuntimeError(f"a run without limits failed: {result.err}")
        sizes = [path.stat().st_size for path in (folder / kind).rglob("*") if path.is_file()]
        found += [limited(kind, file, folder, int(rng.uniform(0, 1.05) ** 2 * max(sizes))) for _ in range(SIZES)]
        if mountable(folder):
            volumes = [int(rng.uniform(0.05, 1.1) * sum(sizes)) for _ in range(VOLUMES)]
            found += [on_volume(kind, file, folder, size) for size in volumes]
        else:
            print("disks: no small file systems, since nothing can be mounted here", flush=True)
    for tool, words in TOOLS.items():
        whole = folder / tool
        whole.mkdir()
        local = [word.replace("=dit", f"={folder}/dit").replace("vit", f"{folder}/vit") for word in words]
        if (result := call(tool, [*local, OUT[tool]], cwd=whole)).code:
            raise RuntimeError(f"{tool} without limits failed: {result.err}")
        largest = max(path.stat().st_size for path in whole.rglob("*") if path.is_file())
        sizes = [int(rng.uniform(0, 1.05) ** 2 * largest) for _ in range(SIZES)]
        found += [limited_tool(tool, [*local, OUT[tool]], whole, size) for size in sizes]
    return found


def limited(kind: str, file: Path, folder: Path, size: int) -> Case:
    """A run none of whose files may be larger than `size` bytes, continued without that limit."""

    def check(place: Path) -> str:
        result = start(kind, file, place / "run", before=lambda: limit_files(size))
        return judge(result) or continued(kind, file, place / "run", folder / kind)

    return Case(f"{kind} files of {size}", check, f"prlimit --fsize={size} {kind}")


def limit_files(size: int) -> None:
    """No file of this process grows beyond `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def continued(kind: str, file: Path, run: Path, whole: Path) -> str:
    """The complaint about the run that continues with room."""
    result = start(kind, file, run)
    if result.code:
        return f"not resumed, exit {result.code}: {result.err[-300:]}"
    return "; ".join(differences(whole, run))


def on_volume(kind: str, file: Path, folder: Path, size: int) -> Case:
    """A run on a file system of `size` bytes, moved to a larger one."""

    def check(place: Path) -> str:
        with volume(place / "disk", size) as disk:
            complaint = judge(start(kind, file, disk / "run"))
            if (disk / "run").exists():
                shutil.copytree(disk / "run", place / "run")
        return complaint or continued(kind, file, place / "run", folder / kind)

    return Case(f"{kind} volume of {size}", check, f"mount -t tmpfs -o size={size} tmpfs DISK; {kind}")


@contextmanager
def volume(where: Path, size: int) -> Iterator[Path]:
    """A file system of `size` bytes mounted at `where`."""
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)], check=True, capture_output=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def mountable(folder: Path) -> bool:
    """Whether this process may mount file systems."""
    try:
        with volume(folder / "probe", 1 << 16):
            pass
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        (folder / "probe").rmdir()
    return True


def limited_tool(tool: str, words: list[str], whole: Path, size: int) -> Case:
    """Another tool under a limit, run again without it: what it writes is what it wrote without."""

    def check(place: Path) -> str:
        result = call(tool, words, cwd=place, before=lambda: limit_files(size))
        if complaint := judge(result):
            return complaint
        if (result := call(tool, words, cwd=place)).code:
            return f"not repeated, exit {result.code}: {result.err[-300:]}"
        names = [sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) for root in (whole, place)]
        if names[0] != names[1]:
            return f"files: {sorted(set(names[0]) ^ set(names[1]))[:3]}"
        weighty = [name for name in names[0] if name.endswith((".npz", ".safetensors", ".csv"))]
        return "; ".join(f"{name} differs" for name in weighty if not same(whole / name, place / name))

    return Case(f"{tool} files of {size}", check, f"prlimit --fsize={size} {shown(tool, words)}")


def same(one: Path, two: Path) -> bool:
    """Whether two files hold the same; the keys of a safetensors header have no order."""
    if one.suffix != ".safetensors":
        return digest(one) == digest(two)
    a, b = load_file(one), load_file(two)
    return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
