"""What a run reports while it runs: to the page `/kme` of the Dask dashboard, to Prometheus, to a log of JSON lines.

    with telemetry(executor, run="digits-1", stage="learn", pipeline="digits", log="run.log") as report:
        learn_on_dataset(..., executor=executor, callback=report.step)

    report.step(record)                          the record of a learning step
    report.chunks(done, failed, total, rows)     progress of a pass over the data
    report.rows(done, total)                     the same if only rows are known
    report.scales(kernel, shape=(28, 28))        length scales, as an image if rows are images
    report.watching(checkpoints, shape)          the same checkpoints, which report themselves and their length scales
    report.event("checkpoint", step=40)          anything else: a name and a few facts
    report.say("fit: column 3 of 16")            a message for people

Reporting is cheap and never blocks: reports are collected for a fraction of a second and sent from the client's own
thread, one small message at a time. Without a cluster only the log is written. A scheduler that is gone or does not
respond never makes a run fail. Row counts are reported; rows and credentials never are.

What workers count themselves is in `kme_dist.meter`.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kme_dist.errors import ConfigError, DataError, KMEError

TOPIC = "kme"
STATUSES = ("running", "succeeded", "failed", "interrupted", "lost")
# The fields of a step's record that are sent.
STEP_FIELDS = (
    "step",
    "steps",
    "seconds",
    "objective",
    "risk",
    "complexity",
    "regularization",
    "gradient_norm",
    "accuracy",
    "validation_accuracy",
    "rows",
    "batches",
    "rows_per_second",
    "waiting_share",
    "workers",
    "jitter",
)
SECONDS_BETWEEN_MESSAGES = 0.3
SECONDS_BETWEEN_LINES = 5.0  # of steps and chunks in the log; events are all written
SECONDS_BETWEEN_SCALES = 2.0
BEAT_S = 10.0  # between two messages of a stage that has nothing to report
STEPS_IN_A_MESSAGE = 64
SCALES_IN_A_MESSAGE = 32 * 32
LAST_MESSAGE_S = 2.0  # timeout of the last message
_SECRET = re.compile(r"pass|secret|token|credential|signature|(^|_)key$", re.IGNORECASE)
_USER_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY_OF_ADDRESS = re.compile(r"(://[^\s?#]+)\?[^\s#]+")


@contextlib.contextmanager
def telemetry(
    cluster: Any = None,
    *,
    run: str,
    stage: str,
    pipeline: str | None = None,
    scheduled: bool = False,
    log: str | Path | TextIO | None = None,
) -> Iterator[Telemetry]:
    """Report `stage` of `run` from its start to its end, whether it succeeds or fails.

    Parameters
    ----------
    cluster : a `distributed.Client`, an executor, or None; tasks sent inside the block belong to the span (run, stage)
    run : the id of the run or of the job, which no other has
    pipeline : what recurs from run to run: the name of the config, the label of its runs; default: the stage
    scheduled : started by a schedule: a success that does not come is worth an alert
    log : a path to append JSON lines to, "-" for stderr, or an open file
    """
    report = Telemetry(cluster, run=run, stage=stage, pipeline=pipeline, scheduled=scheduled, log=log)
    try:
        with report.span():
            yield report
    except BaseException as error:
        report.close("failed" if isinstance(error, Exception) else "interrupted", **_facts_of(error))
        raise
    report.close()


class Telemetry:
    """Reports of one stage of one run. See the top of this file."""

    def __init__(
        self,
        cluster: Any = None,
        *,
        run: str,
        stage: str,
        pipeline: str | None = None,
        scheduled: bool = False,
        log: str | Path | TextIO | None = None,
    ) -> None:
        self.run, self.stage, self.pipeline = str(run), str(stage), str(pipeline or stage)
        self.scheduled = scheduled
        self._cluster = cluster
        self._lock = threading.Lock()
        self._waiting: dict[str, Any] = {}
        self._scheduled, self._not_before, self._beating = False, 0.0, False
        self._next_scales = self._next_line = 0.0
        self._closed = False
        self._began = time.time()
        self._log = _JsonLines(log) if log is not None else None
        self._queue(status="running")
        self._line("info", "started")

    def step(self, record: Mapping[str, Any]) -> None:
        """The record of one learning step; usable as `callback` of every loop."""
        kept: dict[str, Any] = {name: float(record[name]) for name in STEP_FIELDS if record.get(name) is not None}
        kept["phase"] = str(record.get("phase", ""))
        with self._lock:
            steps = self._waiting.setdefault("steps", [])
            steps.append(kept)
            if len(steps) > 2 * STEPS_IN_A_MESSAGE:
                del steps[:-1:2]  # hundreds a second: every other one gives the same curve
        self._schedule()
        self._line_if_due("step", kept)

    def chunks(self, done: int, failed: int, total: int, rows: int, **counts: int) -> None:
        """Number of chunks done and failed so far, their total, and the rows of those done.

        `counts` may contain `retried` and `rejected`, also so far.
        """
        progress = {"done": int(done), "failed": int(failed), "total": int(total), "rows": int(rows)}
        progress |= {name: int(count) for name, count in counts.items()}
        self._queue(chunks=progress)
        self._line_if_due("chunks", progress)

    def rows(self, done: int, total: int) -> None:
        """Number of rows done, and their total; usable as `progress` of a pass over a data set."""
        progress = {"done": int(done), "total": int(total)}
        self._queue(rows=progress)
        self._line_if_due("rows", progress)

    def watching(self, checkpoints: Any, shape: tuple[int, ...] | None = None) -> Any:
        """Checkpoints to pass to a loop instead of `checkpoints`; they report writes and length scales."""
        return _ReportedCheckpoints(checkpoints, self, shape)

    def scales(self, values: Any, shape: tuple[int, ...] | None = None, *, last: bool = False) -> None:
        """Length scales: a kernel or an array. With the shape of one row, (28, 28) say, they are shown as an image.

        Sent every SECONDS_BETWEEN_SCALES at most, except the `last`.
        """
        now = time.monotonic()
        if self._client is None or (now < self._next_scales and not last):
            return
        self._next_scales = now + SECONDS_BETWEEN_SCALES
        packed = pack_scales(_length_scales(values), shape)
        if packed is not None:
            self._queue(scales=packed)

    def event(self, name: str, *, level: str = "info", **facts: Any) -> None:
        """An event: `checkpoint`, `resumed`, `chunk-failed`, ..."""
        clean = _clean(facts)
        with self._lock:
            self._waiting.setdefault("events", []).append({"name": str(name), "at": time.time(), "facts": clean})
            del self._waiting["events"][:-STEPS_IN_A_MESSAGE]
        self._schedule()
        self._line(level, name, **clean)

    def say(self, line: str) -> None:
        """A message for people, on the card and in the log; usable as `report` of a fit, some of whose lines also say
        how far it is."""
        done, total = getattr(line, "done", None), getattr(line, "total", None)
        if done is not None and total is not None:
            self._queue(units={"done": int(done), "total": int(total)})
        self.event("said", line=line)

    def close(self, status: str = "succeeded", **facts: Any) -> None:
        """The stage has ended; queued reports are sent before this returns."""
        if self._closed:
            return
        self._closed = True
        clean = _clean(facts)
        with self._lock:
            self._waiting |= {"status": status, "facts": clean}
        client = self._client
        if client is not None and not client.asynchronous:
            with contextlib.suppress(*_send_errors()):
                client.sync(self._send, callback_timeout=LAST_MESSAGE_S)
        else:
            self._schedule()
        level = "info" if status == "succeeded" else "error"
        self._line(level, "ended", status=status, duration_s=round(time.time() - self._began, 3), **clean)
        if self._log is not None:
            self._log.close()

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Tasks submitted in this block are counted together in Dask's fine performance metrics."""
        if not hasattr(self._cluster, "client") and self._client is None:
            yield
            return
        from distributed import span

        with span(self.run, self.stage):
            yield

    # --- to the scheduler ----------------------------------------------------------------------------

    @property
    def _client(self) -> Any:
        return _client_of(self._cluster)  # looked up each time: some executors open their cluster on first use

    def _queue(self, **news: Any) -> None:
        with self._lock:
            self._waiting |= news
        self._schedule()

    def _schedule(self) -> None:
        """Have the queue sent within a fraction of a second, whether more follows or not."""
        client = self._client
        if client is None or self._scheduled:
            return
        self._scheduled = True
        try:
            client.loop.add_callback(self._send_when_due)
        except (RuntimeError, AttributeError):  # the client's thread has ended: nothing can be sent
            self._cluster = None

    async def _send_when_due(self) -> None:
        await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
        self._not_before = time.monotonic() + SECONDS_BETWEEN_MESSAGES
        self._scheduled = False  # before the message is built: later reports schedule the next one
        with contextlib.suppress(*_send_errors()):
            await self._send()
        client = self._client
        if not self._beating and getattr(client, "status", "") == "running":
            self._beating = True
            client.loop.call_later(BEAT_S, self._beat)

    def _beat(self) -> None:
        """A stage may have nothing to report for minutes (a factorisation): show that its process lives."""
        self._beating = False
        if not self._closed:
            self._queue(alive=True)

    async def _send(self) -> None:
        with self._lock:
            news, self._waiting = self._waiting, {}
        client = self._client
        if news and client is not None and client.scheduler is not None:
            await client.scheduler.log_event(topic=TOPIC, msg=self._message(news))

    def _message(self, news: dict[str, Any]) -> dict[str, Any]:
        """Every message identifies its run, so that a page that was opened late understands any of them."""
        news["steps"] = _thinned(news.get("steps", []), STEPS_IN_A_MESSAGE)
        return {
            "run": self.run,
            "stage": self.stage,
            "pipeline": self.pipeline,
            "scheduled": self.scheduled,
            "client": str(getattr(self._client, "id", "")),
            "version": _version(),
            "began": self._began,
            "at": time.time(),
            **news,
        }

    # --- to the log ----------------------------------------------------------------------------------

    def _line_if_due(self, event: str, facts: Mapping[str, Any]) -> None:
        if self._log is not None and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + SECONDS_BETWEEN_LINES
            self._line("info", event, **facts)

    def _line(self, level: str, event: str, **facts: Any) -> None:
        if self._log is not None:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            named = {"run": self.run, "pipeline": self.pipeline, "stage": self.stage}
            self._log.write({**facts, "ts": now, "level": level, **named, "event": event})


class _ReportedCheckpoints:
    """Checkpoints that report when one is written."""

    def __init__(self, checkpoints: Any, report: Telemetry, shape: tuple[int, ...] | None) -> None:
        self._checkpoints, self._report, self._shape = checkpoints, report, shape

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoints, name)

    def offer(self, snapshot: Any, identity: Mapping[str, Any]) -> bool:
        saved = bool(self._checkpoints.offer(snapshot, identity))
        if saved:
            self._report.event("checkpoint", step=snapshot.step)
        self._show(snapshot)
        return saved

    def save(self, snapshot: Any, identity: Mapping[str, Any]) -> None:
        self._checkpoints.save(snapshot, identity)
        self._report.event("checkpoint", step=snapshot.step)
        self._show(snapshot, last=True)

    def _show(self, snapshot: Any, last: bool = False) -> None:
        scales = _named_scales(snapshot.parameters)
        if scales.size:
            self._report.scales(np.exp(scales), self._shape, last=last)  # snapshots contain logarithms


class _JsonLines:
    """One JSON object per line, never a partial one."""

    def __init__(self, target: str | Path | TextIO) -> None:
        self._own = isinstance(target, str | Path) and str(target) != "-"
        self._lock = threading.Lock()
        if isinstance(target, str | Path):
            self._file: TextIO = open(target, "a", encoding="utf-8") if self._own else sys.stderr  # noqa: SIM115
        else:
            self._file = target

    def write(self, line: dict[str, Any]) -> None:
        ordered = {name: line.pop(name) for name in ("ts", "level", "run", "pipeline", "stage", "event")} | line
        text = json.dumps({name: _finite(value) for name, value in ordered.items()}, default=str) + "\n"
        with self._lock, contextlib.suppress(OSError, ValueError):  # a full disk or a closed pipe must not stop a run
            self._file.write(text)
            self._file.flush()

    def close(self) -> None:
        if self._own:
            self._file.close()


@contextlib.contextmanager
def performance_report(cluster: Any, path: str | Path | None) -> Iterator[None]:
    """Write Dask's performance report of the block as one HTML file; no effect without a path or a cluster."""
    client = _client_of(cluster)
    if client is None or path is None:
        yield
        return
    from distributed import performance_report as report

    file = Path(path)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(f"the performance report cannot be written to {file}; choose a file in a writable folder")
    dask_report = report(filename=str(file), mode="inline")
    with client.as_current():
        dask_report.__enter__()
    try:
        yield
    finally:
        try:
            with client.as_current():
                dask_report.__exit__(None, None, None)
        except _send_errors() as error:  # a missing report is no reason to fail
            logging.getLogger("kme_dist").warning(f"no performance report: {type(error).__name__}: {error}")


# --- content of the messages ------------------------------------------------------------------------


def pack_scales(values: np.ndarray, shape: tuple[int, ...] | None = None) -> dict[str, Any] | None:
    """Length scales in about a kilobyte: logarithms, one byte each, between the smallest and the largest.

    If there are too many, neighbours are averaged; colour planes (h, w, c) are averaged too.
    """
    logs = np.log10(np.asarray(values, dtype=np.float64).reshape(-1))
    logs = np.where(np.isfinite(logs), logs, np.nan)
    if logs.size < 2 or np.isnan(logs).all():
        return None
    image = _as_image(logs, shape)
    grid = image if image is not None else logs[None, :]
    while grid.size > SCALES_IN_A_MESSAGE:
        grid = _halved(grid)
    low, high = float(np.nanmin(grid)), float(np.nanmax(grid))
    levels = np.nan_to_num((grid - low) / max(high - low, 1e-12) * 255)
    return {
        "shape": list(grid.shape),
        "image": image is not None,
        "features": int(logs.size),
        "low": low,
        "high": high,
        "levels": levels.astype(np.uint8).tobytes(),
    }


def unpack_scales(packed: Mapping[str, Any]) -> np.ndarray:
    """The base-10 logarithms, to within a 255th of their range."""
    levels = np.frombuffer(packed["levels"], dtype=np.uint8).reshape(packed["shape"])
    grid: np.ndarray = packed["low"] + levels / 255.0 * (packed["high"] - packed["low"])
    return grid


def _as_image(logs: np.ndarray, shape: tuple[int, ...] | None) -> np.ndarray | None:
    if shape is None or len(shape) < 2 or math.prod(shape) != logs.size or min(shape[:2]) < 2:
        return None
    planes = logs.reshape(shape[0], shape[1], -1)
    image: np.ndarray = planes.mean(axis=2)
    return image


def _halved(grid: np.ndarray) -> np.ndarray:
    """Average neighbours, along both axes if there are two."""
    for axis in (0, 1):
        if grid.shape[axis] > 1:
            even = grid.shape[axis] // 2 * 2
            first, second = (np.take(grid, range(start, even, 2), axis=axis) for start in (0, 1))
            grid = (first + second) / 2
    return grid


def _length_scales(values: Any) -> np.ndarray:
    parameters = getattr(values, "parameters", None)
    return np.asarray(values, dtype=np.float64) if parameters is None else _named_scales(parameters)


def _named_scales(parameters: Mapping[str, Any]) -> np.ndarray:
    """The length scales; of a kernel with several parts, those of the part that has most."""
    found = [np.ravel(value) for name, value in parameters.items() if name.rsplit(".", 1)[-1] == "length_scale"]
    return max(found, key=np.size) if found else np.empty(0)


def _client_of(cluster: Any) -> Any:
    """The client itself, the client of an executor, else None."""
    return cluster if hasattr(cluster, "log_event") else getattr(cluster, "client", None)


def _thinned(steps: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    if len(steps) <= most:
        return steps
    kept = np.linspace(0, len(steps) - 1, most).round().astype(int)
    return [steps[i] for i in kept]


def _facts_of(error: BaseException) -> dict[str, Any]:
    """What may be reported of an error. Messages about data may quote rows, and bugs may quote anything."""
    facts: dict[str, Any] = {"error": type(error).__name__, "exit_code": getattr(error, "exit_code", 1)}
    if isinstance(error, KMEError) and not isinstance(error, DataError):
        facts["message"] = str(error)
    return facts


def _clean(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Plain facts: numbers, flags and short texts, without what looks like a secret."""
    return {str(name): "***" if _SECRET.search(str(name)) else _plain(value) for name, value in facts.items()}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float | np.generic):
        return _finite(float(value))
    text = _QUERY_OF_ADDRESS.sub(r"\1", _USER_IN_ADDRESS.sub("", str(value)))
    return text if len(text) <= 400 else text[:400] + "…"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@functools.cache
def _version() -> str:
    return metadata.version("kme-dist")


def _send_errors() -> tuple[type[BaseException], ...]:
    """Errors of sending: the scheduler is gone or shutting down, or the client was closed."""
    from distributed.client import ClosedClientError
    from distributed.comm import CommClosedError

    return (OSError, TimeoutError, CommClosedError, ClosedClientError, RuntimeError, AttributeError)
