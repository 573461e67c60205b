"""Write docs/results/dit-cifar10.json from the runs and scores of COMMAND; `readme_tables.py` draws its figure."""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from zoo import config
from zoo.io import write_json
from zoo.recipes.settings import RecipeSettings
from zoo.train.denoising.settings import DiffusionSettings
from zoo.train.metrics_log import read_rows

ROOT = Path(__file__).resolve().parents[1]
NAME = "dit-cifar10"
SOURCE = Path("runs/cifar10_dit")
OTHERS = Path("runs/dit")  # ARM-SEED: the control, and recipes
SPACES = {"features": "ViT", "resnet": "ResNet-18"}
SCORES = {"fid": "Frechet", "kid": "KID"}
DATA = "data.train=TRAIN.parquet data.val=TEST.parquet data.workers=6"
TENTH = "data.batch_size=256 schedule.steps=500 schedule.warmup_steps=25 sample.every=0 run.compile=false"
AGAIN = ".sampling1"  # behind the name of a run: the same model, other noise
OLD = "distill.output=0.5"
TRAIN = "python tools/finetune_dit.py configs/dit/cifar10"
RECIPE = f"python tools/convert.py recipe configs/experiments/dit_cifar10_{{}}.yaml {DATA}"
SAMPLE = "sample.count=5000 sample.labels=balanced sample.guidance=1.5 sample.steps=50 \
sample.precision=bf16 sample.compile=true sample.batch_size=1000"
COMMAND = f"""python tools/train_vit.py configs/vit/cifar10.yaml {DATA} run.folder=runs/features
python tools/train_vit.py configs/features/cifar10_resnet18.yaml {DATA} run.folder=runs/resnet
{TRAIN}.yaml {DATA} data.batch_size=256 schedule.steps=5000 schedule.warmup_steps=250 sample.every=0
for M in la ahla; do {TRAIN}_finetune.yaml {DATA} {TENTH} model.mixer=$M run.folder=runs/dit/$M-0; done
{RECIPE.format("taylor2_convert")} keep_softmax=auto:4 out=runs/dit/taylor2_softmax4-0
{RECIPE.format("taylor2_convert")} transfer=0.2 optim.lr=6.0e-4 distill.output=4.0 out=runs/dit/taylor2-0
for S in 0 1 2; do
  {TRAIN}_finetune.yaml {DATA} {TENTH} model.mixer= distill.teacher= run.seed=$S run.folder=runs/dit/control-$S
  {RECIPE.format("convert")} {OLD} 'mixer_options={{radius: 2}}' run.seed=$S out=runs/dit/multipole-$S
  {RECIPE.format("convert")} run.seed=$S out=runs/dit/multipole_radius3_undistilled-$S
done
{RECIPE.format("convert")} {OLD} 'mixer_options={{degree: 0, radius: 2}}' out=runs/dit/multipole_degree0-0
{RECIPE.format("convert")} {OLD} 'mixer_options={{degree: 0}}' out=runs/dit/multipole_radius3_degree0-0
for X in features resnet; do
  python tools/evaluate_fid.py fid.extractor=runs/$X fid.reference=TRAIN.parquet fid.save=runs/$X.safetensors
  python tools/evaluate_fid.py fid.extractor=runs/$X fid.samples=TEST.parquet fid.reference=runs/$X.safetensors \
out=runs/scores/floor.$X.json
done
score() {{
  python tools/sample.py sample.model=$1/transformer_ema {SAMPLE} sample.seed=$3 out=runs/scores/$2.npz
  for X in features resnet; do python tools/evaluate_fid.py fid.extractor=runs/$X fid.samples=runs/scores/$2.npz \
fid.reference=runs/$X.safetensors out=runs/scores/$2.$X.json; done
}}
for S in 0 1 2; do
  score runs/dit/control-$S control-$S 0
  score runs/dit/multipole-$S/finetune multipole-$S 0
  score runs/dit/multipole_radius3_undistilled-$S/finetune multipole_radius3_undistilled-$S 0
  score runs/dit/control-$S control-$S{AGAIN} 1000000
done
python docs/dit_results.py"""


class Arm(NamedTuple):
    """One run: mixer, options, source, seed, steps, batch size, seconds, and the validation losses of the average as
    (images seen, loss)."""

    mixer: str
    options: dict[str, Any]
    source: str
    seed: int
    steps: int
    batch: int
    seconds: float
    curve: list[tuple[int, float]]


def trained(folder: Path) -> Arm:
    """A run of tools/finetune_dit.py, or a transfer."""
    settings = config.load(DiffusionSettings, folder / "config.yaml")
    result = json.loads((folder / "result.json").read_text())
    rows = [row for row in read_rows(folder / "metrics.jsonl") if row["kind"] == "eval"]
    curve = [(row["images_seen"], row.get("ema_val_loss", row["val_loss"])) for row in rows]
    source = "control" if settings.model.checkpoint else "scratch"
    about = settings.run.seed, result["step"], settings.data.batch_size, result["seconds"], curve
    return Arm("softmax", {}, source, *about)


def converted(folder: Path) -> Arm:
    """A recipe: transfer, if it has one, and fine-tuning."""
    recipe = config.load(RecipeSettings, folder / "recipe.yaml")
    keep = json.loads((folder / "calibrate.json").read_text())["keep_softmax"]
    parts = [trained(folder / part) for part in ("transfer", "finetune") if (folder / part).is_dir()]
    last, begun = parts[-1], sum(part.steps * part.batch for part in parts[:-1])
    curve = [part.curve[-1] for part in parts[:-1]] + [(begun + images, loss) for images, loss in last.curve]
    options = recipe.mixer_options | ({"keep_softmax": keep} if keep else {})
    files = ROOT / recipe.finetune, folder / "finetune" / "config.yaml"
    usual, own = (config.load(DiffusionSettings, file) for file in files)
    options |= {} if own.distill.output == usual.distill.output else {"distill.output": own.distill.output}
    steps, seconds = (sum(getattr(part, name) for part in parts) for name in ("steps", "seconds"))
    return Arm(recipe.mixer, options, "converted", last.seed, steps, last.batch, round(seconds, 2), curve)


def arms() -> dict[str, Arm]:
    """Every run, by name; the first is the source."""
    folders = [SOURCE, *sorted(OTHERS.iterdir())]
    return {f.name: (converted if (f / "recipe.yaml").is_file() else trained)(f) for f in folders}


def scores(name: str) -> dict[str, float]:
    """The scores of a run, or of the test images (`floor`), in both feature spaces; none where it was not sampled."""
    if not all(Path(f"runs/scores/{name}.{x}.json").is_file() for x in SPACES):
        return {}
    cards = {title: json.loads(Path(f"runs/scores/{name}.{x}.json").read_text()) for x, title in SPACES.items()}
    return {f"{what} {title}": card["scores"][key] for title, card in cards.items() for key, what in SCORES.items()}


def rows(name: str, arm: Arm) -> list[dict[str, Any]]:
    """The rows of one run: validation loss of the average, distances in both spaces if it was sampled."""
    values = {"validation loss": arm.curve[-1][1], **scores(name)}
    shared = {"experiment": "cifar10_dit", "data": "cifar10-jpeg75", "mixer": arm.mixer, "options": arm.options}
    shared |= {"source": arm.source, "seed": arm.seed}
    budget = {"budget": f"{arm.steps} steps of {arm.batch}", "wall_s": arm.seconds}
    return [{**shared, "metric": metric, "value": round(value, 5), **budget} for metric, value in values.items()]


def kind(row: dict[str, Any]) -> tuple[str, str, str]:
    """What tells the arm of a row from others."""
    return row["mixer"], json.dumps(row["options"], sort_keys=True), row["source"]


def main() -> int:
    """Collect, write, draw."""
    found = arms()
    one = json.loads(Path("runs/scores/floor.resnet.json").read_text())
    floor = {name: round(value, 4) for name, value in scores("floor").items()}
    accuracy = {x: json.loads(Path(f"runs/{x}/result.json").read_text())["top1"] for x in SPACES}
    file = ROOT / "docs" / "results" / f"{NAME}.json"
    about = {key: one[key] for key in ("date", "hardware", "versions")}
    old = json.loads(file.read_text()) if file.is_file() else {"rows": []}
    first = {name: arm.curve for name, arm in found.items() if name.endswith(("-0", SOURCE.name))}
    curves = old.get("curves", {}) | first
    again = {name: values for name in found if (values := scores(name + AGAIN))}
    extra = {"floor": floor, "extractor_top1": accuracy, "other_noise": again, "curves": curves}
    lines = [row for name, arm in found.items() if name != SOURCE.name or scores(name) for row in rows(name, arm)]
    lines += [row for row in old["rows"] if kind(row) not in map(kind, lines)]  # of arms that were not run again
    lines.sort(key=lambda row: ("scratch", "control", "converted").index(row["source"]))
    write_json({"command": COMMAND, **about, "note": old.get("note", []), **extra, "rows": lines}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
