"""Compare stored predictions with stored labels, chunk by chunk on any executor; only sums are returned.

tally = tally_predictions(open_predictions("scores.zarr"), open_dataset("rows.zarr"), executor=executor)
tally.metrics(predictions.classes)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kme_dist.core.metrics import NumericTally, Tally
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.lazy import open_rows
from kme_dist.data.new_rows import ModelColumns
from kme_dist.data.places import Place
from kme_dist.data.predictions import Predictions, open_predictions
from kme_dist.data.receipts import Receipt
from kme_dist.data.rows import RowsRef
from kme_dist.data.schema import announce
from kme_dist.errors import DataError, counted
from kme_dist.run.executors import Executor
from kme_dist.run.predict import features_digest

_CHUNKS_AT_ONCE = 8  # chunks of predictions per task: they are small
_COMPARED_CHUNKS = 16  # chunks of which some rows are compared where the identities of the input do not tell


def tally_predictions(
    predictions: Predictions, data: Dataset, *, executor: Executor, split: str | None = None
) -> Tally:
    """Tally all rows. The rows of `data` (of its `split`) must be those predicted, in the same order."""
    if data.classes is None:
        raise DataError(f"{data.path} has no class labels to compare with; ingest it with the column named by `label`")
    if not {"probability", "label"} & set(predictions.names):
        raise DataError(f"{predictions.path} has outputs {predictions.names}; `probability` or `label` is required")
    known = {str(label): code for code, label in enumerate(predictions.classes.tolist())}
    _refuse_unknown(data, split, known)
    source = _predicted_rows(predictions, data, split)
    if not source.count:
        return Tally.empty(len(known))
    codes = tuple(known.get(str(name), -1) for name in data.classes)
    step = predictions.layout.chunk_rows * _CHUNKS_AT_ONCE
    calls = [
        (_reference(predictions), source.part(start, stop), codes, start, stop) for start, stop in source.blocks(step)
    ]
    total: Tally = executor.map_reduce(tally_rows, calls, operator.add, name="evaluate-chunk")
    return total


def _refuse_unknown(data: Dataset, split: str | None, known: Mapping[str, int]) -> None:
    """Refuse classes that the model does not have, before any row is read; those of other splits do no harm."""
    data.ranges(split)
    found = data.attributes if split is None else data.attributes["splits"][split]
    for name, rows in zip(data.classes or (), found["class_counts"], strict=True):
        if rows and str(name) not in known:
            raise DataError(
                f"{data.path}: class {str(name)!r} is unknown to the model ({counted(rows, 'row')}); its classes are "
                f"{', '.join(known)}: leave such rows out, or fit the model with them"
            )


def tally_numbers(
    predictions: Predictions, data: Dataset, *, executor: Executor, split: str | None = None
) -> NumericTally:
    """The same for the numeric targets of a regressor."""
    if data.classes is not None or data.y is None:
        raise DataError(f"{data.path} has no numeric targets to compare with; ingest it with the task regression")
    if "mean" not in predictions.names:
        raise DataError(f"{predictions.path} has outputs {predictions.names}; `mean` is required")
    source = _predicted_rows(predictions, data, split)
    if not source.count:
        return NumericTally()
    step, anchor = predictions.layout.chunk_rows * _CHUNKS_AT_ONCE, float(data.target_statistics.mean[0])
    calls = [
        (_reference(predictions), source.part(start, stop), start, stop, anchor) for start, stop in source.blocks(step)
    ]
    total: NumericTally = executor.map_reduce(tally_targets, calls, operator.add, name="evaluate-chunk")
    return total


def tally_targets(
    predictions: tuple[str, str, str], rows: RowsRef, start: int, stop: int, anchor: float
) -> NumericTally:
    """On a worker: rows [start, stop) of the predictions, whose targets are those of `rows`."""
    found = _opened(*predictions)
    y = np.asarray(rows.read_labels(0, rows.count), np.float64)
    interval = found.read("interval", start, stop) if "interval" in found.names else None
    return NumericTally.of(y, found.read("mean", start, stop), interval, rows.weights(unit=False), anchor)


def _predicted_rows(predictions: Predictions, data: Dataset, split: str | None) -> RowsRef:
    """The rows of a data set, checked to be those that were predicted."""
    source = open_rows(data, ModelColumns(data.features), split=split)
    rows = source.count
    if rows != predictions.rows:
        raise DataError(
            f"{predictions.path} has {predictions.rows} rows, {data.path}"
            f"{f', split {split!r},' if split else ''} has {rows}; they must be the rows that were predicted"
        )
    if rows:
        _check_same_rows(predictions, source)
    return source


def _check_same_rows(predictions: Predictions, source: RowsRef) -> None:
    """Refuse to compare predictions with other rows than those that were predicted.

    Equal identities prove that they are the same, and other identities of a data set with the same precision, columns
    and chunks that they are not. Where rows are stored in another way (Parquet, or another precision), the features of
    some rows are compared with those on record, and a line says so.
    """
    predicted = predictions.state["computed_from"]["data"]
    receipts = predictions.receipts()
    different = [receipt for receipt in receipts.values() if not _is_input(receipt, source, predictions)]
    if not different:
        return
    first = different[0].chunk * predictions.layout.chunk_rows
    if (predicted.get("path"), predicted.get("split")) == (source.path, source.split):
        raise DataError(
            f"{source.path} has changed since {predictions.path} was predicted from it (rows from {first}); "
            "predict it again"
        )
    known = predictions.state.get("identified_by")  # not in records of earlier versions
    if known is not None and known == source.identified_by:
        for receipt in different:
            at = receipt.chunk * predictions.layout.chunk_rows
            if source.is_identified(at, at + receipt.rows):
                last = at + receipt.rows - 1
                raise _other_rows(predictions, source, f"rows {at} to {last} have other values, or another order")
    steps = np.unique(np.linspace(0, len(different) - 1, min(_COMPARED_CHUNKS, len(different))).astype(np.int64))
    compared = [sample for i in steps for span in different[i].spans for sample in span.samples]
    if not compared and predicted.get("kind") == "dataset":
        raise _other_rows(predictions, source, f"row {first} differs")  # of others records of version 1 have no samples
    row = next((row for row, seen in compared if _features_at(source, row) != seen), None)
    if row is not None:
        raise _other_rows(predictions, source, f"row {row} differs")
    announce(
        [
            f"{source.path}: only samples of the rows ({len(compared):,} of {source.count:,}) were compared with those "
            "predicted, which were stored in another format, precision, encoding or split"
        ]
    )


def _other_rows(predictions: Predictions, source: RowsRef, found: str) -> DataError:
    predicted = predictions.state["computed_from"]["data"]
    where = predicted.get("path", "other rows")
    stored = Place.of(where).exists() if "path" in predicted else True
    return DataError(
        f"{source.path}{f', split {source.split!r},' if source.split else ''} does not have the rows that were "
        f"predicted ({found}); {predictions.path} has the predictions of {where}: "
        + ("evaluate them with it" if stored else f"store those rows and their labels {_encoded_by(predictions)}")
    )


def open_labelled(predictions: Predictions, data: str | Path) -> Dataset:
    """The data set with the labels of the predictions; a file is not one yet, and the error says how it becomes one."""
    place = Place.of(data)
    if place.is_local and place.path.is_file():
        raise DataError(
            f"{place} is a file, not a data set; store its rows and their labels {_encoded_by(predictions, place.name)}"
        )
    return open_dataset(place)


def _encoded_by(predictions: Predictions, source: str = "FILE") -> str:
    """How rows of a table are stored as the model has seen them: in another encoding they are other rows."""
    fitted_to = Place.of(predictions.state["model"]).sibling("data.zarr")  # in the folder of a run
    like = fitted_to.address if fitted_to.exists() else "DATA"
    hint = "" if like != "DATA" else ", DATA being the data set of the fit"
    return (
        f"in the encoding of the fit, and evaluate with them: kme-dist ingest {source} rows.zarr --like {like} "
        f"--unseen zeros{hint}"
    )


def _is_input(receipt: Receipt, source: RowsRef, predictions: Predictions) -> bool:
    at = receipt.chunk * predictions.layout.chunk_rows
    for span in receipt.spans:
        if span.input != source.identity(at, at + span.rows, span.source_rows):
            return False
        at += span.rows
    return True


def _features_at(source: RowsRef, row: int) -> str:
    return features_digest(source.read(row, row + 1)[0], 0)


@functools.lru_cache(maxsize=1)
def _opened(path: str, epoch: str, ended: str) -> Predictions:
    """Opened once per process for all tasks, which then read the receipts once; again when they have been replaced."""
    return open_predictions(path)


def _reference(predictions: Predictions) -> tuple[str, str, str]:
    return predictions.path, predictions.epoch, str(predictions.state.get("ended"))


def tally_rows(
    predictions: tuple[str, str, str], rows: RowsRef, codes: tuple[int, ...], start: int, stop: int
) -> Tally:
    """On a worker: rows [start, stop) of the predictions, whose labels are those of `rows`."""
    found = _opened(*predictions)
    y = np.asarray(codes)[rows.read_labels(0, rows.count)]
    weights = rows.weights(unit=False)
    labels = found.read("label", start, stop) if "label" in found.names else None
    if "probability" in found.names:
        return Tally.of(y, found.read("probability", start, stop), labels, weights)
    assert labels is not None
    return Tally.of_labels(y, labels, len(found.classes), weights)
