"""Rows that are not numbers (texts, sequences, bags), checked against the kernel that takes them.

    objects_of(kernel, X)                        such rows as a list, if the kernel takes them
    check_objects(kernel, rows)                  DataError for the first row that the kernel does not take
    check_objects(kernel, rows, like=centres)    new rows: also bags of another width than those of the fit
    targets_of(kernel, Y)                        targets, checked in the same way
    refuse_objects("CMERegressor", X)            DataError where rows must be numbers

A kernel numbers rows within its tile, so the rows that a user passed are checked here, before they are cut into tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kme_dist.core.conditional import Delta
from kme_dist.core.kernels import Bags, Kernel, from_config
from kme_dist.data.statistics import Statistics
from kme_dist.data.validation import as_values, check_labels, check_only_texts, object_rows
from kme_dist.errors import DataError, counted

TEXT_ESTIMATORS = (
    "texts are rows of MCEClassifier, KernelMean, ConditionalMeanEmbedding, SupportMeasureClassifier and mmd_test, "
    "with a kernel of texts, e.g. kme_dist.kernels.Spectrum(p=2)"
)
_BAGS = "kme_dist.kernels.Bags(kme_dist.kernels.Gaussian())"
_NOT_TAKEN = (DataError, TypeError, ValueError, AttributeError, IndexError)  # of a kernel given rows of another kind


def takes_bags(kernel: Any) -> bool:
    """Whether the kernel, or a part of it, is one of bags."""
    return isinstance(kernel, Bags) or any(map(takes_bags, getattr(kernel, "parts", ())))


def objects_of(kernel: Kernel, X: Any) -> list[Any] | None:
    """Texts, sequences or bags as a list; None for rows that the kernel does not take."""
    found = object_rows(X)
    if takes_bags(kernel) and (hasattr(X, "shape") or (isinstance(X, list | tuple) and len(X))):
        check_objects(kernel, found if found is not None else X)
    elif found is None:
        check_only_texts(X)
    return found if found and _takes(kernel, found) else None


def check_objects(
    kernel: Any, rows: Any, *, like: Any = None, finite: bool = True, setting: str = "kernel", labels: bool = False
) -> None:
    """Raise an error for the first of some rows in memory that the kernel (or that of this name) does not take.

    `like` are rows of the fit, whose kind was checked; `labels` says that the setting may be "delta" too.
    """
    listed = isinstance(rows, list | tuple)
    if listed:
        check_only_texts(rows)
    if takes_bags(kernel) and not listed:
        shape = f"an array of shape {np.shape(rows)}" if hasattr(rows, "shape") else type(rows).__name__
        raise DataError(f"{_name(kernel)} takes a list of bags, got {shape}; pass a list of matrices, one for each bag")
    if takes_bags(kernel):
        _check_bags(rows, like, finite)
    if not listed or not len(rows) or like is not None:
        return
    found = from_config({"name": kernel}) if isinstance(kernel, str) else from_config(kernel)
    if _takes(found, rows):
        return
    first, name = rows[0], _name(found)
    label = "'delta' for labels, or " if labels else ""
    if takes_bags(found):
        raise DataError(
            f"bag 0 has members such as {str(first[0])[:60]!r}, which {name} does not take; choose an inner kernel "
            f"that does, e.g. {setting}=kme_dist.kernels.Bags(kme_dist.kernels.Spectrum(p=2)) for texts"
        )
    if isinstance(first, str):
        raise DataError(
            f"rows are texts, e.g. {first[:60]!r}, and {name} is a kernel of numbers; choose {label}a kernel of texts, "
            f"e.g. {setting}=kme_dist.kernels.Spectrum(p=2)"
        )
    if _is_bag(first):
        raise DataError(
            f"rows are bags (row 0 has {counted(len(first), 'row')} itself), and {name} does not take them; choose a "
            f"kernel of bags, e.g. {setting}={_BAGS}"
        )
    if isinstance(first, list | tuple | np.ndarray) and (_is_ragged(rows) or any(isinstance(v, str) for v in first)):
        raise DataError(
            f"rows are sequences of several lengths, or not of numbers (row 0 is {str(first)[:60]}), and {name} does "
            f"not take them; pass rows of numbers of one length, or choose {label}a kernel of sequences, e.g. "
            f"{setting}=kme_dist.kernels.Spectrum(p=2) for lists of words"
        )


def targets_of(kernel: Any, Y: Any, name: str = "targets") -> Any:
    """Targets for a kernel of targets, or that of this name: numbers as an array, texts and labels as they are."""
    labels = isinstance(kernel, Delta) or (isinstance(kernel, str) and kernel == "delta")
    if labels:
        check_labels(Y)
    if Y is None:
        raise DataError("targets are missing: call fit(X, Y), or pass a data set that has them")
    if isinstance(Y, str) or not hasattr(Y, "__len__") or getattr(Y, "ndim", 1) == 0:
        raise DataError(f"Y is {Y!r}; pass an array or a list with one target for each row of X")
    check_only_texts(Y)
    found = as_values(Y, name, labels)
    if isinstance(found, np.ndarray) and found.dtype.kind in "iuf" and not labels:
        rows = found.reshape(len(found), -1)
        Statistics.of(rows).check_squares(name, (), "divide them by a constant", "float64")
    return found


def refuse_objects(by: str, X: Any) -> None:
    """Raise an error for bags and sequences, where rows must be numbers; texts are told elsewhere."""
    found = object_rows(X)
    if not found or isinstance(found[0], str):
        return
    if _is_bag(found[0]):
        raise DataError(
            f"{by} takes rows of numbers here, got bags: row 0 has {counted(len(found[0]), 'row')} itself; bags are "
            "rows of MCEClassifier, KernelMean, ConditionalMeanEmbedding and mmd_test with a kernel of bags, e.g. "
            f"kernel={_BAGS}, and of SupportMeasureClassifier"
        )
    sizes = [len(row) for row in found]
    row = next((row for row, size in enumerate(sizes) if size != sizes[0]), None)
    if row is not None:
        raise DataError(
            f"rows must have as many numbers as each other: row 0 has {sizes[0]}, row {row} has {sizes[row]}; fill "
            "them up, or pass sequences to MCEClassifier with a kernel of them, e.g. kme_dist.kernels.Spectrum(p=2)"
        )


def _takes(kernel: Kernel, rows: Sequence[Any]) -> bool:
    try:
        kernel.gram(rows[:1])
    except _NOT_TAKEN:
        return False
    return True


def _name(kernel: Any) -> str:
    return repr(kernel) if takes_bags(kernel) else type(kernel).__name__


def _is_bag(row: Any) -> bool:
    """Whether a row has rows itself."""
    if isinstance(row, str) or not hasattr(row, "__len__") or not len(row):
        return False
    return isinstance(row[0], list | tuple) or getattr(row[0], "ndim", 0) > 0


def _is_ragged(rows: Sequence[Any]) -> bool:
    return len({len(row) for row in rows if hasattr(row, "__len__")}) > 1


def _check_bags(bags: Sequence[Any], like: Any, finite: bool) -> None:
    """Every bag has members, of the same features as those of the fit (or of the first bag), which are finite."""
    found = [_members(number, bag) for number, bag in enumerate(bags)]
    widths = [_width(bag) for bag in found]
    first, whose = (widths[0], "bag 0 has") if like is None else (_width(_members(0, like[0])), "those of the fit have")
    for number, width in enumerate(widths):
        if width != first:
            seen, wanted = (counted(w, "feature") if w else "texts" for w in (width, first))
            raise DataError(f"bag {number} has members of {seen}, {whose} {wanted}; pass bags of the same columns")
    if not finite or not first:
        return
    edges = np.cumsum([len(bag) for bag in found])
    wrong = ~np.isfinite(np.concatenate(found)).all(axis=1)
    if wrong.any():
        at = int(np.argmax(wrong))
        number = int(np.searchsorted(edges, at, side="right"))
        member = at - int(edges[number]) + len(found[number])
        raise DataError(
            f"bag {number} has NaN or infinity in its member {member}; remove that member, or replace the value"
        )


def _width(bag: Any) -> int:
    """The number of features of the members; 0 for texts and other objects."""
    return int(bag.shape[1]) if isinstance(bag, np.ndarray) else 0


def _members(number: int, bag: Any) -> Any:
    """A bag of numbers as a matrix; a list of texts as it is."""
    if hasattr(bag, "__len__") and not isinstance(bag, str) and not len(bag):
        raise DataError(f"bag {number} is empty; a bag must have at least one member: leave it out")
    if isinstance(bag, list | tuple) and (isinstance(bag[0], str) or any(isinstance(part, str) for part in bag)):
        try:
            check_only_texts(bag)
        except DataError as error:
            raise DataError(f"bag {number}: {error}") from None
        return bag
    try:
        found = np.asarray(bag)
    except ValueError:
        raise DataError(f"bag {number} has members of several lengths; all need the same features") from None
    if found.ndim != 2:
        raise DataError(
            f"bag {number} has the shape {found.shape}, but a bag is a matrix with one row for each member; for "
            "members of one feature pass bag.reshape(-1, 1), for a bag of one member bag.reshape(1, -1)"
        )
    if found.dtype.kind not in "biuf" or not found.shape[1]:
        raise DataError(
            f"bag {number} (shape {found.shape}, {found.dtype}) has no numbers; pass a matrix of numbers with at least "
            "one column, e.g. bag.astype(float)"
        )
    return found
