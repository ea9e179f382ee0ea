"""Splits (train, validation, test) and the order in which rows are stored.

Everything here is a function of a seed and of the row itself (its number, its key, its value in a column), never of
block sizes or the number of workers, so that the same command gives the same data set on any machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from kme_dist.errors import ConfigError, DataError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Split:
    """How rows are split. One of:

    fractions                random, of exactly these fractions (implies a shuffle); `stratify` keeps class proportions
    fractions and key        by a hash of the key column: rows with equal keys stay together, fractions are approximate
    column                   by the value of a column, which names the split
    ranges                   by row numbers of the source, [start, stop)
    """

    fractions: tuple[tuple[str, float], ...] = ()
    key: str | int | None = None
    column: str | int | None = None
    ranges: tuple[tuple[str, int, int], ...] = ()
    stratify: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        ways = [bool(self.fractions), self.column is not None, bool(self.ranges)]
        if sum(ways) != 1:
            raise ConfigError("a split must be given by exactly one of fractions, a column, or row ranges.")
        if self.key is not None and not self.fractions:
            raise ConfigError("a split by key requires fractions, e.g. train=0.8,test=0.2.")
        if self.stratify and (self.key is not None or not self.fractions):
            raise ConfigError("stratify requires a split by fractions without a key or column.")
        if self.fractions:
            total = sum(share for _, share in self.fractions)
            if any(not 0 < share <= 1 for _, share in self.fractions) or abs(total - 1) > 1e-6:
                raise ConfigError(f"the fractions of a split must be positive and sum to 1; their sum is {total:g}.")
        names = self.names
        if len(set(names)) != len(names):
            raise ConfigError(f"the names of the splits must be unique: {', '.join(names)}.")
        spans = sorted((start, stop) for _, start, stop in self.ranges)
        if any(a >= b for a, b in spans) or any(b > c for (_, b), (c, _) in pairwise(spans)):
            raise ConfigError(f"the row ranges of a split must not be empty or overlap: {spans}.")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.fractions] or [name for name, _, _ in self.ranges]

    @property
    def extra_column(self) -> str | int | None:
        return self.key if self.key is not None else self.column

    @property
    def by_rank(self) -> bool:
        """Whether splits are assigned by position in the shuffled order, once the number of rows is known."""
        return bool(self.fractions) and self.key is None

    @classmethod
    def of(
        cls, given: Any, *, key: Any = None, column: Any = None, stratify: bool = False, seed: int = 0
    ) -> Split | None:
        """From a Split, a mapping, or text: "train=0.8,test=0.2" or "train=0:60000,test=60000:70000"."""
        if isinstance(given, Split):
            return given
        if given is None:
            if key is not None or stratify:
                raise ConfigError("split_key and stratify require a split with fractions, e.g. train=0.8,test=0.2.")
            return None if column is None else cls(column=column)
        if isinstance(given, str):
            pairs = [part.partition("=") for part in given.split(",") if part.strip()]
            if any(not separator for _, separator, _ in pairs):
                raise ConfigError(f"split is {given!r}; use e.g. train=0.8,test=0.2 or train=0:60000,test=60000:70000.")
            given = {name.strip(): value.strip() for name, _, value in pairs}
        if not isinstance(given, Mapping):
            raise ConfigError(f"split is of type {type(given).__name__}; it must map names to fractions or row ranges.")
        fractions, ranges = [], []
        for name, value in given.items():
            try:
                if isinstance(value, str) and ":" in value:
                    start, stop = value.split(":")
                    ranges.append((str(name), int(start), int(stop)))
                elif isinstance(value, (tuple, list)):
                    ranges.append((str(name), int(value[0]), int(value[1])))
                else:
                    fractions.append((str(name), float(value)))
            except (ValueError, IndexError):
                raise ConfigError(
                    f"split: {name} is {value!r}; it must be a fraction or a row range such as 0:60000."
                ) from None
        return cls(tuple(fractions), key, column, tuple(ranges), stratify, seed)

    def to_json(self) -> dict[str, Any]:
        return {
            "fractions": dict(self.fractions),
            "key": self.key,
            "column": self.column,
            "ranges": [list(r) for r in self.ranges],
            "stratify": self.stratify,
            "seed": self.seed,
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Split:
        return cls(
            tuple(stored["fractions"].items()),
            stored["key"],
            stored["column"],
            tuple((n, a, b) for n, a, b in stored["ranges"]),
            stored["stratify"],
            stored["seed"],
        )

    def assign(self, rows: np.ndarray, extra: pa.Array | None, names: list[str], where: str) -> np.ndarray:
        """The split of each row as an index into `names`; new values of a split column are appended to it."""
        if self.ranges:
            parts = np.full(len(rows), -1, np.int64)
            for i, (_, start, stop) in enumerate(self.ranges):
                parts[(rows >= start) & (rows < stop)] = i
            if (parts < 0).any():
                row = int(rows[np.argmax(parts < 0)])
                raise DataError(f"{where}: row {row} is not in any range of the split; extend one of them.")
            return parts
        assert extra is not None
        encoded = extra.dictionary_encode()
        if encoded.null_count:
            row = int(rows[np.argmax(encoded.is_null().to_numpy(zero_copy_only=False))])
            what = "key" if self.key is not None else "split"
            raise DataError(f"{where}: row {row}, column {self.extra_column!r}: the {what} value is missing.")
        values = encoded.dictionary.to_pylist()
        if self.key is not None:
            edges = np.cumsum([share for _, share in self.fractions])[:-1]
            shares = np.array([_share(value, self.seed) for value in values])
            table = np.searchsorted(edges, shares, side="right")
        else:
            for value in values:
                if value not in names:
                    names.append(value)
                    if len(names) > 64:
                        raise DataError(
                            f"{where}: the split column {self.column!r} has more than 64 values: {names[:5]}, ..."
                        )
            table = np.array([names.index(value) for value in values], np.int64)
        return table[encoded.indices.to_numpy(zero_copy_only=False)] if len(table) else np.zeros(0, np.int64)


def _share(value: str, seed: int) -> float:
    """A hash in [0, 1) of a key's text: the same in every format, run and version."""
    raw = hashlib.blake2b(value.encode(), digest_size=8, key=seed.to_bytes(8, "little", signed=True)).digest()
    return int.from_bytes(raw, "little") / 2**64


def order_keys(seed: int, rows: np.ndarray) -> np.ndarray:
    """A 64-bit key for each row number; rows sorted by key are a random permutation (splitmix64)."""
    state = np.uint64(int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little"))
    with np.errstate(over="ignore"):
        z = state + (rows.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def cut_points(fractions: tuple[tuple[str, float], ...], count: int) -> list[int]:
    """Boundaries that split `count` rows by these fractions, each to within one row."""
    edges = np.cumsum([share for _, share in fractions])
    return [0, *(round(float(edge) * count) for edge in edges[:-1]), count]
