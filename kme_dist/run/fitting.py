"""The final fit on a data set that no process holds: one interface, five solvers.

    fit = fit_on_dataset(data, kernel, 1e-4, executor=executor, scratch="run/scratch")
    fit.embedding.decision(X);  fit.solver, fit.reason;  fit.loss, fit.residual, fit.iterations, fit.seconds

    solver      for                        memory of a task             λ is chosen again by
    cholesky    up to about 12,000 rows    n x n, on one worker         leave-one-out (of at most 4,000 rows)
    tiled       up to some 100,000 rows    a few tiles                  the same
    pcg         up to some 100,000 rows    a panel of tiles             the same
    nystrom     any number of rows         centres x centres            leave-one-out of up to 4,000 rows
    features    any number of rows         features x features          leave-one-out of up to 4,000 rows

`auto` takes the exact solver that ends within a few minutes, else centres, and says why. What comes out depends on
data and settings, never on the number of workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.backend import blas_threads, free_bytes, to_device, to_host
from kme_dist.core.embedding import Embedding
from kme_dist.core.kernels.base import FeatureMap, Kernel
from kme_dist.core.nystrom import Basis, Centres, Features, System, judged_rows
from kme_dist.core.objective import one_hot
from kme_dist.core.pivots import choose_centres
from kme_dist.data.dataset import RowSource
from kme_dist.data.places import Place
from kme_dist.data.rows import RowsRef
from kme_dist.data.scaling import Scaling
from kme_dist.errors import ConfigError
from kme_dist.run import solve
from kme_dist.run.additive import Statistics, gather
from kme_dist.run.blocks import Found, Task
from kme_dist.run.executors import Executor
from kme_dist.run.features import FeatureEmbedding
from kme_dist.run.pcg import fit_pcg, relative_residual
from kme_dist.run.scratch import Scratch
from kme_dist.run.tiled import fit_tiled
from kme_dist.run.tuning import solve_on_sample

SOLVERS = ("cholesky", "tiled", "pcg", "nystrom", "features")
_FLOPS, _PATIENCE_S = 2e10, 60.0  # of one worker in double precision; what an exact fit may take under "auto"
_CENTRE_SAMPLE = (10_000, 3)  # at least so many rows, or so many for each centre


@dataclass(frozen=True)
class Fit:
    """A fitted embedding and how it came about."""

    embedding: Any  # Embedding, or FeatureEmbedding for explicit features
    solver: str
    reason: str
    regularization: float
    loss: float | None  # leave-one-out or held-out log loss; None where λ was taken as given
    tried: tuple[tuple[float, float], ...]  # (λ, loss)
    residual: float  # |A V - Y| / |Y|, or that of the p x p system
    iterations: int
    seconds: float
    bytes: int  # of the largest things that were held or stored on the way
    rows: int
    scaling: Scaling
    facts: dict[str, Any] = field(default_factory=dict)  # what else is worth knowing, in words and numbers
    statistics: Statistics | None = None  # of additive solvers


def fit_on_dataset(
    dataset: RowSource,
    kernel: Kernel,
    regularization: float,
    *,
    executor: Executor,
    scratch: str | Path | Place | None = None,
    split: str | None = "auto",
    scaling: str | Scaling | None = "unit",
    dtype: str = "float32",
    solver: str = "auto",
    centres: int | None = None,
    centre_choice: str = "rpcholesky",
    retune: bool = True,
    floor: float = 0.0,
    seed: int = 0,
    tolerance: float = 1e-6,
    tile_rows: int | None = None,
    memory: int | None = None,
    features: FeatureMap | None = None,
    backend: str = "numpy",
    report: Callable[[str], None] | None = None,
) -> Fit:
    """Solve for the embedding on all rows of a split.

    Parameters
    ----------
    dataset : with class labels; `split` "auto" stands for its "train" part where it has one, None for all rows
    kernel, regularization : as learned, for scaled rows; with `retune` λ is chosen again on all rows
    executor : SerialExecutor() or DaskExecutor(client)
    scratch : a folder or address that driver and workers reach; what the fit puts there is removed at its end, but for
        the tiles of a `tiled` fit that was interrupted, which the next one finds. None: the memory of this process,
        where a SerialExecutor works
    solver, centres, centre_choice : see the table above; `centres` says how many
    floor : the probability floor that the losses are measured with
    tolerance : of `pcg`, relative residual
    tile_rows, memory : rows of a tile; bytes that one worker may use (None: its share of what is free)
    features : an explicit feature map for solver "features"
    backend : "numpy" or "cupy", where `cholesky` factorises
    report : told, in a line, what goes on
    """
    began, say = time.perf_counter(), report or (lambda line: None)
    split = dataset.training_split(split)
    if not isinstance(scaling, Scaling):
        scaling = Scaling.of(dataset.split_statistics(split), scaling)
    rows = RowsRef.of(dataset, split=split, scaling=scaling, dtype=dtype, classes=True)
    room = memory or int(0.6 * free_bytes("numpy") / max(1, executor.workers))
    solver, reason = choose(solver, rows.count, centres, features, room, dtype)
    say(f"fit: {solver} on {rows.count} rows ({reason})")
    place = Scratch.at(scratch)
    task = Task(
        rows, kernel, regularization, retune, floor, seed, tolerance, executor, place, tile_rows, room, say, backend
    )  # fmt: skip
    found = _solve(task, solver, centres or solve.NYSTROM_CENTRES, centre_choice, features)
    return _finished(found, solver, reason, rows.count, scaling, began)


def refit(
    statistics: Statistics,
    regularization: float,
    *,
    executor: Executor,
    scratch: str | Path | Place,
    scaling: Scaling,
    retune: bool = True,
    floor: float = 0.0,
    reason: str = "chunks were added or removed",
) -> Fit:
    """Solve an additive model again after its statistics have changed; no row is read."""
    began = time.perf_counter()
    found = solve_statistics(
        statistics, regularization, retune=retune, floor=floor, executor=executor, scratch=Scratch.at(scratch)
    )
    solver = "nystrom" if isinstance(statistics.basis, Centres) else "features"
    return _finished(found, solver, reason, statistics.rows, scaling, began)


def _finished(found: Found, solver: str, reason: str, rows: int, scaling: Scaling, began: float) -> Fit:
    return Fit(
        embedding=found.embedding,
        solver=solver,
        reason=reason,
        regularization=found.embedding.regularization,
        loss=found.loss,
        tried=tuple(sorted(found.tried.items())),
        residual=found.residual,
        iterations=found.iterations,
        seconds=time.perf_counter() - began,
        bytes=found.bytes,
        rows=rows,
        scaling=scaling,
        facts=found.facts,
        statistics=found.statistics,
    )


def _solve(task: Task, solver: str, centres: int, centre_choice: str, features: FeatureMap | None) -> Found:
    if solver == "cholesky":
        return _cholesky(task)
    if solver == "tiled":
        return fit_tiled(task)
    if solver == "pcg":
        return fit_pcg(task)
    if solver == "features":
        assert features is not None
        return _from_sums(task, _feature_basis(task, features), {})
    return _nystrom(task, centres, centre_choice)


def choose(
    solver: str, n: int, centres: int | None, features: FeatureMap | None, room: int, dtype: str
) -> tuple[str, str]:
    """Resolve "auto" and refuse what cannot fit, with the reason in words.

    By the number of rows, never by the number of workers, so that a fit alone and on a cluster are the same. `room`,
    the memory of one worker, decides only where it is too small for one factorisation of rows that are few enough.
    """
    item = np.dtype(dtype).itemsize
    if features is not None and solver in ("auto", "features"):
        return "features", "explicit features were given"
    if solver == "features":
        raise ConfigError("solver='features' needs a feature map; give `features`, or choose another solver")
    if solver not in ("auto", *SOLVERS):
        raise ConfigError(f"solver={solver!r} is unknown; choose 'auto', {', '.join(map(repr, SOLVERS))}")
    held = 2 * n * n * item  # the matrix, and the copy that a failure in single precision asks for
    if solver == "cholesky" and held > room:
        raise ConfigError(
            f"solver='cholesky' needs {held / 1e9:.1f} GB in one worker for {n} rows, {room / 1e9:.1f} GB are there; "
            "use solver='tiled', 'pcg', or 'nystrom' with `centres`"
        )
    if solver != "auto":
        return solver, "asked for"
    if centres is not None:
        return "nystrom", f"{centres} centres were asked for"
    if n <= solve.EXACT_ROWS and held < room:
        return "cholesky", f"{n} rows fit one exact factorisation ({held / 1e6:.0f} MB in one worker)"
    seconds = n**3 / 3 / _FLOPS
    if seconds <= _PATIENCE_S:
        return "tiled", f"an exact factorisation of {n} rows takes one worker about {seconds:.0f} s"
    return "nystrom", (
        f"an exact factorisation of {n} rows would take one worker about {seconds:.0f} s and "
        f"{n * n * item / 2e9:.1f} GB; solver='tiled' does it all the same"
    )


# --- cholesky: one worker ---------------------------------------------------------------------------


def _cholesky(task: Task) -> Found:
    lam, loss, tried = solve_on_sample(task)
    call = (task.rows, task.kernel, lam, task.backend)
    V = task.executor.map(cholesky_on_worker, [call], name="fit-cholesky", gpu=task.backend == "cupy")[0]
    X, _ = task.rows.read(0, task.rows.count)
    residual = relative_residual(task, V.astype(np.float64), lam)
    facts = {"leave_one_out_rows": min(task.rows.count, solve.LOO_ROWS)} if tried else {}
    size = task.rows.count**2 * np.dtype(task.rows.dtype).itemsize
    return Found(Embedding(task.kernel, X, V, lam), loss, tried, residual, 1, size, facts)


def cholesky_on_worker(rows: RowsRef, kernel: Kernel, lam: float, backend: str = "numpy") -> np.ndarray:
    """The exact weights, in one factorisation."""
    X, y = rows.read(0, rows.count)
    found = solve.fit(kernel, to_device(X, backend), y, rows.n_classes, regularization=lam, retune=False)
    return to_host(found.embedding.weights)


# --- sums over rows: nystrom and features -----------------------------------------------------------


def _nystrom(task: Task, centres: int, how: str) -> Found:
    size = min(task.rows.count, max(_CENTRE_SAMPLE[0], _CENTRE_SAMPLE[1] * centres))
    call = (task.rows, task.kernel, min(centres, task.rows.count), how, size, task.seed, task.executor.solo_threads)
    points = task.executor.map(centres_on_worker, [call], name="choose-centres")[0]
    basis, facts = Centres(task.kernel, points), {"centre_choice": how, "centre_sample_rows": size}
    if centres < task.rows.count:
        return _from_sums(task, basis, {"centres": len(points), **facts})
    # Every row a centre is the exact problem, of which sums of squares keep half the digits; they serve updates alone.
    exact = _cholesky(task)
    statistics = gather(task.rows, basis, executor=task.executor, scratch=task.scratch)
    return replace(exact, facts={"centres": task.rows.count, **facts, **exact.facts}, statistics=statistics)


def centres_on_worker(
    rows: RowsRef, kernel: Kernel, count: int, how: str, size: int, seed: int, threads: int
) -> np.ndarray:
    # In double: single precision cannot tell what many centres leave of a smooth kernel from rounding.
    X, _ = rows.sample(size, seed)
    return np.asarray(X[choose_centres(kernel, X.astype(np.float64), count, how, seed, threads)])


def _feature_basis(task: Task, features: FeatureMap) -> Basis:
    few, _ = task.rows.read(0, 1)
    return Features(features, int(features.forward(few).shape[1]))


def _from_sums(task: Task, basis: Basis, facts: dict[str, Any]) -> Found:
    statistics = gather(task.rows, basis, executor=task.executor, scratch=task.scratch)
    return solve_statistics(
        statistics, task.regularization, retune=task.retune, floor=task.floor, executor=task.executor,
        scratch=task.scratch, facts=facts,
    )  # fmt: skip


def solve_statistics(
    statistics: Statistics,
    regularization: float,
    *,
    retune: bool,
    floor: float,
    executor: Executor,
    scratch: Scratch,
    facts: dict[str, Any] | None = None,
) -> Found:
    """Weights from sums: λ by leave-one-out of the sampled rows, one task for each λ; then one p x p solve."""
    basis, total, sample = statistics.basis, statistics.total(), statistics.sample
    assert sample is not None
    with blas_threads(1):
        system = System(total.G, total.B, basis.metric(), total.rows, total.noise)
    lam, loss, leverage = regularization, None, None
    tried: dict[float, float] = {}
    judged = min(len(sample.y), judged_rows(basis.size))  # the sample has no order, so the first are as good as any
    if retune and judged:
        names = _share_system(system, basis, sample.X[:judged], sample.y[:judged], scratch)
        leverages = {}

        def evaluate(lams: list[float]) -> list[float]:
            calls = [(scratch, names, system.rows, system.noise, lam, floor) for lam in lams]
            found = executor.map(judge_regularization, calls, name="leave-one-out")
            leverages.update({lam: value for lam, (_, value) in zip(lams, found, strict=True)})
            return [value for value, _ in found]

        variance = _variance(basis, sample)
        lam, loss, tried = solve.search_regularization(evaluate, scale=variance / system.rows, start=regularization)
        leverage = leverages[lam]
        for name in names.values():
            scratch.delete(name)
    with blas_threads(1):
        V = system.solve(lam)
        residual = system.residual(lam, V)
    known = dict(facts or {})
    if leverage is not None:
        known |= {
            "leave_one_out_rows": judged,
            "effective_dimension": leverage / judged * system.rows,
        }
    embedding: Any
    if isinstance(basis, Centres):
        embedding = Embedding(basis.kernel, basis.points, V, lam)
    else:
        assert isinstance(basis, Features)
        embedding = FeatureEmbedding(basis.features, V, regularization=lam)
    return Found(embedding, loss, tried, residual, 1, 8 * basis.size**2, known, statistics)


def _share_system(system: System, basis: Basis, X: Any, y: np.ndarray, scratch: Scratch) -> dict[str, str]:
    """Put what leave-one-out needs where workers find it."""
    token = os.urandom(6).hex()
    Z = np.asarray(basis.wide.rows(X.astype(np.float64)), dtype=np.float64)
    arrays = {"G": system.G, "B": system.B, "M": system.M, "Z": Z, "y": y}
    names = {key: f"system-{token}-{key}" for key, array in arrays.items() if array is not None}
    for key, name in names.items():
        scratch.save(name, arrays[key])
    return names


def judge_regularization(
    scratch: Scratch, names: dict[str, str], rows: int, noise: float, lam: float, floor: float
) -> tuple[float, float]:
    """Leave-one-out log loss of the sampled rows at one λ, and the sum of their leverages."""
    held = {key: scratch.load(name) for key, name in names.items()}
    system = System(held["G"], np.asarray(held["B"]), held.get("M"), rows, noise)
    Z = np.asarray(held["Z"])
    return system.leave_one_out(lam, Z, one_hot(np.asarray(held["y"]), system.B.shape[1], Z), floor)


def _variance(basis: Basis, sample: Any) -> float:
    """Of the function values, which λ is measured against."""
    if isinstance(basis, Centres):
        return basis.kernel.alpha(basis.points) ** 2 or 1.0
    Z = basis.rows(sample.X)
    return float(np.mean(np.sum(np.asarray(Z, dtype=np.float64) ** 2, axis=1))) or 1.0
