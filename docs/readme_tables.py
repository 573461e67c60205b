"""Write the pages of docs/results, the tables of README.md and docs/*.md, and six figures of docs/pictures.

Every docs/results/NAME.json gives a page NAME.md with all rows, commands and notes, and a line of results/index.md.
Between the lines `<!-- results:NAME -->` and `<!-- /results -->` of other pages comes a summary (SUMMARIES) with a link
to that page. To add rows, append them to the JSON file and run `python docs/readme_tables.py`. A new file needs nothing
else; give it a title and a table in PAGES if all keys of its rows in one table are not readable. docs/all_mixers.md has
a row per mixer, from its class.

With --check: exit with status 1 if the pages differ from what the files give (a test runs this).
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "docs")]  # where the benchmarks and the tables are

import mixer_page  # noqa: E402
import result_tables as tables  # noqa: E402

from benchmarks import report  # noqa: E402
from benchmarks.plots import draw_scaling  # noqa: E402
from benchmarks.quality_plots import draw_denoisers, draw_densities, draw_quality, draw_tradeoff  # noqa: E402

MARKED = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
PAGES = {  # name -> title and table of the page with all rows
    "quality": ("Classifiers with elu1 or ReLU features", tables.by_test),
    "power-h100": ("Classifiers with the power map", tables.by_test),
    "power-h200": ("Classifiers with the power map, and delta rules", tables.by_test),
    "quality-digits": ("Digits", tables.experiments),
    "attention-power-h100": ("Ranks of the attention matrices: hla2, mhla, mhla2", tables.plain),
    "attention-power-h200": ("Ranks of the attention matrices: softmax and first orders, ahla, hla3", tables.plain),
    "dit-cifar10": ("A pixel DiT, converted", tables.diffusion),
    "denoisers-h100": ("Denoisers with the power map", tables.diffusion),
    "denoisers-h200": ("Denoisers with the power map, converted", tables.diffusion),
    "video-clips": ("A small video transformer", tables.diffusion),
    "moving-digits": ("Moving digits, two-sided and frame-causal", tables.diffusion),
    "video-frames-h200": ("Frame-causal video transformers", tables.diffusion),
    "fidelity-h100": ("Adaptive multipole: closeness to softmax", tables.fidelity),
    "fidelity-h200": ("Adaptive multipole: closeness to softmax at 256 tokens", tables.fidelity),
    "fidelity-held-out-h200": ("Adaptive multipole: closeness to softmax on held-out images", tables.fidelity),
    "fidelity-validation-h200": ("Adaptive multipole: closeness to softmax on validation images", tables.fidelity),
    "adaptive-float32-h200": ("Adaptive multipole in float32", tables.plain),
    "two-levels": ("Adaptive multipole: one and two levels of far tiles", tables.plain),
    "nearest-digits": ("Adaptive multipole: nearest tiles among the exact ones", tables.plain),
    "nearest-imagenette": ("Adaptive multipole: nearest tiles among the exact ones, 1,024 tokens", tables.plain),
    "adaptive-branches-h200": ("Adaptive multipole: fine-tuned with linear branches", tables.experiments),
    "adaptive-tuning-h200": ("Adaptive multipole: images per second of fine-tuning", tables.plain),
    "adaptive-conversions-h100": ("Adaptive multipole: fine-tuned", tables.experiments),
    "kernels-h200": ("Operators", report.kernels),
    "two-sided-h200": ("Two-sided operators before and after a third of their code was removed", tables.plain),
    "block-pairs-h200": ("Block mixing of few tokens", tables.plain),
    "multipole-h200": ("Operator multipole", report.multipole),
    "adaptive-h100": ("Operator adaptive multipole, 1,024 tokens", report.TEXT["adaptive"]),
    "adaptive-kernels-h200": ("Operator adaptive multipole", tables.adaptive_kernels),
    "adaptive-registers-h200": ("Operator adaptive multipole: weights in registers", tables.plain),
    "short-heads-h200": ("Linear attention of few tokens and heads: one launch or three", tables.plain),
    "causal-h200": ("Causal operators", tables.plain),
    "causal-forms-h200": ("Causal operators: decays, ratios, frames, decoding, delta rules", report.TEXT["causal"]),
    "causal-profile-h200": ("Causal operators: time per kernel", tables.plain),
    "streaming-memory-h200": ("Streaming video: memory", tables.plain),
    "causal-walk-h200": ("Causal operators: all stages in one launch", tables.plain),
    "causal-h100": ("Causal operators with ratios", report.TEXT["causal"]),
    "two-kernels-h100": ("Two generic kernels instead of one per head", tables.two_kernels),
    "host-h200": ("Host times of eager calls, and first calls", report.TEXT["host"]),
    "models-h200": ("ViT-S and DiT-XL/2", report.models),
    "experiments-h100": ("Small models", report.models),
    "experiments-power-in-torch-h100": ("Small models, power map in torch", report.models),
    "block-models-h100": ("Small models, mhla by pairs of tokens", report.models),
    "video-h200": ("Large models", report.video),
    "arena": ("Small tasks", mixer_page.small_tasks),
    "arena-speed": ("Small tasks, speed", tables.plain),
    "scaling-h200": ("Several GPUs", report.TEXT["scaling"]),
    "wan-finetuning": ("Training steps of Wan2.1-1.3B", tables.finetuning),
}
SUMMARIES = {  # tables of other pages, if not those of PAGES
    "quality": tables.accuracy,
    "power-h100": tables.accuracy,
    "power-h200": tables.accuracy,
    "denoisers-h100": tables.denoisers,
    "denoisers-h200": tables.denoisers,
    "dit-cifar10": tables.denoisers,
    "fidelity-h200": tables.forms,
    "adaptive-float32-h200": tables.adaptive_float32,
    "two-levels": tables.two_levels,
    "kernels-h200": report.two_sided,
    "models-h200": tables.speeds,
    "experiments-h100": tables.speeds,
    "video-h200": tables.speeds,
}


def read(name: str) -> dict:
    """Read a result file."""
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())


def figure(name: str, folder: Path) -> str:
    """The figure of a result file, if there is one, for a page in this folder."""
    picture = ROOT / "docs" / "pictures" / f"{name}.png"
    up = "../" * len(folder.relative_to(ROOT / "docs").parts) if folder != ROOT else "docs/"
    return f"![{name}]({up}pictures/{picture.name})\n\n" if picture.is_file() else ""


def summary(name: str, folder: Path) -> str:
    """Figure, summary and origin of a result file for a page in this folder."""
    if not (ROOT / "docs" / "results" / f"{name}.json").is_file():
        return f"`python tools/benchmark.py {name.partition('-')[0]}` was not run yet.\n"
    result = read(name)
    link = f"{'docs/' if folder == ROOT else ''}results/{name}.md"
    table = SUMMARIES.get(name, PAGES[name][1])(result)
    where = f"{result['hardware']}, {result['date']}. [All rows, commands and notes]({link})."
    return f"{figure(name, folder)}{table}\n\n{where}\n"


def page(name: str) -> str:
    """The page with all rows of a result file."""
    result = read(name)
    title, render = PAGES.get(name, (name, tables.plain))
    folder = ROOT / "docs" / "results"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [f"# {title}", f"Written by `docs/readme_tables.py` from [{name}.json]({name}.json)."]
    parts += [f"{figure(name, folder)}{render(result)}", f"{result['hardware']}, {result['date']}, {versions}."]
    parts += [f"```\n{result['command']}\n```", "\n".join(f"- {note}" for note in result.get("note", []))]
    return "\n\n".join(filter(None, parts)) + "\n"


def written() -> dict[Path, str]:
    """All pages with results: file -> text."""
    docs = ROOT / "docs"
    found = {}
    for file in (ROOT / "README.md", *sorted(docs.glob("*.md"))):
        fill = lambda m, folder=file.parent: m[1] + summary(m[2], folder) + m[3]  # noqa: E731
        found[file] = MARKED.sub(fill, file.read_text())
    stems = [file.stem for file in sorted((docs / "results").glob("*.json"))]
    stems.sort(key=lambda name: list(PAGES).index(name) if name in PAGES else len(PAGES))
    found |= {docs / "results" / f"{name}.md": page(name) for name in stems}
    found[docs / "all_mixers.md"] = mixer_page.page()
    titles = {name: PAGES.get(name, (name,))[0] for name in stems}
    lines = [[f"[{title}]({name}.md)", read(name)["hardware"], read(name)["date"]] for name, title in titles.items()]
    head = "# All rows\n\nOne page per result file, with its commands and notes.\n\n"
    found[docs / "results" / "index.md"] = f"{head}{tables.table(['page', 'hardware', 'date'], lines)}\n"
    return found


def draw() -> None:
    """Draw the figures of several result files, and of those that grow."""
    pictures = ROOT / "docs" / "pictures"
    draw_quality(read("quality"), pictures / "quality.png")
    draw_tradeoff(read("power-h100"), read("experiments-h100"), pictures / "experiments-h100.png")
    draw_denoisers(read("dit-cifar10"), pictures / "dit-cifar10.png")
    mixer_page.arena.report.draw(read("arena"), pictures / "arena.png")
    draw_densities(read("fidelity-h100"), pictures / "adaptive-densities.png")
    draw_scaling(read("scaling-h200"), pictures / "scaling-h200.png")


def main() -> int:
    """Write the pages, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    if not check and (ROOT / "docs" / "results" / "quality.json").is_file():
        draw()
    changed = [file for file, text in written().items() if not file.is_file() or file.read_text() != text]
    for file in changed:
        if check:
            print(f"{file.relative_to(ROOT)} is not what its results give: run python docs/readme_tables.py")
        else:
            file.write_text(written()[file])
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
