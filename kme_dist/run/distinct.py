"""Small tables: weights of rows and repeated rows give the same model, to the last bit.

    data, split = as_distinct_rows(data, split)

A row of weight 2 is the row twice, in exact arithmetic and if all rows are used. But pairs of rows, folds, batches and
orders are drawn by row: they depend on how many rows there are and on their order, and so does rounding. So a small
table is learned from in one form, however it was given: each of its different rows once, with the sum of its weights,
in the order of the values.
"""

from __future__ import annotations

import numpy as np

from kme_dist.core.risk import without_copies
from kme_dist.core.squared import in_order
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import RowSource
from kme_dist.data.rows import RowsRef

_MOST_ROWS, _MOST_NUMBERS = 1_000, 1_000_000  # of positive weight; they are sent with every task


def as_distinct_rows(source: RowSource, split: str | None, batch: int | None = None) -> tuple[RowSource, str | None]:
    """The rows of a split in that form, and the split that has them.

    Unchanged are more than 1,000 rows of positive weight, rows that are not vectors, tables of few different rows,
    whose equal rows are no copies, and tables without copies whose weights are all the same. If copies leave all rows
    with the same weight, they are in the order of their first ones, that of a table which has them once. With `batch`,
    tables of more rows than that are unchanged, too: they have more steps in an epoch than without their copies.
    """
    factors = source.class_factors
    own = source if factors is None else source.with_class_factors([1.0] * len(factors))
    if split != source.training_split() or own.split_positive(split) > min(batch or _MOST_ROWS, _MOST_ROWS):
        return source, split
    rows = RowsRef.of(own, split=split).with_positive_weight()
    X, y = rows.read()
    if not hasattr(X, "dtype") or X.size > _MOST_NUMBERS:
        return source, split
    X, targets, given = X if X.ndim == 2 else X.reshape(len(X), -1), np.asarray(y), None
    if source.has_weights:
        given = np.concatenate([np.asarray(source.read_weights(*span)) for span in rows.ranges])
    codes = np.unique(targets.reshape(len(targets), -1), axis=0, return_inverse=True)[1].reshape(-1)
    found = without_copies(X, codes, given)
    if found is None:
        return source, split
    first, weights = found
    if np.any(weights != weights[0]):
        order = in_order(X[first], codes[first][:, None])
        first, weights = first[order], weights[order]
    elif len(first) == len(targets):
        return source, split
    X = X[first] if hasattr(X, "indptr") else X[first] + 0.0  # -0.0 equals 0.0
    names = source.feature_names if source.named else None
    merged = ArrayRows(X, targets[first], source.classes, names, weights * _unit(source, split))
    merged.path = source.path
    return merged if factors is None else merged.with_class_factors(factors), None


def _unit(source: RowSource, split: str | None) -> float:
    """What weights below 1 on average are multiplied by: for the number of rows that were given."""
    if not source.weighted:
        return 1.0
    totals = source.weight_totals(split)[:, 0]
    return source.split_weight(split) / float(np.asarray(source.class_factors or [1.0] * len(totals)) @ totals)
