"""Batches from a data set, read ahead of the one who uses them.

    plan = plan_batches(data, batch_size=2000, seed=0, split="train")
    with read_batches(data, plan, range(1000)) as batches:
        for batch in batches:                # batch.step, batch.X, batch.y
            ...

`plan_batches` chooses the mode by the size of the rows: exact random rows where all of them fit the cache of an open
data set; beyond that contiguous reads where rows were shuffled at ingest, and blocks where they were not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.data.dataset import CACHE_BYTES, RowSource, joined
from kme_dist.data.plan import BatchPlan, Span
from kme_dist.data.prefetch import Prefetched
from kme_dist.errors import ConfigError


@dataclass(frozen=True)
class Batch:
    """The rows of one step; X and y are what `transfer` made of them."""

    step: int
    X: Any
    y: Any


def plan_batches(
    data: RowSource,
    *,
    batch_size: int,
    seed: int = 0,
    split: str | None = None,
    ranges: tuple[Span, ...] | None = None,
    mode: str = "auto",
    order: str = "permutation",
    blocks: int = 4,
) -> BatchPlan:
    """A plan for the rows of a split (all rows when None), or for those of `ranges`.

    `mode` "rows" gathers exact random rows and is about a hundred times slower to read than "contiguous"; "blocks"
    draws random rows from `blocks` random chunks a batch, and costs as many chunk reads. "contiguous" on data that
    were not shuffled at ingest makes batches of neighbours, which is refused unless asked for by name.
    """
    ranges = data.ranges(split) if ranges is None else ranges
    if mode == "auto":
        # In double precision whatever the stored one is: the same rows make the same batches however they are kept.
        cached = 8 * data.features * sum(stop - start for start, stop in ranges) <= CACHE_BYTES
        mode = "rows" if cached else "contiguous" if data.shuffled is not None else "blocks"
    return BatchPlan(ranges, batch_size, seed, mode, order, data.chunk_rows, blocks)


def read_batch(data: RowSource, plan: BatchPlan, step: int) -> Batch:
    """Batch `step` of a plan, now."""
    ref = plan.batch(step)
    if ref.rows is not None:
        X, y = data.take(ref.rows)
        return Batch(step, X, y)
    if any(stop > data.rows for _, stop in ref.spans):
        raise ConfigError(f"{data.path}: the plan reaches beyond its {data.rows} rows; it was made for other data.")
    parts = [data.read_rows(start, stop) for start, stop in ref.spans]
    if len(parts) == 1:
        return Batch(step, *parts[0])
    labels = [y for _, y in parts if y is not None]
    return Batch(step, joined([X for X, _ in parts]), np.concatenate(labels) if labels else None)


def read_batches(
    data: RowSource,
    plan: BatchPlan,
    steps: Iterable[int],
    *,
    prefetch: int = 2,
    transfer: Callable[[np.ndarray], Any] | None = None,
) -> Prefetched[Batch]:
    """The batches of `steps`, in order, up to `prefetch` of them ready before they are asked for.

    `transfer` is applied to X and to y on the reading thread: the place to copy to a device through pinned memory,
    so that the copy overlaps with the work on the batch before. The result counts `waited_s`, the time its consumer
    stood idle.
    """

    def produce() -> Iterator[Batch]:
        for step in steps:
            batch = read_batch(data, plan, step)
            if transfer is not None:
                batch = Batch(step, transfer(batch.X), None if batch.y is None else transfer(batch.y))
            yield batch

    return Prefetched(produce, prefetch)
