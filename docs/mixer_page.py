"""Page with all mixers, from their classes and the result files: formula, cost, tokens, implementation and source."""

import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import arena.report
from zoo.io import markdown_table
from zoo.mixers import MIXERS, Mixer, MixerConfig

RESULTS = Path(__file__).parent / "results"
RUNS = (
    "quality", "power-h100", "power-h200", "quality-digits", "denoisers-h100", "denoisers-h200", "dit-cifar10",
    "video-clips",
)  # fmt: skip
ARENA, SPEEDS = RESULTS / "arena.json", RESULTS / "arena-speed.json"
BETTER = {"top1": 1, "validation loss": -1, "validation loss of the average": -1}  # measure -> sign of a good one
SOURCES = ("scratch", "converted", "control")  # of the weights that a run starts from
STATES = {  # class or base class -> numbers that are kept of earlier tokens, or of all tokens, without vectors
    "Softmax": "2 N D",
    "LinearAttention": "D^2",
    "HLA2": "2 D^2",
    "AHLA": "2 D^2",
    "HLA3": "3 D^2",
    "Polynomial": "5 D^2",
    "SecondOrderBlockMixer": "3 M D^2",
    "BlockMixer": "M D^2",
    "Mesa": "2 D^2",
    "Resolvent": "2 D^2",
    "Strassen": "2 D^2",
    "Multilinear": "L D^2",
    "Triple": "width D^2",
    "Simplex2": "4 N D",
    "Efficient": "D^2",
    "Performer": "R D",
    "Rfa": "2 R D",
    "Flare": "M D",
    "Linformer": "2 M D",
    "Nystrom": "2 M D",
    "Mega": "2 N D",
    "DeltaMixer": "D^2",
    "Taylor2": "D^2 (D + 1) / 2",
    "Multipole": "2 N D",
}
Contests = dict[str, dict[str, float]]  # name of a contest -> mixer -> score, more is better

FORMS = {  # class or base class -> what computes it on CUDA in 16 bits
    "Softmax": "torch SDPA",
    "Efficient": "Triton",
    "Flare": "torch SDPA",
    "Linformer": "torch SDPA",
    "Nystrom": "torch SDPA",
    "Performer": "torch, Triton",
    "Mega": "torch SDPA",
    "MomentMixer": "torch",
    "DeltaMixer": "Triton",
    "Taylor2": "torch",
    "LinearMixer": "Triton",
    "Mixer": "torch",
}
COST = re.compile(r"(?:^|[;:.] )((?:(?![;:.] ).)*?) multiplications per head")
SOURCE = re.compile(r"arXiv \d{4}\.\d{5}|(?:openreview\.net|github\.com)/[\w./?=]*\w")
HEAD = """# All mixers

Written by `docs/readme_tables.py` from the classes in `zoo/mixers`, whose docstrings have more, and from
`docs/results`. N tokens, D channels per head, ' the transpose, phi the feature map, A = phi(Q) phi(K)'.

- Order: causal is `causal=True` (`softmax`: what the host asks for), frame-causal `causal="frame"` (delta rules:
  `scan="frame"`). State: numbers per head, without vectors of D numbers, that are kept of earlier tokens by a causal
  form; without one, what a query reads of all tokens. M blocks, latents or means, R random features.
- Tokens: whether they need a grid; "any" includes sets of points. Shared: whether devices can share the tokens.
- Implementation: for usual two-sided calls on CUDA in 16 bits ([details](mixers.md#triton-kernels)).
- Best in: experiments of [the results](results/index.md) with the best mean of all mixers but softmax, without softmax
  layers; bold if also better than softmax there. The means are of one to three seeds, and few experiments compare many
  mixers. "-": in none.
- Source: "own" was first defined here.

Options: [mixers and hosts](mixers.md). Quality: [measurements](measurements.md).
"""
COLUMNS = (
    "name", "what", "multiplications per head", "order", "state", "tokens", "rotary", "shared", "implementation",
    "best in", "source",
)  # fmt: skip


ORDERS = """## Where more than first order pays

Small networks trained from scratch on the [small tasks](experiments.md#small-tasks)
([all scores](results/arena.md))."""


def page() -> str:
    """Make the page."""
    won = winners(contests())
    rows = [row(name, kind, won.get(name, [])) for name, kind in MIXERS.items()]
    parts = [HEAD + "\n" + "\n".join(markdown_table(COLUMNS, rows))]
    if ARENA.is_file() and (compared := arena.report.against_first_order(read(ARENA), speeds())):
        parts += [ORDERS, *compared, *speed_notes()]
    return "\n\n".join(parts) + "\n"


def small_tasks(result: dict[str, Any]) -> str:
    """Make the tables of the small tasks."""
    states = {name: of_class(STATES, kind) for name, kind in MIXERS.items()}
    return "\n\n".join([arena.report.text(result, speeds(), states), *speed_notes()])


def speeds() -> list[dict[str, Any]]:
    """Return the rows of processes that had a GPU alone."""
    return read(SPEEDS)["rows"] if SPEEDS.is_file() else []


def speed_notes() -> list[str]:
    """Return a paragraph of what to know about these speeds, if there is anything."""
    notes = read(SPEEDS).get("note", []) if SPEEDS.is_file() else []
    return [f"Speeds: {' '.join(notes)}"] if notes else []


def read(file: Path) -> dict[str, Any]:
    """Read a result file."""
    return json.loads(file.read_text())


def row(name: str, kind: type[Mixer], won: list[str]) -> list[str]:
    """Make the row of a mixer."""
    title = " ".join((kind.__doc__ or "").partition("\n\n")[0].split()).rstrip(".")
    first = re.sub(r"([|*])", r"\\\1", title)
    cost = found(COST, kind)[:1] or ["-"]
    flags = ["yes" if flag else "-" for flag in (kind.takes_rotations, kind.shares_tokens or name == "softmax")]
    tokens = "grid" if kind.defaults.needs_grid else "any"
    sources = ", ".join(map(link, found(SOURCE, kind))) or "own"
    state, form = of_class(STATES, kind), of_class(FORMS, kind)
    return [f"`{name}`", first, *cost, order(name, kind), state, tokens, *flags, form, ", ".join(won) or "-", sources]


def of_class(table: dict[str, str], kind: type) -> str:
    """Return the value of the class, or of its nearest base class with one."""
    return next(table[base.__name__] for base in kind.__mro__ if base.__name__ in table)


def link(source: str) -> str:
    """Make the Markdown link of a source."""
    if source.startswith("arXiv "):
        return f"[{source[6:]}](https://arxiv.org/abs/{source[6:]})"
    site, _, rest = source.partition("/")
    return f"[{'OpenReview' if 'openreview' in site else rest}](https://{source})"


def contests() -> Contests:
    """Return the best mean score of each mixer in each experiment of the result files."""
    scores: dict[str, dict[tuple[str, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in (run for name in RUNS for run in read(RESULTS / f"{name}.json")["rows"]):
        if counts(run):
            form = run["mixer"], json.dumps(run["options"], sort_keys=True)
            name = f"{run['experiment']} ({run['budget'].replace('1 epochs', '1 epoch')})"
            scores[name][form].append(BETTER[run["metric"]] * run["value"])
    found: Contests = defaultdict(dict)
    for name, forms in scores.items():
        for (mixer, _), values in forms.items():
            found[name][mixer] = max(mean(values), found[name].get(mixer, -float("inf")))
    if ARENA.is_file():
        tasks, mixers, cells = arena.report.by_cell(read(ARENA))
        for task in tasks:
            for mixer in (m for m in mixers if cells.get((m, task))):
                name, best = mixer.split()[0], found[task]
                best[name] = max(arena.report.quality(cells[mixer, task]), best.get(name, -float("inf")))
    return found


def counts(run: dict[str, Any]) -> bool:
    """Whether a run is a final score of one mixer in all layers, or of its softmax control, on test data."""
    final = run["metric"] in BETTER and run["source"] in SOURCES and "held out" not in run["data"]
    return final and run["mixer"] in MIXERS and "keep_softmax" not in run["options"]


def winners(scores: Contests) -> dict[str, list[str]]:
    """Return the contests with at least two mixers other than softmax that each mixer won; bold if it beat softmax."""
    won = defaultdict(list)
    for name, found in scores.items():
        others = {mixer: score for mixer, score in found.items() if mixer != "softmax"}
        if len(others) > 1:
            best = max(others.values())
            shown = f"**{name}**" if best > found.get("softmax", float("inf")) else name
            for mixer in (mixer for mixer, score in others.items() if score == best):
                won[mixer].append(shown)
    return won


def text(kind: type) -> str:
    """Return the docstring on one line."""
    return " ".join((kind.__doc__ or "").split())


def found(pattern: re.Pattern[str], kind: type[Mixer]) -> list[str]:
    """Return the matches in the docstring of the class, or of its nearest base class with any."""
    everything = (
        [m.strip() for m in pattern.findall(text(base))] for base in kind.__mro__[: kind.__mro__.index(Mixer)]
    )
    return list(dict.fromkeys(next((matches for matches in everything if matches), [])))


def order(name: str, kind: type[Mixer]) -> str:
    """Return which orders of the tokens the mixer has."""
    if hasattr(kind.defaults, "activation"):  # delta rules
        return "scans, causal, frame-causal"
    causal = ["causal"] * (name == "softmax" or takes(name, True)) + ["frame-causal"] * takes(name, "frame")
    return ", ".join(["two-sided", *causal])


def takes(name: str, causal: bool | str) -> bool:
    """Whether a mixer takes this value of the option `causal`, if need be with a norm of its outputs."""
    for more in ({}, {"post_norm": True}):
        try:
            MixerConfig.parse(name, {"causal": causal, **more})
        except ValueError:
            continue
        return True
    return False
