"""What MkDocs does besides Markdown: pages generated from the program, pictures from scripts, notebooks, and links to
files of the repository that are no pages.

A fence such as ```sh needs=docker says what a block requires that may be absent; the page shows it as a title.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.scripts import notebooks, pictures, reference

# Pages of the site that are files elsewhere in the repository.
ELSEWHERE = {"deploy.md": "deploy/README.md", "changes.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    def add(path: str, content: str | bytes) -> None:
        files.append(File.generated(config, path, content=content))

    for name, page in reference.PAGES.items():
        add(f"reference/{name}.md", page())
    for page_path, source in ELSEWHERE.items():
        add(page_path, _relocated((ROOT / source).read_text(encoding="utf-8"), source, page_path))
    for name, picture in pictures.build(ROOT / "build" / "pictures"):
        add(f"pictures/{name}", picture)
    add("gallery.md", pictures.gallery())
    for name, content in notebooks.pages():
        add(f"notebooks/{name}", content)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = re.sub(r"(?m)^(```\w+) needs=([\w-]+)$", r'\1 title="requires \2"', markdown)
    markdown = re.sub(r"(?m)^!\[([^\]]*)\]\((\S*pictures/\S+)\.svg\)$", _themed, markdown)
    return _relocated(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def _themed(match: re.Match[str]) -> str:
    """One picture in two colourings; the page shows the one of its theme."""
    text, path = match.groups()
    return f"![{text}]({path}.svg){{ .picture .light-only }}![{text}]({path}-dark.svg){{ .picture .dark-only }}"


def _relocated(markdown: str, source: str, page: str) -> str:
    """Links to files outside docs/: to their page if there is one, else the path as code."""

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if path.startswith("docs/"):
            if source.startswith("docs/"):
                return match.group()
            return f"[{text}]({posixpath.relpath(path.removeprefix('docs/'), posixpath.dirname(page) or '.')}{anchor})"
        for name, origin in ELSEWHERE.items():
            if origin == path:
                return f"[{text}]({posixpath.relpath(name, posixpath.dirname(page) or '.')}{anchor})"
        return f"{text} (`{path}`)" if text != path else f"`{path}`"

    parts = re.split(r"(?ms)(^```.*?^```$)", markdown)
    for at in range(0, len(parts), 2):
        parts[at] = re.sub(r"(?<!!)\[([^\]\n]+)\]\(((?!\w+:|#)[^)#\s]+)(#[^)\s]*)?\)", link, parts[at])
    return "".join(parts)
