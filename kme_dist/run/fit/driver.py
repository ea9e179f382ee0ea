"""One driver for all solvers: choose, prepare, search λ by leave-one-out, solve, measure the residual."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kme_dist.core.kernels.base import FeatureMap, Kernel
from kme_dist.core.regularization import search_regularization
from kme_dist.core.sums import Centres
from kme_dist.data.dataset import RowSource, Span
from kme_dist.data.places import Place
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.errors import counted
from kme_dist.run.executors import Executor
from kme_dist.run.fit import pcg
from kme_dist.run.fit.additive import FitStatistics
from kme_dist.run.fit.choose import SOLVERS, TOLERANCE, Choice, choose
from kme_dist.run.fit.equations import Equations
from kme_dist.run.fit.exact import raised_regularization
from kme_dist.run.fit.problem import Fit, Prepared, Problem, Room, Size, silent
from kme_dist.run.scratch import Scratch


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
    centre_choice: str | None = None,
    retune: bool | str = True,
    floor: float = 0.0,
    seed: int = 0,
    tolerance: float | None = None,
    tile_rows: int | None = None,
    memory: int | None = None,
    seconds: float | None = None,
    features: FeatureMap | None = None,
    sampled: tuple[Span, ...] = (),
    backend: str = "numpy",
    report: Callable[[str], None] | None = None,
) -> Fit:
    """Solve for the embedding on all rows of a split.

    Parameters
    ----------
    dataset : with class labels; `split` "auto" is its "train" split if it has one, None all rows
    kernel, regularization : as learned, for scaled rows; with `retune` λ is searched again on all rows, with "shared"
        only by a solver that compares values of λ in the passes of one solve, and raised where that costs nothing and
        makes an iteration on all rows possible
    executor : SerialExecutor() or DaskExecutor(client)
    scratch : a folder or address that driver and workers can reach; the fit removes its files at the end, except the
        tiles of an interrupted `tiled` fit, which the next one reuses. None: the memory of this process, enough for a
        SerialExecutor, and on any executor for solvers that sum over rows
    solver, centres, centre_choice : see `kme_dist.run.fit`; `centres` is their number
    floor : the probability floor used in the losses
    tolerance : of `pcg`, relative residual (None: 1e-6, and 2e-2 if solver "auto" chose it)
    tile_rows, memory : rows per tile; bytes that one worker may use (None: 60 % of its limit, or of the free memory)
    seconds : budget of processor time under solver "auto" (None: a fixed amount of work, the same on every machine)
    features : an explicit feature map for solver "features"
    sampled : sorted ranges of rows of the data set from which solvers "nystrom" and "features" draw the rows for
        leave-one-out; empty: from all rows
    backend : "numpy" or "cupy", for the factorisation of `cholesky`
    report : called with one line for each stage of the fit
    """
    began, report = time.perf_counter(), report or silent
    split = dataset.training_split(split)
    if not isinstance(scaling, Scaling):
        scaling = Scaling.of(dataset.split_statistics(split), scaling)
    rows = RowsRef.of(dataset, split=split, scaling=scaling, dtype=dtype, classes=True)
    exchanged = Scratch.at(scratch)
    room = Room.of(executor, exchanged, memory)
    width = dataset.features  # 0 for rows that are not vectors
    size = Size(rows.positive, rows.n_classes, width=width, dtype=dtype, labelled=bool(width and rows.n_classes))
    problem = Problem(
        rows, kernel, executor, exchanged, room.task, floor=floor, seed=seed, tolerance=tolerance or TOLERANCE,
        tile_rows=tile_rows, backend=backend, centre_choice=centre_choice or "auto", features=features,
        sampled=sampled, retune=bool(retune), report=report,
    )  # fmt: skip
    # A factorisation is nearly all matrix products, at which a GPU is best.
    chosen = choose(solver, size, centres, features, room, seconds, iterate=backend == "numpy")
    if solver == "auto" and chosen.solver == "pcg" and not pcg.converges(problem, regularization):
        raised = raised_regularization(problem, regularization) if retune == "shared" else regularization
        if pcg.converges(problem, raised):
            report(f"fit: regularization raised from {regularization:.2g} to {raised:.2g}: as good on a sample of rows")
            regularization = raised
        else:
            chosen = choose(solver, size, centres, features, room, seconds, iterate=False)
    report(f"fit: {chosen.solver} on {counted(rows.count, 'row')} ({chosen.reason})")
    problem = replace(problem, tolerance=tolerance or chosen.tolerance, centres=chosen.centres or centres)
    prepared = SOLVERS[chosen.solver].prepare(problem)
    fit = _solve(prepared, regularization, retune is True, chosen, rows.count, scaling)
    fit = replace(fit, weight=rows.weight)
    return replace(fit, seconds=time.perf_counter() - began)


def refit(
    statistics: FitStatistics,
    regularization: float,
    *,
    executor: Executor,
    scratch: str | Path | Place,
    scaling: Scaling,
    retune: bool = True,
    floor: float = 0.0,
    reason: str = "chunks were added or removed",
) -> Fit:
    """Solve an additive model again after its statistics changed; no rows are read."""
    began = time.perf_counter()
    prepared = Equations(statistics, floor, executor, Scratch.at(scratch))
    chosen = Choice("nystrom" if isinstance(statistics.basis, Centres) else "features", reason)
    fit = _solve(prepared, regularization, retune, chosen, statistics.rows, scaling)
    fit = replace(fit, weight=statistics.weight)
    return replace(fit, seconds=time.perf_counter() - began)


def _solve(prepared: Prepared, regularization: float, retune: bool, chosen: Choice, rows: int, scaling: Scaling) -> Fit:
    lam, loss, facts = regularization, None, dict(prepared.facts)
    tried: dict[float, float] = {}
    try:
        if retune and prepared.evaluated_rows:
            lam, loss, tried = search_regularization(prepared.leave_one_out, scale=prepared.scale, start=regularization)
            facts["leave_one_out_rows"] = prepared.evaluated_rows
        solved = prepared.solve(lam)
        lam, loss = solved.regularization or lam, loss if solved.loss is None else solved.loss
        residual = prepared.residual(solved, lam)
    finally:
        prepared.close()
    return Fit(
        embedding=solved.embedding,
        solver=chosen.solver,
        reason=chosen.reason,
        regularization=lam,
        loss=loss,
        tried=tuple(sorted(tried.items())),
        residual=residual,
        iterations=solved.iterations,
        seconds=0.0,  # set by the caller
        bytes=solved.bytes,
        rows=rows,
        scaling=scaling,
        facts=facts | solved.facts,
        statistics=prepared.statistics,
        left_out=solved.left_out,
        training=solved.training,
    )
