"""The runs of a cluster, kept by its scheduler: the page `/kme` of the Dask dashboard and `kme_*` Prometheus metrics.

    install(client)                                        on a cluster that runs already; a second time changes nothing
    dask scheduler --preload kme_dist.dashboard            or from the start
    dask worker ADDRESS --preload kme_dist.dashboard

The commands install it by themselves. `RunBoard` gathers what runs report through `kme_dist.ops.telemetry` in
bounded memory, so a page that is opened late or loaded again shows the whole curves. `TileMeter` counts on each worker.
Nothing here is needed for a run to be right: what matters is in the run folder.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from kme_dist import meter
from kme_dist.errors import KMEError
from kme_dist.ops import telemetry
from kme_dist.ops.certs import ends_at
from kme_dist.ops.telemetry import STATUSES, STEP_FIELDS, TOPIC

NAME = "kme"
RUNS_KEPT = 24
POINTS_KEPT = 800  # of a curve; a longer one loses every other point
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

    `generation` changes when points were dropped: a reader that drew the old ones draws again.
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
    """Length scales as they are drawn: base-10 logarithms, an image or one row."""

    grid: np.ndarray
    is_image: bool
    features: int

    @staticmethod
    def of(packed: Mapping[str, Any]) -> Scales:
        return Scales(telemetry.unpack_scales(packed), bool(packed["image"]), int(packed["features"]))


class Run:
    """One stage of one run, as told so far."""

    def __init__(self, message: Mapping[str, Any], number: int) -> None:
        self.run, self.stage = str(message["run"])[:120], str(message["stage"])[:40]
        self.pipeline, self.version = str(message.get("pipeline", ""))[:120], str(message.get("version", ""))[:40]
        self.client = str(message.get("client", ""))
        self.began = float(message["began"])
        self.number = number  # in order of appearance: decides its colour
        self.status, self.facts = "running", dict[str, Any]()
        self.heard = self.progressed = self.began
        self.ended: float | None = None
        self.latest, self.phase = dict[str, float](), ""
        self.chunks: dict[str, int] = {}
        self.scales: Scales | None = None
        self.scales_seen = 0
        self.checkpoint_at: float | None = None
        self.steps, self.pace = Curve(STEP_COLUMNS), Curve(PACE_COLUMNS)
        self.events: deque[tuple[str, float]] = deque(maxlen=EVENTS_KEPT)  # what, and when
        self.rows, self.rows_total = 0, 0  # worked through by now, over all steps or chunks; of how many, where known
        self.rows_per_second = 0.0
        self._marks: deque[tuple[float, float, int]] = deque(maxlen=40)  # when, how far, rows: for the time left

    def hear(self, message: Mapping[str, Any]) -> None:
        self.heard = float(message["at"])
        for told in message.get("steps", ()):
            self._step({name: float(told[name]) for name in STEP_FIELDS if name in told}, str(told.get("phase", "")))
        if message.get("steps"):
            self._mark(self.heard, self.latest.get("step", 0.0))
        if "chunks" in message:
            self._chunks(message["chunks"])
        if "rows" in message:
            self._rows(message["rows"]["done"], message["rows"]["total"])
        if "scales" in message:
            self.scales, self.scales_seen = Scales.of(message["scales"]), self.scales_seen + 1
        for event in message.get("events", ()):
            what = event.get("facts", {}).get("line") if event["name"] == "said" else event["name"]
            self.events.append((str(what)[:200], float(event["at"])))
            self.progressed = self.heard  # a stage that counts nothing tells by events that it goes on
            if event["name"] == "checkpoint":
                self.checkpoint_at = float(event["at"])
        status = message.get("status")
        if status in STATUSES:
            self.status, self.facts = status, dict(message.get("facts", {}))
            self.ended = None if status == "running" else self.heard

    def _step(self, record: dict[str, float], phase: str) -> None:
        step, before = record.get("step", 0.0), self.latest.get("step", 0.0)
        if len(self.steps) and (step <= before or phase != self.phase):
            self.steps.add({"step": step})  # a gap in the curves: another start, another objective
        # Steps left out of a message still count: a step has as many rows as the one before it.
        made = step - before if self.latest and step > before else 1.0
        self.rows += int(made * record.get("rows", 0) * record.get("batches", 1))
        self.latest, self.phase = {**self.latest, **record}, phase
        self.rows_per_second = record.get("rows_per_second", self.rows_per_second)
        self.steps.add(record)
        self.pace.add(record)

    def _chunks(self, chunks: Mapping[str, int]) -> None:
        self.chunks = {str(name): int(count) for name, count in chunks.items()}
        self.rows = self.chunks["rows"]
        self._mark(self.heard, self.chunks["done"] + self.chunks["failed"])
        self._measure_pace()

    def _rows(self, done: int, total: int) -> None:
        self.rows, self.rows_total = int(done), int(total)
        self._mark(self.heard, self.rows)
        self._measure_pace()

    def _measure_pace(self) -> None:
        when, _, rows = self._marks[0]
        if self.heard - when > 0.5:
            self.rows_per_second = (self.rows - rows) / (self.heard - when)
            self.pace.add({"seconds": self.heard - self.began, "rows_per_second": self.rows_per_second})

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
        return float(self.rows if self.rows_total else self.latest.get("step", 0))

    @property
    def total(self) -> float:
        return float(self.chunks["total"] if self.chunks else self.rows_total or self.latest.get("steps", 0))

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def seconds(self) -> float:
        return max(0.0, (self.ended or time.time()) - self.began)

    @property
    def seconds_left(self) -> float | None:
        """By the pace of the last messages; None where nothing can be said."""
        if self.status != "running" or len(self._marks) < 2 or not self.total:
            return None
        (then, before, _), (_, now, _) = self._marks[0], self._marks[-1]
        elapsed = max(time.time(), self._marks[-1][0]) - then  # a step that takes long slows the pace
        return None if now <= before else (self.total - now) * elapsed / (now - before)


class RunBoard(SchedulerPlugin):  # type: ignore[misc]
    """What the scheduler knows about runs: the latest of them, each in bounded memory."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], Run] = {}
        self.last_start: dict[tuple[str, str], float] = {}
        self.last_success: dict[tuple[str, str], float] = {}
        self.last_duration: dict[tuple[str, str], float] = {}
        self.certificate_ends: float | None = None  # of the scheduler's own, where it has one
        self._number = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return (RunBoard, ())  # travels empty

    async def start(self, scheduler: Any) -> None:
        """Also called by Dask when a client registers the plugin on a scheduler that runs already."""
        from kme_dist.ops import metrics

        scheduler.extensions[NAME] = self
        # Once: the scheduler keeps the certificate it was started with, whatever its file holds later.
        certificate = getattr(scheduler.security, "tls_scheduler_cert", None)
        if certificate and scheduler.address.startswith("tls"):
            with contextlib.suppress(KMEError, ValueError):
                self.certificate_ends = ends_at(certificate)
        for _, message in scheduler.get_events(TOPIC):  # told before anybody listened
            self.log_event(TOPIC, message)
        metrics.show_board(self)
        _add_page(scheduler)

    def log_event(self, topic: str, msg: Any) -> None:
        if topic != TOPIC or not isinstance(msg, Mapping):
            return
        key = (str(msg["run"])[:120], str(msg["stage"])[:40])
        found = self.runs.get(key)
        if found is None or float(msg["began"]) > found.began:  # the same run, started anew
            found = Run(msg, self._number if found is None else found.number)
            self._number += 1
            self.runs.pop(key, None)
            self.runs[key] = found
            self._forget_old()
        if float(msg["began"]) < found.began:
            return  # of an earlier start, arrived late
        found.hear(msg)
        self._remember(found)

    def _remember(self, run: Run) -> None:
        """What alerts ask for outlives the runs themselves."""
        what = (run.pipeline, run.stage)
        self.last_start[what] = max(run.began, self.last_start.get(what, 0.0))
        if run.status == "succeeded" and run.ended is not None:
            self.last_success[what], self.last_duration[what] = run.ended, run.seconds
        for table in (self.last_start, self.last_success, self.last_duration):
            while len(table) > 4 * RUNS_KEPT:
                del table[next(iter(table))]

    def _forget_old(self) -> None:
        while len(self.runs) > RUNS_KEPT:
            ended = [run for run in self.runs.values() if run.status != "running"]
            del self.runs[min(ended or self.runs.values(), key=lambda run: run.heard).key]

    def remove_client(self, scheduler: Any, client: str) -> None:
        """A run whose process is gone without a word will not go on here."""
        for run in self.runs.values():
            if run.status == "running" and run.client == client:
                run.status, run.ended = "lost", time.time()

    def latest(self, most: int, name: str | None = None) -> list[Run]:
        """Those that run first, then the ones heard of last."""
        wanted = [run for run in self.runs.values() if name in (None, run.run)]
        wanted.sort(key=lambda run: (run.status != "running", -run.heard))
        return sorted(wanted[:most], key=lambda run: run.number)


class TileMeter(WorkerPlugin):  # type: ignore[misc]
    """Counts calls, rows and seconds on a worker, for its /metrics and for the table of workers."""

    name = NAME
    idempotent = True

    def __reduce__(self) -> tuple[Any, ...]:
        return (TileMeter, ())

    def setup(self, worker: Any) -> None:
        from kme_dist.ops import metrics

        self.meters = metrics.worker_meters()
        self.counts = {"rows": 0, "calls": 0, "failed": 0, "seconds": 0.0}
        self._lock = threading.Lock()
        worker.metrics[NAME] = self._report  # travels with every heartbeat
        meter.count_by(self)

    def teardown(self, worker: Any) -> None:
        meter.unregister(self)
        worker.metrics.pop(NAME, None)

    async def _report(self, worker: Any) -> dict[str, float]:
        return dict(self.counts)

    def call(self, name: str, seconds: float, result: Any, *, failed: bool) -> None:
        """A call has ended; `rows` and `bytes` are counted where its result says so."""
        rows, written = _whole(result, "rows"), _whole(result, "bytes")
        self.meters.tile(name, seconds, rows, written, failed=failed)
        with self._lock:
            self.counts["calls"] += 1
            self.counts["failed"] += failed
            self.counts["rows"] += rows
            self.counts["seconds"] += seconds

    def stage(self, name: str, seconds: float) -> None:
        self.meters.stage(name, seconds)


class QuietEnd(WorkerPlugin):  # type: ignore[misc]
    """A worker that is closing says nothing of a heartbeat that found the door shut: it is no fault of anybody's."""

    name = f"{NAME}-quiet-end"
    idempotent = True
    loggers = ("distributed.worker", "tornado.application")  # both tell the same exception

    def __reduce__(self) -> tuple[Any, ...]:
        return (QuietEnd, ())

    def setup(self, worker: Any) -> None:
        for logger in self.loggers:
            logging.getLogger(logger).addFilter(self.keeps)

    @staticmethod
    def keeps(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, RuntimeError) and str(error) == "ConnectionPool is closed")


def _whole(result: Any, name: str) -> int:
    result = getattr(result, "record", result)  # some results hold their record beside other things
    found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


# --- putting it in place ----------------------------------------------------------------------------


def install(client: Any) -> str | None:
    """Board, page and meters on the cluster of `client`, where they are not there yet.

    Returns None, or why it could not be done: a cluster that cannot show a run can still do it.
    """
    try:
        client.register_plugin(RunBoard())
        client.register_plugin(TileMeter())
        client.register_plugin(QuietEnd())
    except Exception as error:  # whatever the scheduler could not import or refused, as it was raised there
        return f"no /kme page on this cluster: {type(error).__name__}: {error}"
    return None


async def dask_setup(server: Any) -> None:
    """Called by `--preload kme_dist.dashboard`, on a scheduler or a worker."""
    if hasattr(server, "add_plugin"):
        board = RunBoard()
        server.add_plugin(board, name=NAME, idempotent=True)
        await board.start(server)
    elif hasattr(server, "plugin_add"):
        await server.plugin_add(plugin=TileMeter(), name=NAME)
        await server.plugin_add(plugin=QuietEnd(), name=QuietEnd.name)


def has_page(dask_scheduler: Any) -> bool:
    """On the scheduler: whether its dashboard shows the page."""
    from distributed.dashboard import scheduler as dask_pages

    from kme_dist.ops.dashboard_page import PATH

    if not hasattr(dask_scheduler, "http_application"):
        return False
    return PATH.strip("/") in dask_pages.template_variables(dask_scheduler)["pages"]


def _add_page(scheduler: Any) -> None:
    """The page beside Dask's own, with a tab in their navigation; nothing where there is no dashboard."""
    from distributed.dashboard import scheduler as dask_pages
    from distributed.dashboard.core import BokehApplication, BokehTornado
    from tornado.ioloop import IOLoop

    from kme_dist.ops.dashboard_page import PATH, document

    applications = getattr(scheduler.http_application, "applications", [])
    there = next((app for app in applications if isinstance(app, BokehTornado)), None)
    if there is None:
        return
    variables = dask_pages.template_variables(scheduler)
    if PATH.strip("/") in variables["pages"]:
        return
    variables["pages"].append(PATH.strip("/"))
    page = BokehApplication({PATH: document}, scheduler, prefix=there.prefix, template_variables=variables)
    scheduler.http_application.add_application(page)
    page.initialize(IOLoop.current())
    page.start()
