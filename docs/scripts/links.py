"""Follow every link of the built site: files, anchors, pictures; and find what would be loaded from other servers.

python -m docs.scripts.links build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []  # (tag, target)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {str(found[name]) for name in ("id", "name") if found.get(name)}
        for name in ("href", "src"):
            if found.get(name) is not None:
                self.links.append((tag, str(found[name])))


def problems(site: Path) -> tuple[list[str], int, set[str]]:
    """(what is wrong, links followed, addresses elsewhere that a reader may click)."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = _Page()
        pages[path].feed(path.read_text(encoding="utf-8"))
    wrong, followed, elsewhere = [], 0, set()
    for path, page in pages.items():
        where = path.relative_to(site)
        if where.name == "404.html":  # its links start at the root of the server
            continue
        for tag, target in page.links:
            parts = urlsplit(target)
            if parts.scheme in ("mailto", "data", "javascript"):
                continue
            if parts.scheme or parts.netloc:
                if tag in ("a", "link") and not target.endswith((".css", ".js")):
                    elsewhere.add(target)
                else:
                    wrong.append(f"{where}: loads {target} from another server")
                continue
            followed += 1
            goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            goal = goal / "index.html" if goal.is_dir() else goal
            if not goal.exists():
                wrong.append(f"{where}: {target} does not exist")
            elif parts.fragment and goal.suffix == ".html" and goal in {p.resolve() for p in pages}:
                anchors = next(p for q, p in pages.items() if q.resolve() == goal).anchors
                if unquote(parts.fragment) not in anchors and not parts.fragment.startswith("__"):
                    wrong.append(f"{where}: {target} has no such anchor")
    return wrong, followed, elsewhere


if __name__ == "__main__":
    found, count, outside = problems(Path(sys.argv[1]))
    for line in found:
        print(line, file=sys.stderr)
    shown = ", ".join(sorted(outside)) or "none"
    print(f"{count} links followed, {len(found)} broken; addresses elsewhere, not followed: {shown}")
    sys.exit(1 if found else 0)
