"""The cells measured so far, in OUT/results.jsonl: one line each, appended whole, so that a killed run can resume.

A cell is a set, a split, a model, the kind of rows, and for our own model the code that was measured.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path


def code_of(folder: Path) -> str:
    """A digest of the sources of kme_dist in this folder: figures of other sources are not mixed with these."""
    digest = hashlib.sha256()
    for path in sorted((folder / "kme_dist").rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def key(record):
    """What makes two records figures of the same cell."""
    return tuple(record.get(part) for part in ("set", "split", "model", "development", "code"))


def append(path: Path, record: dict) -> None:
    """Add a record in a single write; a line that a kill left unfinished is closed first."""
    line = json.dumps(record) + "\n"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            line = "\n" + line
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path) -> list[dict]:
    """The last record of every cell; lines that are not whole are skipped."""
    found = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[key(record)] = record
    return list(found.values())


def missing(tasks: list[dict], records: list[dict]) -> list[dict]:
    """Tasks without a record, with a failed one, or stopped by a lower limit than the present one."""
    found = {key(record): record for record in records}

    def is_measured(task):
        record = found.get(key(task))
        if record is None or record["status"] in ("failed", "labels") or record.get("reason") == "not installed":
            return False
        return record["status"] != "over" or record["limit"] >= task["limit"]

    return [task for task in tasks if not is_measured(task)]


def stopped_before(task: dict, records: list[dict]) -> dict | None:
    """The record of another split of the same set and model that was stopped by a limit as high as the present one; of
    several, one without labels."""
    same = ("set", "model", "development", "code")
    found = [
        record
        for record in records
        if record["status"] == "over"
        and record["split"] != task["split"]
        and record["limit"] >= task["limit"]
        and all(record.get(part) == task.get(part) for part in same)
    ]
    return min(found, key=lambda record: "accuracy" in record, default=None)


def not_tried(task: dict, stopped: dict) -> dict:
    """The record of a cell that is not measured because the model was stopped on another split of the set."""
    split = stopped.get("stopped_in", stopped["split"])
    kept = {part: stopped[part] for part in ("features", "classes") if part in stopped}
    reason = f"over {stopped['limit']:g} s in split {split}"
    return {**task, **kept, "status": "over", "reason": reason, "limit": stopped["limit"], "stopped_in": split}
