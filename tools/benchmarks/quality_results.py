"""Rows and files of quality tables, such as docs/results/quality.json."""

import json
import shlex
from pathlib import Path
from typing import Any


def quality_row(
    experiment: str,
    data: str,
    mixer: str,
    options: dict[str, Any],
    source: str,
    seed: int,
    value: float,
    budget: str,
    wall_s: float,
) -> dict[str, Any]:
    """Return a row of the table. source: scratch, converted, control or teacher. value: top-1 in percent."""
    return {
        "experiment": experiment,
        "data": data,
        "mixer": mixer or "softmax",
        "options": options,
        "source": source,
        "seed": seed,
        "metric": "top1",
        "value": round(value, 2),
        "budget": budget,
        "wall_s": round(wall_s, 1),
    }


def merge_results(files: list[Path]) -> dict[str, Any]:
    """Merge result files of several runs of one command with different arguments.

    Rows keep their order; a run in two files is kept once. Raises ValueError for a missing or damaged file, different
    results of the same run, and different hardware or versions.
    """
    results = [_read_result(file) for file in files]
    first, rows = results[0], dict[str, dict[str, Any]]()
    for file, result in zip(files, results, strict=True):
        for key in ("hardware", "versions"):
            if result[key] != first[key]:
                raise ValueError(f"{file} and {files[0]} cannot be merged: their {key} differ")
        for row in result["rows"]:
            run = json.dumps({k: v for k, v in row.items() if k not in ("value", "wall_s")}, sort_keys=True)
            if rows.setdefault(run, row)["value"] != row["value"]:
                raise ValueError(f"{file} and a file before it give different results for the run {run}")
    command = _common_command([result["command"] for result in results])
    date = max(result["date"] for result in results)
    return {**first, "command": command, "date": date, "rows": list(rows.values())}


def _read_result(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"there is no result file {file}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the result file {file} is damaged: {error}") from error
    keys, rows = ("command", "date", "hardware", "versions", "rows"), []
    if isinstance(result, dict) and all(key in result for key in keys):
        rows = result["rows"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "value" in row for row in rows) or not rows:
        raise ValueError(f"{file} is not a quality table: it needs {', '.join(keys)}, and rows with a value")
    return result


def _common_command(commands: list[str]) -> str:
    """Merge commands that differ in argument values into one with alternatives: seeds=[0]|[1]."""
    split = [shlex.split(command) for command in dict.fromkeys(commands)]
    keys = {tuple(word.partition("=")[0] for word in words) for words in split}
    if len(keys) > 1:
        return "; ".join(dict.fromkeys(commands))
    words = []
    for column in zip(*split, strict=True):
        key, equals, _ = column[0].partition("=")
        words.append(key + equals + "|".join(dict.fromkeys(word.partition("=")[2] for word in column)))
    return shlex.join(words)
