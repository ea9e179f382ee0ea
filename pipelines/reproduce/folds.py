"""The unit of work: a fold is plain data, and gives one figure.

    fold = Fold("hnr-table-1", "wine", "GMCE", 3, quick=False, settings={}, data="8f3c...")
    compute_fold(asdict(fold), "/data")          # {"value": 94.4, "seconds": 2.1, ...}, on any machine

Folds are independent of each other: what a protocol needs from earlier ones (the state of a random generator, for
example) it repeats. A protocol is a function of fold, X and y (None if the table has no data) that returns a record
with "value" and whatever the pictures of the table need.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kme_dist import backend
from kme_dist.data.places import Place
from kme_dist.errors import DataError
from kme_dist.pipelines.reproduce import askl, cme, hnr, kmse, mnist

Protocol = Callable[["Fold", Any, Any], dict[str, Any]]


@dataclass(frozen=True)
class Fold:
    """One figure to compute. `data` is the digest of the data set: other rows are another fold."""

    table: str
    row: str
    method: str
    fold: int
    quick: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    data_set: str | None = None
    data: str | None = None

    @property
    def name(self) -> str:
        """Of its file."""
        words = "-".join("".join(c if c.isalnum() else "-" for c in part) for part in (self.row, self.method))
        return f"{words}-{self.fold:03d}.json"


PROTOCOLS: dict[str, Protocol] = {
    "hnr-table-1": hnr.table_1,
    "hnr-figure-1": hnr.figure_1,
    "hnr-figure-2": mnist.figure_2,
    "askl-table-2": askl.table_2,
    "kmse-table-1": kmse.table_1,
    "kmse-table-2": kmse.table_2,
    "kmse-table-3": kmse.table_3,
    "kmse-figures": kmse.figures,
    "cme-pendulum": cme.pendulum_trial,
}


def compute_fold(plain: dict[str, Any], folder: str) -> dict[str, Any]:
    """The record of one fold; runs on a worker."""
    fold, began = Fold(**plain), time.perf_counter()
    X, y = (None, None) if fold.data_set is None else read_arrays(folder, fold.data_set)
    with backend.blas_threads(1):
        found = PROTOCOLS[fold.table](fold, X, y)
    return {**found, "value": float(found["value"]), "seconds": time.perf_counter() - began}


def read_arrays(folder: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """X and y of NAME.npz in a folder or an object store; wine and iris are also part of scikit-learn."""
    if not folder:
        from sklearn import datasets

        bunch = {"wine": datasets.load_wine, "iris": datasets.load_iris}[name]()
        return bunch.data, bunch.target
    try:
        with np.load(io.BytesIO(Place.of(folder).read(f"{name}.npz")), allow_pickle=False) as stored:
            return stored["X"], stored["y"]
    except (ValueError, KeyError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise DataError(f"data set {name} not found: {folder}/{name}.npz does not exist") from None
        raise DataError(f"{folder}/{name}.npz is not an npz file with X and y: {error}") from None


def data_digest(folder: str, name: str) -> str:
    """Of the bytes of a data set; DataError if it is missing."""
    if not folder:
        if name in ("wine", "iris"):
            return "scikit-learn"
        raise DataError(f"data set {name} is not part of scikit-learn; pass its folder with --data")
    try:
        return hashlib.sha256(Place.of(folder).read(f"{name}.npz")).hexdigest()[:16]
    except FileNotFoundError:
        raise DataError(f"data set {name} not found: {folder}/{name}.npz does not exist") from None
