"""Good and bad files that the command lines name: runs, images, tables, shards, YAML, payloads."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from tests.campaign.damages import Payload, evil
from tests.campaign.harness import call, fork
from tests.campaign.runs import RUNS, write_config
from zoo.config import merge

SCRIPT = "import os\nopen('executed', 'w').close()\n"
VIDEO = {
    "model": {
        "kind": "wan",
        "kwargs": {
            "num_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "ffn_dim": 16,
            "freq_dim": 8,
            "patch_size": [1, 2, 2],
        },
    },
    "data": {"source": "moving_digits", "img_size": 16, "frames": 4, "clips": 10, "batch_size": 2, "workers": 0},
    "schedule": {"steps": 1},
    "sample": {"count": 1, "steps": 1},
}


def build(world: Path) -> None:
    """Write everything into the folder `world`. Raises RuntimeError when a tool fails on good input."""
    world.mkdir()
    short = {"vit": {"schedule": {"epochs": 1}, "optim": {"ema": 0.0}}, "dit": {"schedule": {"steps": 2}}}
    for kind in RUNS:
        write_config(kind, world / f"{kind}.yaml", short[kind])
    softmax = {"model": {"mixer": ""}, "run": {"folder": "vit"}}
    (world / "softmax.yaml").write_text(yaml.safe_dump(merge(merge(RUNS["vit"], short["vit"]), softmax)))
    (world / "video.yaml").write_text(yaml.safe_dump(VIDEO))
    for action in (lambda: pictures(world), lambda: tables(world), lambda: shards(world), lambda: texts(world)):
        finish(fork(action, cwd=world))
    finish(fork(lambda: models(world), cwd=world))
    finish(call("train_vit", ["softmax.yaml"], cwd=world))
    finish(call("train_vit", ["vit.yaml", "run.folder=ahla"], cwd=world))
    finish(call("finetune_dit", ["dit.yaml", "run.folder=dit"], cwd=world))
    latents = ["images.source=digits", "images.where=train", "images.img_size=8", "images.workers=0"]
    finish(
        call("extract_latents", [*latents, f"encode.vae={world}/vae", "encode.dtype=float32", "out=latents"], cwd=world)
    )


def finish(result: Any) -> None:
    """Raise RuntimeError unless a child succeeded."""
    if result.code:
        raise RuntimeError(f"the world could not be built: {result.err}")


def models(world: Path) -> None:
    """A VAE, damaged files of weights, and payloads in place of weights."""
    import torch
    from diffusers import AutoencoderKL
    from safetensors.torch import save_file

    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"]}
    vae = AutoencoderKL(**blocks, block_out_channels=[4], norm_num_groups=2, layers_per_block=1, latent_channels=4)
    vae.save_pretrained(world / "vae")
    save_file({"a": torch.zeros(2)}, world / "foreign.safetensors")
    for name in ("evil.pt", "evil.pth", "evil.bin", "evil.safetensors", "evil.ckpt"):
        evil(world / name)
    np.savez(world / "evil.npz", arr_0=np.array([Payload()], dtype=object))
    (world / "empty.safetensors").touch()
    (world / "huge_header.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    (world / "folder.safetensors").mkdir()
    remote = world / "remote"
    remote.mkdir()
    (remote / "model_index.json").write_text(json.dumps({"_class_name": ["pipeline", "Evil"], "x": ["evil", "Evil"]}))
    (remote / "pipeline.py").write_text(SCRIPT)
    (remote / "config.json").write_text(json.dumps({"_class_name": "Evil", "auto_map": {"AutoModel": "pipeline.Evil"}}))


def picture(seed: int = 0, size: int = 12) -> Image.Image:
    """Noise."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8))


def png(seed: int = 0, size: int = 12) -> bytes:
    """The same as a file."""
    out = io.BytesIO()
    picture(seed, size).save(out, "png")
    return out.getvalue()


def bomb(side: int = 60000) -> bytes:
    """A PNG of a few bytes that says it is huge."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def pictures(world: Path) -> None:
    """Folders of images: `images` is good; the others are odd or damaged in one way each."""

    def folder(name: str, count: int = 10) -> Path:
        for label in "ab":
            (world / name / label).mkdir(parents=True)
            for i in range(count):
                (world / name / label / f"{i}.png").write_bytes(png(ord(label) + i))
        return world / name / "a"

    folder("images")
    folder("flat", 0)
    (world / "no_folders").mkdir()
    (world / "no_folders" / "a.png").write_bytes(png())
    for file in folder("broken").parent.glob("*/*.png"):
        file.write_bytes(png()[:60])
    for name, content in {
        "one_truncated": png()[:60],
        "one_empty": b"",
        "one_text": b"text",
        "one_bomb": bomb(),
        "one_pixel": png(size=1),
    }.items():
        (folder(name) / "0.png").write_bytes(content)
    (folder("one_folder") / "x.png").mkdir()
    (folder("dangling") / "x.png").symlink_to("nowhere")
    (folder("cycle") / "back").symlink_to("..")
    folder("empty_class")
    (world / "empty_class" / "c").mkdir()
    Image.fromarray((np.arange(144) * 400).reshape(12, 12).astype(np.uint16)).save(folder("sixteen") / "x.png")
    picture().convert("CMYK").save(folder("cmyk") / "x.jpg")
    picture().convert("P").save(folder("palette") / "x.png")
    picture().save(folder("webp") / "x.webp")
    odd = os.fsdecode(b"\xff\xfe.png")
    (folder("odd_names") / odd).write_bytes(png())
    (world / "odd_names" / "b" / "line\nbreak.png").write_bytes(png())
    arrays = {"a": np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), dtype=np.uint8)}
    arrays["b"], arrays["few"] = arrays["a"][::-1], arrays["a"][:1]
    arrays |= {"floats": arrays["a"] / 255.0, "flat_npz": arrays["a"].reshape(64, -1), "none": arrays["a"][:0]}
    arrays |= {"nan_npz": np.full((64, 8, 8, 3), np.nan), "grey": arrays["a"][..., :1]}
    for name, array in arrays.items():
        np.savez(world / f"{name}.npz", arr_0=array)
    np.savez(world / "other_key.npz", images=arrays["a"])
    np.savez(world / "stats_nan.npz", mu=np.full(3, np.nan), sigma=np.eye(3))
    np.savez(world / "stats_text.npz", mu="x", sigma="y")
    (world / "half.npz").write_bytes((world / "a.npz").read_bytes()[:5000])
    (world / "empty.npz").touch()


def tables(world: Path) -> None:
    """Parquet files: `good.parquet` and others with one fault each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": png(i), "path": None} for i in range(20)]
    labels: list[Any] = [i % 2 for i in range(20)]
    faults: dict[str, dict[str, list[Any]]] = {
        "good": {},
        "ints": {"image": list(range(20))},
        "texts": {"image": ["x"] * 20},
        "garbage": {"image": [{"bytes": b"no image", "path": None}] * 20},
        "local": {"image": [{"bytes": None, "path": "/etc/hostname"}] * 20},
        "nulls": {"image": [None] * 20},
        "null_labels": {"label": [None, *labels[1:]]},
        "negative": {"label": [-1, *labels[1:]]},
        "huge_label": {"label": [10**12, *labels[1:]]},
        "gap": {"label": [5 * label for label in labels]},
        "float_labels": {"label": [0.5, *map(float, labels[1:])]},
        "text_labels": {"label": ["a"] * 20},
        "list_labels": {"label": [[0]] * 20},
        "no_rows": {"image": [], "label": []},
    }
    for name, columns in faults.items():
        pq.write_table(pa.table({"image": images, "label": labels} | columns), world / f"{name}.parquet")
    pq.write_table(pa.table({"label": labels}), world / "no_image.parquet")
    pq.write_table(pa.table({"image": images}), world / "no_label.parquet")
    content = (world / "good.parquet").read_bytes()
    for name, part in {"half": content[:900], "empty": b"", "text": b"image,label\n1,2\n"}.items():
        (world / f"{name}.parquet").write_bytes(part)
    script = world / "script"
    script.mkdir()
    (script / "script.py").write_text(SCRIPT)


def shards(world: Path) -> None:
    """Webdataset shards: `good.tar` and others with one fault each."""

    def write(name: str, members: dict[str, bytes]) -> None:
        with tarfile.open(world / f"{name}.tar", "w") as tar:
            for member, content in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))

    good = {f"{i:02d}.{end}": c for i in range(8) for end, c in (("png", png(i)), ("cls", str(i % 2).encode()))}
    import pickle

    faults: dict[str, dict[str, bytes]] = {
        "good": {},
        "text_class": {"00.cls": b"cat"},
        "negative_class": {"00.cls": b"-1"},
        "empty_class": {"00.cls": b""},
        "bad_image": {"00.png": b"no image"},
        "pickled": {"00.pyd": pickle.dumps(Payload()), "00.pickle": pickle.dumps(Payload())},
        "traversal": {"../../escaped.png": png(), "../../escaped.cls": b"0"},
        "absolute": {"/tmp/escaped.png": png(), "/tmp/escaped.cls": b"0"},
        "no_dots": {"name": b"x"},
    }
    for name, members in faults.items():
        write(name, good | members)
    write("nothing", {})
    write("images_only", {k: v for k, v in good.items() if k.endswith("png")})
    write("one_pickle", {"00.pyd": pickle.dumps(Payload()), "00.cls": b"0"})
    content = (world / "good.tar").read_bytes()
    for name, part in {"half": content[: len(content) // 2 + 100], "empty": b"", "noise": os.urandom(4096)}.items():
        (world / f"{name}.tar").write_bytes(part)


def texts(world: Path) -> None:
    """YAML, JSON and text files."""
    vit = (world / "vit.yaml").read_text()
    bombs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    content: dict[str, str | bytes] = {
        "empty.yaml": "",
        "latin.yaml": b"model: {name: '\xe9\xff'}",
        "utf16.yaml": vit.encode("utf-16"),
        "binary.yaml": os.urandom(500),
        "zeros.yaml": b"\0" * 500,
        "tabs.yaml": "model:\n\tname: x",
        "open.yaml": "model: {name: x",
        "brackets.yaml": "[" * 3000,
        "braces.yaml": "model: {kwargs: " + "{a: " * 2000,
        "list.yaml": "[1, 2]",
        "number.yaml": "7",
        "text.yaml": "text",
        "documents.yaml": "model: {}\n---\nmodel: {}\n",
        "object.yaml": "model: !!python/object/apply:os.system ['touch executed']",
        "tuple.yaml": "model: !!python/tuple [1]",
        "bomb.yaml": bombs,
        "bomb_kwargs.yaml": "model:\n  kwargs:\n" + "".join(f"    {line}\n" for line in bombs.splitlines()),
        "self.yaml": "base: self.yaml",
        "circle.yaml": "base: circle2.yaml",
        "circle2.yaml": "base: circle.yaml",
        "no_base.yaml": "base: none.yaml",
        "list_base.yaml": "base: [a, b]",
        "number_keys.yaml": "{1: 2}",
        "section_list.yaml": "model: [1]",
        "section_text.yaml": "model: x",
        "section_null.yaml": "model:",
        "twice.yaml": "optim: {lr: 1.0e-3}\noptim: {lr: x}",
        "recursive.yaml": "model: &a {kwargs: *a}",
        "dates.yaml": "optim: {lr: 2026-01-01}",
        "long.yaml": "banana" * 5000 + ": 1",
        "bad.json": "{",
        "list.json": "[1]",
        "rows.json": '{"rows": [1]}',
        "latin.txt": b"\xff\xfe\xe9\n",
        "empty.txt": "",
        "prompts.txt": "a b c\nd\n",
        "evil.py": SCRIPT,
        "exits.py": "raise SystemExit(3)",
        "syntax.py": "def",
    }
    for name, text in content.items():
        (world / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (world / "loop.yaml").symlink_to("loop.yaml")
    (world / "loop").symlink_to("loop")
    (world / "folder.yaml").mkdir()
    (world / "file").touch()
    os.mkfifo(world / "pipe.yaml")
