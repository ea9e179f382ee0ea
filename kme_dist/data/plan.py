"""The rows of each batch: integers and seeds only.

    plan = BatchPlan(ranges=((0, 464809),), batch_size=2000, seed=0, mode="contiguous", chunk_rows=8192)
    plan.batch(17)               # BatchRef: the rows of batch 17, the same on any worker and after a restart

A plan is plain data. The rows of a batch are a function of the plan and its number, computed in constant time: nothing
is drawn in sequence, so there is no state to lose and the number of workers does not matter.

    mode         a batch is                                       for
    contiguous   one range of consecutive rows                    data shuffled at ingest: one read
    blocks       random rows from a few random chunks             data in their original order: a few reads
    rows         random rows from all chunks                      exact sampling: about a hundred times slower
                                                                  than contiguous, unless the cache holds the data

    order
    permutation  an epoch uses each row once; a remainder smaller than a batch is dropped, a different one in each
                 epoch
    sampling     each batch is drawn independently
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kme_dist.data.dataset import spans_within
from kme_dist.errors import ConfigError, DataError

MODES = ("contiguous", "blocks", "rows")
ORDERS = ("permutation", "sampling")


@dataclass(frozen=True)
class BatchRef:
    """The rows of one batch: ranges [start, stop), or single rows."""

    step: int
    spans: tuple[tuple[int, int], ...]
    rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows) if self.rows is not None else sum(stop - start for start, stop in self.spans)


@dataclass(frozen=True)
class BatchPlan:
    """How to draw batches from row ranges. See the table of the module."""

    ranges: tuple[tuple[int, int], ...]
    batch_size: int
    seed: int
    mode: str = "contiguous"
    order: str = "permutation"
    chunk_rows: int = 8192
    blocks: int = 4  # chunks a batch draws from in mode "blocks"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode is {self.mode!r}; it must be one of {', '.join(MODES)}.")
        if self.order not in ORDERS:
            raise ConfigError(f"order is {self.order!r}; it must be one of {', '.join(ORDERS)}.")
        if self.batch_size < 1 or self.blocks < 1 or self.chunk_rows < 1:
            raise ConfigError(f"batch_size {self.batch_size}, blocks {self.blocks}: both must be integers >= 1.")
        if any(not 0 <= start <= stop for start, stop in self.ranges):
            raise ConfigError(f"row ranges {self.ranges}: every range must have 0 <= start <= stop.")
        if not self.rows:
            raise DataError("there are no rows to draw batches from; the split is empty.")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> BatchPlan:
        ranges = tuple((int(start), int(stop)) for start, stop in stored["ranges"])
        return cls(**{**stored, "ranges": ranges})

    @cached_property
    def rows(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def rows_per_batch(self) -> int:
        """The batch size, or the number of rows if that is smaller."""
        return min(self.batch_size, self.rows)

    @cached_property
    def steps_per_epoch(self) -> int:
        """The number of batches that use (nearly) every row once."""
        if self._has_blocks:
            return int(self._pieces[-1]) // self.blocks
        return max(1, self.rows // self.batch_size)

    def batch(self, step: int) -> BatchRef:
        """The rows of batch `step` (0, 1, 2, ...)."""
        if step < 0:
            raise ConfigError(f"step is {step}; it must be an integer >= 0.")
        if self.mode == "contiguous":
            start = self._contiguous_start(step)
            stop = start + self.rows_per_batch
            wrapped = spans_within(self.ranges, 0, stop - self.rows)
            return BatchRef(step, spans_within(self.ranges, start, min(stop, self.rows)) + wrapped)
        if self.rows_per_batch == self.rows:
            return BatchRef(step, spans_within(self.ranges, 0, self.rows))  # every row: in order, in one read
        virtual = self._from_blocks(step) if self._has_blocks else self._from_everywhere(step)
        return BatchRef(step, (), self._absolute(virtual))

    # The concatenated ranges are a virtual row space from 0 to `rows`; batches are drawn there.

    @cached_property
    def _edges(self) -> np.ndarray:
        return np.cumsum([0] + [stop - start for start, stop in self.ranges])

    def _absolute(self, virtual: np.ndarray) -> np.ndarray:
        part = np.searchsorted(self._edges, virtual, side="right") - 1
        starts = np.array([start for start, _ in self.ranges])
        return np.asarray(virtual - self._edges[part] + starts[part])

    def _contiguous_start(self, step: int) -> int:
        """Rows wrap around, so that those at the ends are drawn as often as the others."""
        if self.order == "sampling":
            return _key(self.seed, "start", step) % self.rows
        epoch, within = divmod(step, self.steps_per_epoch)
        spare = self.rows - self.steps_per_epoch * self.rows_per_batch
        offset = _key(self.seed, "offset", epoch) % self.rows if spare else 0
        slot = permuted(np.array([within]), self.steps_per_epoch, _key(self.seed, "slots", epoch))
        return (offset + int(slot[0]) * self.rows_per_batch) % self.rows

    def _from_everywhere(self, step: int) -> np.ndarray:
        size = self.rows_per_batch
        if self.order == "sampling":
            return permuted(np.arange(size), self.rows, _key(self.seed, "rows", step))
        epoch, within = divmod(step, self.steps_per_epoch)
        return permuted(np.arange(within * size, (within + 1) * size), self.rows, _key(self.seed, "rows", epoch))

    # Blocks: the virtual space is cut at chunk boundaries into segments, and each segment into pieces of a few random
    # rows of it.

    @cached_property
    def _has_blocks(self) -> bool:
        """False with too few rows for a piece per block; rows then come from all chunks, which fit the cache."""
        return self.mode == "blocks" and int(self._pieces[-1]) >= self.blocks

    @cached_property
    def _piece(self) -> int:
        return -(-self.rows_per_batch // self.blocks)

    @cached_property
    def _segments(self) -> np.ndarray:
        """Boundaries of the segments. None is smaller than a piece, so that every row is used."""
        borders = [np.zeros(1, np.int64)]
        for (start, stop), edge in zip(self.ranges, self._edges[:-1].tolist(), strict=True):
            inside = np.arange(-(-(start + 1) // self.chunk_rows), -(-stop // self.chunk_rows)) * self.chunk_rows
            borders += [inside - start + edge, np.array([edge + stop - start])]
        cuts = np.unique(np.concatenate(borders))
        kept = [0]
        for cut in cuts[1:].tolist():
            if cut - kept[-1] >= self._piece:
                kept.append(cut)
        if len(kept) == 1:
            kept.append(self.rows)
        kept[-1] = self.rows
        return np.array(kept)

    @cached_property
    def _pieces(self) -> np.ndarray:
        """Cumulative number of pieces before each segment, and the total."""
        return np.concatenate([[0], np.cumsum(np.maximum(1, np.diff(self._segments) // self._piece))])

    def _from_blocks(self, step: int) -> np.ndarray:
        epoch, within = divmod(step, self.steps_per_epoch)
        if self.order == "sampling":
            anchors = [_key(self.seed, "block", step, j) % self.rows for j in range(self.blocks)]
            segments = np.searchsorted(self._segments, anchors, side="right") - 1
            places = np.zeros(self.blocks, np.int64)
        else:
            total = int(self._pieces[-1])
            wanted = np.arange(within * self.blocks, (within + 1) * self.blocks) % total
            pieces = permuted(wanted, total, _key(self.seed, "pieces", epoch))
            segments = np.searchsorted(self._pieces, pieces, side="right") - 1
            places = pieces - self._pieces[segments]
        low, high = self._segments[segments], self._segments[segments + 1]
        if self.order == "sampling":
            keys = [_key(self.seed, "inside", step, j) for j in range(self.blocks)]
        else:
            keys = [_key(self.seed, "inside", epoch, segment) for segment in segments.tolist()]
        size = (high - low)[:, None]
        picks = (places[:, None] * self._piece + np.arange(self._piece)) % size
        key_of = np.array(keys, np.uint64)[:, None]
        return np.asarray(low[:, None] + permuted(picks, size, key_of)).reshape(-1)[: self.rows_per_batch]


def _key(*parts: object) -> int:
    """A 64-bit hash of a seed and names; not Python's `hash`, which differs between processes."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def permuted(index: np.ndarray, count: int | np.ndarray, key: int | np.ndarray) -> np.ndarray:
    """The images of these indices under a random permutation of 0 ... count - 1, without building it.

    A Feistel network of four rounds permutes the next power of four; it is applied again to indices that land outside,
    which gives a permutation of the inside. `count` and `key` are broadcast against the indices.
    """
    counts = np.broadcast_to(np.asarray(count, np.uint64), index.shape).reshape(-1)
    keys = np.broadcast_to(np.asarray(key, np.uint64), index.shape).reshape(-1)
    out = np.array(index, np.uint64).reshape(-1)
    bits = np.frexp((counts - np.uint64(1)).astype(np.float64))[1]  # of the largest index
    half = np.maximum(1, (bits + 1) // 2).astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    rounds = [_mix(keys + np.uint64(i)) for i in range(4)]
    todo = np.arange(len(out))
    while len(todo):
        h, m = half[todo], mask[todo]
        left, right = out[todo] >> h, out[todo] & m
        for round_keys in rounds:
            left, right = right, left ^ (_mix(right ^ round_keys[todo]) & m)
        out[todo] = (left << h) | right
        todo = todo[out[todo] >= counts[todo]]
    return out.astype(np.int64).reshape(index.shape)


def _mix(z: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64; array arithmetic wraps around, as intended."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)))
