"""`kme_*` metrics, on the /metrics endpoints of Dask's schedulers and workers.

    scheduler    the state of each run, from the messages it sends: status, steps, chunks, loss, rows, times
    workers      what was computed on this worker: kme_rows_total, kme_tile_duration_seconds, kme_stage_seconds_total

Dask serves the default registry of `prometheus_client`, so registering there is enough. Names are in base units,
counters end in `_total`; labels are those of runs that are still on the board, so their number is bounded.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator

from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kme_dist.ops.board import BoardRun, RunBoard
from kme_dist.ops.telemetry import STATUSES

RUN = ("run_id", "pipeline", "phase")
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
# Metric, help text, field of a step's record.
TRAIN = (
    ("kme_train_step", "Learning steps made", "step"),
    ("kme_train_loss", "Objective q of the last step", "objective"),
    ("kme_train_risk", "Empirical risk of the last step", "risk"),
    ("kme_train_complexity", "Complexity r of the last step", "complexity"),
    ("kme_train_regularization", "Regularisation of the last step", "regularization"),
    ("kme_train_gradient_norm", "Norm of the gradient of the last step", "gradient_norm"),
    ("kme_train_accuracy_ratio", "Accuracy on the batches of the last step", "accuracy"),
    ("kme_train_validation_accuracy_ratio", "Accuracy on held-out rows", "validation_accuracy"),
    ("kme_train_waiting_ratio", "Share of the workers' time spent waiting in the last step", "waiting_share"),
    ("kme_gram_jitter", "Added to the diagonal of Gram matrices that were not positive definite", "jitter"),
)


class BoardCollector:
    """Reads the board of this process's scheduler at every scrape."""

    def __init__(self) -> None:
        self.board: RunBoard | None = None

    def collect(self) -> Iterator[Metric]:
        if self.board is not None:
            runs = list(self.board.runs.values())
            yield from _states(runs)
            yield from _training(runs)
            yield from _progress(runs)
            yield from _recurring(self.board)
            yield from _certificate(self.board)

    def describe(self) -> Iterable[Metric]:
        return []  # the names depend on the runs; nothing to reserve


@functools.cache
def _collector() -> BoardCollector:
    found = BoardCollector()
    REGISTRY.register(found)
    return found


def show_board(board: RunBoard) -> None:
    """There is one registry per process: of several schedulers in it, the last one is shown, as in Dask."""
    _collector().board = board


def _labels(run: BoardRun) -> tuple[str, str, str]:
    return run.run, run.pipeline, run.stage


def _states(runs: list[BoardRun]) -> Iterator[Metric]:
    info = GaugeMetricFamily("kme_run_info", "A run and its version", labels=[*RUN, "version"])
    status = GaugeMetricFamily("kme_run_status", "1 for the current status of a run", labels=[*RUN, "status"])
    duration = GaugeMetricFamily("kme_run_duration_seconds", "Time since the stage began, or its duration", labels=RUN)
    progressed = GaugeMetricFamily(
        "kme_run_last_progress_timestamp_seconds", "When a step or a chunk last finished", labels=RUN
    )
    for run in runs:
        info.add_metric([*_labels(run), run.version], 1)
        for name in STATUSES:
            status.add_metric([*_labels(run), name], float(run.status == name))
        duration.add_metric(_labels(run), run.seconds)
        progressed.add_metric(_labels(run), run.progressed)
    yield from (info, status, duration, progressed)


def _training(runs: list[BoardRun]) -> Iterator[Metric]:
    for name, text, field in TRAIN:
        family = GaugeMetricFamily(name, text, labels=RUN)
        for run in runs:
            if field in run.latest:
                family.add_metric(_labels(run), run.latest[field])
        yield family
    age = GaugeMetricFamily("kme_checkpoint_age_seconds", "Time since the last checkpoint of a running run", labels=RUN)
    for run in runs:
        if run.checkpoint_at is not None and run.status == "running":
            age.add_metric(_labels(run), max(0.0, time.time() - run.checkpoint_at))
    yield age


def _progress(runs: list[BoardRun]) -> Iterator[Metric]:
    share = GaugeMetricFamily("kme_run_progress_ratio", "Fraction of the steps or chunks that is done", labels=RUN)
    left = GaugeMetricFamily("kme_run_remaining_seconds", "Estimated time until the stage ends", labels=RUN)
    rows = CounterMetricFamily("kme_run_rows", "Rows processed by a run", labels=RUN)
    tiles = GaugeMetricFamily("kme_tiles", "Chunks of a run by state", labels=[*RUN, "state"])
    rejected = CounterMetricFamily("kme_rows_rejected", "Rows skipped by a run", labels=[*RUN, "reason"])
    retries = CounterMetricFamily("kme_tile_retries", "Chunks that were recomputed", labels=[*RUN, "reason"])
    for run in runs:
        if run.total or run.status == "succeeded":
            share.add_metric(_labels(run), run.share)
        if run.seconds_left is not None:
            left.add_metric(_labels(run), run.seconds_left)
        rows.add_metric(_labels(run), run.rows)
        if run.chunks:
            done, failed = run.chunks["done"], run.chunks["failed"]
            waiting = max(0, run.chunks["total"] - done - failed)
            for state, count in (("done", done), ("failed", failed), ("waiting", waiting)):
                tiles.add_metric([*_labels(run), state], count)
            rejected.add_metric([*_labels(run), "invalid"], run.chunks.get("rejected", 0))
            retries.add_metric([*_labels(run), "lost"], run.chunks.get("retried", 0))
    yield from (share, left, rows, tiles, rejected, retries)


def _recurring(board: RunBoard) -> Iterator[Metric]:
    """By pipeline: these are kept when the runs themselves are dropped."""
    for name, text, table in (
        ("kme_run_last_start_timestamp_seconds", "When a pipeline's stage last began", board.last_start),
        ("kme_run_last_success_timestamp_seconds", "When a pipeline's stage last succeeded", board.last_success),
        ("kme_run_last_duration_seconds", "Duration of the last success", board.last_duration),
    ):
        family = GaugeMetricFamily(name, text, labels=["pipeline", "phase", "scheduled"])
        for (pipeline, stage), value in table.items():
            scheduled = "true" if board.scheduled.get((pipeline, stage)) else "false"
            family.add_metric([pipeline, stage, scheduled], value)
        yield family


def _certificate(board: RunBoard) -> Iterator[Metric]:
    if board.certificate_expires is not None:
        text = "When the certificate that the scheduler was started with expires"
        yield GaugeMetricFamily("kme_certificate_expiry_timestamp_seconds", text, value=board.certificate_expires)


class WorkerMeters:
    """The counters of one worker process."""

    def __init__(self) -> None:
        self._rows = Counter("kme_rows", "Rows processed on this worker", ["phase"])
        self._tiles = Counter("kme_tiles_computed", "Calls that ended on this worker", ["phase", "outcome"])
        self._seconds = Histogram("kme_tile_duration_seconds", "Duration of one call", ["phase"], buckets=SECONDS)
        self._written = Counter("kme_bytes_written", "Bytes of results written by this worker", ["phase"])
        self._stages = Counter("kme_stage_seconds", "Time spent on this worker by kind of work", ["stage"])

    def tile(self, phase: str, seconds: float, rows: int, written: int = 0, *, failed: bool = False) -> None:
        self._tiles.labels(phase, "failed" if failed else "done").inc()
        self._seconds.labels(phase).observe(seconds)
        self._rows.labels(phase).inc(rows)
        self._written.labels(phase).inc(written)

    def stage(self, stage: str, seconds: float) -> None:
        self._stages.labels(stage).inc(seconds)


@functools.cache
def worker_meters() -> WorkerMeters:
    """One per process, however many workers are in it."""
    return WorkerMeters()
