"""What the scheduler of a cluster knows about runs, in bounded memory: plain data, filled by telemetry messages.

`kme_dist.ops.dashboard` keeps one `RunBoard` on the scheduler; the page `/kme` and the metrics read it. Curves are
thinned out as they grow, so a page that is opened late or reloaded shows them from the first step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.ops.telemetry import STATUSES, STEP_FIELDS, unpack_scales

NAME = "kme"  # of the board on a scheduler and of the counts on a worker
RUNS_KEPT = 24
KEPT_S = 86_400.0  # of a run that has ended, since its last message
TONES = 8  # colours of runs; those that are shown together are different
POINTS_KEPT = 800  # of a curve; from a longer one every other point is dropped
EVENTS_KEPT = 20
STEP_COLUMNS = (
    "step",
    "objective",
    "risk",
    "complexity",
    "regularization",
    "gradient_norm",
    "accuracy",
    "validation_accuracy",
)
PACE_COLUMNS = ("seconds", "rows_per_second", "waiting_share")


class Curve:
    """Points in columns, at most `most` of them, evenly spaced over all that were ever added.

    `generation` changes when points were dropped: a reader that drew the old ones redraws.
    """

    def __init__(self, names: Sequence[str], most: int = POINTS_KEPT) -> None:
        self.columns: dict[str, list[float]] = {name: [] for name in names}
        self.generation = 0
        self._most, self._stride, self._seen = most, 1, 0
        self._first = names[0]

    def __len__(self) -> int:
        return len(self.columns[self._first])

    def add(self, values: Mapping[str, Any]) -> None:
        self._seen += 1
        if (self._seen - 1) % self._stride:
            return
        for name, column in self.columns.items():
            column.append(float(values.get(name, "nan")))
        if len(self) > self._most:
            for column in self.columns.values():
                del column[1::2]
            self._stride *= 2
            self.generation += 1

    def since(self, start: int) -> dict[str, list[float]]:
        return {name: column[start:] for name, column in self.columns.items()}


@dataclass(frozen=True)
class Scales:
    """Length scales as plotted: base-10 logarithms, an image or one row."""

    grid: np.ndarray
    is_image: bool
    features: int

    @staticmethod
    def of(packed: Mapping[str, Any]) -> Scales:
        return Scales(unpack_scales(packed), bool(packed["image"]), int(packed["features"]))


class BoardRun:
    """One stage of one run, as reported so far."""

    def __init__(self, message: Mapping[str, Any], number: int) -> None:
        self.run, self.stage = str(message["run"])[:120], str(message["stage"])[:40]
        self.pipeline, self.version = str(message.get("pipeline", ""))[:120], str(message.get("version", ""))[:40]
        self.scheduled = bool(message.get("scheduled"))
        self.client = str(message.get("client", ""))
        self.began = float(message["began"])
        self.number = number  # in order of appearance
        self.tone = number % TONES  # its colour
        self.status, self.facts = "running", dict[str, Any]()
        self.last_message = self.progressed = self.began
        self.ended: float | None = None
        self.latest, self.phase = dict[str, float](), ""
        self.chunks: dict[str, int] = {}
        self.scales: Scales | None = None
        self.scales_seen = 0
        self.checkpoint_at: float | None = None
        self.steps, self.pace = Curve(STEP_COLUMNS), Curve(PACE_COLUMNS)
        self.events: deque[tuple[str, float]] = deque(maxlen=EVENTS_KEPT)  # what, and when
        self.rows, self.rows_total = 0, 0  # processed so far, over all steps or chunks; the total, if known
        self.units = (0, 0)  # done and total, of a stage that counts neither steps, chunks nor rows
        self.rows_per_second = 0.0
        self._marks: deque[tuple[float, float, int]] = deque(maxlen=40)  # time, progress, rows: for the time left

    def receive(self, message: Mapping[str, Any]) -> None:
        self.last_message = float(message["at"])
        for step in message.get("steps", ()):
            self._step({name: float(step[name]) for name in STEP_FIELDS if name in step}, str(step.get("phase", "")))
        if message.get("steps"):
            self._mark(self.last_message, self.latest.get("step", 0.0))
        if "chunks" in message:
            self._chunks(message["chunks"])
        if "rows" in message:
            self._rows(message["rows"]["done"], message["rows"]["total"])
        if "units" in message:
            self._units(message["units"]["done"], message["units"]["total"])
        if "scales" in message:
            self.scales, self.scales_seen = Scales.of(message["scales"]), self.scales_seen + 1
        for event in message.get("events", ()):
            what = event.get("facts", {}).get("line") if event["name"] == "said" else event["name"]
            self.events.append((str(what)[:200], float(event["at"])))
            self.progressed = self.last_message  # a stage without a count shows its progress by events
            if event["name"] == "checkpoint":
                self.checkpoint_at = float(event["at"])
        status = message.get("status")
        if status in STATUSES:
            self.status, self.facts = status, dict(message.get("facts", {}))
            self.ended = None if status == "running" else self.last_message

    def _step(self, record: dict[str, float], phase: str) -> None:
        step, before = record.get("step", 0.0), self.latest.get("step", 0.0)
        if len(self.steps) and (step <= before or phase != self.phase):
            self.steps.add({"step": step})  # a gap in the curves: another start, another objective
        # Steps missing from a message still count: a step has as many rows as the one before it.
        made = step - before if self.latest and step > before else 1.0
        self.rows += int(made * record.get("rows", 0) * record.get("batches", 1))
        self.latest, self.phase = {**self.latest, **record}, phase
        self.rows_per_second = record.get("rows_per_second", self.rows_per_second)
        self.steps.add(record)
        self.pace.add(record)

    def _chunks(self, chunks: Mapping[str, int]) -> None:
        self.chunks = {str(name): int(count) for name, count in chunks.items()}
        self.rows = self.chunks["rows"]
        self._mark(self.last_message, self.chunks["done"] + self.chunks["failed"])
        self._measure_pace()

    def _rows(self, done: int, total: int) -> None:
        self.rows, self.rows_total = int(done), int(total)
        self._mark(self.last_message, self.rows)
        self._measure_pace()

    def _units(self, done: int, total: int) -> None:
        if int(done) < self.units[0]:
            self._marks.clear()  # another part of the stage
        self.units = (int(done), int(total))
        self._mark(self.last_message, int(done))

    def _measure_pace(self) -> None:
        when, _, rows = self._marks[0]
        if self.last_message - when > 0.5:
            self.rows_per_second = (self.rows - rows) / (self.last_message - when)
            self.pace.add({"seconds": self.last_message - self.began, "rows_per_second": self.rows_per_second})

    def _mark(self, when: float, far: float) -> None:
        if not self._marks or far != self._marks[-1][1]:
            self.progressed = when
            self._marks.append((when, far, self.rows))

    @property
    def key(self) -> tuple[str, str]:
        return self.run, self.stage

    @property
    def done(self) -> float:
        if self.chunks:
            return float(self.chunks["done"] + self.chunks["failed"])
        return float(self.rows if self.rows_total else self.latest.get("step", self.units[0]))

    @property
    def total(self) -> float:
        if self.chunks:
            return float(self.chunks["total"])
        return float(self.rows_total or self.latest.get("steps", self.units[1]))

    @property
    def share(self) -> float:
        """The fraction that is done; all of it after a success, also where learning stopped early."""
        if self.status == "succeeded":
            return 1.0
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def seconds(self) -> float:
        return max(0.0, (self.ended or time.time()) - self.began)

    @property
    def seconds_left(self) -> float | None:
        """By the pace of the last messages; None if it is unknown."""
        if self.status != "running" or len(self._marks) < 2 or not self.total:
            return None
        (then, before, _), (_, now, _) = self._marks[0], self._marks[-1]
        elapsed = max(time.time(), self._marks[-1][0]) - then  # a step that takes long slows the pace
        return None if now <= before else (self.total - now) * elapsed / (now - before)


class RunBoard:
    """The latest runs of a cluster, each in bounded memory."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], BoardRun] = {}
        self.last_start: dict[tuple[str, str], float] = {}
        self.last_success: dict[tuple[str, str], float] = {}
        self.last_duration: dict[tuple[str, str], float] = {}
        self.scheduled: dict[tuple[str, str], bool] = {}  # whether a schedule has started it, once or more
        self.certificate_expires: float | None = None  # that of the scheduler, if it has one
        self._number = 0

    def receive(self, message: Mapping[str, Any]) -> None:
        key = (str(message["run"])[:120], str(message["stage"])[:40])
        found = self.runs.get(key)
        if found is None or float(message["began"]) > found.began:  # the same run, restarted
            before, found = found, BoardRun(message, self._number if found is None else found.number)
            self._number += before is None
            self.runs.pop(key, None)
            self.runs[key] = found
            self._forget_old(float(message["at"]))
        if float(message["began"]) < found.began:
            return  # a late message of an earlier start
        found.receive(message)
        self._remember(found)

    def _remember(self, run: BoardRun) -> None:
        """What alerts use is kept longer than the runs themselves."""
        what = (run.pipeline, run.stage)
        self.last_start[what] = max(run.began, self.last_start.get(what, 0.0))
        if run.status == "succeeded" and run.ended is not None:
            self.last_success[what], self.last_duration[what] = run.ended, run.seconds
        self.scheduled[what] = run.scheduled or self.scheduled.get(what, False)
        for table in (self.last_start, self.last_success, self.last_duration, self.scheduled):
            while len(table) > 4 * RUNS_KEPT:
                del table[next(iter(table))]

    def _forget_old(self, now: float) -> None:
        for run in list(self.runs.values()):
            if run.status != "running" and run.last_message < now - KEPT_S:
                del self.runs[run.key]
        while len(self.runs) > RUNS_KEPT:
            ended = [run for run in self.runs.values() if run.status != "running"]
            del self.runs[min(ended or self.runs.values(), key=lambda run: run.last_message).key]

    def client_left(self, client: str) -> None:
        """A run whose process disappeared without a message does not continue on this cluster."""
        for run in self.runs.values():
            if run.status == "running" and run.client == client:
                run.status, run.ended = "lost", time.time()

    def latest(self, most: int, name: str | None = None) -> list[BoardRun]:
        """Running ones first, then those with the latest messages; `name` is an id, or that of a config."""
        wanted = [run for run in self.runs.values() if name in (None, run.run, run.pipeline)]
        wanted.sort(key=lambda run: (run.status != "running", -run.last_message))
        shown = sorted(wanted[:most], key=lambda run: run.number)
        for place, run in enumerate(shown):
            taken = {other.tone for other in shown[:place]}
            if run.tone in taken and len(taken) < TONES:
                run.tone = next(tone for tone in range(TONES) if tone not in taken)
        return shown


def duration(seconds: float) -> str:
    """For people, on both pages."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
