"""Benchmark tables: speed of operators and models on one GPU, fidelity and quality.

    python tools/benchmark.py kernels shapes=[vit224,dit256] impls=[ours,sdpa_cudnn] options=[identity]
    python tools/benchmark.py models models=[vit_small] sizes=[224,512]
    python tools/benchmark.py video models=[wan_1.3b] 'mixers=[softmax,mhla every:3,multipole density=0.0625 k_tile=32]'
    python tools/benchmark.py adaptive shapes=[tokens4k] selects=[error,mean] k_tiles=[16,64]
    python tools/benchmark.py causal groups=[plain,decay] shapes=[tokens4k]
    python tools/benchmark.py host ops=[linear_attention,hla2]
    python tools/benchmark.py scaling gpus=[1,2] layers=8 'methods=[softmax ring,la,mhla]'
    python tools/benchmark.py fidelity models=[RUN] data.source=folder data.val=VAL
    python tools/benchmark.py arena tasks=[recall,compose] 'mixers=[softmax,la,strassen]'
    python tools/benchmark.py quality CONFIG.yaml data.train=A.parquet data.val=B.parquet 'mixers=[softmax,la]'

Rows are added to the result file as they are measured; then the table is printed and the figure drawn. fidelity:
trained softmax classifiers with adaptive multipole attention, without training. host: host time of eager calls, and
first calls of a new process. arena: small tasks, trained from scratch. scaling: one sample, or one batch, on several
GPUs. quality: one training run (arguments with a dot) for several mixers and seeds, or their conversion with
recipe=RECIPE.yaml. Rerun to resume. To split a quality table, give each process its own `json=` and join the files with
`quality merge=[A.json,B.json] json=ALL.json`.
"""

import sys
from pathlib import Path
from typing import Any

import arena.race
import arena.report
from benchmarks import adaptive, causal, fidelity, host, models, operators, plots, report, scaling
from benchmarks.quality import QualitySettings, quality
from benchmarks.rows import command_of
from zoo import config
from zoo.errors import unknown_name

USAGE = (
    "usage: benchmark.py kernels|models|video|adaptive|causal|host|scaling|fidelity|arena [key=value ...] | "
    "quality CONFIG.yaml [key=value ...]"
)
TABLES: dict[str, Any] = {
    "kernels": (operators.KernelSettings, operators.run, plots.draw_kernels),
    "models": (models.ModelSettings, models.run, plots.draw_models),
    "video": (models.VideoSettings, models.run, plots.draw_video),
    "adaptive": (adaptive.AdaptiveSettings, adaptive.run, None),
    "causal": (causal.CausalSettings, causal.run, None),
    "host": (host.HostSettings, host.run, None),
    "scaling": (scaling.ScalingSettings, scaling.run, plots.draw_scaling),
    "fidelity": (fidelity.FidelitySettings, fidelity.run, fidelity.draw),
    "arena": (arena.race.ArenaSettings, arena.race.run, arena.report.draw),
}
SCHEMAS: dict[str, type] = {name: row[0] for name, row in TABLES.items()} | {"quality": QualitySettings}


def main(words: list[str]) -> dict[str, Any]:
    """Run the selected benchmark. Returns the content of the result file. Raises ValueError for invalid arguments."""
    if not words or words[0] in ("-h", "--help"):
        print(__doc__, USAGE, *(f"\n{name}{config.describe(schema)}" for name, schema in SCHEMAS.items()), sep="\n")
        return {}
    what, *rest = words
    if what not in SCHEMAS:
        raise unknown_name("benchmark", what, SCHEMAS)
    if config.print_help_if_asked(rest, __doc__, USAGE, SCHEMAS[what]):
        return {}
    return quality(rest) if what == "quality" else table(what, rest)


def table(what: str, words: list[str]) -> dict[str, Any]:
    """Measure, plot and print a table; return the content of the result file. Raises ValueError without any result."""
    schema, measure, draw = TABLES[what]
    settings: Any = config.from_command_line(schema, words)
    result = measure(settings, command_of([what, *words]))
    if not result["rows"]:
        raise ValueError(f"nothing could be measured.{report.failures(result)}")
    if draw:
        draw(result, Path(settings.picture))
    print((report.TEXT | {"arena": arena.report.text})[what](result))
    return result


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    config.command_line(main)
