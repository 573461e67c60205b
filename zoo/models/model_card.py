"""Model cards: the README.md in the folder of a saved model."""

from collections import Counter
from pathlib import Path
from typing import Any

from zoo.io import environment, markdown_table, write_text
from zoo.models.checkpoint_tags import sites_of

CARD = "README.md"
OURS = "- hla-zoo"  # a tag in the metadata of our cards
LOADING = ["```python", "import zoo  # of hla-zoo", "", 'model = zoo.load("FOLDER")  # the folder of this file', "```"]


def write_card(model: Any, folder: Path, name: str, base: str, library: str) -> None:
    """Write README.md into `folder`, unless it holds one that was written by hand.

    model: what was saved, converted or not. name: of its architecture. base: name of the model that was converted.
    library: timm or diffusers.
    """
    file = folder / CARD
    if not file.exists() or OURS in file.read_text().splitlines():
        write_text(model_card(model, name, base, library), file)


def model_card(model: Any, name: str, base: str, library: str) -> str:
    """Return the text of a card: metadata of the Hugging Face hub, mixers with their options, base model, how to
    load."""
    mixers = Counter((site.mixer_name, _text(site.mixer_options)) for _, site in sites_of(model))
    versions = environment()["versions"]
    facts = [
        ["architecture", f"`{name}`"],
        ["base model", f"`{base}`"],
        ["parameters", f"{sum(p.numel() for p in model.parameters()):,}"],
        ["libraries", ", ".join(f"{package} {versions[package]}" for package in (library, "torch"))],
    ]
    rows = [[f"`{mixer}`", count, options] for (mixer, options), count in mixers.items()]
    tags = [OURS, *sorted({f"- {mixer}" for mixer, _ in mixers})]
    lines = ["---", f"library_name: {library}", "tags:", *tags, "---", "", f"# {name}", ""]
    lines += [*markdown_table(["", ""], facts), ""]
    lines += [*markdown_table(["mixer", "attention layers", "options"], rows), ""] if rows else []
    return "\n".join([*lines, *LOADING, ""])


def _text(options: dict[str, Any]) -> str:
    return ", ".join(f"`{key}={value!r}`" for key, value in options.items() if value is not None) or "-"
