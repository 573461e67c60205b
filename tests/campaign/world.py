"""Good and bad files that the command lines name: runs, images, tables, shards, YAML, payloads."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image

from tests.campaign.folders import Payload, evil
from tests.campaign.harness import TABLES, call, fork, succeed
from tests.campaign.runs import write_config

TEXTS = yaml.safe_load((TABLES / "world.yaml").read_text())
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # kind of run and changes
    "vit": ("vit", {"schedule": {"epochs": 1}, "optim": {"ema": 0.0}}),
    "dit": ("dit", {"schedule": {"steps": 2}}),
    "softmax": (
        "vit", {"schedule": {"epochs": 1}, "optim": {"ema": 0.0}, "model": {"mixer": ""}, "run": {"folder": "vit"}}
    ),
    "video": ("video", {}),
}  # fmt: skip


def build(world: Path) -> None:
    """Write everything into the folder `world`. Raises RuntimeError when a tool fails on good input."""
    world.mkdir()
    for name, (kind, changes) in CONFIGS.items():
        write_config(kind, world / f"{name}.yaml", changes)
    for action in (pictures, arrays, tables, shards, texts, models):
        succeed(fork(lambda make=action: make(world), cwd=world))
    for tool, words in (
        ("train_vit", "softmax.yaml"),
        ("train_vit", "vit.yaml run.folder=ahla"),
        ("finetune_dit", "dit.yaml run.folder=dit"),
        ("extract_latents", "images.source=digits images.where=train images.img_size=8 images.workers=0 "
                            f"encode.vae={world}/vae encode.dtype=float32 out=latents"),
    ):  # fmt: skip
        succeed(call(tool, words.split(), cwd=world))


def write(world: Path, files: dict[str, bytes | str]) -> None:
    """Files with their content."""
    for name, content in files.items():
        (world / name).parent.mkdir(parents=True, exist_ok=True)
        (world / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def models(world: Path) -> None:
    """A VAE, damaged files of weights, and payloads in place of weights."""
    from diffusers import AutoencoderKL
    from safetensors.torch import save_file

    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"], "up_block_types": ["UpDecoderBlock2D"]}
    vae = AutoencoderKL(**blocks, block_out_channels=[4], norm_num_groups=2, layers_per_block=1, latent_channels=4)
    vae.save_pretrained(world / "vae")
    save_file({"a": torch.zeros(2)}, world / "foreign.safetensors")
    for name in ("evil.pt", "evil.pth", "evil.bin", "evil.safetensors", "evil.ckpt"):
        evil(world / name)
    (world / "folder.safetensors").mkdir()
    write(world, {
        "empty.safetensors": b"",
        "huge_header.safetensors": struct.pack("<Q", 1 << 60) + b"{}",
        "remote/model_index.json": json.dumps({"_class_name": ["pipeline", "Evil"], "x": ["evil", "Evil"]}),
        "remote/pipeline.py": TEXTS["evil.py"],
        "remote/config.json": json.dumps({"_class_name": "Evil", "auto_map": {"AutoModel": "pipeline.Evil"}}),
    })  # fmt: skip


def image(seed: int = 0, size: int = 12, mode: str = "RGB", kind: str = "png") -> bytes:
    """A file of noise."""
    out, noise = io.BytesIO(), np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(noise).convert(mode).save(out, kind)
    return out.getvalue()


def bomb(side: int = 60000) -> bytes:
    """A PNG of a few bytes that says it is huge."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def pictures(world: Path) -> None:
    """Folders of images: `images` is good; the others have one odd or damaged file each, or are empty."""
    good = {f"{label}/{i}.png": image(ord(label) + i) for label in "ab" for i in range(10)}
    sixteen = io.BytesIO()
    Image.fromarray((np.arange(144) * 400).reshape(12, 12).astype(np.uint16)).save(sixteen, "png")
    odd: dict[str, dict[str, bytes]] = {
        "images": {},
        "broken": dict.fromkeys(good, image()[:60]),
        "one_truncated": {"a/0.png": image()[:60]},
        "one_empty": {"a/0.png": b""},
        "one_text": {"a/0.png": b"text"},
        "one_bomb": {"a/0.png": bomb()},
        "one_pixel": {"a/0.png": image(size=1)},
        "sixteen": {"a/x.png": sixteen.getvalue()},
        "cmyk": {"a/x.jpg": image(mode="CMYK", kind="jpeg")},
        "palette": {"a/x.png": image(mode="P")},
        "webp": {"a/x.webp": image(kind="webp")},
        "odd_names": {f"a/{os.fsdecode(bytes([255, 254]))}.png": image(), "b/line\nbreak.png": image()},
        **{name: {} for name in ("one_folder", "dangling", "cycle", "empty_class")},
    }
    for name, files in odd.items():
        write(world / name, good | files)
    write(world, {"no_folders/a.png": image()})
    for name in ("flat/a", "flat/b", "one_folder/a/x.png", "empty_class/c"):
        (world / name).mkdir(parents=True)
    (world / "dangling/a/x.png").symlink_to("nowhere")
    (world / "cycle/a/back").symlink_to("..")


def arrays(world: Path) -> None:
    """NPZ files of samples and of statistics."""
    a = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), dtype=np.uint8)
    found = {"a": a, "b": a[::-1], "few": a[:1], "floats": a / 255.0, "flat_npz": a.reshape(64, -1), "none": a[:0]}
    found |= {"nan_npz": np.full((64, 8, 8, 3), np.nan), "grey": a[..., :1]}
    found["evil"] = np.array([Payload()], dtype=object)
    for name, array in found.items():
        np.savez(world / f"{name}.npz", arr_0=array)
    np.savez(world / "other_key.npz", images=a)
    np.savez(world / "stats_nan.npz", mu=np.full(3, np.nan), sigma=np.eye(3))
    np.savez(world / "stats_text.npz", mu="x", sigma="y")
    write(world, {"half.npz": (world / "a.npz").read_bytes()[:5000], "empty.npz": b""})


def tables(world: Path) -> None:
    """Parquet files: `good.parquet` and others with one fault each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    images = [{"bytes": image(i), "path": None} for i in range(20)]
    labels: list[Any] = [i % 2 for i in range(20)]
    faults: dict[str, dict[str, list[Any] | None]] = {
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
        "no_image": {"image": None},
        "no_label": {"label": None},
    }
    for name, changes in faults.items():
        columns = {"image": images, "label": labels} | changes
        pq.write_table(pa.table({k: v for k, v in columns.items() if v is not None}), world / f"{name}.parquet")
    half = (world / "good.parquet").read_bytes()[:900]
    write(world, {"half.parquet": half, "empty.parquet": b"", "text.parquet": "image,label\n1,2\n"})
    write(world, {"script/script.py": TEXTS["evil.py"]})


def shards(world: Path) -> None:
    """Webdataset shards: `good.tar` and others with one fault each."""
    good = {f"{i:02d}.{end}": c for i in range(8) for end, c in (("png", image(i)), ("cls", str(i % 2).encode()))}
    payload = pickle.dumps(Payload())
    faults: dict[str, dict[str, bytes]] = {
        "good": good,
        "text_class": good | {"00.cls": b"cat"},
        "negative_class": good | {"00.cls": b"-1"},
        "empty_class": good | {"00.cls": b""},
        "bad_image": good | {"00.png": b"no image"},
        "pickled": good | {"00.pyd": payload, "00.pickle": payload},
        "traversal": good | {"../../escaped.png": image(), "../../escaped.cls": b"0"},
        "absolute": good | {"/tmp/escaped.png": image(), "/tmp/escaped.cls": b"0"},
        "no_dots": good | {"name": b"x"},
        "nothing": {},
        "images_only": {k: v for k, v in good.items() if k.endswith("png")},
        "one_pickle": {"00.pyd": payload, "00.cls": b"0"},
    }
    for name, members in faults.items():
        with tarfile.open(world / f"{name}.tar", "w") as tar:
            for member, content in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    content = (world / "good.tar").read_bytes()
    write(world, {"half.tar": content[: len(content) // 2 + 100], "empty.tar": b"", "noise.tar": os.urandom(4096)})


def texts(world: Path) -> None:
    """YAML, JSON and text files, and what cannot be read as such."""
    pairs = zip("abcdefgh", "bcdefghi", strict=True)
    bombs = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairs)
    write(world, TEXTS | {
        "latin.yaml": b"model: {name: '\xe9\xff'}",
        "latin.txt": b"\xff\xfe\xe9\n",
        "utf16.yaml": (world / "vit.yaml").read_text().encode("utf-16"),
        "binary.yaml": os.urandom(500),
        "zeros.yaml": b"\0" * 500,
        "brackets.yaml": "[" * 3000,
        "braces.yaml": "model: {kwargs: " + "{a: " * 2000,
        "bomb.yaml": bombs,
        "bomb_kwargs.yaml": "model:\n  kwargs:\n" + "".join(f"    {line}\n" for line in bombs.splitlines()),
        "long.yaml": "banana" * 5000 + ": 1",
        "file": b"",
    })  # fmt: skip
    for name in ("loop.yaml", "loop"):
        (world / name).symlink_to(name)
    (world / "folder.yaml").mkdir()
    os.mkfifo(world / "pipe.yaml")
