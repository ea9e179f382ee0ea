"""Process every row of an input exactly once: finished rows are kept, bad ones skipped, failing chunks quarantined.

    rows = open_rows(dataset_or_path_or_array, ModelColumns(54))                  # kme_dist.data.lazy
    outcome = run_chunks(state, layout, rows, predict_chunk, (plan,), executor=SerialExecutor())

Every chunk of the input is one task, which reads its rows by path (rows in memory are sent with the task), computes,
stores the output chunk and then its receipt. A kill at any moment is safe: a chunk with a receipt is never recomputed,
one without is. The record says what was computed from what; a model or input that changed during a job is refused. Of a
chunk that has grown since it was finished, because rows were appended to the input, only the new rows are computed.

This module deals with chunks and receipts, not with models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kme_dist.backend import is_sparse
from kme_dist.data.dataset import Span
from kme_dist.data.leases import Check, writer_lease
from kme_dist.data.places import Place, store_errors
from kme_dist.data.predictions import PARTS, OutputLayout, finished_receipts
from kme_dist.data.receipts import (
    FINISHED,
    MOST_SHOWN,
    RECEIPTS,
    Receipt,
    RowSpan,
    check_epoch,
    gather_receipts,
    read_receipt,
    read_receipts,
    read_state,
    state_key,
    state_version,
    write_receipt,
    write_state,
)
from kme_dist.data.rows import RowsRef
from kme_dist.errors import ConfigError, CorruptError, DataError, NumericalError, RetryError, plural
from kme_dist.failpoints import passing
from kme_dist.meter import metered
from kme_dist.run.executors import Executor

ATTEMPTS = 3  # before a failing chunk is quarantined
SAMPLED_ROWS = 8  # of a task: their features are on record, to tell whether other rows are the same ones
_POISON = (CorruptError, DataError, NumericalError)
# What may differ between the jobs of two models, if nothing but the model was replaced.
_OF_THE_MODEL = {"model", "precision", "outputs"}
Progress = Callable[[int, int], None]  # rows done, total rows


class Watch(Protocol):
    """Called with the chunks done, failed and in total, the rows done, the number of retries, and how many of the rows
    done have no prediction because their input or their output is not finite."""

    def __call__(self, done: int, failed: int, total: int, rows: int, *, retried: int, rejected: int) -> None: ...


# --- the job ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictionOutcome:
    """How a job ended."""

    path: str
    rows: int
    chunks: int
    computed: int  # chunks computed in this run
    computed_rows: int  # rows computed in this run
    skipped: int  # chunks done before
    retried: int
    quarantined: list[dict[str, Any]]
    skipped_rows: int  # without a prediction, because their input or their output is not finite
    first_skipped: list[dict[str, Any]]  # some of them, with their reasons
    seconds: float
    rows_per_second: float
    unseen: dict[str, Any]  # categories that the model does not know: their number and the first, by column
    notes: tuple[str, ...] = ()  # what was assumed or ignored, one line each

    @property
    def complete(self) -> bool:
        return not self.quarantined and not self.skipped_rows


@dataclass(frozen=True)
class ChunkTask:
    """What a worker computes and stores: rows [start, stop) of the input, the last ones of a chunk. Plain data."""

    layout: OutputLayout
    job: str
    chunk: int
    start: int
    stop: int
    input: str  # the identity of these rows
    source_rows: int
    before: Receipt | None = None  # of the rows of the chunk that are done

    def __post_init__(self) -> None:
        """Refuse rows of another chunk, whose task would write to the same stored objects."""
        first, done = self.chunk * self.layout.chunk_rows, 0 if self.before is None else self.before.rows
        if self.start != first + done or not self.start <= self.stop <= first + self.layout.chunk_rows:
            raise DataError(
                f"{self.layout.address}: a task for rows {self.start} to {self.stop} does not write chunk {self.chunk} "
                f"alone (rows from {first}, {done} of them done, at most {self.layout.chunk_rows})"
            )

    @property
    def inputs(self) -> list[tuple[int, str]]:
        """Number and identity of all rows of the chunk, as its receipt will have them."""
        done = () if self.before is None else self.before.spans
        return [*((span.rows, span.input) for span in done), (self.stop - self.start, self.input)]


Compute = Callable[..., Receipt]


def run_chunks(
    state: Mapping[str, Any],
    layout: OutputLayout,
    source: RowsRef,
    compute: Compute,
    arguments: tuple[Any, ...],
    *,
    executor: Executor,
    overwrite: bool = False,
    from_scratch: bool = False,
    on_model_change: str = "refuse",
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> PredictionOutcome:
    """Bring the predictions at `layout.place` up to date with `source`: calls `compute(*arguments, task, rows)` for
    every chunk with missing rows. `state["job"]` identifies what is computed: model, outputs, precision."""
    place, began = layout.place, time.monotonic()
    with store_errors(place), writer_lease(place) as still_held:
        seen = state_version(place, layout.format)
        earlier = read_state(place, damaged_too=from_scratch)
        kept = None if from_scratch else _kept(place, earlier, state, layout, source, overwrite, on_model_change)
        epoch = (earlier or {}).get("epoch") if kept is not None else None
        layout = dataclasses.replace(layout, epoch=epoch or uuid.uuid4().hex[:12])
        record = {**state, "epoch": layout.epoch, "status": "running", "quarantined": [], "started": _now()}
        if (earlier or {}).get("status") in FINISHED:  # a worker that woke up too late may have left something
            for folder in (RECEIPTS, PARTS):
                place.delete_below(folder)
        seen = write_state(place, record, seen)
        if kept is None and earlier is not None:
            still_held()
            place.delete_others(state_key(layout.format))
        layout.declare(source.count)
        job = _ChunkProgress(layout, state["job"], source, compute, arguments, executor, progress, watch, kept or {})
        failed = job.run()
        return _finish(job, record, failed, began, still_held, seen)


def _kept(
    place: Place,
    earlier: Mapping[str, Any] | None,
    state: Mapping[str, Any],
    layout: OutputLayout,
    source: RowsRef,
    overwrite: bool,
    on_model_change: str,
) -> dict[int, Receipt] | None:
    """The receipts that are up to date, also of chunks with further rows to compute; None to begin again.

    ConfigError if the predictions there belong to another job.
    """
    if earlier is None:
        return None
    finished = earlier.get("status") in FINISHED
    held, way_out = "an unfinished job", "restart with --from-scratch, or resume with the same model and data"
    if finished:
        held, way_out = "finished predictions", "replace them with --overwrite"
    if earlier.get("job") != state["job"]:
        differing = _differences(earlier.get("computed_from", {}), state["computed_from"])
        if overwrite or (on_model_change == "recompute" and "model" in differing and differing <= _OF_THE_MODEL):
            return None
        shown = ", ".join(key for key in state["computed_from"] if key in differing) or "version"
        if finished and "model" in differing and differing <= _OF_THE_MODEL:
            way_out += " (in a schedule: --on-model-change recompute)"
        raise ConfigError(f"{place} holds {held} with other settings ({shown} changed); {way_out}")
    before = dataclasses.replace(layout, epoch=str(earlier.get("epoch", "")))
    kept = finished_receipts(before, state["job"], since=False) if finished else _published(before, state["job"])
    for chunk, receipt in list(kept.items()):
        change = _change(receipt, source, layout)
        if change is None:
            continue
        if receipt.skipped or (receipt.spans[-1].source_rows == 0 and _has_grown(receipt, source, layout)):
            del kept[chunk]  # the input was repaired; or the record of version 1 does not say what it was before
        elif overwrite:
            return None
        else:
            raise ConfigError(f"{place} holds {held} of {source.path}, which {change}; {way_out}")
    return kept


def _differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    differing = {key for key, value in now.items() if earlier.get(key) != value}
    outputs = [[output[0] for output in found.get("outputs", [])] for found in (earlier, now)]
    if "outputs" in differing and outputs[0] != outputs[1]:
        differing.add("names of outputs")  # not only their shapes, which follow the classes of the model
    return differing


def _published(layout: OutputLayout, job: str) -> dict[int, Receipt]:
    """The receipts of finished chunks, after those were published whose driver died before it could do so."""
    for chunk, receipt in read_receipts(layout.place, job, layout.epoch).items():
        layout.publish(chunk, receipt.attempt)
    return finished_receipts(layout, job, since=True)


def _change(receipt: Receipt, source: RowsRef, layout: OutputLayout) -> str | None:
    """How the rows of a receipt differ from those of the input; None if they are the same."""
    at = receipt.chunk * layout.chunk_rows
    if at + receipt.rows > source.count:
        return "now has fewer rows"
    for span in receipt.spans:
        if span.input != source.identity(at, at + span.rows, span.source_rows):
            return f"has changed (chunk {receipt.chunk}, already predicted)"
        at += span.rows
    return None


def _has_grown(receipt: Receipt, source: RowsRef, layout: OutputLayout) -> bool:
    start, stop = span_of(source, layout, receipt.chunk)
    return receipt.rows < stop - start


def span_of(source: RowsRef, layout: OutputLayout, chunk: int) -> Span:
    """The rows of one chunk."""
    return chunk * layout.chunk_rows, min(source.count, (chunk + 1) * layout.chunk_rows)


class _ChunkProgress:
    """Chunks in flight, and their results."""

    def __init__(
        self,
        layout: OutputLayout,
        job: str,
        source: RowsRef,
        compute: Compute,
        arguments: tuple[Any, ...],
        executor: Executor,
        progress: Progress | None,
        watch: Watch | None,
        kept: Mapping[int, Receipt],
    ) -> None:
        self.layout, self.job, self.source, self.compute, self.arguments = layout, job, source, compute, arguments
        self.executor, self.progress, self.watch = executor, progress, watch
        self.chunks = -(-source.count // layout.chunk_rows)
        self.done = {chunk: receipt for chunk, receipt in kept.items() if receipt.rows == self.rows_of(chunk)}
        self.grown = {chunk: receipt for chunk, receipt in kept.items() if chunk not in self.done}
        self.kept = len(self.done)
        self.retried = self.computed_rows = 0
        self.rows_done = sum(receipt.rows for receipt in kept.values())
        self.rejected = sum(receipt.skipped for receipt in kept.values())
        self._reruns_before = self._reruns

    def rows_of(self, chunk: int) -> int:
        start, stop = span_of(self.source, self.layout, chunk)
        return stop - start

    def run(self) -> dict[int, Exception]:
        """Compute the missing rows; returns the chunks that failed in every attempt."""
        self._report(0)
        todo = [chunk for chunk in range(self.chunks) if chunk not in self.done]
        failed: dict[int, Exception] = {}
        for attempt in range(ATTEMPTS):
            failed = {}
            for chunk, result in self._stream(todo):
                if isinstance(result, Receipt):
                    self._finished(chunk, result)
                elif isinstance(result, _POISON) or type(result).__name__ == "KilledWorker":
                    failed[chunk] = result
                    self._forget_rows_before(chunk)
                else:
                    raise result
                self._report(len(failed))
            todo = sorted(failed)
            if not todo:
                break
            self.retried += len(todo) if attempt + 1 < ATTEMPTS else 0
        return failed

    def _finished(self, chunk: int, receipt: Receipt) -> None:
        self.layout.publish(chunk, receipt.attempt)
        passing("predict.after_publish", lambda: self.layout.files(chunk))
        before = self.grown.pop(chunk, None)
        self.done[chunk] = receipt
        self.rows_done += receipt.rows - (before.rows if before is not None else 0)
        self.rejected += receipt.skipped - (before.skipped if before is not None else 0)
        self.computed_rows += receipt.rows - (before.rows if before is not None else 0)

    def _forget_rows_before(self, chunk: int) -> None:
        """Compute the whole chunk next time: what failed may be the rows that were stored before."""
        if (before := self.grown.pop(chunk, None)) is not None:
            self.rows_done -= before.rows
            self.rejected -= before.skipped

    def _report(self, failed: int) -> None:
        if self.progress is not None:
            self.progress(self.rows_done, self.source.count)
        if self.watch is not None:
            retried = self.retried + self._reruns - self._reruns_before
            self.watch(len(self.done), failed, self.chunks, self.rows_done, retried=retried, rejected=self.rejected)

    @property
    def _reruns(self) -> int:
        """Calls that the executor repeated because their worker died or hung."""
        return int(getattr(self.executor, "retried", 0))

    def _stream(self, todo: list[int]) -> Iterator[tuple[int, Receipt | Exception]]:
        results = self.executor.stream(self.compute, _ChunkCalls(self, todo), name="predict-chunk")
        for index, result in results:
            yield todo[index], result


@dataclass(frozen=True)
class _ChunkCalls:
    """A call for every chunk, made when it is sent: rows in memory are part of it."""

    job: _ChunkProgress
    todo: list[int]

    def __len__(self) -> int:
        return len(self.todo)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        own, source = self.job, self.job.source
        for chunk in self.todo:
            (start, stop), before = span_of(source, own.layout, chunk), own.grown.get(chunk)
            start += 0 if before is None else before.rows
            identity, total = source.identity(start, stop), source.source.rows
            task = ChunkTask(own.layout, own.job, chunk, start, stop, identity, total, before)
            yield (*own.arguments, task, source.part(start, stop))


def _finish(
    job: _ChunkProgress,
    record: dict[str, Any],
    failed: dict[int, Exception],
    began: float,
    still_held: Check,
    seen: str | None,
) -> PredictionOutcome:
    place, layout = job.layout.place, job.layout
    lost = [chunk for chunk in range(job.chunks) if chunk not in job.done and chunk not in failed]
    if lost:
        raise RetryError(
            f"{place}: {len(lost)} {plural(len(lost), 'chunk')} without a result (the first is {lost[0]}); run the "
            "same command again"
        )
    quarantined = [_quarantine(job, chunk, error) for chunk, error in sorted(failed.items())]
    seconds = time.monotonic() - began
    receipts = [job.done[chunk] for chunk in sorted(job.done)]
    first = list(itertools.islice((entry for receipt in receipts for entry in receipt.first_skipped), MOST_SHOWN))
    outcome = PredictionOutcome(
        path=place.address,
        rows=job.source.count,
        chunks=job.chunks,
        computed=len(job.done) - job.kept,
        computed_rows=job.computed_rows,
        skipped=job.kept,
        retried=job.retried,
        quarantined=quarantined,
        skipped_rows=sum(receipt.skipped for receipt in receipts),
        first_skipped=[{"row": row, "error": why} for row, why in first],
        seconds=round(seconds, 3),
        rows_per_second=round(job.computed_rows / seconds, 1) if seconds else 0.0,
        unseen=_all_unseen(receipts),
    )
    passing("commit.before_manifest")
    still_held()
    gather_receipts(place, layout.epoch, receipts)
    place.delete_below(PARTS)
    record |= {
        "status": "complete" if outcome.complete else "incomplete",
        "quarantined": quarantined,
        "skipped_rows": outcome.skipped_rows,
        "ended": _now(),
        "seconds": outcome.seconds,
    }
    passing("commit.before_state")
    write_state(place, record, seen)
    passing("commit.after_state")
    return outcome


def _quarantine(job: _ChunkProgress, chunk: int, error: Exception) -> dict[str, Any]:
    """Store missing values, for readers that ignore the receipts; returns the entry of the record."""
    layout, rows = job.layout, job.rows_of(chunk)
    attempt, digests, _ = layout.write(chunk, {field.name: field.empty(rows) for field in layout.fields})
    layout.publish(chunk, attempt)
    return {
        "chunk": chunk,
        "first_row": chunk * layout.chunk_rows,
        "rows": rows,
        "digests": digests,
        "error": " ".join(f"{type(error).__name__}: {error}".split())[:500],
    }


def _all_unseen(receipts: Sequence[Receipt]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for receipt in receipts:
        for name, (count, first) in receipt.unseen.items():
            before = found.get(name, (0, first))
            found[name] = (before[0] + count, before[1])
    return found


# --- on a worker -----------------------------------------------------------------------------------


def recorded_chunk(task: ChunkTask) -> Receipt | None:
    """The receipt, if the task is done already. A worker may die between storing a chunk and returning its receipt;
    the call is then repeated, but not the work."""
    found = read_receipt(task.layout.place, task.layout.epoch, task.chunk)
    if found is None or (found.job, found.epoch) != (task.job, task.layout.epoch):
        return None
    return found if [(span.rows, span.input) for span in found.spans] == task.inputs else None


def store_chunk(
    task: ChunkTask,
    arrays: Mapping[str, Any],
    *,
    features: Any,
    skipped: Mapping[int, str] | None = None,
    unseen: Mapping[str, Any] | None = None,
) -> Receipt:
    """Store the outputs of the rows of a task, then the receipt of the chunk. `skipped`: rows of the task without a
    prediction, with the reasons. RetryError if another job has replaced this one meanwhile."""
    place, layout, before = task.layout.place, task.layout, task.before
    check_epoch(place, layout.epoch)
    samples = tuple(sampled_digests(features, task.start, skipped or {}))
    span = RowSpan(task.stop - task.start, task.input, task.source_rows, samples)
    named = [(task.start + row, why) for row, why in sorted((skipped or {}).items())]
    with metered("write"):
        attempt, digests, stored = layout.write(task.chunk, arrays, before)
        passing("predict.after_chunk", lambda: layout.files(task.chunk, attempt))
        receipt = Receipt(
            task.job,
            task.chunk,
            layout.epoch,
            attempt,
            (*(before.spans if before is not None else ()), span),
            digests,
            stored,
            _added(before.unseen if before is not None else {}, unseen or {}),
            len(named) + (before.skipped if before is not None else 0),
            (*(before.first_skipped if before is not None else ()), *named)[:MOST_SHOWN],
        )
        write_receipt(place, receipt)
    passing("predict.after_receipt")
    return receipt


def _added(before: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(new)
    for name, (count, first) in before.items():
        found[name] = (count + found.get(name, (0, ""))[0], first)
    return found


def sampled_digests(X: Any, start: int, skipped: Mapping[int, str]) -> Iterator[tuple[int, str]]:
    """Some rows by their numbers, with digests of their features in single precision: the same whatever the source.
    Skipped rows have no features that could be compared."""
    count = min(SAMPLED_ROWS, len(X))
    for row in np.unique(np.linspace(0, len(X) - 1, count).astype(np.int64)).tolist() if count else []:
        if row in skipped:
            continue
        yield start + row, features_digest(X, row)


def features_digest(X: Any, row: int) -> str:
    """Of one row of numbers, dense or sparse, of a text, or of whatever else a kernel takes."""
    one = X[[row]].toarray() if is_sparse(X) else X[row]
    try:
        with np.errstate(over="ignore"):
            numbers = np.asarray(one, np.float32).ravel() + np.float32(0)  # -0 and 0 are the same number
    except (TypeError, ValueError):
        return hashlib.sha256(repr(one).encode()).hexdigest()[:16]
    return hashlib.sha256(numbers.tobytes()).hexdigest()[:16]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
