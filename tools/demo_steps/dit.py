"""Diffusion part of the demo: commands, report lines and sample figure."""

from pathlib import Path
from typing import Any

import numpy as np

from demo_steps.processes import Command, to_mixer
from zoo.data import open_source
from zoo.plotting import pyplot, save_figure
from zoo.recipes.report import number
from zoo.train.metrics_log import read_rows

MIXER = "multipole"
DIT = {  # run folder -> name in the report
    "dit": "softmax (source)",
    "dit_more": "softmax, trained further (control)",
    "dit_zero_shot": f"{MIXER}, zero-shot",
    "dit_converted": f"{MIXER}, fine-tuned",
}
PATCH = "model.kwargs.patch_size=2"  # 16 instead of 64 tokens: a quarter of the time
ROWS = 6  # of ten classes each, in the figure


def dit_commands(out: Path, configs: Path, steps: int, samples: int) -> list[Command]:
    """Return (tool, arguments) of training a softmax DiT for `steps`, its conversion, fine-tuning and sampling."""
    source = f"{out}/dit/transformer_ema"
    first = [f"{configs}/dit/digits.yaml", PATCH, f"run.folder={out}/dit", *_length(steps)]
    fine = [f"{configs}/dit/digits_finetune.yaml", PATCH, f"model.checkpoint={source}", *_length(max(2, steps // 10))]
    commands = [("finetune_dit", first)]
    words = [f"diffusers={source}", *to_mixer(MIXER), f"out={out}/dit_zero_shot/transformer_ema"]
    commands.append(("convert", words))
    commands.append(("finetune_dit", [*fine, "model.mixer=", "distill.teacher=", f"run.folder={out}/dit_more"]))
    commands.append(("finetune_dit", [*fine, *to_mixer(MIXER), f"run.folder={out}/dit_converted"]))
    for name in DIT:
        words = [f"sample.model={out}/{name}/transformer_ema", f"sample.count={samples}"]
        words += ["sample.steps=25", "sample.labels=balanced"]
        commands.append(("sample", [*words, f"out={out}/{name}/samples.npz"]))
    return commands


def score_commands(out: Path) -> list[Command]:
    """Return (tool, arguments) that compute the statistics of the digits and the scores of the runs in `DIT`, with the
    features of the demo classifier."""
    words, reference = [f"fid.extractor={out}/softmax", "fid.workers=0"], f"{out}/digits.safetensors"
    scores = [[f"fid.samples={out}/{name}/samples.npz", f"fid.reference={reference}", *words] for name in DIT]
    return [("evaluate_fid", words) for words in (["fid.reference=digits", f"fid.save={reference}", *words], *scores)]


def _length(steps: int) -> list[str]:
    every = max(1, steps // 2)
    cadence = [f"run.eval_steps={every}", f"run.checkpoint_steps={steps}", f"sample.every={steps}"]
    return [f"schedule.steps={steps}", f"schedule.warmup_steps={steps // 12}", *cadence]


def dit_lines(folder: Path, cards: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the report."""
    first = next(iter(cards.values()))
    features, real = first["extractor"]["dim"], first["reference"]["n"]
    lines = [
        "## A diffusion transformer, converted",
        "",
        f"A pixel DiT (softmax, flow matching) was trained on the same digits, converted to {MIXER}, and fine-tuned",
        "for a tenth of its steps with the softmax model as teacher. Each model generated "
        f"{first['samples']['n']} samples without guidance.",
        f"Their Fréchet distance to the {real} held-out digits is computed in the {features} features of the softmax",
        "ViT of this demo. It compares the rows of this table only.",
        "",
        "| model | steps | validation loss | Fréchet distance | KID |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, title in DIT.items():
        steps, loss = _trained(folder, name)
        scores = cards[name]["scores"]
        lines.append(f"| {title} | {steps:,} | {loss} | {scores['fid']:.2f} | {number(scores['kid'], 4)} |")
    text = "Samples of each model from the same noise and labels"
    return [*lines, "", f"![{text}](demo_dit.png)", "", f"{text}; one column per class.", ""]


def _trained(folder: Path, name: str) -> tuple[int, str]:
    """Return the training steps of a run, including its source, and its validation loss."""
    own = read_rows(folder / name / "metrics.jsonl")
    before = 0 if name == "dit" else read_rows(folder / "dit" / "metrics.jsonl")[-1]["step"]
    found = [row["ema_val_loss"] for row in own if row["kind"] == "eval"]
    return before + (own[-1]["step"] if own else 0), f"{found[-1]:.3f}" if found else "-"


def draw_samples(folder: Path, cards: dict[str, dict[str, Any]]) -> None:
    """Draw demo_dit.png: held-out digits and the first samples of each run."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(DIT) + 1, figsize=(13, 2.3), layout="constrained")
    pictures = {"held-out digits": _by_class()}
    for name, title in DIT.items():
        with np.load(folder / name / "samples.npz", allow_pickle=False) as arrays:
            label = f"{title}\nFréchet distance {cards[name]['scores']['fid']:.2f}"
            pictures[label] = arrays["arr_0"][: ROWS * 10]
    for place, (title, images) in zip(axes, pictures.items(), strict=True):
        place.imshow(_tiled(images), interpolation="nearest")
        place.set_title(title, fontsize=9)
        place.set_axis_off()
    save_figure(figure, folder / "demo_dit.png", dpi=150)


def _by_class() -> np.ndarray:
    """Arrange real digits [ROWS * 10, 8, 8, 3] in rows by class."""
    source = open_source("digits", "", train=False)
    kept: dict[int, list[np.ndarray]] = {i: [] for i in range(10)}
    for i in range(len(source)):
        image, label = source.read(i)
        kept[label].append(np.asarray(image.convert("RGB")))
    return np.stack([kept[i % 10][i // 10] for i in range(ROWS * 10)])


def _tiled(images: np.ndarray) -> np.ndarray:
    """Tile [n, H, W, 3] in rows of ten, separated by dark lines."""
    padded = np.pad(images, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=60)
    n, height, width, _ = padded.shape
    rows = padded[: n - n % 10].reshape(n // 10, 10, height, width, 3)
    return rows.transpose(0, 2, 1, 3, 4).reshape(n // 10 * height, 10 * width, 3)
