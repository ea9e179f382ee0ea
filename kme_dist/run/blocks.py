"""What the tasks of a fit share: the rows of a data set by number, and a scratch place for arrays between tasks.

    rows = Rows.of(dataset, split="train", scaling=scaling, dtype="float32")
    X, y = rows.read(0, 2048)                # scaled rows and labels; the same on any worker
    scratch = Scratch.at(folder)
    scratch.save("tile-3-1", tile)           # whole or not at all
    scratch.load("tile-3-1")                 # mapped, not read, where the place is a local folder

Rows are counted within the split, from 0 to `rows.count`, whatever lies between its ranges. Only the address of the
data set travels; a worker opens it once. Arrays in the scratch place are written under a name that says what they are,
so a task that runs twice writes the same bytes twice, and one that died leaves nothing that counts. Where all tasks run
in this process, the scratch place is a dictionary.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from kme_dist.core.kernels.base import Kernel
from kme_dist.data.batches import plan_batches
from kme_dist.data.dataset import RowSource
from kme_dist.data.places import Place
from kme_dist.errors import DataError
from kme_dist.meter import metered
from kme_dist.run.executors import Executor
from kme_dist.run.scaling import Scaling

Span = tuple[int, int]
_SAMPLED_CHUNKS = 64  # of rows that are neither in order at random nor few enough for the cache


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one split, scaled: what every task of a fit reads from."""

    token: str  # tells a worker whether it has met these rows before
    source: RowSource
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
    def of(cls, dataset: RowSource, *, split: str | None, scaling: Scaling | str | None, dtype: str) -> Self:
        """`split` "auto" stands for "train" where the data set has it, None for all rows."""
        if dataset.classes is None:
            raise DataError(f"{dataset.path} has no class labels; ingest it again with the column named by `label`")
        split = dataset.training_split(split)
        ranges = tuple(span for span in dataset.ranges(split) if span[0] < span[1])
        if not ranges:
            raise DataError(f"{dataset.path}: there are no rows to fit; the split {split!r} is empty")
        scale = scaling if isinstance(scaling, Scaling) else Scaling.of(dataset.split_statistics(split), scaling)
        return cls(os.urandom(8).hex(), dataset, ranges, scale, dtype, len(dataset.classes))

    @property
    def path(self) -> str:
        return self.source.path

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Scaled rows [start, stop) of the split, and their labels."""
        with metered("read"):
            parts = [self.source.read_rows(low, high) for low, high in self.stored(start, stop)]
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
        X, _ = self.source.take(numbers - edges[part] + starts[part])
        return self._scaled(X)

    def digest(self) -> str:
        """Of the stored rows and labels, whatever split is taken of them."""
        return self.source.digest

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
        size, spans, before = self.source.chunk_rows, [], 0
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
        plan = plan_batches(self.source, batch_size=size, seed=seed, order="sampling", blocks=_SAMPLED_CHUNKS)
        batch = dataclasses.replace(plan, ranges=self.ranges).batch(0)
        if batch.rows is not None:
            X, y = self.source.take(np.sort(batch.rows))
        else:
            parts = [self.source.read_rows(*span) for span in batch.spans]
            labels = [y for _, y in parts if y is not None]
            X, y = np.concatenate([X for X, _ in parts]), np.concatenate(labels) if labels else None
        return self._scaled(X), np.zeros(len(X), np.int64) if y is None else np.asarray(y)


class Scratch:
    """Arrays by name in a folder (or object store) that the driver and all workers reach; in memory without one."""

    def __init__(self, place: Place | None = None) -> None:
        self._place, self._held = place, {}  # type: tuple[Place | None, dict[str, np.ndarray]]

    @classmethod
    def at(cls, path: Any) -> Scratch:
        """In a folder; in the memory of this process where `path` is None."""
        if isinstance(path, Scratch):
            return path
        return cls() if path is None else cls(Place.of(path))

    @property
    def place(self) -> Place:
        if self._place is None:
            raise DataError("arrays in the memory of one process have no address; give the fit a scratch folder")
        return self._place

    @property
    def in_memory(self) -> bool:
        return self._place is None

    def child(self, name: str) -> Scratch:
        return Scratch() if self._place is None else Scratch(self._place.child(name))

    def save(self, name: str, array: np.ndarray) -> None:
        if self._place is None:
            self._held[name] = np.array(array)  # a copy, as a file would be
            return
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array = np.ascontiguousarray(array)
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
        flat = array.reshape(-1, order="A")  # a view: the bytes as they lie
        with metered("write"):
            self._place.write(f"{name}.npy", [header.getvalue(), flat.view(np.uint8).data], sync=False)

    def load(self, name: str) -> np.ndarray:
        if self._place is None:
            return self._held[name]
        if self._place.is_local:
            mapped: np.ndarray = np.load(self._place.path / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            return mapped
        read: np.ndarray = np.load(io.BytesIO(self._place.read(f"{name}.npy")), allow_pickle=False)
        return read

    def has(self, name: str) -> bool:
        if self._place is None:
            return name in self._held
        if self._place.is_local:
            return (self._place.path / f"{name}.npy").is_file()
        return bool(self._place.sizes(f"{name}.npy"))

    def delete(self, name: str) -> None:
        if self._place is None:
            self._held.pop(name, None)
        else:
            self._place.delete(f"{name}.npy")

    def bytes(self) -> int:
        if self._place is None:
            return sum(array.nbytes for array in self._held.values())
        return sum(self._place.sizes().values()) if not self._place.is_local or self._place.path.exists() else 0

    def clear(self) -> None:
        if self._place is None:
            self._held.clear()
        else:
            self._place.delete_all()


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
    backend: str = "numpy"  # where a whole Gram matrix is factorised


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
