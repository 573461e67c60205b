"""Report of a recipe: a Markdown file and a figure per stage, and report.md."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zoo.config import Tree
from zoo.conversion.cost_model import predict_times
from zoo.io import markdown_table, write_csv, write_text
from zoo.plotting import COLORS, legend_below, plain_axes, pyplot, save_figure
from zoo.recipes.settings import RecipeSettings

Content = Tree


def write_report(recipe: RecipeSettings, out: Path, found: dict[str, Content]) -> None:
    """Write NAME.md and NAME.png of each finished stage, pareto.csv, and report.md."""
    parts = [f"# {recipe.source} with {recipe.mixer}", ""]
    for name, content in found.items():
        lines = LINES[name](content) if name in LINES else []
        if not lines:
            continue
        if name in FIGURES and (figure := FIGURES[name](content)):
            save_figure(figure, out / f"{name}.png", dpi=150)
            lines += ["", f"![{name}]({name}.png)"]
        where = f"{content['hardware']}, {content['date']}, torch {content['versions']['torch']}"
        text = "\n".join([f"## {name}", "", *lines, "", f"*{where}*", ""])
        write_text(text, out / f"{name}.md")
        parts.append(text)
    if "calibrate" in found:
        _write_pareto(found["calibrate"]["choices"], out / "pareto.csv")
    write_text("\n".join(parts), out / "report.md")


def _write_pareto(rows: list[Content], file: Path) -> None:
    keys = ("distance", "agreement", "attention_ms")
    cells = [[len(r["kept"]), " ".join(r["kept"]), *(r[k] for k in keys), int(r["pareto"])] for r in rows]
    write_csv(["kept", "layers", *keys, "pareto"], cells, file)


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` decimal places; None gives a dash."""
    return "-" if value is None else f"{value:.{digits}f}"


def inspect_lines(content: Content) -> list[str]:
    """Return a table of all attention layers."""
    head = ["layer", "class", "tokens", "heads", "width", "now", "becomes", "softmax us", "mixer us"]
    head += ["faster from N =", "token share (%)"]
    rows = []
    for r in content["rows"]:
        after = r["after"] if not r["reason"] else f"{r['after']} ({r['reason']})"
        sizes = [r["tokens"] or "-", r["heads"] or "-", r["width"] or "-"]
        times = [number(r["softmax_us"], 1), number(r["mixer_us"], 1), r["break_even"] or "-"]
        share = r.get("token_share")  # fraction of the mixer's output that differs between tokens
        rows.append([r["layer"], r["kind"], *sizes, r["before"], after, *times, number(share and 100 * share, 2)])
    note = f"Times of the operators alone, forward, one batch of calibration, predicted from: {content['table']}."
    return [*markdown_table(head, rows), "", note]


def convert_lines(content: Content) -> list[str]:
    """Return a sentence on the number of parameters that the mixers added."""
    return [f"{content['new_parameters']:,} of {content['parameters']:,} parameters are new, all others inherited."]


def training_lines(content: Content) -> list[str]:
    """Return a table of the runs of a training stage, with links to their curves."""
    rows = []
    for name in ("finetune", "control", "floor"):
        result = content["result"] if name == "finetune" and "result" in content else content.get(name)
        if result:
            rows.append([f"[{name}]({name}/curves.png)", result["model"], result["step"], f"{result['seconds']:.0f}"])
    return markdown_table(["run", "model", "steps", "seconds"], rows)


def calibrate_lines(content: Content) -> list[str]:
    """Return tables of the converted layers and of the tried choices of softmax layers."""
    head = ["layer", "R2", "R2 centred", "token share (%)", "key shift", "query shift", "of fp16", "distance alone"]
    head += ["softmax ms", "mixer ms"]
    keys = ("r2", "r2_centred", "key_shift", "query_shift")
    rows = []
    for r in content["rows"]:
        times = [number(r["softmax_ms"], 2), number(r["mixer_ms"], 2)]
        share = r.get("token_share")
        values = [number(r[k]) for k in keys]
        values.insert(2, number(share and 100 * share, 2))
        rows.append([r["layer"], *values, f"{r['fp16_part']:.1e}", f"{r['distance']:.4f}", *times])
    kept = [
        [len(c["kept"]), " ".join(c["kept"]) or "-", f"{c['distance']:.4f}", number(c["agreement"]),
         number(c["attention_ms"], 2), "yes" if c["pareto"] else ""]
        for c in content["choices"]
    ]  # fmt: skip
    head_kept = ["softmax layers kept", "which", "distance", "same class", "attention ms", "Pareto"]
    note = f"Kept softmax: {content['keep_softmax'] or 'none'}. Most sensitive blocks: {content['suggested']}."
    if density := content.get("density"):
        note += f" Densities by sensitivity, with the mean of these: {density}."
    return [*markdown_table(head, rows), "", *markdown_table(head_kept, kept), "", note, "", COLUMNS]


def transfer_lines(content: Content) -> list[str]:
    """Return a table of layer distances: first logged, after training on the teacher's inputs, and after training on
    the student's own inputs."""
    if not content["rows"]:
        return []
    own, rows = content["own"], []
    for r in content["rows"]:
        taught = [d for d, mine in zip(r["distance"], own, strict=True) if not mine]
        cells = [f"{r['distance'][0]:.4f}", number(taught[-1] if taught else None, 4)]
        rows.append([r["layer"], *cells, number(r["distance"][-1] if own[-1] else None, 4)])
    first = f"distance at step {content['steps'][0]}"
    return markdown_table(["layer", first, "last with the teacher's inputs", "last with its own"], rows)


def evaluate_lines(content: Content) -> list[str]:
    """Return a table of all models, with recovery and forward times."""
    rows = []
    for r in content["rows"]:
        change = f"{r['top1_diff']:+.2f} [{r['diff_low']:+.2f}, {r['diff_high']:+.2f}]" if "top1_diff" in r else "-"
        rows.append([r["what"], number(r["value"], 2 if "top1" in r else 4), change])
    lines = markdown_table(["model", content["metric"], "against the source, 95 %"], rows)
    if content["recovery"] is not None:
        lines += ["", f"Recovery (fine-tuned - floor) / (control - floor) = {content['recovery']:.3f}, one seed."]
    times = [f"{name} {ms:.2f} ms" for name, ms in content["forward_ms"].items()]
    note = "One forward pass of a calibration batch on this machine, in the precision of the runs"
    return [*lines, "", f"{note}: {', '.join(times)}."]


def summary(found: dict[str, Content]) -> str:
    """Return the finished stages, and if models were evaluated, the metric of each and the recovery."""
    lines = [f"finished: {', '.join(found)}"]
    if content := found.get("evaluate"):
        lines += [f"{r['what']}: {content['metric']} {r['value']:.4g}" for r in content["rows"]]
        if content["recovery"] is not None:
            lines.append(f"recovery: {content['recovery']:.3f}")
    return "\n".join(lines)


LINES = {
    "inspect": inspect_lines,
    "convert": convert_lines,
    "calibrate": calibrate_lines,
    "transfer": transfer_lines,
    "finetune": training_lines,
    "controls": training_lines,
    "evaluate": evaluate_lines,
}


DISTANCE = "distance to softmax"
COLUMNS = """\
R2: fraction of the power of the softmax output that the calibrated layer explains; centred: after subtraction of the
token mean. Token share: norm of the output minus its token mean, relative to the norm of the output. Key and query
shift: norm of the mean key or query, relative to the mean norm; near 1 if all tokens are similar. Of fp16: largest
softmax output, relative to the largest float16 number. Distance: KL divergence of class probabilities, or relative
squared error of other outputs, from those of the softmax model; alone: with only this layer converted. Same class:
fraction of inputs for which both predict the same class. Pareto: no other choice is closer and faster."""


def _figure(width: float, panels: int) -> tuple[Figure, list[Axes]]:
    figure, axes = pyplot().subplots(1, panels, figsize=(width, 3.4), layout="constrained", squeeze=False)
    for place in axes[0]:
        plain_axes(place)
    return figure, list(axes[0])


def draw_inspect(content: Content) -> Figure | None:
    """Plot predicted times over the number of tokens."""
    row = next((r for r in content["rows"] if r["softmax_us"] is not None and not r["reason"]), None)
    if row is None:
        return None
    figure, (place,) = _figure(5, 1)
    tokens = [64 * 2**i for i in range(10)]
    found = [predict_times(row["after"], {}, 1, row["heads"], n, row["width"]) for n in tokens]
    place.loglog(tokens, [p.softmax_us for p in found], label="softmax")
    if row["mixer_us"] is not None:
        place.loglog(tokens, [p.mixer_us for p in found], label=row["after"])
    place.axvline(row["tokens"], color="gray", linestyle=":", label="this model")
    place.set(xlabel="tokens", ylabel="predicted us per layer and sample")
    legend_below(place, 3)
    return figure


def draw_calibrate(content: Content) -> Figure:
    """Plot R2 and sensitivity per layer, and for each choice of softmax layers, its distance over its time."""
    figure, (left, middle, right) = _figure(12, 3)
    rows, choices = content["rows"], content["choices"]
    at = range(len(rows))
    left.bar([i - 0.2 for i in at], [r["r2"] for r in rows], 0.4, label="all of the output", color=COLORS[2])
    left.bar([i + 0.2 for i in at], [r["r2_centred"] for r in rows], 0.4, label="mean removed", color=COLORS[3])
    left.set(xlabel="converted layer", ylabel="R²", title="Softmax output explained")
    left.set_ylim(min(0, left.get_ylim()[0]), 1)
    legend_below(left, 2)
    middle.bar(at, [r["distance"] for r in rows], color=COLORS[4])
    middle.set(xlabel="converted layer", ylabel=DISTANCE, title="Model output, one layer converted")
    right.scatter([c["attention_ms"] for c in choices], [c["distance"] for c in choices], color="gray")
    front = sorted((c for c in choices if c["pareto"]), key=lambda c: c["attention_ms"])
    right.plot([c["attention_ms"] for c in front], [c["distance"] for c in front], marker="o", label="Pareto front")
    for c in choices:
        right.annotate(str(len(c["kept"])), (c["attention_ms"], c["distance"]), fontsize=8)
    right.set(xlabel="time in attention layers (ms)", ylabel=DISTANCE, title="Number of softmax layers kept")
    legend_below(right, 1)
    return figure


def draw_transfer(content: Content) -> Figure | None:
    """Plot the distance of each layer over the steps."""
    if not content["rows"]:
        return None
    figure, (place,) = _figure(5, 1)
    for row in content["rows"]:
        place.semilogy(content["steps"], row["distance"], label=row["layer"])
    place.set(xlabel="step", ylabel="distance of attention outputs")
    place.legend(frameon=False, fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def draw_evaluate(content: Content) -> Figure:
    """Plot the metric of all models."""
    figure, (place,) = _figure(7, 1)
    rows = content["rows"]
    bars = place.barh([r["what"] for r in rows], [r["value"] for r in rows], color=COLORS[2])
    place.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    place.invert_yaxis()
    place.set(xlabel=content["metric"])
    return figure


FIGURES = {
    "inspect": draw_inspect,
    "calibrate": draw_calibrate,
    "transfer": draw_transfer,
    "evaluate": draw_evaluate,
}
