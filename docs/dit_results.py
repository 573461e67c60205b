"""Write docs/results/dit-cifar10.json and docs/dit-cifar10.png from the runs and scores of COMMAND, in this folder."""

import json
import sys
from pathlib import Path
from typing import Any

from zoo import config
from zoo.eval.results import write_json
from zoo.train.diffusion.settings import DiffusionSettings
from zoo.train.record import read_rows

ROOT = Path(__file__).resolve().parents[1]
NAME = "dit-cifar10"
ARMS = {"source": "scratch", "control": "control", "la": "converted", "ahla": "converted"}
SPACES = {"features": "ViT", "resnet": "ResNet-18"}
SCORES = {"fid": "Frechet", "kid": "KID"}
WORDS = "data.train=TRAIN.parquet data.val=TEST.parquet data.workers=4"
DIT = f"python tools/finetune_dit.py configs/dit/cifar10{{}}.yaml {WORDS} data.batch_size=256 schedule.steps="
SAMPLE = "sample.count=10000 sample.labels=balanced sample.guidance=1.5 sample.steps=50 sample.precision=bf16"
COMMAND = f"""python tools/train_vit.py configs/vit/cifar10.yaml {WORDS} run.folder=runs/features
python tools/train_vit.py configs/features/cifar10_resnet18.yaml {WORDS} run.folder=runs/resnet
{DIT.format("")}5000 schedule.warmup_steps=250 sample.every=2500 run.eval_steps=500
for ARM in "control model.mixer= distill.teacher=" "la model.mixer=la" "ahla model.mixer=ahla"; do set -- $ARM
  {DIT.format("_finetune")}500 schedule.warmup_steps=25 run.eval_steps=100 $2 $3 run.folder=runs/cifar10_dit_$1
done
for X in features resnet; do python tools/evaluate_fid.py fid.extractor=runs/$X \
fid.reference=TRAIN.parquet fid.save=runs/$X.safetensors; done
for RUN in cifar10_dit cifar10_dit_control cifar10_dit_la cifar10_dit_ahla; do
  python tools/sample.py sample.model=runs/$RUN/transformer_ema {SAMPLE} out=runs/$RUN.npz
done
for X in features resnet; do
  for RUN in cifar10_dit cifar10_dit_control cifar10_dit_la cifar10_dit_ahla; do python tools/evaluate_fid.py \
fid.extractor=runs/$X fid.samples=runs/$RUN.npz fid.reference=runs/$X.safetensors out=runs/$RUN.$X.json; done
  python tools/evaluate_fid.py fid.extractor=runs/$X fid.samples=TEST.parquet fid.reference=runs/$X.safetensors \
out=runs/floor.$X.json
done
python docs/dit_results.py"""


def folder(arm: str) -> Path:
    return Path("runs") / ("cifar10_dit" if arm == "source" else f"cifar10_dit_{arm}")


def scores(name: str) -> dict[str, float]:
    """The scores of a run, or of the test images (`floor`), in both feature spaces."""
    cards = {title: json.loads(Path(f"runs/{name}.{x}.json").read_text()) for x, title in SPACES.items()}
    return {f"{what} {title}": card["scores"][key] for title, card in cards.items() for key, what in SCORES.items()}


def rows(arm: str, source: str) -> list[dict[str, Any]]:
    """The rows of one arm: validation loss of the average, distances in both spaces."""
    settings = config.load(DiffusionSettings, folder(arm) / "config.yaml")
    result = json.loads((folder(arm) / "result.json").read_text())
    values = {"validation loss": result["ema_val_loss"], **scores(folder(arm).name)}
    shared = {
        "experiment": "cifar10_dit",
        "data": "cifar10-jpeg75",
        "mixer": settings.model.mixer or "softmax",
        "options": settings.model.mixer_options,
        "source": source,
        "seed": settings.run.seed,
    }
    budget = {"budget": f"{result['step']} steps of {settings.data.batch_size}", "wall_s": result["seconds"]}
    return [{**shared, "metric": metric, "value": round(value, 4), **budget} for metric, value in values.items()]


def draw(curves: dict[str, list[tuple[int, float]]], file: Path) -> None:
    """Validation losses at fixed (t, noise), the fine-tuned arms behind their source, and the last grid of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(11, 3.6), layout="constrained")
    (one, two) = figure.subfigures(1, 2, width_ratios=(1, 1.7))
    left, grids = one.subplots(), two.subplots(2, 2).flat
    for arm, points in curves.items():
        left.plot(*zip(*points, strict=True), marker=".", label=arm)
    left.set(xlabel="images seen", ylabel="validation loss, fixed times and noise")
    left.legend(frameon=False, fontsize=8)
    for axes, arm in zip(grids, ARMS, strict=True):
        axes.imshow(plt.imread(max(folder(arm).glob("samples/*.png")))[:160])  # five of each class
        axes.set(title=arm, xticks=[], yticks=[])
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> int:
    """Collect, write, draw."""
    found = [row for arm, source in ARMS.items() for row in rows(arm, source)]
    one = json.loads(Path("runs/floor.resnet.json").read_text())
    floor = {name: round(value, 4) for name, value in scores("floor").items()}
    records = {arm: [r for r in read_rows(folder(arm) / "metrics.jsonl") if r["kind"] == "eval"] for arm in ARMS}
    begun = {arm: 0 if arm == "source" else records["source"][-1]["images_seen"] for arm in ARMS}
    curves = {arm: [(begun[arm] + r["images_seen"], r["ema_val_loss"]) for r in records[arm]] for arm in ARMS}
    accuracy = {x: json.loads(Path(f"runs/{x}/result.json").read_text())["top1"] for x in SPACES}
    file = ROOT / "docs" / "results" / f"{NAME}.json"
    about = {key: one[key] for key in ("date", "hardware", "versions")}
    kept = {"note": json.loads(file.read_text()).get("note", "")} if file.is_file() else {}
    extra = {"floor": floor, "extractor_top1": accuracy, "curves": curves}
    write_json({"command": COMMAND, **about, **kept, **extra, "rows": found}, file)
    draw(curves, ROOT / "docs" / f"{NAME}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
