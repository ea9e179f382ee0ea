"""Validation of user input: rows, columns, labels.

    rows = as_rows(X)                  numbers as a C-ordered matrix of floats; anything else as it is
    values = as_values(Y)              targets: numbers as an array, texts and labels as they are
    check_columns(X)                   an error for a column of dates, by name, before other checks fail
    check_labels(y)                    an error for labels of mixed types, dates and missing labels, by row
    object_rows(X)                     texts, sequences or bags as a list; None for anything else
    check_only_texts(rows)             an error for a row that is no text, among texts
    check_not_path(X)                  an error for a path, which has to be opened first, and for a lazy frame
    check_collected(X)                 an error for a lazy frame alone
    check_numeric_targets(y, by)       an error for targets of a regression that are texts, dates or durations
    long_integer_words(least, most)    why integers of this range cannot become floating point numbers; None: they can
    check_targets_given(X, y)          an error for a single value as targets
    check_long_integers(y, what)       an error for targets with such integers
    text_among(X)                      the first text in a table that should hold numbers, and where it is
    not_finite_among(X)                the first NaN or infinity in a table, and where it is
    not_finite_words(error, X, y)      scikit-learn's error for one, with the place and what to do

`check_columns` and `check_labels` return nothing and change nothing, so they can be called before scikit-learn's
`validate_data`.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np

from kme_dist.errors import DataError

_NUMBERS = ("b", "i", "u", "f")
_DATES = ("m", "M")
LARGEST_INTEGER = 2**53
_LOOKED_AT = 1_000  # rows of a column of objects


# --- rows ---------------------------------------------------------------------------------------------------


def as_rows(X: Any, dtype: str = "float64") -> Any:
    """Rows as kernels accept them.

    A table of numbers (an array, a data frame, a list of rows of equal length) becomes a C-ordered matrix of `dtype`,
    so that the same values give the same bits in any memory order. Anything else (texts, ...) is returned as it is, for
    the kernel to check.
    """
    check_not_path(X)
    check_columns(X)
    if hasattr(X, "to_numpy"):  # a data frame or one of its columns
        X = _from_frame(X)
    elif hasattr(X, "column_names"):  # an Arrow table
        X = _from_arrow(X)
    elif isinstance(X, list | tuple):
        X = _from_list(X)
    if not isinstance(X, np.ndarray):
        if not hasattr(X, "__len__"):
            raise DataError(f"rows must be a table or a list of rows, got {X!r}; for one row pass [[...]]")
        return X
    if X.dtype.kind == "O" and X.ndim == 2:
        X = _numbers_or_same(X)
    if X.dtype.kind not in _NUMBERS:
        return X.tolist()
    if X.ndim == 3:  # bags of equal size, for a kernel that takes them
        return list(X)
    if X.ndim != 2:
        raise DataError(
            f"expected an array of shape (rows, features), got {X.shape}. For a single feature pass "
            "X.reshape(-1, 1), for a single row X.reshape(1, -1)"
        )
    X = np.ascontiguousarray(X, dtype=dtype)
    if (found := not_finite_among(X)) is not None:
        raise DataError(f"rows contain NaN or infinity: {found}; remove or replace them first")
    return X


def object_rows(X: Any) -> list[Any] | None:
    """Rows that are not numbers (texts, sequences, bags) as a list; None for a table of numbers."""
    if isinstance(X, np.ndarray) and X.ndim == 3:
        return list(X)  # bags of equal size
    if getattr(X, "ndim", 1) != 1 or isinstance(X, str | bytes | dict) or hasattr(X, "dask"):
        return None
    if hasattr(X, "to_numpy") or isinstance(X, np.ndarray):
        values = np.asarray(X.to_numpy() if hasattr(X, "to_numpy") else X)
        return values.tolist() if values.dtype.kind in "UT" else _objects(values) if values.dtype.kind == "O" else None
    return _objects(X) if isinstance(X, list | tuple) and len(X) else None


def _objects(rows: Any) -> list[Any] | None:
    found = list(rows)
    if not all(isinstance(row, str | list | tuple | np.ndarray) for row in found):
        return None
    if all(isinstance(row, str) for row in found):
        return found
    try:
        numbers = np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError):  # of several lengths, or not numbers
        return found
    return None if numbers.ndim == 2 else found


def check_only_texts(rows: Any) -> None:
    """Raise an error for the first of several rows that is no text (or sequence), where others are texts."""
    if isinstance(rows, list | tuple):
        values = list(rows)
    elif getattr(rows, "ndim", 0) == 1 and not hasattr(rows, "dask"):
        found = np.asarray(rows.to_numpy() if hasattr(rows, "to_numpy") else rows)
        values = found.tolist() if found.dtype.kind == "O" else []
    else:
        return
    row = next((i for i, value in enumerate(values) if not isinstance(value, str | list | tuple | np.ndarray)), None)
    if row is not None and any(isinstance(value, str) for value in values):
        raise DataError(f"row {row} is {_shown(values[row])} among texts; remove that row, or pass a text there")


def _from_frame(X: Any) -> np.ndarray:
    values = np.asarray(X.to_numpy())
    if values.dtype.kind in _NUMBERS or values.ndim != 2:
        return values
    found = _numbers_or_same(values)
    if found.dtype.kind in _NUMBERS or values.shape[1] < 2:
        return found
    _refuse_objects(values, _column_names(X, values.shape[1]))
    return values


def _from_arrow(X: Any) -> np.ndarray:
    columns = [np.asarray(column) for column in X.columns]
    if not columns or not X.num_rows:
        raise DataError("the table has no rows")
    if any(column.dtype.kind not in _NUMBERS for column in columns):
        columns = [column.astype(object) for column in columns]
        _refuse_objects(np.stack(columns, axis=1), X.column_names)
    return np.stack(columns, axis=1)


def _refuse_objects(values: np.ndarray, names: Sequence[Any]) -> None:
    """Raise an error for the first value that is no number, by its column and row."""
    for name, column in zip(names, values.T, strict=True):
        for row, value in enumerate(column):
            if not _is_number(value):
                raise DataError(
                    f"column {name!r} holds {_shown(value)} in row {row}, but kernels of rows require numbers; encode "
                    f"the column as numbers first, or drop it: X.drop(columns={name!r})"
                )


def _from_list(X: Sequence[Any]) -> Any:
    """A list of numeric rows of equal length as an array; any other list as it is."""
    if not len(X) or isinstance(X[0], str):
        return X
    try:
        found = np.asarray(X)
    except ValueError:  # rows of several lengths: sequences, for a kernel that takes them
        return X
    if found.ndim == 2 and found.dtype.kind == "O":
        found = _numbers_or_same(found)
    return found if found.ndim == 2 and found.dtype.kind in _NUMBERS else X


def _numbers_or_same(values: np.ndarray) -> np.ndarray:
    """An array of objects as floats if all of them are numbers (None is missing)."""
    if any(not _is_number(value) for value in values.ravel()):
        return values
    found = [np.nan if _is_missing(value) else float(value) for value in values.ravel()]
    return np.array(found, np.float64).reshape(values.shape)


def _is_number(value: Any) -> bool:
    if _is_missing(value) or isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        return True
    return isinstance(value, Decimal | Fraction)


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ == "NAType"  # pandas' missing number


def check_not_path(X: Any) -> None:
    """Raise an error for a path or a single text where rows are expected, and for a query that was not run."""
    check_collected(X)
    if isinstance(X, str | os.PathLike):
        path = os.fspath(X)
        raise DataError(
            f"rows must be a table or a list of rows, got {path!r}; for a stored data set pass "
            f"kme_dist.open_dataset({path!r}), for a single text [{path!r}]"
        )


def check_collected(X: Any) -> None:
    """Raise an error for a lazy frame, which has no rows yet."""
    if type(X).__name__ == "LazyFrame":
        raise DataError("rows must be in memory, got a LazyFrame, a query that was not run yet; run it: .collect()")


@dataclass(frozen=True)
class FoundText:
    """A text among numbers, in words; `whole` if it is all of its row."""

    words: str
    whole: bool


def text_among(X: Any) -> FoundText | None:
    """The first text that is not a number, and where it is; None if there is none."""
    values = np.asarray(X.to_numpy() if hasattr(X, "to_numpy") else X, dtype=object)
    whole = not hasattr(X, "columns") and (values.ndim < 2 or values.shape[1] == 1)
    for at, value in np.ndenumerate(values):
        if isinstance(value, str | bytes) and not _is_float(value):
            column = "" if whole else f", column {_column_names(X, values.shape[1])[at[1]]!r}"
            return FoundText(f"the text {value[:60]!r} in row {at[0]}{column}", whole)
    return None


def not_finite_among(values: Any) -> str | None:
    """The first number that is NaN or infinite, and where it is; None if there is none, or if these are no numbers."""
    if hasattr(values, "tocsr"):
        rows = values.tocsr()
        bad = np.flatnonzero(~np.isfinite(rows.data))[:1]
        places = [(int(np.searchsorted(rows.indptr, i, side="right")) - 1, int(rows.indices[i])) for i in bad]
        found = rows.data[bad]
    else:
        try:
            numbers = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values, dtype=np.float64)
        except (TypeError, ValueError):
            return None
        first = np.argwhere(~np.isfinite(numbers))[:1]
        places, found = [tuple(place) for place in first.tolist()], numbers[tuple(first.T)]
    if not places:
        return None
    row, *column = places[0]
    names = values.columns if hasattr(values, "columns") else range(column[0] + 1) if column else ()
    named = f", column {names[column[0]]!r}" if len(column) == 1 else ""
    return f"{'NaN' if np.isnan(found[0]) else found[0]} in row {row}{named}"


def not_finite_words(error: str, X: Any, y: Any = None) -> str:
    """What scikit-learn says of NaN and infinity, with the place, and what to do; `y` are the targets of a fit."""
    targets = error.startswith("Input y")
    where = not_finite_among(y if targets else X)
    words = error.partition("\n")[0].rstrip(".") + ("" if where is None else f": {where}")
    if targets:
        return f"{words}; remove such rows, or give them a target"
    if "infinity" in error:
        return f"{words}; remove such rows, or replace the value"
    instead = (
        "a model that was fitted to a data frame with missing values takes them"
        if y is None
        else "pass a data frame, whose missing values are filled in and marked (in a config: `missing`)"
    )
    return f"{words}; arrays must be complete: remove such rows, fill the values in, or {instead}"


def check_numeric_targets(y: Any, by: str) -> None:
    """Raise an error for targets of a regression that are texts, dates or durations."""
    kind = getattr(getattr(y, "dtype", None), "kind", "")
    if kind in ("i", "u") and not hasattr(y, "dask"):
        targets = np.asarray(y)
        words = long_integer_words(int(targets.min()), int(targets.max())) if targets.size else None
        if words is not None:
            raise DataError(f"the targets hold {words}; subtract an offset")
    if y is None or kind in (*_NUMBERS, "c"):  # complex: scikit-learn's error
        return
    values = list(y) if isinstance(y, list | tuple) else np.asarray(y).ravel()[:_LOOKED_AT].tolist()
    moment = next(
        (value for value in values if isinstance(value, date | timedelta | np.datetime64 | np.timedelta64)), None
    )
    if kind in _DATES or moment is not None:
        spans = kind == "m" or isinstance(moment, timedelta | np.timedelta64)
        what = "durations" if spans else "dates or times"
        how = "seconds: y / numpy.timedelta64(1, 's')" if spans else "days: (y - y.min()) / numpy.timedelta64(1, 'D')"
        raise DataError(f"{by} predicts numbers, and its targets are {what}; pass numbers as y, e.g. {how}")
    try:
        np.asarray(y, np.float64)
    except (TypeError, ValueError):
        if (found := text_among(y)) is not None:
            raise DataError(
                f"{by} predicts numbers, and among its targets is {found.words}; pass numbers as y, or fit a "
                "classifier such as MCEClassifier to class labels"
            ) from None


def check_targets_given(X: Any, y: Any) -> None:
    """Raise an error for a single value where a column of X or one value for each row is expected."""
    if y is None or not (np.isscalar(y) or getattr(y, "ndim", 1) == 0):
        return
    named = hasattr(X, "columns")
    ways = "the name of a column of X (a text) or an array" if named else "an array or a list"
    hint = "" if named or not isinstance(y, str) else "; only the columns of a table have names"
    raise DataError(f"y={y!r} is a single value; pass {ways} with one value for each row{hint}")


def check_long_integers(y: Any, what: str) -> None:
    """Raise an error for targets in memory with integers that floating point numbers would merge."""
    if hasattr(y, "columns") and hasattr(y, "dtypes"):
        for name in y.columns:  # each of its own type; of two equal names the columns are a frame
            if not hasattr(y[name], "columns"):
                check_long_integers(y[name], f"{what}, column {name!r}")
        return
    values = y.to_numpy() if hasattr(y, "to_numpy") else y
    if isinstance(values, list | tuple):  # NumPy would round integers that stand beside a fraction
        parts = (part if isinstance(part, list | tuple) else (part,) for part in values)
        values = np.fromiter(itertools.chain.from_iterable(parts), object)
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iuO" or not values.size:
        return
    if values.dtype.kind == "O":
        found = [value for value in values.ravel() if isinstance(value, int | np.integer)]
        least, most = int(min(found, default=0)), int(max(found, default=0))
    else:
        least, most = int(values.min()), int(values.max())
    if words := long_integer_words(least, most):
        raise DataError(f"{what}: found {words}; subtract an offset")


def _is_float(text: str | bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_columns(X: Any) -> None:
    """Raise an error for dates, durations and integers without a floating point number of their own, by column."""
    check_collected(X)
    if hasattr(X, "columns") and hasattr(X, "dtypes"):
        name, count = Counter(X.columns).most_common(1)[0] if len(X.columns) else (None, 0)
        if count > 1:
            raise DataError(f"the column name {name!r} occurs {count} times; names must be unique")
        for name, dtype in zip(X.columns, X.dtypes, strict=True):
            if getattr(dtype, "kind", "") in _DATES or str(dtype).lower().startswith(("date", "time", "period")):
                _refuse_dates(repr(name), str(dtype), f"X[{name!r}]")
            if getattr(dtype, "kind", "") in "iu" and not hasattr(X, "dask"):
                _refuse_long_integers(X[[name]].to_numpy(), [name])
            if getattr(dtype, "kind", "") == "O" and not hasattr(X, "dask"):
                _check_objects(X[[name]].to_numpy()[:_LOOKED_AT], [name])
    elif getattr(getattr(X, "dtype", None), "kind", "") in _DATES:
        _refuse_dates("0", str(X.dtype), "X")
    elif isinstance(X, np.ndarray) and X.dtype.kind in "iu" and X.ndim == 2:
        _refuse_long_integers(X, range(X.shape[1]))
    elif isinstance(X, np.ndarray) and X.dtype.kind == "O" and X.ndim == 2:
        _check_objects(X[:_LOOKED_AT], range(X.shape[1]))
    elif isinstance(X, list | tuple) and len(X) and isinstance(X[0], list | tuple):
        _check_objects(X[:1], range(len(X[0])))


def _check_objects(rows: Any, names: Sequence[Any]) -> None:
    for row in rows:
        for name, value in zip(names, row, strict=False):
            if isinstance(value, date | timedelta | np.datetime64 | np.timedelta64):
                _refuse_dates(repr(name), type(value).__name__, "")


def _refuse_long_integers(rows: np.ndarray, names: Sequence[Any]) -> None:
    """As floating point numbers, neighbours would be equal."""
    if rows.dtype.kind not in "iu" or rows.dtype.itemsize < 8 or not rows.size:
        return
    for name, least, most in zip(names, rows.min(axis=0).tolist(), rows.max(axis=0).tolist(), strict=True):
        if words := long_integer_words(least, most):
            raise DataError(
                f"column {name!r} has {words}; subtract an offset, or drop the column if it is an identifier"
            )


def long_integer_words(least: int, most: int) -> str | None:
    """What is wrong with integers from `least` to `most` as floating point numbers; None: nothing.

    The one rule for every way in: tables and arrays in memory, files, and rows to predict.
    """
    if least >= -LARGEST_INTEGER and most <= LARGEST_INTEGER:
        return None
    shown = most if most > LARGEST_INTEGER else least
    return f"the integer {shown}, and beyond 2**53 integers cannot be told apart as floating point numbers"


def _refuse_dates(column: str, kind: str, where: str) -> None:
    if "timedelta" in kind:
        how = f"{where} / numpy.timedelta64(1, 's')" if where else "value.total_seconds()"
        raise DataError(
            f"column {column} holds durations ({kind}), but kernels of rows require numbers; convert it first "
            f"(seconds: {how}), or drop it"
        )
    how = f"{where}.astype('datetime64[s]').astype('int64') / 86_400" if where else "seconds / 86_400"
    raise DataError(
        f"column {column} holds dates or times ({kind}), but kernels of rows require numbers; convert it first "
        f"(days since 1970: {how}), or drop it"
    )


def _column_names(X: Any, width: int) -> list[Any]:
    return list(X.columns) if hasattr(X, "columns") else list(range(width))


def _shown(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})"


def not_finite_rows(X: np.ndarray) -> dict[int, str]:
    """Rows of a matrix with a value that is not finite, with the first of them."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(X.sum(dtype=np.float64)):
            return {}
    bad = ~np.isfinite(X)
    rows = np.flatnonzero(bad.any(axis=1))
    columns = bad[rows].argmax(axis=1)
    return {
        row: f"feature {column}: the value is {X[row, column]}, must be finite"
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True)
    }


def as_values(Y: Any, name: str = "targets", labels: bool = False) -> Any:
    """Targets (or those of another name): numbers as an array of one or two axes, texts and labels as they are; dates
    are an error, and so are integers beyond 2**53 that are no labels."""
    if not labels:
        check_long_integers(Y, name)
    check_columns(Y)
    if hasattr(Y, "to_numpy"):
        Y = np.asarray(Y.to_numpy())
    if isinstance(Y, np.ndarray) and Y.dtype.kind == "O":
        Y = _numbers_or_same(Y)
    elif isinstance(Y, list | tuple) and len(Y) and not isinstance(Y[0], str):
        flat = np.asarray(Y) if all(_is_number(value) for value in Y) else _from_list(Y)
        Y = _numbers_or_same(flat) if isinstance(flat, np.ndarray) and flat.dtype.kind == "O" else flat
    if isinstance(Y, np.ndarray) and Y.dtype.kind in _DATES:
        raise DataError(f"{name}: dates or times ({Y.dtype}); convert them to numbers first")
    if isinstance(Y, np.ndarray) and Y.dtype.kind == "f" and not np.isfinite(Y).all():
        row = int(np.argmin(np.isfinite(Y.reshape(len(Y), -1)).all(axis=1)))
        if len(Y) == 1:
            raise DataError(f"{name}: NaN or infinity; pass finite numbers")
        raise DataError(
            f"{name}: row {row} has NaN or infinity; remove or correct that row, and its counterparts, first"
        )
    return Y


# --- labels -------------------------------------------------------------------------------------------------


def check_labels(y: Any) -> None:
    """Raise an error for labels that cannot be sorted: texts among numbers, missing labels, dates."""
    if y is None or hasattr(y, "dask"):
        return
    kind = getattr(getattr(y, "dtype", None), "kind", "O")
    if kind in _DATES:
        raise DataError(f"labels are dates or times ({y.dtype}); use texts or numbers as labels, e.g. y.astype(str)")
    if kind != "O" or not (hasattr(y, "__len__") or hasattr(y, "__array__")):
        return
    values = list(y) if isinstance(y, list | tuple) else list(np.asarray(y, dtype=object).ravel())
    first: dict[str, tuple[int, Any]] = {}
    for row, value in enumerate(values):
        if isinstance(value, list | tuple | np.ndarray):
            return  # several outputs: not checked here
        if _is_missing(value) or type(value).__name__ == "NaTType":
            raise DataError(f"the label of row {row} is missing ({value!r}); remove that row, or give it a label")
        if isinstance(value, date | timedelta | np.datetime64 | np.timedelta64):
            raise DataError(
                f"the label of row {row} is {_shown(value)}; use texts or numbers as labels, e.g. [str(v) for v in y]"
            )
        first.setdefault("texts" if isinstance(value, str) else "others", (row, value))
        if len(first) == 2:
            (a, one), (b, other) = first.values()
            raise DataError(
                f"labels mix types: {_shown(one)} in row {a} and {_shown(other)} in row {b}; make them all texts, e.g. "
                "[str(v) for v in y], or all numbers"
            )


def unknown_label_words(y: Any) -> str | None:
    """Why labels are of no type that scikit-learn knows, and what to do; None for other reasons."""
    values = np.asarray(y).ravel().tolist()
    for row, value in enumerate(values):
        if isinstance(value, bytes):
            return f"the label of row {row} is {_shown(value)}; decode it to a text, e.g. [v.decode() for v in y]"
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return f"the label of row {row} is {value}, which does not fit 64 bits; use texts, e.g. [str(v) for v in y]"
    kinds = {type(value).__name__ for value in values}
    if len(kinds) > 1:
        named = ", ".join(sorted(kinds))
        return f"labels mix types: {named}; make them all texts, e.g. [str(v) for v in y], or all numbers"
    return None


def as_numbers(values: Any, what: str) -> np.ndarray:
    """Real numbers as an array of doubles; DataError for anything else."""
    try:
        found = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
        if not np.iscomplexobj(found):
            return np.asarray(found, np.float64)
    except (TypeError, ValueError):
        pass
    raise DataError(f"{what} must be real numbers, or rows of equal length of them, got {str(values)[:60]!r}")


def one_line(error: str) -> str:
    """An error of scikit-learn without the rows that it prints; that on names of columns as it is."""
    if error.startswith("The feature names"):
        return error
    kept = re.sub(r"(array=)?\[.*\]\.?", "", error, flags=re.DOTALL) if "\n" in error else error
    return " ".join(kept.split())


def check_matrix(X: Any, by: str) -> None:
    """Refuse arrays that are not tables of real numbers; anything else is checked by the kernel."""
    if hasattr(X, "tocsr"):
        raise DataError(f"sparse input is not supported by {by}; pass X.toarray()")
    if not isinstance(X, np.ndarray):
        return
    if np.iscomplexobj(X):
        raise DataError("Complex data not supported: pass real and imaginary parts as columns")
    if X.ndim == 1 and X.dtype.kind in "biuf":
        raise DataError(
            f"expected an array of shape (rows, features), got {X.shape}. Reshape your data: X.reshape(-1, 1) for a "
            "single feature, X.reshape(1, -1) for a single row"
        )
    if X.ndim == 2 and X.shape[1] == 0:
        raise DataError(f"0 feature(s) (shape={X.shape}) while a minimum of 1 is required; pass columns to learn from")
