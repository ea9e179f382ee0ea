"""What `MCEClassifier()` gives on tables that nobody tuned it for, beside other classifiers.

    python -m benchmarks.defaults [--splits 5] [--sets iris,wine] [--models mce,svc] [--out FOLDER] [--resume]
    python -m benchmarks.defaults --development ...    three folds inside the half that has no test rows
    python -m benchmarks.defaults --before COMMIT ...  with MCEClassifier() of that commit, measured in the same run

Accuracy, log loss, Brier score, calibration error and seconds on the shared classification sets (folder KME_DATA or
../shared/data) and those of scikit-learn; which rows are test rows: `benchmarks/defaults/rows.py`. Every cell (set,
split, model) runs in a process of its own on one core and is stopped after `--limit` processor seconds; what is
compared are processor seconds, which depend little on what else the machine does. A model that was stopped on a set is
not tried on further splits of it; if it was stopped after its labels, these alone are measured. Writes
FOLDER/results.jsonl (a line per cell; `--resume` measures only what is missing), FOLDER/summary.txt and
FOLDER/report.html. xgboost and lightgbm are in the extra `bench`; without them their columns are empty.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.defaults import cell, page, results, summary
from benchmarks.defaults.models import MODELS
from benchmarks.defaults.ranks import Table
from benchmarks.defaults.rows import NAMES, available
from benchmarks.machine import load_average

FOLDS = 3


def chosen(given, known, what):
    names = given.split(",") if given else list(known)
    wrong = [name for name in names if name not in known]
    if wrong:
        raise SystemExit(f"unknown {what} {', '.join(wrong)}; use {', '.join(known)}")
    return names


def commit_of(revision=None):
    """The commit of a revision, or of what is checked out (with `-dirty` if files were changed)."""
    asked = (
        ["rev-parse", "--short", "--verify", f"{revision}^{{commit}}"]
        if revision
        else ["describe", "--always", "--dirty"]
    )
    said = subprocess.run(["git", "-C", cell.ROOT, *asked], capture_output=True, text=True)
    if revision and said.returncode:
        raise SystemExit(f"--before {revision} is not a commit of this repository; list them with `git log --oneline`")
    return said.stdout.strip() or None


@contextlib.contextmanager
def checked_out(revision):
    """A temporary folder with the repository at this revision; None without a revision."""
    if revision is None:
        yield None
        return
    git = ["git", "-C", cell.ROOT, "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder) / "before"
        subprocess.run([*git, "add", "--quiet", "--detach", before, revision], check=True)
        try:
            yield before
        finally:
            subprocess.run([*git, "remove", "--force", before], check=True)


def plan(sets, models, splits, development, limit, codes, commits):
    """All cells: every set and model in the first split, then in the next, so that early stops leave whole splits."""
    return [
        {
            "set": name,
            "split": number,
            "model": model,
            "development": development,
            "limit": limit,
            "code": codes.get(model),
            "commit": commits.get(model),
        }
        for number in range(splits)
        for name in sets
        for model in models
    ]


def measure(tasks, path, sources):
    for number, task in enumerate(tasks, 1):
        began = time.time()
        stopped = results.stopped_before(task, results.read(path))
        if stopped is None or "accuracy" in stopped:
            record = cell.run(task if stopped is None else {**task, "labels_only": True}, sources.get(task["model"]))
        else:
            record = results.not_tried(task, stopped)
        results.append(path, record)
        got = f"accuracy {100 * record['accuracy']:.1f} %" if "accuracy" in record else ""
        said, load = record.get("reason", ""), record.get("load", load_average())
        print(
            f"{number}/{len(tasks)} {task['set']} split {task['split']} {MODELS[task['model']].title}: "
            f"{'; '.join(filter(None, (got, said)))} ({time.time() - began:.1f} s, load {load})",
            flush=True,
        )


def report(folder, tasks, splits, development):
    """Write summary and page of the cells in `tasks`, and return the summary."""
    wanted = {results.key(task) for task in tasks}
    records = {results.key(r): r for r in results.read(folder / "results.jsonl") if results.key(r) in wanted}
    ordered = [records[results.key(task)] for task in tasks if results.key(task) in records]
    if not ordered:
        return "no cell was measured\n"
    figures = Table(ordered, splits)
    kind = (
        f"{splits}-fold cross-validation of development rows"
        if development
        else "one split"
        if splits == 1
        else f"mean of {splits} splits"
    )
    text = summary.text(figures, f"MCEClassifier() beside other classifiers: {kind}")
    (folder / "summary.txt").write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(page.render(figures, ordered, development), encoding="utf-8")
    return text


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--sets", help=f"of {','.join(NAMES)}")
    parser.add_argument("--models", help=f"of {','.join(m for m in MODELS if m != 'before')}")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/defaults)")
    parser.add_argument("--resume", action="store_true", help="measure only the cells that FOLDER does not have")
    parser.add_argument("--limit", type=float, default=900, help="processor seconds of a cell")
    parser.add_argument("--development", action="store_true", help="cross-validation inside the development rows")
    parser.add_argument("--before", metavar="COMMIT", help="also measure MCEClassifier() of this commit")
    given = parser.parse_args(argv)
    sets = chosen(given.sets, NAMES if given.sets else available(), "set")
    models = chosen(given.models, [m for m in MODELS if m != "before"], "model") + ["before"] * bool(given.before)
    if given.splits < 1:
        raise SystemExit(f"--splits is {given.splits}; must be an integer >= 1")
    splits = FOLDS if given.development else given.splits
    folder = given.out or Path("runs/defaults-development" if given.development else "runs/defaults")
    path = folder / "results.jsonl"
    if path.exists() and not given.resume:
        raise SystemExit(f"{path} already exists; add to it with --resume, or use another folder with --out")
    commits = {"mce": commit_of(), "before": given.before and commit_of(given.before)}
    folder.mkdir(parents=True, exist_ok=True)
    with checked_out(given.before) as before:
        sources = {"mce": cell.ROOT, "before": before}
        codes = {model: results.code_of(source) for model, source in sources.items() if source and model in models}
        tasks = plan(sets, models, splits, given.development, given.limit, codes, commits)
        todo = results.missing(tasks, results.read(path))
        print(f"{len(todo)} of {len(tasks)} cells to measure; load {load_average()}", flush=True)
        try:
            measure(todo, path, sources)
        finally:  # what was measured is shown, also after ctrl-C
            print("\n" + report(folder, tasks, splits, given.development))
            print(f"{folder / 'report.html'}")


if __name__ == "__main__":
    main()
