"""Process every chunk of an input exactly once: finished chunks are kept, failing ones quarantined.

    rows = open_rows(dataset_or_path_or_array, ModelColumns(54))                  # kme_dist.data.lazy
    outcome = run_chunks(state, layout, rows, predict_chunk, (plan,), executor=SerialExecutor())

Every chunk of the input is one task, which reads its rows by path (rows in memory are sent with the task), computes,
stores the output chunk atomically and then its receipt. A kill at any moment is safe: a chunk with a receipt is never
recomputed, one without is. The record says what was computed from what; a model or input that changed during a job is
refused. Rows appended to the input are new chunks; the last chunk is recomputed if it was not full.

This module deals with chunks and receipts, not with models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kme_dist.data.dataset import Span
from kme_dist.data.leases import Check, writer_lease
from kme_dist.data.places import Place, store_errors
from kme_dist.data.predictions import (
    PREDICTIONS_FORMAT,
    PREDICTIONS_VERSION,
    OutputLayout,
    Receipt,
    gather_receipts,
    read_receipt,
    read_receipts,
    read_state,
    write_receipt,
    write_state,
)
from kme_dist.data.rows import RowsRef
from kme_dist.errors import ConfigError, CorruptError, DataError, NumericalError, RetryError
from kme_dist.meter import metered
from kme_dist.run.executors import Executor

ATTEMPTS = 3  # before a failing chunk is quarantined
_POISON = (CorruptError, DataError, NumericalError)
Progress = Callable[[int, int], None]  # rows done, total rows


class Watch(Protocol):
    """Called with the chunks done, failed and in total, the rows done, and the number of retries."""

    def __call__(self, done: int, failed: int, total: int, rows: int, *, retried: int) -> None: ...


# --- the job ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictionOutcome:
    """How a job ended."""

    path: str
    rows: int
    chunks: int
    computed: int  # chunks computed in this run
    skipped: int  # chunks done before
    retried: int
    quarantined: list[dict[str, Any]]
    seconds: float
    rows_per_second: float
    unseen: dict[str, Any]  # categories that the model does not know: their number and the first, by column
    notes: tuple[str, ...] = ()  # what was assumed or ignored, one line each


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
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> PredictionOutcome:
    """Bring the predictions at `layout.place` up to date with `source`: calls `compute(*arguments, chunk, identity,
    rows)` for every missing chunk. `state["job"]` identifies what is computed: model, outputs, precision."""
    place, began = layout.place, time.monotonic()
    with store_errors(place), writer_lease(place) as still_held:
        done = _done_before(place, state, layout, source, overwrite, from_scratch)
        record = {"format": PREDICTIONS_FORMAT, "format_version": PREDICTIONS_VERSION, **state}
        record |= {"status": "running", "quarantined": [], "started": _now()}
        write_state(place, record)
        layout.declare(source.count)
        job = _ChunkProgress(layout, source, compute, arguments, executor, progress, watch, done)
        skipped = len(done)
        failed = job.run()
        return _finish(job, record, failed, skipped, began, still_held)


def _done_before(
    place: Place, state: Mapping[str, Any], layout: OutputLayout, source: RowsRef, overwrite: bool, from_scratch: bool
) -> dict[int, Receipt]:
    """The chunks that are up to date; ConfigError if the predictions there belong to another job."""
    earlier = read_state(place)
    if earlier is None:
        return {}
    if from_scratch:
        place.delete_all()
        return {}
    finished = earlier.get("status") == "complete"
    held, way_out = "an unfinished job", "restart with --from-scratch, or resume with the same model and data"
    if finished:
        held, way_out = "finished predictions", "replace them with --overwrite"
    if earlier.get("job") != state["job"]:
        if overwrite:
            place.delete_all()
            return {}
        known = earlier.get("computed_from", {})
        differing = [key for key, value in state["computed_from"].items() if known.get(key) != value]
        raise ConfigError(
            f"{place} holds {held} with other settings ({', '.join(differing) or 'version'} changed); {way_out}"
        )
    done = read_receipts(place, state["job"], place.sizes(), layout)
    chunks = -(-source.count // layout.chunk_rows)
    last = max(done, default=-1)
    for chunk, receipt in list(done.items()):
        if chunk < chunks and receipt.input == source.identity(*span_of(source, layout, chunk)):
            continue
        grown = chunk == last and receipt.rows < min(source.count - chunk * layout.chunk_rows, layout.chunk_rows)
        if grown:
            del done[chunk]
        elif overwrite:
            place.delete_all()
            return {}
        else:
            change = "now has fewer rows" if chunk >= chunks else f"has changed (chunk {chunk}, already predicted)"
            raise ConfigError(f"{place} holds {held} of {source.path}, which {change}; {way_out}")
    return done


def span_of(source: RowsRef, layout: OutputLayout, chunk: int) -> Span:
    """The rows of one chunk."""
    return chunk * layout.chunk_rows, min(source.count, (chunk + 1) * layout.chunk_rows)


class _ChunkProgress:
    """Chunks in flight, and their results."""

    def __init__(
        self,
        layout: OutputLayout,
        source: RowsRef,
        compute: Compute,
        arguments: tuple[Any, ...],
        executor: Executor,
        progress: Progress | None,
        watch: Watch | None,
        done: dict[int, Receipt],
    ) -> None:
        self.layout, self.source, self.compute, self.arguments = layout, source, compute, arguments
        self.executor, self.progress, self.watch, self.done = executor, progress, watch, done
        self.chunks = -(-source.count // layout.chunk_rows)
        self.retried = self.computed_rows = 0
        self.rows_done = sum(receipt.rows for receipt in done.values())
        self._reruns_before = self._reruns

    def rows_of(self, chunk: int) -> int:
        start, stop = span_of(self.source, self.layout, chunk)
        return stop - start

    def run(self) -> dict[int, Exception]:
        """Compute the missing chunks; returns those that failed in every attempt."""
        self._report(0)
        todo = [chunk for chunk in range(self.chunks) if chunk not in self.done]
        failed: dict[int, Exception] = {}
        for attempt in range(ATTEMPTS):
            failed = {}
            for chunk, result in self._stream(todo):
                if isinstance(result, Receipt):
                    self.done[chunk] = result
                    self.rows_done += result.rows
                    self.computed_rows += result.rows
                elif isinstance(result, _POISON) or type(result).__name__ == "KilledWorker":
                    failed[chunk] = result
                else:
                    raise result
                self._report(len(failed))
            todo = sorted(failed)
            if not todo:
                break
            self.retried += len(todo) if attempt + 1 < ATTEMPTS else 0
        return failed

    def _report(self, failed: int) -> None:
        if self.progress is not None:
            self.progress(self.rows_done, self.source.count)
        if self.watch is not None:
            retried = self.retried + self._reruns - self._reruns_before
            self.watch(len(self.done), failed, self.chunks, self.rows_done, retried=retried)

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
        for chunk in self.todo:
            span = span_of(self.job.source, self.job.layout, chunk)
            yield (*self.job.arguments, chunk, self.job.source.identity(*span), self.job.source.part(*span))


def _finish(
    job: _ChunkProgress,
    record: dict[str, Any],
    failed: dict[int, Exception],
    skipped: int,
    began: float,
    still_held: Check,
) -> PredictionOutcome:
    place, layout = job.layout.place, job.layout
    for chunk in failed:
        layout.write_nothing(chunk, job.rows_of(chunk))
    quarantined = [
        {
            "chunk": chunk,
            "first_row": chunk * layout.chunk_rows,
            "rows": job.rows_of(chunk),
            "error": " ".join(f"{type(error).__name__}: {error}".split())[:500],
        }
        for chunk, error in sorted(failed.items())
    ]
    seconds = time.monotonic() - began
    outcome = PredictionOutcome(
        path=place.address,
        rows=job.source.count,
        chunks=job.chunks,
        computed=len(job.done) - skipped,
        skipped=skipped,
        retried=job.retried,
        quarantined=quarantined,
        seconds=round(seconds, 3),
        rows_per_second=round(job.computed_rows / seconds, 1) if seconds else 0.0,
        unseen=_all_unseen(job.done),
    )
    still_held()
    gather_receipts(place, [job.done[chunk] for chunk in sorted(job.done)])
    record |= {
        "status": "incomplete" if quarantined else "complete",
        "quarantined": quarantined,
        "ended": _now(),
        "seconds": outcome.seconds,
    }
    write_state(place, record)
    return outcome


def _all_unseen(done: Mapping[int, Receipt]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for chunk in sorted(done):
        for name, (count, first) in done[chunk].unseen.items():
            before = found.get(name, (0, first))
            found[name] = (before[0] + count, before[1])
    return found


def recorded_chunk(layout: OutputLayout, job: str, chunk: int, identity: str) -> Receipt | None:
    """On a worker: the receipt, if the chunk is done already. A worker may die between storing a chunk and returning
    its receipt; the call is then repeated, but not the work."""
    found = read_receipt(layout.place, chunk)
    return found if found is not None and (found.job, found.input) == (job, identity) else None


def store_chunk(
    layout: OutputLayout,
    job: str,
    chunk: int,
    identity: str,
    arrays: Mapping[str, Any],
    rows: int,
    unseen: Mapping[str, Any] | None = None,
) -> Receipt:
    """On a worker: store the chunk, then its receipt. RetryError if another job has replaced this one meanwhile."""
    place = layout.place
    state = read_state(place)
    if state is None or state["job"] != job:
        raise RetryError(f"{place}: another job has replaced this one; nothing was written")
    with metered("write"):
        digest, stored = layout.write(chunk, arrays)
        receipt = Receipt(job, chunk, rows, identity, digest, stored, dict(unseen or {}))
        write_receipt(place, receipt)
    return receipt


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
