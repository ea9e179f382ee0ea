"""Additive models: fit, add chunks, remove chunks, merge two models, all without reading old rows again.

    statistics = gather(rows, basis, executor=executor, scratch=scratch)
    add_rows(statistics, newer, executor=executor, scratch=scratch)       # skips chunks that are already in
    remove_rows(statistics, older, executor=executor, scratch=scratch)    # reads only those chunks
    statistics.merge(other)
    statistics.save("statistics.zarr"); FitStatistics.load("statistics.zarr")

`Statistics` holds the sums in a few parts (one for the fit, one for each update), the digest of every chunk included,
so that no chunk is counted twice, a sample of rows for leave-one-out, and the factors of class weights: those of the
first rows, since "balanced" ones change with every row. In whatever order chunks were added and removed, the result is
that of a new fit on the chunks now included, with the same factors, up to rounding in double precision.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kme_dist.backend import computed_once, moved_ahead, resolve, to_device, to_host
from kme_dist.core import kernels
from kme_dist.core.kernels.base import FeatureMap, Kernel
from kme_dist.core.nystrom import Sample
from kme_dist.core.sums import Accumulator, Basis, Centres, FeatureBasis, OneHot, Sums, packed, unpacked
from kme_dist.data.chunks import read_attributes
from kme_dist.data.dataset import Span
from kme_dist.data.places import Place
from kme_dist.data.rows import RowsRef
from kme_dist.data.store import load_arrays, save_arrays
from kme_dist.errors import ConfigError, CorruptError, DataError, memory_errors
from kme_dist.failpoints import passing
from kme_dist.run.executors import Executor
from kme_dist.run.scratch import Scratch

STATISTICS_FORMAT = "kme-dist/statistics"
_TASK_ROWS = 1 << 16  # per task at most, in whole chunks
TASKS = 8  # or a multiple, so that a few workers finish at the same time
_PARTS = 8  # kept separately; beyond that the oldest are merged
_MATRICES = ("G", "B")


# --- on a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BasisRef:
    """A basis as sent to a worker: the kernel or the feature map; centres are in the scratch folder."""

    token: str
    scratch: Scratch
    kernel: Kernel | None
    features: FeatureMap | None
    size: int
    backend: str = "auto"
    sampled: tuple[Span, ...] = ()  # of the source, for leave-one-out; empty: all rows

    def __hash__(self) -> int:
        return hash(self.token)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BasisRef) and other.token == self.token


def basis_of(ref: BasisRef) -> Centres:
    """The published centres on this worker."""
    basis, _ = _basis(ref)
    assert isinstance(basis, Centres)
    return basis


@computed_once(1)
def _basis(ref: BasisRef) -> tuple[Basis, str]:
    """The basis on this worker, and the device it computes on."""
    device = resolve(ref.backend)
    if ref.features is not None:
        return FeatureBasis(ref.features, ref.size), device
    assert ref.kernel is not None
    centres = np.array(ref.scratch.load(f"centres-{ref.token}"))
    return Centres(ref.kernel, to_device(centres, device)), device


def publish(
    basis: Basis, scratch: Scratch, backend: str = "auto", *, sampled: tuple[Span, ...] = (), token: str = ""
) -> BasisRef:
    """Make a basis available to workers. `token` names its content; empty: a random one."""
    token = token or os.urandom(6).hex()
    if isinstance(basis, Centres):
        scratch.save(f"centres-{token}", np.asarray(to_host(basis.points)))
        return BasisRef(token, scratch, basis.kernel, None, basis.size, backend, sampled)
    assert isinstance(basis, FeatureBasis)
    return BasisRef(token, scratch, None, basis.features, basis.size, backend, sampled)


@dataclass(frozen=True)
class Summed:
    """The result of a task; with a scratch folder, G (packed) and B are stored there under `name`."""

    name: str
    sums: Sums
    ledger: tuple[tuple[str, int], ...]
    sample: Sample

    def fetch(self, scratch: Scratch) -> Sums:
        """The sums, with G packed."""
        if scratch.in_memory:
            return self.sums
        return replace(self.sums, G=scratch.load(f"{self.name}-G"), B=scratch.load(f"{self.name}-B"))


def sum_chunks(rows: RowsRef, ref: BasisRef, spans: tuple[Span, ...], name: str) -> Summed:
    """Sum a few chunks. Runs on a worker."""
    passing("fit.before_part")
    basis, device = _basis(ref)
    ledger, sample = [], None
    with memory_errors(f"sums over {basis.size} centres or features", "use fewer"):
        accumulator = Accumulator(basis, OneHot(rows.n_classes), to_device(np.zeros(0, rows.dtype), device))
        for on_device, (X, y, w, entry, wanted) in moved_ahead(_chunks(rows, spans, ref.sampled), device):
            accumulator.add(on_device, y, w)
            ledger.append(entry)
            drawn = Sample.of(X[wanted], y[wanted], entry[0], weights=None if w is None else w[wanted])
            sample = drawn if sample is None else sample + drawn
        sums = accumulator.sums()
    assert sample is not None
    result = replace(sums, G=packed(to_host(sums.G)), B=to_host(sums.B))
    if not ref.scratch.in_memory:
        for key in _MATRICES:
            ref.scratch.save(f"{name}-{key}", getattr(result, key))
        result = replace(result, G=np.zeros(0), B=np.zeros(0))
    return Summed(name, result, tuple(ledger), sample)


def _chunks(
    rows: RowsRef, spans: tuple[Span, ...], sampled: tuple[Span, ...]
) -> Iterator[tuple[Any, tuple[Any, Any, Any, tuple[str, int], np.ndarray]]]:
    """X, and for every chunk X, y, weights, the entry of the ledger, and which rows may be sampled."""
    for start, stop in spans:
        X, y = rows.read(start, stop)
        entry = chunk_key(rows, start, stop), stop - start
        w = rows.weights(start, stop, unit=False)
        wanted = among(rows, start, stop, sampled) if sampled else np.ones(len(y), bool)
        if w is not None and not w.all():  # rows of weight 0 are neither counted nor sampled
            X, y, w, wanted = X[w > 0], y[w > 0], w[w > 0], wanted[w > 0]
        yield X, (X, y, w, entry, wanted)


def among(rows: RowsRef, start: int, stop: int, ranges: tuple[Span, ...]) -> np.ndarray:
    """Which of the rows [start, stop) are in sorted ranges of the source."""
    numbers = np.concatenate([np.arange(low, high) for low, high in rows.stored(start, stop)])
    starts, stops = np.array(ranges).T
    block = np.searchsorted(starts, numbers, side="right") - 1
    return np.asarray((block >= 0) & (numbers < stops[np.maximum(block, 0)]))


def chunk_key(rows: RowsRef, start: int, stop: int) -> str:
    """Identifies the content of a span: the stored digest if it is a whole chunk, else a digest of its rows."""
    ((low, high),) = rows.stored(start, stop)
    found = rows.source.span_digests(low, high)
    return hashlib.sha256("".join(found).encode()).hexdigest()[:32]


# --- the record -------------------------------------------------------------------------------------


@dataclass
class Part:
    """The sums of one fit or update, and the chunks included."""

    sums: Sums
    ledger: list[tuple[str, int]]


@dataclass
class FitStatistics:
    """All that is needed to solve an additive model again, with other rows or another λ."""

    basis: Basis
    parts: list[Part] = field(default_factory=list)
    sample: Sample | None = None
    class_factors: tuple[float, ...] | None = None  # of the weights of all rows, added and removed ones included

    def weighed(self, rows: RowsRef) -> RowsRef:
        """The rows, with the factors that the rows of these sums have."""
        if rows.source.class_factors == self.class_factors:
            return rows
        source = rows.source.with_class_factors(self.class_factors)
        return replace(rows, source=source, token=f"{rows.token}-weighed")

    @property
    def rows(self) -> int:
        return sum(part.sums.rows for part in self.parts)

    @property
    def weight(self) -> float:
        """The sum of the weights, but not less than the number of rows; without weights the number of rows."""
        return max(sum(part.sums.weight for part in self.parts), self.rows)

    @property
    def ledger(self) -> Counter[str]:
        return Counter(key for part in self.parts for key, _ in part.ledger)

    def total(self) -> Sums:
        """The sum of all parts, oldest first."""
        if not self.rows:
            raise DataError("the model has no rows left; add rows before solving")
        total = self.parts[0].sums.copy()
        for part in self.parts[1:]:
            total += part.sums
        return total

    def add(self, part: Part, sample: Sample) -> None:
        self.parts.append(part)
        self.sample = sample if self.sample is None else self.sample + sample
        while len(self.parts) > _PARTS:
            first, second = self.parts[:2]
            first.sums += second.sums
            self.parts[:2] = [Part(first.sums, first.ledger + second.ledger)]

    def merge(self, other: FitStatistics) -> int:
        """Add the rows of another model with the same basis; returns how many, 0 if all are included already.

        Chunks in both models are refused: it is not clear which of the two should count.
        """
        if _describe(self.basis) != _describe(other.basis) or not _same_points(self.basis, other.basis):
            raise ConfigError("the models differ in kernel, features or centres; only models with the same basis merge")
        if self.class_factors != other.class_factors:
            raise ConfigError(
                f"the models weigh classes differently, {self.class_factors} and {other.class_factors}; only models "
                "with the same factors merge: start the second site from a copy of the fitted run folder"
            )
        both = sum((self.ledger & other.ledger).values())
        if both == sum(other.ledger.values()):
            return 0
        if both:
            raise ConfigError(f"{both} chunks are in both models; remove them from one before merging")
        for part in other.parts:
            self.parts.append(Part(part.sums.copy(), list(part.ledger)))
        if other.sample is not None:
            self.sample = other.sample if self.sample is None else self.sample + other.sample
        return other.rows

    def save(self, path: Any) -> None:
        arrays = {}
        for i, part in enumerate(self.parts):
            arrays[f"part{i}/G"], arrays[f"part{i}/B"] = packed(part.sums.G), part.sums.B
            arrays[f"part{i}/counts"] = part.sums.totals
        if isinstance(self.basis, Centres):
            arrays["centres"] = np.asarray(to_host(self.basis.points))
        elif isinstance(self.basis, FeatureBasis):
            held: Any = self.basis.features
            arrays |= {f"features/{name}": value for name, value in held.arrays.items()}
        if self.sample is not None:
            arrays |= {"sample/X": self.sample.X, "sample/y": self.sample.y, "sample/keys": self.sample.keys}
            if self.sample.weights is not None:
                arrays["sample/weights"] = self.sample.weights
        described = [
            {"ledger": part.ledger, "variance": part.sums.variance, "rows": part.sums.rows, "excess": part.sums.excess}
            for part in self.parts
        ]
        attributes = {"basis": _describe(self.basis), "parts": described, "class_factors": self.class_factors}
        save_arrays(path, arrays, {"format": STATISTICS_FORMAT, **attributes})

    @classmethod
    def load(cls, path: Any) -> FitStatistics:
        arrays, found = load_arrays(path)
        if found.get("format") != STATISTICS_FORMAT:
            raise DataError(f"{path} is {found.get('format')!r}, not the statistics of a model")
        try:
            parts = []
            for i, described in enumerate(found["parts"]):
                B, counts, variance = arrays[f"part{i}/B"], arrays[f"part{i}/counts"], float(described["variance"])
                rows, excess = int(described.get("rows", counts.sum())), float(described.get("excess", 0.0))
                sums = Sums(unpacked(arrays[f"part{i}/G"], len(B)), B, counts, rows, variance, excess)
                parts.append(Part(sums, [(str(key), int(count)) for key, count in described["ledger"]]))
            sample = None
            if "sample/X" in arrays:
                X, y, keys = (arrays[f"sample/{name}"] for name in ("X", "y", "keys"))
                sample = Sample(X, y, keys, arrays.get("sample/weights"))
            return cls(_restored(found["basis"], arrays), parts, sample, _factors(found))
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"{path} is incomplete ({error!r}); fit the model again") from error


def stored_class_factors(path: Any) -> tuple[float, ...] | None:
    """The factors of class weights of stored statistics; None if they have none, or are those of an older version."""
    return _factors(read_attributes(Place.of(path)))


def _factors(found: Mapping[str, Any]) -> tuple[float, ...] | None:
    factors = found.get("class_factors")
    return None if factors is None else tuple(float(factor) for factor in factors)


def _describe(basis: Basis) -> dict[str, Any]:
    if isinstance(basis, Centres):
        return {"kernel": basis.kernel.to_config(), "size": basis.size}
    assert isinstance(basis, FeatureBasis)
    to_config: Any = getattr(basis.features, "to_config", None)
    if to_config is None:
        raise ConfigError(f"{type(basis.features).__name__} has no to_config(), so its model cannot be stored")
    return {"features": to_config(), "size": basis.size}


def _restored(described: dict[str, Any], arrays: dict[str, np.ndarray]) -> Basis:
    if "kernel" in described:
        return Centres(kernels.from_config(described["kernel"]), arrays["centres"])
    from kme_dist.core import features

    held = {name.removeprefix("features/"): array for name, array in arrays.items() if name.startswith("features/")}
    return FeatureBasis(features.from_config(described["features"], arrays=held), int(described["size"]))


def _same_points(one: Basis, other: Basis) -> bool:
    if isinstance(one, Centres) and isinstance(other, Centres):
        return bool(np.array_equal(to_host(one.points), to_host(other.points)))
    return True


# --- over an executor -------------------------------------------------------------------------------


def gather(
    rows: RowsRef,
    basis: Basis,
    *,
    executor: Executor,
    scratch: Scratch,
    backend: str = "auto",
    sampled: tuple[Span, ...] = (),
) -> FitStatistics:
    """The statistics of all rows, summed on `backend` ("auto": as each worker has it).

    `sampled` are sorted ranges of the source, from which the rows for leave-one-out are drawn; empty: from all rows.
    """
    statistics = FitStatistics(basis, class_factors=rows.source.class_factors)
    statistics.add(*_sum(rows, basis, rows.chunks(), executor, scratch, backend, sampled))
    return statistics


def add_rows(statistics: FitStatistics, rows: RowsRef, *, executor: Executor, scratch: Scratch) -> int:
    """Add the chunks that are not included yet; returns the number of rows added.

    A chunk that was not full when added and has grown since is removed as it was and added as it is now, so that
    chunks are summed whole, as in a new fit.
    """
    rows, before = statistics.weighed(rows), statistics.rows
    spans, grown = _new_chunks(rows, statistics)
    if grown:
        _subtract(statistics, rows, grown, executor, scratch)
    if spans:
        statistics.add(*_sum(rows, statistics.basis, spans, executor, scratch))
    return statistics.rows - before


def remove_rows(statistics: FitStatistics, rows: RowsRef, *, executor: Executor, scratch: Scratch) -> int:
    """Remove those chunks of `rows` that are included; returns the number of rows removed."""
    rows, held, spans = statistics.weighed(rows), statistics.ledger, []
    for span in rows.chunks():
        key = chunk_key(rows, *span)
        if held[key]:
            held[key] -= 1
            spans.append(span)
    if spans:
        _subtract(statistics, rows, spans, executor, scratch)
    return sum(stop - start for start, stop in spans)


def _subtract(
    statistics: FitStatistics, rows: RowsRef, spans: Sequence[Span], executor: Executor, scratch: Scratch
) -> None:
    out, _ = _sum(rows, statistics.basis, spans, executor, scratch)
    removed = Counter(key for key, _ in out.ledger)
    # If all of it is in one part, only that part changes; an empty part is dropped together with its rounding errors.
    target = next((p for p in statistics.parts if not removed - Counter(k for k, _ in p.ledger)), statistics.parts[0])
    target.sums -= out.sums
    for part in [target, *(p for p in statistics.parts if p is not target)]:
        kept = []
        for key, count in part.ledger:
            if removed[key]:
                removed[key] -= 1
            else:
                kept.append((key, count))
        part.ledger = kept
    statistics.parts = [p for p in statistics.parts if p.ledger or p.sums.rows]
    if statistics.sample is not None:
        statistics.sample = statistics.sample.without([key for key, _ in out.ledger])


def _new_chunks(rows: RowsRef, statistics: FitStatistics) -> tuple[list[Span], list[Span]]:
    """Chunks that are not in the ledger; and the leading rows of those that are in it with fewer rows."""
    held = statistics.ledger
    spans: list[Span] = []
    grown: list[Span] = []
    sizes = sorted({count for part in statistics.parts for _, count in part.ledger}, reverse=True)
    for start, stop in rows.chunks():
        key = chunk_key(rows, start, stop)
        if held[key]:
            held[key] -= 1
            continue
        for size in sizes:
            if size < stop - start and held[key := chunk_key(rows, start, start + size)]:
                held[key] -= 1
                grown.append((start, start + size))
                break
        spans.append((start, stop))
    return spans, grown


def _sum(
    rows: RowsRef,
    basis: Basis,
    spans: Sequence[Span],
    executor: Executor,
    scratch: Scratch,
    backend: str = "auto",
    sampled: tuple[Span, ...] = (),
) -> tuple[Part, Sample]:
    """Sum over spans in tasks of about equal size; their results are added here in row order."""
    ref = publish(basis, scratch, backend, sampled=sampled)
    calls = [(rows, ref, group, f"sums-{ref.token}-{i}") for i, group in enumerate(_groups(spans))]
    total, ledger, sample = None, [], None
    for summed in ordered(executor, sum_chunks, calls, name="sum-chunks"):
        part = summed.fetch(scratch)
        if total is None:
            total = replace(part, G=unpacked(part.G, len(part.B)), B=np.array(part.B), totals=part.totals.copy())
            sample = summed.sample
        else:
            total.add_packed(part)
            sample = sample + summed.sample
        ledger += list(summed.ledger)
        for key in _MATRICES:
            scratch.delete(f"{summed.name}-{key}")
    scratch.delete(f"centres-{ref.token}")
    assert total is not None
    assert sample is not None
    return Part(total, ledger), sample


def sum_tasks(rows: int) -> int:
    """Tasks of a sum over rows, if there are as many chunks."""
    return TASKS * -(-rows // (TASKS * _TASK_ROWS))


def _groups(spans: Sequence[Span]) -> list[tuple[Span, ...]]:
    """Neighbouring spans in groups with about equal numbers of rows; the same for any number of workers."""
    ends = np.cumsum([stop - start for start, stop in spans])
    count = min(sum_tasks(int(ends[-1])), len(spans))
    middles = ends - np.diff(ends, prepend=0) / 2
    group = (middles * count / ends[-1]).astype(int)
    cuts = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(spans)]
    return [tuple(spans[a:b]) for a, b in itertools.pairwise(cuts)]


def ordered(executor: Executor, function: Any, calls: Sequence[tuple[Any, ...]], *, name: str) -> Iterator[Any]:
    """Results in the order of the calls, with a few calls in flight; the first failure is raised."""
    early: dict[int, Any] = {}
    wanted = 0
    for place, result in executor.stream(function, calls, name=name):
        if isinstance(result, Exception):
            raise executor.failure(f"a task named {name}", result)
        early[place] = result
        while wanted in early:
            yield early.pop(wanted)
            wanted += 1
