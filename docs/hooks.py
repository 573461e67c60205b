"""mkdocs hooks: the README is the home page, and links from the pages to files outside of docs/ are text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the README, with links as seen from docs/."""
    text = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Point links to the README at the home page, and drop those to files that are no page."""
    folder = Path(page.file.src_uri).parent

    def repaired(link: re.Match) -> str:
        text, target = link.groups()
        path, _, anchor = target.partition("#")
        if "://" in target or not path:
            return link.group(0)
        if path.endswith("README.md"):
            return f"[{text}]({'../' * len(folder.parts)}index.md{'#' * bool(anchor)}{anchor})"
        outside = not (ROOT / "docs" / folder / path).exists() and path != "index.md" and not path.endswith("/index.md")
        return text if outside or (ROOT / "docs" / folder / path).is_dir() else link.group(0)

    return LINK.sub(repaired, markdown)
