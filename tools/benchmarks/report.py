"""Markdown tables of result files, printed by the tool and shown in the README."""

import statistics
from typing import Any

from benchmarks import adaptive, causal, fidelity, host, scaling
from benchmarks.shapes import ALL_SHAPES, MIXED_TARGETS, OPS, PASSES, SHAPES, SLOWDOWN, Shape
from zoo.io import markdown_table

Row = dict[str, Any]
TRAIN_TARGETS = {224: 1.0, 512: 1.3, 1024: 2.5}  # target speed-up over softmax, ViT-S training
WAN_TARGETS = {  # same, denoising step at 480 pixels
    "mhla": 2.4, "ahla": 2.4, "mhla every:3": 1.7, "ahla every:3": 1.7, "multipole density=0.0625 k_tile=32": 2.5,
}  # fmt: skip
FIXED = (("fixed", True),)  # coefficients that need no gradient
PLAIN = ((), FIXED)
RATIOS = {  # feature maps whose ratios are compared with eager torch
    "softmax pair": (("feature_map", "softmax_pair"), ("normalize", True)),
    "power": (("feature_map", "power"), ("normalize", True)),
}
# keys that identify a failed case
FAILED = ("model", "size", "tokens", "mode", "weights", "shape", "impl", "mixer", "method", "gpus", "op")


def kernels(result: Row) -> str:
    """Return our operators by shape, the peers by shape, and how they were measured."""
    found = {_place(row): row for row in result["rows"]}
    ratios = [_ratios(found, title, options) for title, options in RATIOS.items()]
    parts = [_ours(found), *ratios, _mixed(result["rows"], found), _taylor(found), _multipole(found)]
    parts += [_peers(result["rows"]), _measured(result)]
    return "\n\n".join(part for part in parts if part)


def multipole(result: Row) -> str:
    """Return the `multipole` rows of `kernels` and how they were measured."""
    return f"{_multipole({_place(row): row for row in result['rows']})}\n\n{_measured(result)}"


def two_sided(result: Row) -> str:
    """Return our two-sided operators forward and backward with plain options, one line each, one column per shape,
    softmax first."""
    found, which = {_place(row): row for row in result["rows"]}, "forward_backward"
    shapes = [
        shape
        for shape in SHAPES.values()
        if any((tuple(shape.sizes), op, "ours", (), which) in found for op in OPS) and shape.targets is not None
    ]
    softmax = [found.get((tuple(shape.sizes), "softmax_attention", "sdpa_cudnn", (), which)) for shape in shapes]
    lines = [["softmax, cuDNN", *("-" if row is None else f"{row['us']:.0f}" for row in softmax)]]
    for op, options in ((op, options) for op in OPS for options in PLAIN):
        rows = [found.get((tuple(shape.sizes), op, "ours", options, which)) for shape in shapes]
        if not any(rows):
            continue
        cells = [_title(op, options)]
        for row, peer in zip(rows, softmax, strict=True):
            if row is None:
                cells.append("-")
                continue
            floor = row["floor_us"] / row["us"]
            cells.append(f"{row['us']:.0f} ({_times(peer, row, None)}; {floor:.0%})")
        lines.append(cells)
    head = ["forward + backward, us (speed-up over cuDNN; of memory bound)", *(shape.title for shape in shapes)]
    return _table(head, lines) if shapes else ""


def _place(row: Row) -> tuple:
    return (tuple(row["shape"]), row["op"], row["impl"], _key(row["options"]), row["pass"])


def _key(options: Row) -> tuple:
    """Return options as a hashable key, the same for lists of a file and tuples of a program."""
    return tuple(sorted((k, tuple(v) if isinstance(v, list | tuple) else v) for k, v in options.items()))


def _ours(found: dict[tuple, Row]) -> str:
    head = ["shape", "op", "forward us (of bound)", "forward+backward us (of bound)", "times cuDNN, f+b"]
    head += ["elu1+ratio, f+b", "centred, f+b", "error f / b", "peak MiB f+b", "first call s, slowest form"]
    lines = []
    for shape in SHAPES.values():
        for op in OPS:
            for options in PLAIN:
                plain = {which: found.get((tuple(shape.sizes), op, "ours", options, which)) for which in PASSES}
                if any(plain.values()):
                    lines.append(_line(shape, op, options, plain, found))
    return _table(head, lines) if lines else ""


def _title(op: str, options: tuple) -> str:
    return f"{op}, fixed coefficients" if options == FIXED else op


def _line(shape: Shape, op: str, given: tuple, plain: dict[str, Row | None], found: dict[tuple, Row]) -> list[str]:
    assert shape.targets is not None
    sizes = tuple(shape.sizes)
    both = plain["forward_backward"]
    cells = [shape.title, _title(op, given)]
    for which in PASSES:
        row = plain[which]
        if row is None:
            cells.append("-")
            continue
        fraction = row["floor_us"] / row["us"]
        cells.append(f"{row['us']:.0f} ({_verdict(fraction, getattr(shape.targets, which))})")
    cudnn = found.get((sizes, "softmax_attention", "sdpa_cudnn", (), "forward_backward"))
    cells.append(_verdict(cudnn["us"] / both["us"], shape.targets.times_cudnn) if both and cudnn else "-")
    for options in ((("feature_map", "elu1"), ("normalize", True)), (("center", "k"), ("mean_path", True))):
        other = found.get((sizes, op, "ours", options, "forward_backward"))
        if both is None or other is None or given == FIXED:  # options are measured with learned coefficients
            cells.append("-")
            continue
        slower = other["us"] / both["us"]
        cells.append(f"x {slower:.2f} {'pass' if slower <= SLOWDOWN else 'miss'}")
    rows = [row for row in plain.values() if row]
    cells.append(" / ".join(f"{row['rel_err']:.1e}" for row in rows))
    cells.append(f"{both['peak_mib']:.0f}" if both else "-")
    forms = [place for place in found if place[:3] == (sizes, op, "ours") and (place[3] == FIXED) == (given == FIXED)]
    cells.append(f"{max(found[place]['first_s'] for place in forms):.1f}")
    return cells


def _ratios(found: dict[tuple, Row], title: str, options: tuple) -> str:
    """Ratios of one feature map (a softmax pair has twice as many features as channels), and eager torch."""
    head = ["shape", f"{title} + ratio", "forward us", "times eager", "forward+backward us", "times eager"]
    head += ["error f / b", "peak MiB f+b"]
    lines = []
    for shape in ALL_SHAPES.values():
        for op in OPS:
            ours, eager = (
                [found.get((tuple(shape.sizes), op, impl, options, which)) for which in PASSES]
                for impl in ("ours", "eager")
            )
            if ours[0] is None or ours[1] is None:
                continue
            cells = [shape.title, op]
            for row, peer in zip(ours, eager, strict=True):
                cells += [f"{row['us']:.0f}", _times(peer, row, None)] if row else []
            errors = " / ".join(f"{row['rel_err']:.1e}" for row in ours if row)
            lines.append([*cells, errors, f"{ours[1]['peak_mib']:.0f}"])
    return _table(head, lines) if lines else ""


def _mixed(rows: list[Row], found: dict[tuple, Row]) -> str:
    """`mhla` forward and backward, with `linear_attention` of the same options, eager torch and cuDNN."""
    head = ["shape", "blocks", "options", "forward us", "forward+backward us", "times linear_attention"]
    head += ["faster than eager", "faster than cuDNN", "error f / b", "peak MiB f+b"]
    lines = []
    for row in rows:
        if (row["op"], row["impl"], row["pass"]) != ("mhla", "ours", "forward_backward"):
            continue
        name = next(name for name, shape in ALL_SHAPES.items() if shape.sizes == list(row["shape"]))
        sizes, options = tuple(row["shape"]), _key(row["options"])
        # targets hold for the plain call
        target = MIXED_TARGETS.get(name) if len(row["options"]) == 4 else None
        plain = _key({k: row["options"][k] for k in ("feature_map", "normalize")})
        forward = found.get((sizes, "mhla", "ours", options, "forward"))
        linear = found.get((sizes, "linear_attention", "ours", plain, "forward_backward"))
        eager = found.get((sizes, "mhla", "eager", options, "forward_backward"))
        cudnn = found.get((sizes, "softmax_attention", "sdpa_cudnn", (), "forward_backward"))
        most = "-" if linear is None else f"{row['us'] / linear['us']:.2f}"
        if linear is not None and target is not None:
            most += f" {'pass' if row['us'] <= target.times_linear * linear['us'] else 'miss'} {target.times_linear:g}"
        cells = [ALL_SHAPES[name].title, "x".join(map(str, row["options"]["blocks"]))]
        kept = {k: v for k, v in row["options"].items() if k not in ("grid", "blocks", "feature_map", "normalize")}
        words = ["relu", *(["ratio"] if row["options"]["normalize"] else [])]
        words += [k if v is True else f"{k} {v}" for k, v in kept.items()]
        cells += [", ".join(words), f"{forward['us']:.0f}" if forward else "-"]
        cells += [f"{row['us']:.0f}", most, _times(eager, row, target and target.times_eager)]
        errors = " / ".join(f"{x['rel_err']:.1e}" for x in (forward, row) if x)
        lines.append([*cells, _times(cudnn, row, target and target.times_cudnn), errors, f"{row['peak_mib']:.0f}"])
    return _table(head, lines) if lines else ""


def _taylor(found: dict[tuple, Row]) -> str:
    """`taylor2` and softmax on two SDPA backends; targets: as fast as flash, 1.3 times as fast as cuDNN."""
    head = ["shape", "taylor2: forward us", "times flash", "times cuDNN", "forward+backward us", "times flash"]
    head += ["times cuDNN", "error f / b", "peak MiB f+b"]
    lines = []
    for shape in ALL_SHAPES.values():
        sizes = tuple(shape.sizes)
        rows = [found.get((sizes, "taylor2", "ours", (), which)) for which in PASSES]
        if rows[0] is None or rows[1] is None:
            continue
        cells = [shape.title]
        for which, row in zip(PASSES, rows, strict=True):
            assert row is not None
            flash, cudnn = (found.get((sizes, "softmax_attention", f"sdpa_{p}", (), which)) for p in ("flash", "cudnn"))
            cells += [f"{row['us']:.0f}", _times(flash, row, 1.0), _times(cudnn, row, 0.77)]
        errors = " / ".join(f"{row['rel_err']:.1e}" for row in rows if row)
        lines.append([*cells, errors, f"{rows[1]['peak_mib']:.0f}"])
    return _table(head, lines) if lines else ""


def _multipole(found: dict[tuple, Row]) -> str:
    """`multipole`, softmax with cuDNN, and the form in torch."""
    head = ["shape", "multipole: blocks", "radius", "degree", "forward us", "times cuDNN", "forward+backward us"]
    head += ["times cuDNN", "times torch", "form", "error f / b", "peak MiB f+b"]
    lines = []
    for (sizes, op, impl, options, which), row in found.items():
        forward = found.get((sizes, op, impl, options, PASSES[0]))
        if (op, impl, which) != ("multipole", "ours", PASSES[1]) or forward is None:
            continue
        cudnn = [found.get((sizes, "softmax_attention", "sdpa_cudnn", (), name)) for name in PASSES]
        title = next(shape.title for shape in ALL_SHAPES.values() if tuple(shape.sizes) == sizes)
        own = row["options"]
        cells = [title, "x".join(map(str, own["blocks"])), str(own["radius"]), str(own["degree"])]
        times = [(cudnn[0], forward), (cudnn[1], row), (found.get((sizes, op, "eager", options, which)), row)]
        one, two, three = ("-" if peer is None else f"{peer['us'] / x['us']:.2f}" for peer, x in times)
        cells += [f"{forward['us']:.0f}", one, f"{row['us']:.0f}", two, three]
        errors = " / ".join(f"{x['rel_err']:.1e}" for x in (forward, row))
        lines.append([*cells, row["ran"], errors, f"{row['peak_mib']:.0f}"])
    return _table(head, lines) if lines else ""


def _times(peer: Row | None, row: Row, target: float | None) -> str:
    if peer is None:
        return "-"
    value = peer["us"] / row["us"]
    return f"{value:.1f}" if target is None else _verdict(value, target)


def _verdict(value: float, target: float) -> str:
    return f"{value:.2f} {'pass' if value >= target else 'miss'} {target:g}"


def _peers(rows: list[Row]) -> str:
    rows = [row for row in rows if row["op"] not in ("mhla", "multipole")]  # separate tables
    columns = list(dict.fromkeys((row["impl"], row["op"], _words(row)) for row in rows if row["impl"] != "ours"))
    if not columns:
        return ""
    by_place: dict[tuple, dict[str, Row]] = {}
    for row in rows:
        by_place.setdefault((row["impl"], row["op"], _words(row), tuple(row["shape"])), {})[row["pass"]] = row
    shapes = [shape for shape in ALL_SHAPES.values() if any(place[3] == tuple(shape.sizes) for place in by_place)]
    lines = []
    for column in columns:
        cells = [" ".join(word for word in column if word)]
        for shape in shapes:
            passes = by_place.get((*column, tuple(shape.sizes)), {})
            cells.append(" / ".join(f"{passes[w]['us']:.0f}" if w in passes else "-" for w in PASSES))
        lines.append(cells)
    return _table(["peer: us, forward / forward+backward", *(shape.title for shape in shapes)], lines)


def _words(row: Row) -> str:
    return ", ".join(f"{name}={value}" for name, value in row["options"].items())


def models(result: Row) -> str:
    """Return one line per model, size, mode and weight dtype, each mixer at its best of eager and compiled.

    Speed-ups are relative to the best softmax. The last column is the speed-up that attention of zero cost would give.
    """
    mixers = list(dict.fromkeys(row["mixer"] for row in result["rows"]))
    head = ["model", "pixels", "tokens", "batch", "mode", "weights"]
    head += [f"{mixer}: images/s, peak MiB, attention share" for mixer in mixers]
    key = ("model", "size", "tokens", "mode", "weights")
    cases = dict.fromkeys(tuple(row[name] for name in key) for row in result["rows"])
    lines = []
    for case in sorted(cases, key=lambda c: (c[0] != "vit_small", c[0], c[3], c[4] != "float32", c[1])):
        model, size, tokens, mode, weights = case
        rows = [row for row in result["rows"] if tuple(row[name] for name in key) == case]
        best = {
            m: max(of, key=lambda r: r["per_second"]) for m in mixers if (of := [r for r in rows if r["mixer"] == m])
        }
        cells = [model, str(size), str(tokens), str(rows[0]["batch"]), mode, weights]
        for mixer in mixers:
            cells.append(_model_cell(best[mixer], best.get("softmax")) if mixer in best else "-")
        lines.append(cells)
    return f"{_table(head, lines)}\n\n{failures(result)}".rstrip()


def _model_cell(row: Row, softmax: Row | None) -> str:
    text = f"{row['per_second']:.0f}"
    if softmax is not None and row is not softmax:
        times = row["per_second"] / softmax["per_second"]
        target = TRAIN_TARGETS[row["size"]] if (row["model"], row["mode"]) == ("vit_small", "train") else None
        text += f" (x {times:.2f})" if target is None else f" (x {_verdict(times, target)})"
    how, share = "compiled" if row["compiled"] else "eager", row["shares"]["attention"]
    without = f" (without attention x {1 / (1 - share):.2f})" if row is softmax else ""
    return f"{text}, {row['peak_mib']}, {100 * share:.0f} %{without}, {how}"


def video(result: Row) -> str:
    """Return one line per model, mode and mixer: step time in ms and relative to softmax, memory, attention share."""
    head = ["model", "pixels", "tokens", "batch", "mode", "mixer", "ms", "times softmax", "peak MiB"]
    head += ["attention share", "softmax backend"]
    lines = []
    for row in sorted(result["rows"], key=lambda row: (row["model"] != "wan_1.3b", row["model"], row["mode"])):
        place = ("model", "size", "mode", "weights", "compiled")
        peers = [r for r in result["rows"] if r["mixer"] == "softmax" and all(r[k] == row[k] for k in place)]
        times = f"{peers[0]['ms'] / row['ms']:.2f}" if peers and row["mixer"] != "softmax" else ""
        has_target = (row["model"], row["size"], row["mode"]) == ("wan_1.3b", 480, "infer")
        target = WAN_TARGETS.get(row["mixer"]) if has_target else None
        if times and target:
            times = _verdict(float(times), target)
        cells = [row["model"], str(row["size"]), str(row["tokens"]), str(row["batch"]), row["mode"], row["mixer"]]
        cells[-1] += "" if row["compiled"] else ", eager"
        share = f"{100 * row['shares']['attention']:.0f} %"
        peak = "-" if row["peak_mib"] is None else str(row["peak_mib"])
        lines.append([*cells, f"{row['ms']:.1f}", times, peak, share, row.get("backend", "")])
    return f"{_table(head, lines)}\n\n{failures(result)}".rstrip()


def _measured(result: Row) -> str:
    rows = result["rows"]
    timers = sorted({row["timer"] for row in rows})
    rate = statistics.median(row["copy_tb_s"] for row in rows)
    worst = max((row["rel_err"] for row in rows if row["impl"] == "ours"), default=float("nan"))
    text = f"Timed by {' and '.join(timers)}; copy {rate:.2f} TB/s; worst error of ours against float64 {worst:.1e}."
    return text + failures(result)


def failures(result: Row) -> str:
    """Return the cases that could not be timed, with reasons."""
    out = ""
    for row in result.get("failed", []):
        words = [str(row[name]) for name in FAILED if name in row]
        out += f" Not timed: {' '.join(words)}: {row['reason']}."
    return out


def _table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(markdown_table(head, lines))


def efficiency(rows: list[Row], row: Row) -> tuple[float, float | None] | None:
    """Return the parallel efficiency, and the largest relative difference of the losses from one GPU.

    Speeds are compared with one GPU that has as many samples per GPU, or else as many in all; losses only with one that
    has as many in all. None for what cannot be compared.
    """
    same = ("model", "tokens", "mode", "layers", "mixer", "compiled")
    ones = [one for one in rows if one["gpus"] == 1 and all(one.get(name) == row.get(name) for name in same)]
    ones = [one for one in ones if one["method"] == scaling.alone(row["method"])]
    samples, n = row.get("samples", 1), row["gpus"]
    wanted = (samples // n, samples) if "samples" in row else (1,)
    found = [one for number in wanted for one in ones if one.get("samples", 1) == number]
    if not found:
        return None
    one = found[0]
    speed = samples / row["ms"] / (n * one.get("samples", 1) / one["ms"])
    equal = [one for one in found if one.get("samples", 1) == samples]
    pairs = [zip(row["results"], one["results"], strict=True) for one in equal[:1]]
    return speed, max(abs(a - b) / abs(b) for a, b in pairs[0]) if pairs else None


def scaled(result: Row) -> str:
    """Return the scaling table: one line per case and number of GPUs."""
    head = ["model", "layers", "tokens", "mode", "method", "compiled", "GPUs", "samples per GPU", "ms per step"]
    head += ["samples/s", "efficiency", "MiB sent per GPU", "peak MiB per GPU", "difference"]
    lines = []
    for row in result["rows"]:
        cells = [row["model"], str(row.get("layers", "all")), str(row["tokens"]), row["mode"], row["method"]]
        cells += [
            "yes" if row.get("compiled") else "-",
            str(row["gpus"]),
            str(row.get("samples", row["gpus"]) // row["gpus"]),
        ]
        cells += [f"{row['ms']:.1f}", str(row.get("per_second", "-"))]
        speed, apart = efficiency(result["rows"], row) or (None, None)
        cells += ["-" if speed is None else f"{speed:.3f}", "-" if "sent_mib" not in row else f"{row['sent_mib']:.1f}"]
        cells.append(str(row["peak_mib"]))
        lines.append([*cells, "-" if apart is None else f"{apart:.1e}"])
    return f"{_table(head, lines)}\n\n{failures(result)}".rstrip()


TEXT = {
    "kernels": kernels,
    "models": models,
    "video": video,
    "adaptive": adaptive.text,
    "causal": causal.text,
    "host": host.text,
    "fidelity": fidelity.text,
    "scaling": scaled,
}
