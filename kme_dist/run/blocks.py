"""What the tasks of a fit share: the rows of a data set by number, and a scratch place for arrays between tasks.

    rows = Rows.of(dataset, split="train", scaling=scaling, dtype="float32")
    X, y = rows.read(0, 2048)                # scaled rows and labels; the same on any worker
    scratch = Scratch.at(folder)
    scratch.save("tile-3-1", tile)           # whole or not at all
    scratch.load("tile-3-1")                 # mapped, not read, where the place is a local folder

Rows are counted within the split, from 0 to `rows.count`, whatever lies between its ranges. Only the address of the
data set travels; a worker opens it once. Arrays in the scratch place are written under a name that says what they are,
so a task that runs twice writes the same bytes twice, and one that died leaves nothing that counts.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kme_dist.core.kernels.base import Kernel
from kme_dist.data.batches import plan_batches
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.places import Place
from kme_dist.errors import DataError
from kme_dist.meter import metered
from kme_dist.run.executors import Executor
from kme_dist.run.scaling import Scaling

Span = tuple[int, int]
_SAMPLED_CHUNKS = 64  # of rows that were not shuffled at ingest


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one split, scaled: what every task of a fit reads from."""

    token: str  # tells a worker whether it has met these rows before
    path: str
    ranges: tuple[Span, ...]
    scale: Scaling
    dtype: str
    n_classes: int  # 0: whatever labels there are, they are no classes
    columns: tuple[int, ...] = ()  # of the data set that count as features; none named: all of them

    def __hash__(self) -> int:
        return hash(self.token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and other.token == self.token

    @classmethod
    def of(cls, dataset: Dataset, *, split: str | None, scaling: Scaling | str | None, dtype: str) -> Self:
        """`split` "auto" stands for "train" where the data set has it, None for all rows."""
        if dataset.classes is None:
            raise DataError(f"{dataset.path} has no class labels; ingest it again with the column named by `label`")
        split = resolve_split(dataset, split)
        ranges = tuple(span for span in dataset.ranges(split) if span[0] < span[1])
        if not ranges:
            raise DataError(f"{dataset.path}: there are no rows to fit; the split {split!r} is empty")
        scale = scaling if isinstance(scaling, Scaling) else Scaling.of(dataset.split_statistics(split), scaling)
        return cls(os.urandom(8).hex(), dataset.path, ranges, scale, dtype, len(dataset.classes))

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Scaled rows [start, stop) of the split, and their labels."""
        with metered("read"):
            parts = [opened(self).read_rows(low, high) for low, high in self.stored(start, stop)]
        X = parts[0][0] if len(parts) == 1 else np.concatenate([X for X, _ in parts])
        labels = [y for _, y in parts if y is not None]
        return self._scaled(X), np.concatenate(labels) if labels else np.zeros(len(X), np.int64)

    def _scaled(self, X: np.ndarray) -> np.ndarray:
        return self.scale.apply(X[:, list(self.columns)] if self.columns else X, self.dtype)

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Scaled rows by their numbers in the split."""
        edges = np.cumsum([0] + [high - low for low, high in self.ranges])
        part = np.searchsorted(edges, numbers, side="right") - 1
        starts = np.array([low for low, _ in self.ranges])
        X, _ = opened(self).take(numbers - edges[part] + starts[part])
        return self._scaled(X)

    def digest(self) -> str:
        """Of the stored rows and labels, whatever split is taken of them."""
        known = {name: opened(self).attributes[name] for name in ("digests", "rows")}
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    def in_precision(self, dtype: str) -> Rows:
        return self if dtype == self.dtype else dataclasses.replace(self, dtype=dtype, token=f"{self.token}-{dtype}")

    def stored(self, start: int, stop: int) -> list[Span]:
        """Where rows [start, stop) of the split lie in the data set."""
        found, before = [], 0
        for low, high in self.ranges:
            a, b = max(start - before, 0), min(stop - before, high - low)
            if a < b:
                found.append((low + a, low + b))
            before += high - low
        return found

    def chunks(self) -> list[Span]:
        """The split cut where the data set is cut, so that a span never reaches over two chunks."""
        size, spans, before = opened(self).chunk_rows, [], 0
        for low, high in self.ranges:
            cuts = [low, *range((low // size + 1) * size, high, size), high]
            spans += [(before + a - low, before + b - low) for a, b in itertools.pairwise(cuts)]
            before += high - low
        return spans

    def blocks(self, size: int) -> list[Span]:
        """The split in pieces of `size` rows, the last one smaller."""
        return [(start, min(start + size, self.count)) for start in range(0, self.count, size)]

    def sample(self, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """About `size` random rows (all, where there are no more), read in few pieces; scaled, with labels.

        Rows that were shuffled at ingest are one run of neighbours; others come from up to 64 chunks.
        """
        if size >= self.count:
            return self.read(0, self.count)
        data = opened(self)
        chunks = sum(-(-high // data.chunk_rows) - low // data.chunk_rows for low, high in self.ranges)
        blocks = min(_SAMPLED_CHUNKS, chunks)
        mode = "contiguous" if data.shuffled is not None else "rows" if chunks <= blocks else "blocks"
        plan = plan_batches(data, batch_size=size, seed=seed, mode=mode, order="sampling", blocks=blocks)
        batch = dataclasses.replace(plan, ranges=self.ranges).batch(0)
        if batch.rows is not None:
            X, y = data.take(np.sort(batch.rows))
        else:
            parts = [data.read_rows(*span) for span in batch.spans]
            X, y = np.concatenate([X for X, _ in parts]), np.concatenate([y for _, y in parts if y is not None])
        return self.scale.apply(X, self.dtype), np.asarray(y)


def resolve_split(dataset: Dataset, split: str | None) -> str | None:
    if split == "auto":
        return "train" if "train" in dataset.splits else None
    return split


@functools.lru_cache(maxsize=2)
def opened(rows: Rows) -> Dataset:
    return open_dataset(rows.path)


@dataclass(frozen=True)
class Scratch:
    """Arrays by name in a folder (or object store) that the driver and all workers reach."""

    place: Place

    @classmethod
    def at(cls, path: Any) -> Scratch:
        return path if isinstance(path, Scratch) else cls(Place.of(path))

    def child(self, name: str) -> Scratch:
        return Scratch(self.place.child(name))

    def save(self, name: str, array: np.ndarray) -> None:
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array = np.ascontiguousarray(array)
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
        flat = array.reshape(-1, order="A")  # a view: the bytes as they lie
        with metered("write"):
            self.place.write(f"{name}.npy", [header.getvalue(), flat.view(np.uint8).data], sync=False)

    def load(self, name: str) -> np.ndarray:
        if self.place.is_local:
            mapped: np.ndarray = np.load(self.place.path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            return mapped
        read: np.ndarray = np.load(io.BytesIO(self.place.read(f"{name}.npy")), allow_pickle=False)
        return read

    def has(self, name: str) -> bool:
        if self.place.is_local:
            return (self.place.path / f"{name}.npy").is_file()
        return bool(self.place.sizes(f"{name}.npy"))

    def bytes(self) -> int:
        return sum(self.place.sizes().values()) if not self.place.is_local or self.place.path.exists() else 0

    def clear(self) -> None:
        self.place.delete_all()


# --- what a solver is asked, and what it brings back ------------------------------------------------


@dataclass(frozen=True)
class Task:
    """What is to be fitted, where, and by whom."""

    rows: Rows
    kernel: Kernel
    regularization: float
    retune: bool
    floor: float
    seed: int
    tolerance: float
    executor: Executor
    scratch: Scratch
    tile_rows: int | None
    memory: int
    say: Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """What a solver brings back."""

    embedding: Any
    loss: float | None
    tried: dict[float, float]
    residual: float
    iterations: int
    bytes: int
    facts: dict[str, Any] = field(default_factory=dict)
    statistics: Any = None  # of additive solvers
