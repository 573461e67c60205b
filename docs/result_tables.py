"""Tables of result files (docs/results/NAME.json), as Markdown. `readme_tables.py` puts them into the pages."""

import json
import math
import re
import statistics

from zoo.io import markdown_table

CALIBRATED = "top1 after calibration"


def table(head: list[str], lines: list[list[object]]) -> str:
    """Markdown of a table."""
    return "\n".join(markdown_table(head, lines))


def plain(result: dict) -> str:
    """All rows, one column per key."""
    keys = list(dict.fromkeys(key for row in result["rows"] for key in row))
    return table(keys, [[_text(row.get(key, "-")) for key in keys] for row in result["rows"]])


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, str | int) else json.dumps(value).replace('"', "")


def by_test(result: dict) -> str:
    """Tables of classification runs: scored on test images, then on held-out training images (the choices)."""
    test = [row for row in result["rows"] if "held out" not in row["data"]]
    held_out = [row for row in result["rows"] if "held out" in row["data"]]
    titles = {"## Test images": test, "## Held-out training images": held_out}
    return "\n\n".join(f"{title}\n\n{experiments({'rows': rows})}" for title, rows in titles.items() if rows)


def accuracy(result: dict) -> str:
    """Summary of classification runs on test images: one line per mixer, one column per experiment with several mixers.
    Cells: mean top-1 in percent (number of seeds). Conversions are calibrated, a control is the best of its seed."""
    rows = [
        row | {"column": _column(row), "named": short_name(row)}
        for row in result["rows"]
        if row["metric"] in ("top1", CALIBRATED) and row["source"] not in ("floor", "teacher")
        and "held out" not in row["data"] and row.get("how", {}).get("calibrated", True)
    ]  # fmt: skip
    columns = {c: rows for (c,), rows in grouped_by(rows, "column").items() if len({r["named"] for r in rows}) > 1}
    names = dict.fromkeys(row["named"] for rows in columns.values() for row in rows)
    lines = []
    for name in sorted(names, key=lambda name: (name.split()[0] != "softmax", name.split()[0])):
        found = [by_seed([row for row in column if row["named"] == name]) for column in columns.values()]
        lines.append([name, *(f"{statistics.mean(c.values()):.1f} ({len(c)})" if c else "-" for c in found)])
    return table(["mixer", *columns], lines)


def _column(row: dict) -> str:
    place, _, converted = row["experiment"].partition("_")
    if row["metric"] == CALIBRATED:
        return f"{place}, {converted}, only calibrated"
    return f"{place}, {f'{converted}, ' if converted else ''}{row['budget'].replace('1 epochs', '1 epoch')}"


def short_name(row: dict) -> str:
    """A mixer with its options, except defaults and the gains that calibration adds."""
    return named(row | {"options": short_options(row)})


def short_options(row: dict) -> dict:
    """The options of a row, except defaults and the gains that calibration adds."""
    usual = ("feature_map", "power"), ("gains", True)
    return {k: v for k, v in row["options"].items() if (k, v) not in usual}


def speeds(result: dict) -> str:
    """Summary of whole models: speed relative to softmax, one column per mixer, each at its best of eager and compiled.
    Cells: one number per mode and type of weights. The last column is softmax's speed if its attention took no time."""
    mixers = [m for m in dict.fromkeys(row["mixer"] for row in result["rows"]) if m != "softmax"]
    lines = []
    for case, rows in grouped_by(result["rows"], "model", "tokens", "size").items():
        modes = dict(sorted(grouped_by(rows, "mode", "weights").items()))
        best = [{m: min(of, key=lambda r: r["ms"]) for (m,), of in grouped_by(of, "mixer").items()}
                for of in modes.values()]  # fmt: skip
        cells: list[object] = [*case, " / ".join(" ".join(mode) for mode in modes)]
        for m in mixers:
            times = [f"{b['softmax']['ms'] / b[m]['ms']:.2f}" if m in b else "-" for b in best]
            cells.append(" / ".join(times))
        cells.append(" / ".join(f"{1 / (1 - b['softmax']['shares']['attention']):.2f}" for b in best))
        lines.append(cells)
    lines.sort(key=lambda line: (line[0], line[1]))
    return table(["model", "tokens", "pixels", "mode and weights", *mixers, "no attention"], lines)


def denoisers(result: dict) -> str:
    """Summary of diffusion runs: means over seeds, without KID and times."""
    rows = [row for row in result["rows"] if not row["metric"].startswith("KID")]
    metrics = list(dict.fromkeys(row["metric"] for row in rows))
    lines = []
    for (source, budget, experiment, name), runs in grouped(
        [row | {"options": short_options(row)} for row in rows], "source", "budget", "experiment"
    ).items():
        values = [[row["value"] for row in runs if row["metric"] == metric] for metric in metrics]
        cells = [f"{statistics.mean(v):.4g}" if v else "-" for v in values]
        about = [_model(experiment), name, f"{source}, {budget.partition(' of ')[0]}"]
        lines.append([*about, len({row["seed"] for row in runs}), *cells])
    lines.sort(key=lambda line: line[0])
    return table(["model", "mixer", "training", "seeds", *metrics], lines)


def _model(experiment: str) -> str:
    return re.sub("_(tune|convert)$", "", experiment)


def experiments(result: dict) -> str:
    """Tables of classification runs: one line per mixer from scratch, one line per converted mixer with its stages."""
    scratch = [row for row in result["rows"] if row["source"] == "scratch"]
    converted = [row for row in result["rows"] if row["source"] != "scratch"]
    return "\n\n".join(table(rows) for rows, table in ((scratch, from_scratch), (converted, conversions)) if rows)


def named(row: dict) -> str:
    """A mixer with its options."""
    return " ".join([row["mixer"], *(f"{k}={str(v).replace(' ', '')}" for k, v in row["options"].items())])


def grouped(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Rows with the same mixer, options and these columns, in the order of the file."""
    return grouped_by([row | {"named": named(row)} for row in rows], *names, "named")


def spread(values: list[float]) -> str:
    """Mean, and the range if there are several."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.2f} to {max(values):.2f})"


def by_seed(rows: list[dict]) -> dict[int, float]:
    """The best value of each seed: several controls differ in their settings."""
    best: dict[int, float] = {}
    for row in rows:
        best[row["seed"]] = max(row["value"], best.get(row["seed"], row["value"]))
    return best


def differences(rows: list[dict], others: list[dict]) -> str:
    """Mean difference to the best run of the same seed, and the range."""
    other = by_seed(others)
    found = [row["value"] - other[row["seed"]] for row in rows if row["seed"] in other]
    return spread(found) if found else "-"


def from_scratch(rows: list[dict]) -> str:
    """One line per mixer: top-1, and the difference per seed to softmax with the same depthwise options."""
    head = ["experiment", "data", "budget", "mixer", "top-1 (%)", "against softmax", "against la", "seeds", "seconds"]
    groups = grouped(rows, "experiment", "data", "budget")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for key, runs in sorted(groups.items(), key=lambda group: group[0][:3]):  # stable: as in the file
        local = "".join(f" {k}={v}" for k, v in runs[0]["options"].items() if k in ("depthwise", "lepe"))
        against = [differences(runs, groups.get((*key[:3], name + local), [])) for name in ("softmax", "la")]
        cells = [*key, spread([r["value"] for r in runs]), *against, str(len(runs)), mean_seconds(runs)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_seconds(rows: list[dict]) -> str:
    """Mean time of the runs."""
    return f"{statistics.mean(row['wall_s'] for row in rows):.0f}"


def conversions(rows: list[dict]) -> str:
    """One line per mixer: top-1 at each stage, the gap to softmax trained for the same further budget (control), and
    recovery, (converted - floor) / (control - floor) with the floor from random attention weights. Gaps and recoveries
    are computed per seed, then averaged."""
    stages = {m: f"top1 after {m}" for m in ("conversion", "calibration", "transfer")}
    head = ["experiment", "data", "budget", "mixer", *(f"after {m}" for m in stages), "top-1 (%)", "against control"]
    head += ["floor", "recovery", "seeds", "seconds"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for place, inside in grouped_by(rows, "experiment", "data").items():
        tuned = [row for row in inside if row["metric"] == "top1"]
        controls = [row for row in tuned if row["source"] == "control"]
        for key, runs in grouped([r for r in tuned if r["source"] == "converted"], "budget").items():
            mine = [row for row in inside if named(row) == key[-1]]
            floors = [row for row in mine if row["source"] == "floor"]
            early = [[r["value"] for r in mine if r["metric"] == name] for name in stages.values()]
            cells = [*place, *key, *(spread(values) if values else "-" for values in early)]
            cells += [spread([r["value"] for r in runs]), differences(runs, controls)]
            cells += [spread([r["value"] for r in floors]) if floors else "-", recovery(runs, controls, floors)]
            lines.append(f"| {' | '.join([*cells, str(len(runs)), mean_seconds(runs)])} |")
        for key, runs in grouped(
            [r for r in tuned if r["source"] in ("teacher", "control")], "source", "budget"
        ).items():
            values = spread(list(by_seed(runs).values()))
            seeds = str(len({row["seed"] for row in runs}))
            cells = [*place, key[1], f"softmax ({key[0]})", "-", "-", "-", values, "-", "-", "-", seeds]
            lines.append(f"| {' | '.join([*cells, mean_seconds(runs)])} |")
    return "\n".join(lines)


def grouped_by(rows: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Rows with the same values in these columns, in the order of the file."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def recovery(runs: list[dict], controls: list[dict], floors: list[dict]) -> str:
    """The mean over seeds of (converted - floor) / (control - floor)."""
    control, floor = by_seed(controls), by_seed(floors)
    found = [
        (row["value"] - floor[row["seed"]]) / (control[row["seed"]] - floor[row["seed"]])
        for row in runs
        if row["seed"] in floor and control.get(row["seed"], floor[row["seed"]]) != floor[row["seed"]]
    ]
    return f"{statistics.mean(found):.3f}" if found else "-"


def diffusion(result: dict) -> str:
    """One line per model and one column per metric: mean and range over seeds; Frechet distances also relative to the
    control of the same model. The last line holds the distances of the test images, if there are scores."""
    metrics = list(dict.fromkeys(row["metric"] for row in result["rows"]))
    arms = grouped(result["rows"], "source", "budget", "experiment")
    several = len({_model(row["experiment"]) for row in result["rows"]}) > 1
    control = [row | {"model": _model(row["experiment"])} for row in result["rows"] if row["source"] == "control"]
    controls = {key: [row["value"] for row in rows] for key, rows in grouped_by(control, "metric", "model").items()}
    head = [*(["experiment"] if several else []), "mixer", "source", "budget", "seeds", "seconds", *metrics]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (source, budget, experiment, name), runs in arms.items():
        by_metric = {m: [row["value"] for row in runs if row["metric"] == m] for m in metrics}
        beside = [controls.get((m, _model(experiment)), []) if source == "converted" else [] for m in metrics]
        cells = [distances(m, by_metric[m], control) for m, control in zip(metrics, beside, strict=True)]
        seconds = statistics.mean(row["wall_s"] for row in runs)
        seeds = str(len({row["seed"] for row in runs}))
        about = [*([experiment] if several else []), name, source, budget, seeds, f"{seconds:.0f}"]
        lines.append(f"| {' | '.join(about + cells)} |")
    if "floor" in result:
        floor = " | ".join(f"{result['floor'][m]:.4g}" if m in result["floor"] else "-" for m in metrics)
        lines.append(f"| {'- | ' if several else ''}- | test images | - | - | - | {floor} |")
    return "\n".join(lines)


def finetuning(result: dict) -> str:
    """One line per run: seconds and memory per step, relative to softmax without a teacher."""
    head = ["mixer", "teacher", "seconds per step", "times softmax", "peak GiB"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    (softmax,) = [row for row in result["rows"] if row["mixer"] == "softmax"]
    for row in result["rows"]:
        times = f"{softmax['seconds_per_step'] / row['seconds_per_step']:.2f}" if row is not softmax else ""
        cells = [row["mixer"], "softmax" if row["teacher"] else "-", f"{row['seconds_per_step']:.2f}", times]
        cells.append(f"{row['peak_mib'] / 1024:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def two_kernels(result: dict) -> str:
    """One line per shape, one column per operator: the sketch's time over the package's, and both in microseconds."""
    lines = []
    for (shape,), rows in grouped_by(result["rows"], "shape").items():
        if not lines:
            lines = ["| " + " | ".join(["shape", *(row["op"] for row in rows)]) + " |", "|---" * (len(rows) + 1) + "|"]
        timed = "{ratio:.2f} ({sketch_us:.0f}, {package_us:.0f})"
        cells = [timed.format(**row) if "ratio" in row else "-" for row in rows]
        lines.append(f"| {' | '.join([shape, *cells])} |")
    return "\n".join(lines)


def fidelity(result: dict) -> str:
    """One line per number of tokens and options: KL and top-1 at each density, means over seeds."""
    lines = []
    rounded = [row | {"round": 2 ** round(math.log2(row["density"]))} for row in result["rows"]]
    groups = grouped_by(rounded, "tokens", "select", "far", "q_tile", "k_tile")
    densities = sorted({row["round"] for rows in groups.values() for row in rows})
    for (tokens, select, *options), rows in sorted(groups.items()):
        cells = [str(tokens), select, *("-" if select == "near" else str(x) for x in options)]
        for density in densities:
            some = [row for row in rows if row["round"] == density]
            kl, top1 = ([row[key] for row in some] for key in ("kl", "top1"))
            cells.append(f"{statistics.mean(kl):.3f}, {statistics.mean(top1):.1f}" if some else "-")
        softmax = statistics.mean(row["softmax_top1"] for row in rows)
        lines.append(f"| {' | '.join([*cells, f'{softmax:.1f}', str(len({row['seed'] for row in rows}))])} |")
    head = ["tokens", "select", "far", "q_tile", "k_tile", *(f"1/{1 / x:g}: KL, top-1" for x in densities)]
    head += ["softmax's top-1", "seeds"]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


def forms(result: dict) -> str:
    """Summary of `fidelity` at a density of 1/8: one line per select and far, KL and top-1 per size of key tiles."""
    rows = [row for row in result["rows"] if row["density"] == 1 / 8]
    tiles = sorted({row["k_tile"] for row in rows})
    lines = []
    for options, same in grouped_by(rows, "select", "far").items():
        found = {row["k_tile"]: f"{row['kl']:.3f}, {row['top1']:.1f}" for row in same}
        lines.append([*options, *(found[size] for size in tiles)])
    return table(["select", "far", *(f"k_tile={size}: KL, top-1" for size in tiles)], lines)


def adaptive_kernels(result: dict) -> str:
    """One line per shape and options: times and speed-ups over cuDNN."""
    head = ["tokens [B, H, N, D]", "select", "density", "k_tile", "forward, us", "forward + backward, us"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in result["rows"]:
        timed = [
            f"{row[f'{p}_us']} ({row[f'cudnn_{p}_us'] / row[f'{p}_us']:.2f}x)" if f"{p}_us" in row else "-"
            for p in ("forward", "forward_backward")
        ]
        cells = [tuple(row["sizes"]), row["select"], f"{row['density']:g}", row["k_tile"], *timed]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def adaptive_float32(result: dict) -> str:
    """Summary: one line per shape and size of key tiles, with speed-ups over softmax and times of the torch form."""
    lines = []
    rows = [row | {"sizes": tuple(row["sizes"])} for row in result["rows"]]
    for (sizes,), same in grouped_by(rows, "sizes").items():
        by_form = grouped_by(same, "form")
        (softmax,) = by_form["softmax",]
        for ours, torch in zip(by_form["triton",], by_form["torch",], strict=True):
            cells = [
                [f"{_three_digits(ours[key])} ({softmax[key] / ours[key]:.2f}x)", _three_digits(torch[key])]
                for key in ("forward_ms", "forward_backward_ms")
            ]
            lines.append([sizes, ours["k_tile"], *cells[0], *cells[1]])
    head = ["tokens [B, H, N, D]", "k_tile", "forward, ms", "torch form", "forward + backward, ms", "torch form"]
    return table(head, lines)


def _three_digits(x: float) -> str:
    return f"{x:#.3g}".rstrip(".")


def two_levels(result: dict) -> str:
    """Summary of simulations: one line per size of far tiles, one column per form of them, KL at each density."""
    found: dict[str, dict[str, list[str]]] = {}
    rows = [row for row in result["rows"] if row["form"] == "simulation"]
    for row in rows:
        size = f"{row['coarse']}, {row['refine']:.0%} refined to {row['fine']}" if row.get("coarse") else row["fine"]
        found.setdefault(str(size), {}).setdefault(row["far"], []).append(f"{row['kl']:.3f}")
    densities = ", ".join(dict.fromkeys(f"1/{1 / row['density']:g}" for row in rows))
    columns = list(dict.fromkeys(row["far"] for row in rows))
    lines = [[size, *(", ".join(values[far]) for far in columns)] for size, values in found.items()]
    return table(["far tiles", *(f"far={far}: KL at {densities}" for far in columns)], lines)


def distances(metric: str, values: list[float], control: list[float]) -> str:
    """Mean, range if there are several values, and for a Frechet distance its ratio to the control's mean."""
    if not values:
        return "-"
    text = f"{statistics.mean(values):.4g}"
    if len(values) > 1:
        text += f" ({min(values):.4g} to {max(values):.4g})"
    if control and metric.startswith("Frechet"):
        text += f", x {statistics.mean(values) / statistics.mean(control):.2f}"
    return text
