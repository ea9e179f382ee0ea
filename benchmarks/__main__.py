"""All benchmarks, and the page that shows what they printed: `make bench`.

    python -m benchmarks [--only gradient,fit] [--again] [--folder runs/bench] [--page docs/benchmarks.md]
    python -m benchmarks --list

Each part of the page is a command of its own, run one after the other. What it printed, its figures and the machine are
kept in FOLDER/NAME.json, and a part that is there is not run again (`--again` does). The page is written after every
part, from what is there. The tables of defaults and of regression take hours: they are read from runs/defaults and
runs/regression, where `python -m benchmarks.defaults` and `benchmarks.regression` write them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import FIGURES, described, load_average, revision
from benchmarks.page import PARTS, write_page

ROOT = Path(__file__).parents[1]


def measure(part, folder):
    """Run the command of a part, print its lines as they come, and keep them with its figures."""
    with tempfile.TemporaryDirectory() as scratch:
        figures, before, began = Path(scratch) / "figures.jsonl", load_average(), time.time()
        command = [sys.executable, "-m", *part.command.split()]
        lines = []
        with subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, FIGURES: str(figures)}, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout:
                print(f"  {line}", end="", flush=True)
                lines.append(line.rstrip())
        record = {
            "command": f"python -m {part.command}",
            "output": lines,
            "exit_code": process.returncode,
            "figures": [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else [],
            "seconds": round(time.time() - began),
            "load_before": before,
            "commit": revision(),
            "date": time.strftime("%Y-%m-%d", time.gmtime(began)),
            "machine": described(),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{part.name}.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    return process.returncode


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"of {','.join(part.name for part in PARTS)}")
    parser.add_argument("--again", action="store_true", help="also the parts that were measured before")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "bench")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    parser.add_argument("--list", action="store_true", help="print the parts, and run nothing")
    given = parser.parse_args(argv)
    names = given.only.split(",") if given.only else [part.name for part in PARTS]
    if unknown := set(names) - {part.name for part in PARTS}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; see --list")
    failed = []
    for part in PARTS:
        if given.list:
            print(f"{part.name:14} python -m {part.command}")
        elif part.name in names and (given.again or not (given.folder / f"{part.name}.json").exists()):
            print(f"\n== {part.name}: python -m {part.command}", flush=True)
            if measure(part, given.folder):
                failed.append(part.name)
            write_page(given.page, given.folder)
    if not given.list:
        write_page(given.page, given.folder)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
