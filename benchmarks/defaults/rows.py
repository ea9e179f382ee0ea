"""The tables of the benchmark, and which of their rows may be used for what.

    X, y = table("satimage")
    reserve("satimage", len(y))           # row numbers: the half from which test rows are drawn
    X, y = development_rows("satimage")   # the other half: design choices use these rows only
    X, y, Xq, yq = split("satimage", 0)   # training and test rows of split 0
    for X, y, Xq, yq in development_folds("satimage"): ...

A fixed half of the rows of every table is its reserve. The test rows of every split are a quarter of the table, drawn
from the reserve, in each class in proportion; all other rows are training rows. Kernels, scalings, constants and all
else about the defaults are chosen by cross-validation inside the other half, which has no test row of any split.

Rows are ordered by a hash of the table's name and their number, so that they are the same on every machine and with
every version of every library.
"""

from __future__ import annotations

import hashlib

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine

from benchmarks.machine import shared_data

SAMPLE = 15_000
# iris and wine come from scikit-learn, so that they are the same with and without the shared folder.
SHIPPED = {"iris": load_iris, "wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
SHARED = (
    "parkinsons",
    "ecoli",
    "ionosphere",
    "pima",
    "banknote",
    "segment",
    "abalone-3",
    "satimage",
    "pendigits",
    "covtype-15k",
    "mnist-15k",
    "poker-15k",
)
NAMES = (*SHIPPED, *SHARED)


def available() -> tuple[str, ...]:
    """Names of the tables that can be read here: all, or those of scikit-learn without the shared folder."""
    return NAMES if shared_data() else tuple(SHIPPED)


def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    """All rows X (float64) and labels y (0, 1, ...) of a table."""
    if name in SHIPPED:
        X, y = SHIPPED[name](return_X_y=True)
    elif name in SHARED:
        X, y = _shared(name)
    else:
        raise SystemExit(f"unknown set {name!r}; use one of {', '.join(NAMES)}")
    return X.astype(np.float64), np.unique(y, return_inverse=True)[1]


def _shared(name):
    folder = shared_data()
    if folder is None:
        raise SystemExit(f"{name} is one of the shared data sets, which were not found; set KME_DATA to their folder")
    stem, _, kind = name.partition("-")
    with np.load(folder / f"{stem}.npz", allow_pickle=False) as stored:
        X, y = stored["X"], stored["y"]
    if kind == "15k":
        kept = np.sort(hashed_order(f"{name} sample", len(y))[:SAMPLE])
        X, y = X[kept], y[kept]
    if kind == "3":
        y = np.digitize(y, [8.5, 10.5])  # the customary groups of rings: up to 8, 9 and 10, from 11
    return X, y


def hashed_order(key, n):
    """The numbers 0, ..., n - 1 in an order that depends only on `key`."""
    digests = b"".join(hashlib.sha256(f"{key} {i}".encode()).digest()[:8] for i in range(n))
    return np.argsort(np.frombuffer(digests, ">u8"), kind="stable")


def reserve(name: str, n: int) -> np.ndarray:
    """Numbers of the rows of the reserve, half of the `n` rows, in ascending order."""
    return np.sort(hashed_order(f"{name} reserve", n)[: n // 2])


def _others(rows, n):
    return np.setdiff1d(np.arange(n), rows)


def test_rows(name: str, y: np.ndarray, seed: int) -> np.ndarray:
    """Numbers of the test rows of a split: a quarter of all rows, from the reserve, in each class in proportion."""
    rows = reserve(name, len(y))
    return np.sort(rows[_proportional(f"{name} split {seed}", y[rows], len(y) // 4)])


def _proportional(key, y, size):
    """Places of `size` entries of `y`, from each class in proportion; what does not divide goes by largest rest."""
    labels, counts = np.unique(y, return_counts=True)
    exact = counts * size / len(y)
    quota = np.floor(exact).astype(int)
    ties = hashed_order(f"{key} rest", len(labels))
    largest = ties[np.argsort(-(exact - quota)[ties], kind="stable")]
    quota[largest[: size - quota.sum()]] += 1
    order = hashed_order(key, len(y))
    return np.concatenate([order[y[order] == label][:count] for label, count in zip(labels, quota, strict=True)])


def split(name: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """X and y of the training rows, X and y of the test rows."""
    X, y = table(name)
    test = test_rows(name, y, seed)
    train = _others(test, len(y))
    return X[train], y[train], X[test], y[test]


def development_rows(name: str) -> tuple[np.ndarray, np.ndarray]:
    """X and y of the rows outside the reserve: training rows of every split, and the rows for design choices."""
    X, y = table(name)
    rows = _others(reserve(name, len(y)), len(y))
    return X[rows], y[rows]


def development_folds(name: str, folds: int = 3):
    """Folds of the development rows, each class spread evenly: X and y for training, X and y to evaluate."""
    X, y = development_rows(name)
    order = hashed_order(f"{name} folds", len(y))
    order = order[np.argsort(y[order], kind="stable")]  # class by class, shuffled within
    for fold in range(folds):
        held = np.sort(order[fold::folds])
        rest = _others(held, len(y))
        yield X[rest], y[rest], X[held], y[held]


def rows_of(name: str, number: int, development: bool = False):
    """Training and test rows of split `number`, or of fold `number` of the development rows."""
    return list(development_folds(name))[number] if development else split(name, number)
