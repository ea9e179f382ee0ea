"""Stored predictions against stored labels, chunk by chunk over any executor; only sums come home.

tally = tally_predictions(open_predictions("scores.zarr"), open_dataset("rows.zarr"), executor=executor)
tally.metrics(predictions.classes)
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from kme_dist.core.metrics import Tally
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.places import Place
from kme_dist.data.predictions import Predictions, open_predictions
from kme_dist.errors import DataError
from kme_dist.run.executors import Executor

_CHUNKS_AT_ONCE = 8  # of predictions in one task: they are small


def tally_predictions(
    predictions: Predictions, data: Dataset, *, executor: Executor, split: str | None = None
) -> Tally:
    """Add up all rows. The rows of `data` (of its `split`) are those that were predicted, in the same order."""
    if data.classes is None:
        raise DataError(f"{data.path} has no class labels to compare with; ingest it with the column named by `label`")
    if not {"probability", "label"} & set(predictions.names):
        raise DataError(f"{predictions.path} holds {predictions.names}; evaluating needs `probability` or `label`")
    known = {str(label): code for code, label in enumerate(predictions.classes.tolist())}
    strangers = [
        str(name)
        for name, count in zip(data.classes, data.class_counts or [], strict=True)
        if str(name) not in known and count
    ]
    if strangers:
        raise DataError(
            f"{data.path}: rows of class {strangers[0]!r} cannot be judged, the model knows {', '.join(known)}"
        )
    ranges = tuple(span for span in data.ranges(split) if span[0] < span[1])
    rows = sum(stop - start for start, stop in ranges)
    if rows != predictions.rows:
        raise DataError(
            f"{predictions.path} has {predictions.rows} rows, {data.path}"
            f"{f', split {split!r},' if split else ''} has {rows}; they must be the rows that were predicted"
        )
    if not rows:
        return Tally.empty(len(known))
    codes = tuple(known.get(str(name), -1) for name in data.classes)
    step = predictions.layout.chunk_rows * _CHUNKS_AT_ONCE
    calls = [
        (predictions.path, (data.path, data.rows), ranges, codes, start, min(rows, start + step))
        for start in range(0, rows, step)
    ]
    total: Tally = executor.map_reduce(tally_rows, calls, operator.add, name="evaluate-chunk")
    return total


@functools.lru_cache(maxsize=4)
def _dataset(path: str, rows: int) -> Dataset:
    """In this process; `rows` tells a data set that grew from what it was."""
    return open_dataset(Place.of(path))


def tally_rows(
    predictions: str,
    data: tuple[str, int],
    ranges: tuple[tuple[int, int], ...],
    codes: tuple[int, ...],
    start: int,
    stop: int,
) -> Tally:
    """On a worker: rows [start, stop) of the predictions."""
    found = open_predictions(predictions)
    y = np.asarray(codes)[_labels(_dataset(*data), ranges, start, stop)]
    labels = found.read("label", start, stop) if "label" in found.names else None
    if "probability" in found.names:
        return Tally.of(y, found.read("probability", start, stop), labels)
    assert labels is not None
    return Tally.of_labels(y, labels, len(found.classes))


def _labels(data: Dataset, ranges: tuple[tuple[int, int], ...], start: int, stop: int) -> np.ndarray:
    parts: list[Any] = []
    before = 0
    for low, high in ranges:
        a, b = max(start - before, 0), min(stop - before, high - low)
        if a < b:
            assert data.y is not None
            parts.append(data.y.read(low + a, low + b))
        before += high - low
    return np.concatenate(parts)
