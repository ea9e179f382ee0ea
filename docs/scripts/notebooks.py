"""Notebooks: run by nbclient, and shown on the site with the outputs they are stored with.

    python -m docs.scripts.notebooks            run all, in a temporary folder; the stored ones are not changed
    python -m docs.scripts.notebooks --write    run all, or those named, and store their outputs

Stored outputs are small, and contain no path of the machine that ran them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "notebooks"
LARGEST = 150_000  # bytes of a stored notebook


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


def run(path: Path, write: bool = False, quick: bool = False) -> float:
    """Execute every cell in an empty folder, with fewer rows if quick; an error of a cell is raised. Returns the
    seconds."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "OMP_NUM_THREADS": "1"}
        settings |= {"ROWS": "20000"} if quick else {}
        client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": folder}})
        client.execute(env={**os.environ, **settings})
        for cell in notebook.cells:
            _tidy(cell, folder)
    if write:
        notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        nbformat.write(notebook, path)
    return time.monotonic() - start


def _tidy(cell: Any, folder: str) -> None:
    """Outputs without what differs from run to run: times of cells, folders, colours of a terminal."""
    cell.metadata = {}
    for output in cell.get("outputs", []):
        output.pop("metadata", None)
        if output["output_type"] != "stream":
            output["metadata"] = {}
        texts = [output] if "text" in output else [output.get("data", {})]
        for holder in texts:
            for key in ("text", "text/plain", "text/html"):
                if isinstance(holder.get(key), str):
                    holder[key] = re.sub(r"\x1b\[[0-9;]*m", "", holder[key].replace(folder, "."))


def pages() -> Iterator[tuple[str, str | bytes]]:
    """(file name, content) of every notebook as a page of the site, and of its pictures."""
    for path in paths():
        notebook = json.loads(path.read_text(encoding="utf-8"))
        lines, pictures = [], 0
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                lines += [source, ""]
                continue
            lines += ["```python", source, "```", ""]
            for output in cell["outputs"]:
                data = output.get("data", {})
                if "image/png" in data:
                    pictures += 1
                    name = f"{path.stem}-{pictures}.png"
                    yield name, base64.b64decode("".join(data["image/png"]))
                    lines += [f"![Output of the cell above]({name}){{ .picture }}", ""]
                else:
                    text = "".join(output.get("text", data.get("text/plain", "")))
                    lines += ["```text", text.rstrip(), "```", ""]
        lines += [f"The notebook itself: `docs/notebooks/{path.name}`."]
        yield f"{path.stem}.md", "\n".join(lines)


if __name__ == "__main__":
    chosen = [Path(word) for word in sys.argv[1:] if not word.startswith("--")]
    for notebook_path in chosen or paths():
        seconds = run(notebook_path, write="--write" in sys.argv[1:])
        print(f"{notebook_path.name}: every cell ran, {seconds:.0f} s", flush=True)
