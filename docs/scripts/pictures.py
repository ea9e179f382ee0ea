"""The pictures of the site: every script in docs/pictures draws one, in the colours of the light and of the dark page.

A script has a docstring (its caption in the gallery) and `draw() -> Figure`. Pictures are SVG, and are kept in a folder
until the script or the package changes. `python -m docs.scripts.pictures FOLDER` writes them all.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import matplotlib

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "docs" / "pictures"
INKS = {"": "#1d2b2a", "-dark": "#dfe7e6"}


def names() -> list[str]:
    return sorted(path.stem for path in SCRIPTS.glob("*.py"))


def script(name: str) -> ModuleType:
    """The module of a picture."""
    spec = importlib.util.spec_from_file_location(f"picture_{name.replace('-', '_')}", SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render(name: str) -> dict[str, bytes]:
    """The SVG of a picture for each theme; the same bytes on every call with the same numbers."""
    from matplotlib import pyplot

    matplotlib.use("Agg")
    ink = INKS[""]
    colours = {key: ink for key in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")}
    style = {
        **colours, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
        "legend.frameon": False, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
        "grid.color": ink, "grid.alpha": 0.18, "svg.hashsalt": name, "figure.constrained_layout.use": True,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = script(name).draw()
        target = io.BytesIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)
    drawn = target.getvalue()
    # The dark one is the same drawing in another ink.
    return {f"{name}{suffix}.svg": drawn.replace(ink.encode(), other.encode()) for suffix, other in INKS.items()}


def build(folder: Path) -> Iterator[tuple[str, bytes]]:
    """(file name, bytes) of all pictures, from the folder where they are up to date."""
    folder.mkdir(parents=True, exist_ok=True)
    package = hashlib.sha256()
    for path in sorted((ROOT / "kme_dist").rglob("*.py")):
        package.update(path.read_bytes())
    for name in names():
        key = package.copy()
        key.update((SCRIPTS / f"{name}.py").read_bytes())
        key.update(Path(__file__).read_bytes())
        stored = {suffix: folder / f"{name}{suffix}-{key.hexdigest()[:16]}.svg" for suffix in INKS}
        if not all(path.exists() for path in stored.values()):
            for file, content in render(name).items():
                stored["-dark" if file.endswith("-dark.svg") else ""].write_bytes(content)
        for suffix, path in stored.items():
            yield f"{name}{suffix}.svg", path.read_bytes()


def gallery() -> str:
    """The page of all pictures, with the docstrings of their scripts as captions."""
    lines = [
        "# Gallery",
        "",
        "Each picture is drawn by a short script in `docs/pictures` while this site is built, with the package that it",
        "documents: `python -m docs.scripts.pictures FOLDER` draws them all.",
        "",
    ]
    for name in names():
        title = name.replace("-", " ").capitalize()
        caption = " ".join((script(name).__doc__ or "").split())
        lines += [f"## {title}", "", f"![{title}](pictures/{name}.svg)", ""]
        lines += [f"{caption} Script: `docs/pictures/{name}.py`.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    for file, content in build(Path(sys.argv[1])):
        (Path(sys.argv[1]) / file).write_bytes(content)
        print(file)
