"""Stages of a recipe, one function per stage.

A stage gets the task, the output folder and the results of earlier stages by name, and returns the content of its JSON
file. A finished stage has its file NAME.json in `out` and is not repeated; training stages resume from their last
checkpoint. The settings are stored in recipe.yaml; a folder with other settings is an error.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from zoo import config
from zoo.config import Tree
from zoo.conversion.calibrate import calibrate
from zoo.conversion.cost_model import table_provenance
from zoo.conversion.dependence import token_shares, warn_of_mean_pooling
from zoo.conversion.hooks import Inputs, converted_layers, forward, layers_of
from zoo.conversion.inspection import inspect
from zoo.conversion.sensitivity import by_distance, choices, densities, median_seconds, pareto, sensitivities
from zoo.files import FolderLock, sweep
from zoo.io import result_file, write_json
from zoo.mixers.multipole import Multipole
from zoo.models.convert import backbone_of
from zoo.models.timm.model_files import check_output_folder
from zoo.recipes.report import Content, write_report
from zoo.recipes.settings import STAGES, RecipeSettings
from zoo.recipes.tasks import ConversionTask, KeptBlocks, open_task
from zoo.train.layerwise import STUDENT_SHARE
from zoo.train.metrics_log import read_rows

RESUMABLE_KEYS = ("stages", "out")  # keys that may differ when a recipe resumes


def run_recipe(recipe: RecipeSettings) -> dict[str, Content]:
    """Carry out the unfinished stages of a recipe, in order, and write report.md.

    Returns the content of each finished stage, by name. Raises ValueError for a source or configuration that does not
    fit, for a folder with other settings, and for a stage that needs one that is not finished.
    """
    kind, out = open_task(recipe), Path(recipe.out)
    lock = FolderLock(out)
    try:
        return _run_stages(recipe, kind, out)
    finally:
        lock.release()


def _run_stages(recipe: RecipeSettings, kind: ConversionTask, out: Path) -> dict[str, Content]:
    for folder in (out, *(out / name for name in MODELS)):
        sweep(folder, earlier=True)
    if not (out / "calibrate.json").is_file():
        _check_conversion(kind)
    _check_folder(recipe, out)
    found: dict[str, Content] = {}
    for name in STAGES:
        file = out / f"{name}.json"
        if file.is_file():
            found[name] = json.loads(file.read_text())
        elif name in recipe.stages:
            print(f"\n== {name}", flush=True)
            content = result_file(f"stage {name} of {recipe.out}", []) | STAGE[name](kind, out, found)
            write_json(content, file)
            found[name] = json.loads(file.read_text())
    write_report(recipe, out, found)
    return found


def _check_conversion(kind: ConversionTask) -> None:
    """Raise ValueError for a mixer, options or softmax blocks that do not fit the source, before any file is written
    and data is read."""
    auto = kind.recipe.auto_keep()
    model = kind.convert(kind.recipe.keep_softmax if auto is None else [])
    blocks = len(set(backbone_of(model).blocks(model).values()))
    if auto is not None and auto >= blocks:
        raise ValueError(
            f"keep_softmax=auto:{auto} leaves no block to convert: the source has {blocks} blocks with attention; "
            f"allowed: auto:0 to auto:{blocks - 1}"
        )


def _check_folder(recipe: RecipeSettings, out: Path) -> None:
    file = out / "recipe.yaml"
    if not file.is_file():
        for folder in (out, *(out / name for name in MODELS)):
            check_output_folder(recipe.source, folder)
            if folder != out and folder.exists():
                raise ValueError(f"{folder} exists but {file} does not: choose another folder as out=")
        out.mkdir(parents=True, exist_ok=True)
        config.save(recipe, file)
        return
    changed = config.differences(config.load(RecipeSettings, file), recipe, ignore=RESUMABLE_KEYS)
    if changed:
        raise ValueError(f"{out} holds a recipe with other settings; they differ in {', '.join(changed)}")


def _stage_result(found: dict[str, Content], stage: str) -> Content:
    if stage not in found:
        raise ValueError(f"the stage {stage} comes first: add it to stages")
    return found[stage]


def inspect_stage(kind: ConversionTask, out: Path, found: dict[str, Content]) -> Content:
    """List the attention layers, with predicted times for one batch of calibration."""
    model, recipe = kind.source(), kind.recipe
    keep = None if recipe.auto_keep() is not None else recipe.keep_softmax or None
    sites = inspect(model, kind.inputs()[0], recipe.mixer, keep_softmax=keep, **kind.options())
    return {"rows": [asdict(site) for site in sites], "table": table_provenance()}


def convert_stage(kind: ConversionTask, out: Path, found: dict[str, Content]) -> Content:
    """Convert without calibration, as a baseline."""
    keep = [] if kind.recipe.auto_keep() is not None else kind.recipe.keep_softmax
    model = kind.convert(keep)
    kind.save(model, keep, out / "converted")
    new = sum(p.numel() for n, p in model.named_parameters() if ".mixer." in n)
    return {"rows": [], "new_parameters": new, "parameters": sum(p.numel() for p in model.parameters())}


def calibrate_stage(kind: ConversionTask, out: Path, found: dict[str, Content]) -> Content:
    """Calibrate each head, measure the sensitivity of each layer, and choose softmax layers for keep_softmax=auto."""
    recipe, teacher, inputs = kind.recipe, kind.source(), kind.inputs()
    auto = recipe.auto_keep()
    keep: KeptBlocks = recipe.keep_softmax if auto is None else []
    student = kind.convert(keep)
    rows = calibrate(student, teacher, inputs)
    alone = sensitivities(student, teacher, inputs, kind.autocast)
    tried = choices(student, teacher, inputs, alone)
    blocks = backbone_of(teacher).blocks(teacher)
    ranked = [blocks[name] for name in by_distance(alone)]
    if auto:
        keep = sorted(set(ranked[:auto]))
        calibrated, student = student.state_dict(), kind.convert(keep)
        student.load_state_dict({k: calibrated[k] for k in student.state_dict()})
    kind.save(student, keep, out / "calibrated")
    by_name, shares = {row.layer: row for row in alone}, _shares(student, inputs[0])
    each = [{**asdict(row), **vars(by_name[row.layer]), "token_share": shares.get(row.layer)} for row in rows]
    front = {tuple(c.kept) for c in pareto(tried)}
    table = [{**asdict(c), "pareto": tuple(c.kept) in front} for c in tried]
    content: Content = {"rows": each, "choices": table, "keep_softmax": keep, "suggested": ranked[:2]}
    mixers = [site.mixer for site in converted_layers(student).values() if isinstance(site.mixer, Multipole)]
    if not keep and (used := [mixer.density for mixer in mixers if mixer.options.select != "near"]):
        content["density"] = densities(alone, sum(used) / len(used))
    return content


def _shares(student: nn.Module, batch: Inputs) -> dict[str, float]:
    """Return the fraction of the output of each converted layer that differs between tokens. Warns if it is too
    small for bfloat16."""
    layers = converted_layers(student)
    found = {name: share for name, share in token_shares(student, batch).items() if name in layers}
    warn_of_mean_pooling(found, {name: layer.mixer_name for name, layer in layers.items()})
    return {name: float(share.mean()) for name, share in found.items()}


def transfer_stage(kind: ConversionTask, out: Path, found: dict[str, Content]) -> Content:
    """Run layer-wise distillation, for its fraction of the budget."""
    keep = _stage_result(found, "calibrate")["keep_softmax"]
    n = transfer_length(kind)
    if n == 0:
        return {"rows": [], "length": 0}
    recipe = kind.recipe
    tree = kind.settings(
        kind.starting_from(out / "calibrated", keep),
        kind.with_length(n),
        {
            "optim": {
                "lr": recipe.transfer_lr * kind.tree["optim"]["lr"],
                "weight_decay": 0.0,
                "ema": 0.0,
                "anneal": 0.0,
            }
        },
        {"run": {"folder": str(out / "transfer"), "compile": False}},  # required by `LayerwiseLoss`
    )
    result = kind.run(tree, transfer=True)
    steps = [row for row in read_rows(out / "transfer" / "metrics.jsonl") if row["kind"] == "train"]
    distances = {k.partition("/")[2] for row in steps for k in row if k.startswith("distance/")}
    layers = [n for n in layers_of(kind.source()) if n in distances]
    rows = [{"layer": n, "distance": [row[f"distance/{n}"] for row in steps]} for n in layers]
    own = [row["step"] > round((1 - STUDENT_SHARE) * steps[-1]["step"]) for row in steps]
    return {"rows": rows, "steps": [row["step"] for row in steps], "own": own, "length": n, "result": result}


def transfer_length(kind: ConversionTask) -> int:
    """Return the length of layer-wise distillation in epochs or steps: 0 if it is off, else at least 1."""
    share = kind.recipe.transfer * kind.budget()
    return max(1, round(share)) if share else 0


def finetune_stage(kind: ConversionTask, out: Path, found: dict[str, Content]) -> Content:
    """Fine-tune end to end, for the rest of the budget."""
    keep, length = _stage_result(found, "calibrate")["keep_softmax"], _stage_result(found, "transfer")["length"]
    start = out / ("transfer" if length else "calibrated")
    rest = kind.with_length(kind.budget() - length)
    tree = kind.settings(kind.starting_from(start, keep), rest, _folder(out / "finetune"))
    return {"rows": [], "result": kind.run(tree)}


def controls_stage(kind: ConversionTask, out: Path, found: dict[str, Content]) -> Content:
    """Train for the full budget: the softmax control, and the floor (attention layers re-initialised at random)."""
    keep = _stage_result(found, "calibrate")["keep_softmax"]
    source = {"model": {**kind.starting_from(Path(kind.recipe.source), [])["model"], "mixer": "", "mixer_options": {}}}
    alone: Tree = {"distill": {"teacher": "", "attention": 0.0}, "optim": {"anneal": 0.0}}  # no order warm-up
    control = kind.run(kind.settings(source, alone, _folder(out / "control")))
    start = out / "floor_start"
    if not start.is_dir():
        model = kind.convert(keep)
        kind.random_attention(model)
        kind.save(model, keep, start)
    floor = kind.run(kind.settings(kind.starting_from(start, keep), _folder(out / "floor")))
    return {"rows": [], "control": control, "floor": floor}


def _folder(folder: Path) -> Tree:
    return {"run": {"folder": str(folder)}}


MODELS = {  # folder in `out` -> description
    "converted": "converted",
    "calibrated": "calibrated",
    "transfer": "transferred",
    "finetune": "fine-tuned",
    "control": "softmax, trained on (control)",
    "floor": "random attention weights, fine-tuned (floor)",
}


def evaluate_stage(kind: ConversionTask, out: Path, found: dict[str, Content]) -> Content:
    """Evaluate the source, all stages and the controls on the validation data, and measure forward times."""
    folders = {"source": Path(kind.recipe.source)}
    folders |= {name: out / name for name in MODELS if (out / name).is_dir()}
    rows = kind.evaluate(folders)
    value = {name: row["value"] for name, row in rows.items()}
    batch = kind.inputs()[0]
    with kind.autocast():
        times = {n: _milliseconds(kind.load(folders[n]), batch) for n in ("source", "finetune") if n in folders}
    named = [{**row, "model": name, "what": MODELS.get(name, "softmax (source)")} for name, row in rows.items()]
    return {"rows": named, "metric": kind.metric, "recovery": recovery(value), "forward_ms": times}


def recovery(value: dict[str, float]) -> float | None:
    """Return the recovery, (fine-tuned - floor) / (control - floor), from the metric of each model: 1 is as good as
    softmax with the same budget, 0 as random attention weights. None if one of the three is missing."""
    if not {"finetune", "floor", "control"} <= value.keys() or value["control"] == value["floor"]:
        return None
    return (value["finetune"] - value["floor"]) / (value["control"] - value["floor"])


@torch.no_grad()
def _milliseconds(model: nn.Module, batch: Inputs) -> float:
    model = copy.deepcopy(model).eval()
    return 1e3 * median_seconds(lambda: forward(model, batch))


STAGE: dict[str, Callable[[ConversionTask, Path, dict[str, Content]], Content]] = {
    "inspect": inspect_stage,
    "convert": convert_stage,
    "calibrate": calibrate_stage,
    "transfer": transfer_stage,
    "finetune": finetune_stage,
    "controls": controls_stage,
    "evaluate": evaluate_stage,
}
