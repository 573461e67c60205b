"""Speed on one GPU: the operators against their peers, and whole models against softmax.

    python tools/benchmark.py kernels
    python tools/benchmark.py kernels shapes=[vit224,dit256] impls=[ours,sdpa_cudnn] options=[identity]
    python tools/benchmark.py models models=[vit_small] sizes=[224,512]

Rows are merged into the result file as they come, so that a table can be measured in parts; then the table is printed
and the picture drawn from the whole file.
"""

import sys
from pathlib import Path
from typing import Any

from zoo import config
from zoo.eval.speed import kernels, models, pictures, report
from zoo.eval.speed.rows import command_of
from zoo.names import unknown_name

USAGE = "usage: benchmark.py kernels|models [key=value ...]"
SCHEMAS = {"kernels": kernels.KernelSettings, "models": models.ModelSettings}


def main(words: list[str]) -> dict[str, Any]:
    """Measure what the words select. Returns the content of the result file; raises ValueError."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{__doc__}\n{USAGE}")
        for name, schema in SCHEMAS.items():
            print(f"\n{name}{config.describe(schema)}")
        return {}
    what, rest = words[0], words[1:]
    if what not in SCHEMAS:
        raise unknown_name("benchmark", what, SCHEMAS)
    if config.wants_help(rest, __doc__, USAGE, SCHEMAS[what]):
        return {}
    settings = config.from_command_line(SCHEMAS[what], rest)
    result = {"kernels": kernels, "models": models}[what].run(settings, command_of(words))
    if not result["rows"]:
        raise ValueError(f"nothing could be timed.{report.failures(result)}")
    draw = {"kernels": pictures.draw_kernels, "models": pictures.draw_models}[what]
    draw(result, Path(settings.picture))
    print(report.TEXT[what](result))
    return result


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    config.command_line(main)
