"""Kinds of damage to the folder of a run: name -> function of the folder and of the folder with other runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Damage = Callable[[Path, Path], Any]
LAST, BEFORE = "checkpoints/step-00000008", "checkpoints/step-00000006"
WEIGHTS = ("model.safetensors", "ema.safetensors")


class Payload:
    """Unpickled, it writes a file named `executed` into the working directory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch executed",)


def flip(file: Path, part: float) -> None:
    """Change one byte, `part` of the way through the file."""
    content = bytearray(file.read_bytes())
    content[int(part * (len(content) - 1))] ^= 0x55
    file.write_bytes(content)


def cut(file: Path, part: float) -> None:
    """Keep the first `part` of a file."""
    file.write_bytes(file.read_bytes()[: int(part * file.stat().st_size)])


def replace(path: Path, content: bytes | str | None = None) -> None:
    """Put a file (None: an empty folder) where something else was."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def loop(path: Path) -> None:
    """A symbolic link to itself."""
    replace(path, "")
    path.unlink()
    path.symlink_to(path.name)


def evil(path: Path) -> None:
    """A pickle that executes a command."""
    torch.save(Payload(), path)


def files() -> dict[str, Damage]:
    """What may happen to any file of a checkpoint."""
    found: dict[str, Damage] = {}
    for name in (*WEIGHTS, "state.pt"):
        kinds: dict[str, Damage] = {
            "a byte of the data": lambda run, _, n=name: flip(run / LAST / n, 0.7),
            "a byte of the header": lambda run, _, n=name: flip(run / LAST / n, 0.02),
            "the last byte": lambda run, _, n=name: flip(run / LAST / n, 1.0),
            "half": lambda run, _, n=name: cut(run / LAST / n, 0.5),
            "empty": lambda run, _, n=name: cut(run / LAST / n, 0.0),
            "missing": lambda run, _, n=name: (run / LAST / n).unlink(),
            "garbage": lambda run, _, n=name: replace(run / LAST / n, os.urandom(3000)),
            "a folder": lambda run, _, n=name: replace(run / LAST / n),
            "a loop": lambda run, _, n=name: loop(run / LAST / n),
            "a pickle": lambda run, _, n=name: evil(run / LAST / n),
            "of another step": lambda run, _, n=name: shutil.copy(run / BEFORE / n, run / LAST / n),
        }
        for other in ("seed", "wide", "narrow"):
            kinds[f"of the run {other}"] = lambda run, others, n=name, o=other: shutil.copy(
                others / o / LAST / n, run / LAST / n
            )
        found |= {f"{name}: {kind}": damage for kind, damage in kinds.items()}
    return found


def weights(*places: str) -> dict[str, Damage]:
    """Files of weights that hold something else than they should; `places` are relative to the run."""

    def edited(change: Callable[[dict[str, torch.Tensor]], Any], place: str) -> Damage:
        def damage(run: Path, _: Path) -> None:
            file = run / place
            with safe_open(file, "pt") as opened:
                header = opened.metadata()
            tensors = load_file(file)
            change(tensors)
            save_file(tensors, file, metadata=header)

        return damage

    def set_first(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, torch.Tensor]], Any]:
        def edit(tensors: dict[str, torch.Tensor]) -> None:
            key = next(k for k in sorted(tensors) if tensors[k].ndim == 2)
            tensors[key] = change(tensors[key]).contiguous()

        return edit

    changes: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
        "one NaN": set_first(lambda t: torch.where(torch.arange(t.numel()).view_as(t) == 3, torch.nan, t)),
        "infinite": set_first(lambda t: t + torch.inf),
        "another type": set_first(lambda t: t.double()),
        "whole numbers": set_first(lambda t: t.long()),
        "another shape": set_first(lambda t: t[:-1]),
        "transposed": set_first(lambda t: t.T),
        "a scalar": set_first(lambda t: t.sum()),
        "a tensor less": lambda tensors: tensors.pop(sorted(tensors)[0]),
        "a tensor more": lambda tensors: tensors.update(extra=torch.zeros(3)),
        "no tensors": lambda tensors: tensors.clear(),
    }
    return {f"{place}: {kind}": edited(change, place) for place in places for kind, change in changes.items()}


def headers(place: str) -> dict[str, Damage]:
    """Headers that say something else about the model."""

    def edited(change: Callable[[dict[str, Any]], Any]) -> Damage:
        def damage(run: Path, _: Path) -> None:
            file = run / place
            with safe_open(file, "pt") as opened:
                header = opened.metadata()
            recipe = json.loads(header["hla_zoo"])
            recipe = change(recipe) or recipe
            text = recipe if isinstance(recipe, str) else json.dumps(recipe)
            save_file(load_file(file), file, metadata={**header, "hla_zoo": text})

        return damage

    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "a newer key": lambda r: r.update(newer=1),
        "a list": lambda r: [1, 2],
        "null": lambda r: "null",
        "not JSON": lambda r: "{not",
        "NaN": lambda r: "NaN",
        "kwargs a list": lambda r: r.update(kwargs=[1]),
        "a huge width": lambda r: r["kwargs"].update(embed_dim=2**40),
        "another width": lambda r: r["kwargs"].update(embed_dim=32),
        "a width of 0": lambda r: r["kwargs"].update(embed_dim=0),
        "a negative depth": lambda r: r["kwargs"].update(depth=-1),
        "a local file": lambda r: r["kwargs"].update(checkpoint_path="../evil.pth"),
        "an unknown keyword": lambda r: r["kwargs"].update(banana=1),
        "an unknown model": lambda r: r.update(name="banana"),
        "a model of the hub": lambda r: r.update(name="hf_hub:a/b"),
        "no name": lambda r: r.update(name=None),
        "an unknown mixer": lambda r: r.update(mixer="banana"),
        "another mixer": lambda r: r.update(mixer="poly"),
        "bad options": lambda r: r.update(mixer_options={"eps": "x"}),
        "classes a number": lambda r: r.update(classes=7),
        "many classes": lambda r: r.update(num_classes=10**12),
        "no classes": lambda r: r.update(num_classes="ten"),
        "an input of text": lambda r: r.update(input="x"),
        "an input with NaN": lambda r: r.update(input={**r["input"], "mean": [float("nan")] * 3}),
        "img_size of text": lambda r: r.update(img_size="x"),
    }
    return {f"header: {kind}": edited(change) for kind, change in changes.items()}


def states() -> dict[str, Damage]:
    """state.pt with other contents."""

    def edited(change: Callable[[dict[str, Any]], Any]) -> Damage:
        def damage(run: Path, _: Path) -> None:
            file = run / LAST / "state.pt"
            state = torch.load(file, weights_only=True)
            changed = change(state)
            torch.save(state if changed is None else changed, file)

        return damage

    def moment(value: Callable[[torch.Tensor], Any]) -> Damage:
        def change(state: dict[str, Any]) -> None:
            first = next(iter(state["optimizer"]["state"].values()))
            first["exp_avg"] = value(first["exp_avg"])

        return edited(change)

    found = {
        "a list": edited(lambda s: [1]),
        "a tensor": edited(lambda s: torch.zeros(3)),
        "no counts": edited(lambda s: s.pop("counts") and None),
        "no optimizer": edited(lambda s: s.pop("optimizer") and None),
        "optimizer none": edited(lambda s: s.update(optimizer=None)),
        "optimizer empty": edited(lambda s: s.update(optimizer={})),
        "a parameter less": edited(lambda s: s["optimizer"]["state"].popitem() and None),
        "text as step": edited(lambda s: s.update(step="8")),
        "a huge step": edited(lambda s: s.update(step=10**9)),
        "a negative step": edited(lambda s: s.update(step=-1)),
        "another step": edited(lambda s: s.update(step=6)),
        "text as seconds": edited(lambda s: s.update(seconds="x")),
        "meters none": edited(lambda s: s.update(meters=None)),
        "text as unreadable": edited(lambda s: s.update({k: "x" for k in s if k in ("bad", "unreadable")})),
        "counts a list": edited(lambda s: s.update(counts=[1])),
        "a short moment": moment(lambda t: torch.tensor([1.0, 2.0, 3.0])),
        "a moment of NaN": moment(lambda t: t + torch.nan),
        "a moment in float64": moment(lambda t: t.double()),
        "a moment that is text": moment(lambda t: "x"),
    }
    return {f"state.pt: {kind}": damage for kind, damage in found.items()}


def folders() -> dict[str, Damage]:
    """Stray and missing files and folders; those with "record" in their name lose rows of it."""

    def swap(run: Path, _: Path) -> None:
        (run / LAST).rename(run / "x")
        (run / BEFORE).rename(run / LAST)
        (run / "x").rename(run / BEFORE)

    def line(text: str) -> Damage:
        def damage(run: Path, _: Path) -> None:
            lines = (run / "metrics.jsonl").read_text().splitlines()
            lines[2] = text
            (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")

        return damage

    checkpoints = "checkpoints"
    return {
        "config.yaml empty": lambda run, _: replace(run / "config.yaml", ""),
        "config.yaml missing": lambda run, _: (run / "config.yaml").unlink(),
        "config.yaml garbage": lambda run, _: replace(run / "config.yaml", b"\xff\xfe\x00"),
        "config.yaml half": lambda run, _: cut(run / "config.yaml", 0.5),
        "config.yaml a folder": lambda run, _: replace(run / "config.yaml"),
        "config.yaml of another run": lambda run, o: shutil.copy(o / "seed" / "config.yaml", run / "config.yaml"),
        "config.yaml newer": lambda run, _: (run / "config.yaml").open("a").write("newer: {key: 1}\n"),
        "record missing": lambda run, _: (run / "metrics.jsonl").unlink(),
        "record empty": lambda run, _: replace(run / "metrics.jsonl", ""),
        "record torn": lambda run, _: cut(run / "metrics.jsonl", 0.6),
        "record garbage": lambda run, _: replace(run / "metrics.jsonl", b"\xff\xfe\x00" * 99),
        "record a folder": lambda run, _: replace(run / "metrics.jsonl"),
        "record a list": line("[1, 2]"),
        "record without step": line('{"kind": "train"}'),
        "record with text as step": line('{"kind": "train", "step": "x"}'),
        "record of zeros": line("\0" * 50),
        "checkpoints a file": lambda run, _: replace(run / checkpoints, "x"),
        "checkpoints empty": lambda run, _: replace(run / checkpoints),
        "last missing": lambda run, _: shutil.rmtree(run / LAST),
        "last empty": lambda run, _: replace(run / LAST),
        "last a file": lambda run, _: replace(run / LAST, "x"),
        "last a loop": lambda run, _: loop(run / LAST),
        "last of another seed": lambda run, o: (
            shutil.rmtree(run / LAST),
            shutil.copytree(o / "seed" / LAST, run / LAST),
        ),
        "last of another width": lambda run, o: (
            shutil.rmtree(run / LAST),
            shutil.copytree(o / "wide" / LAST, run / LAST),
        ),
        "swapped": swap,
        "renamed": lambda run, _: (run / LAST).rename(run / checkpoints / "step-00000007"),
        "renamed past the end": lambda run, _: (run / LAST).rename(run / checkpoints / "step-00000123"),
        "a stray huge step": lambda run, _: (run / checkpoints / "step-999999999999").mkdir(),
        "a stray empty step": lambda run, _: (run / checkpoints / "step-00000009").mkdir(),
        "a stray file": lambda run, _: (run / checkpoints / "step-00000009").touch(),
        "a stray name": lambda run, _: (run / checkpoints / "step-x").mkdir(),
        "writing as a file": lambda run, _: (run / checkpoints / "writing-x").touch(),
        "writing as a folder": lambda run, _: (run / checkpoints / "writing-x").mkdir(),
        "a stray result": lambda run, _: (run / "result.json").write_text("{"),
        "a stray picture": lambda run, _: (run / "curves.png").mkdir(),
        "weights a folder": lambda run, _: (run / "model.safetensors").mkdir(),
    }


def pipelines() -> dict[str, Damage]:
    """Folders of diffusers that are damaged."""

    def edited(change: Callable[[dict[str, Any]], Any]) -> Damage:
        def damage(model: Path, _: Path) -> None:
            config = json.loads((model / "config.json").read_text())
            changed = change(config)
            (model / "config.json").write_text(json.dumps(config if changed is None else changed))

        return damage

    name = "diffusion_pytorch_model.safetensors"
    found: dict[str, Damage] = {
        "config missing": lambda model, _: (model / "config.json").unlink(),
        "config empty": lambda model, _: replace(model / "config.json", ""),
        "config a list": lambda model, _: replace(model / "config.json", "[]"),
        "config not UTF-8": lambda model, _: replace(model / "config.json", b"\xff\xfe"),
        "weights missing": lambda model, _: (model / name).unlink(),
        "weights half": lambda model, _: cut(model / name, 0.5),
        "weights empty": lambda model, _: cut(model / name, 0),
        "weights garbage": lambda model, _: replace(model / name, os.urandom(999)),
        "weights a folder": lambda model, _: replace(model / name),
        "weights a pickle": lambda model, _: ((model / name).unlink(), evil(model / "diffusion_pytorch_model.bin")),
        "an unknown class": edited(lambda c: c.update(_class_name="Banana")),
        "a list as class": edited(lambda c: c.update(_class_name=["os", "system"])),
        "no class": edited(lambda c: c.pop("_class_name") and None),
        "a negative depth": edited(lambda c: c.update(num_layers=-1)),
        "another depth": edited(lambda c: c.update(num_layers=3)),
        "no heads": edited(lambda c: c.update(num_attention_heads=0)),
        "text as width": edited(lambda c: c.update(attention_head_dim="x")),
        "remote code": edited(lambda c: c.update(auto_map={"AutoModel": "evil.Evil"})),
        "scheduler missing": lambda model, _: shutil.rmtree(model / "scheduler"),
        "scheduler garbage": lambda model, _: replace(model / "scheduler" / "scheduler_config.json", "{"),
        "scheduler unknown": lambda model, _: replace(
            model / "scheduler" / "scheduler_config.json", '{"_class_name": "Banana"}'
        ),
    }
    return found
