"""The final fit on all rows, and the regularisation that suits them.

A kernel learned on batches is right for the full data far more often than the λ learned beside it: the best λ falls as
rows are added. So λ is chosen again on all rows by leave-one-out log loss, in closed form.

    cholesky    exact: (K + nλI)⁻¹ Y. Leave-one-out costs one factorisation and one inversion for each λ tried.
    nystrom     p centres, any n: one pass for KᵀK and KᵀY, then a p x p factorisation for each λ tried.

These are rows in memory, on the host or on a device. For data sets see `kme_dist.run.fitting`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kme_dist.backend import Array, astype, free_bytes, namespace_of, to_host
from kme_dist.core.embedding import Embedding, leave_one_out, log_loss, solve_dual
from kme_dist.core.kernels.base import Kernel, length_scale_names, median_length_scale, select
from kme_dist.core.nystrom import Accumulator, Centres, System, judged_rows
from kme_dist.core.objective import Workspace, one_hot
from kme_dist.core.pivots import choose_centres
from kme_dist.core.precision import Need, need_of_solve
from kme_dist.errors import ConfigError, NumericalError, PrecisionWarning

# n λ / α² over which λ is sought: from "trust every label" to "average over everything".
_SHIFTS = 10.0 ** np.arange(-6.0, 2.5, 1.0)
_REFINEMENTS = (0.5, 0.25)  # decades to either side of the best so far
_PATIENCE = 1  # decades uphill before the walk turns back
LOO_ROWS = 4_000  # leave-one-out on more rows than this uses a sample
_START_ROWS = 1_500
_START_FACTORS = (0.2, 0.35, 0.6, 1.0, 1.7)  # times the median distance
EXACT_ROWS = 12_000  # beyond this `auto` prefers centres over the exact solve
NYSTROM_CENTRES = 2_000
_CENTRE_ROWS, _ROWS_PER_CENTRE = 10_000, 6  # among so many random rows centres are chosen


@dataclass(frozen=True)
class Solution:
    """A fitted embedding and how it came about."""

    embedding: Embedding
    solver: str
    reason: str
    loo_log_loss: float | None  # None where λ was taken as given
    tried: tuple[tuple[float, float], ...] = ()  # (λ, leave-one-out log loss)


def choose_solver(solver: str, n: int, centres: int | None, dtype: str, backend: str) -> tuple[str, str]:
    """Resolve "auto" and refuse what cannot fit, with the reason in words."""
    needed = n * n * np.dtype(dtype).itemsize
    available = free_bytes(backend)
    if solver == "auto":
        if centres is not None:
            return "nystrom", f"{centres} centres were asked for"
        if n <= EXACT_ROWS and needed < 0.5 * available:
            return "cholesky", f"{n} rows fit one exact factorisation ({needed / 1e6:.0f} MB)"
        return "nystrom", f"an exact factorisation of {n} rows would take {needed / 1e9:.1f} GB"
    if solver == "cholesky":
        if needed > available:
            raise ConfigError(
                f"solver='cholesky' needs {needed / 1e9:.1f} GB for {n} rows, {available / 1e9:.1f} GB are free; "
                "use solver='nystrom' with `centres`"
            )
        return "cholesky", "asked for"
    if solver in ("tiled", "pcg", "nystrom"):
        return solver, "asked for"
    if solver == "features":
        raise ConfigError(
            "solver='features' needs a feature map, and a kernel has none: use CENClassifier(network=...), or "
            "fit_on_dataset(..., features=...)"
        )
    raise ConfigError(f"solver={solver!r} is unknown; choose 'auto', 'cholesky', 'tiled', 'pcg' or 'nystrom'")


def fit(
    kernel: Kernel,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    *,
    regularization: float,
    retune: bool,
    solver: str = "cholesky",
    reason: str = "",
    centres: int | None = None,
    floor: float = 0.0,
    seed: int = 0,
    workspace: Workspace | None = None,
) -> Solution:
    """Solve for the embedding on all rows; with `retune`, λ is chosen by leave-one-out first."""
    problem = _Problem(kernel, X, y, n_classes, regularization, retune, floor, seed)
    if solver == "nystrom" and (centres or NYSTROM_CENTRES) < len(X):
        return _fit_nystrom(problem, reason, centres)
    # Every row a centre is the exact problem, of which sums of squares would keep half the digits.
    return replace(_fit_cholesky(problem, reason, workspace or Workspace()), solver=solver)


@dataclass(frozen=True)
class _Problem:
    """What is to be fitted, and whether λ is to be chosen on the way."""

    kernel: Kernel
    X: Any
    y: np.ndarray
    n_classes: int
    regularization: float
    retune: bool
    floor: float
    seed: int


def _fit_cholesky(problem: _Problem, reason: str, workspace: Workspace) -> Solution:
    kernel, X, y, n_classes = problem.kernel, problem.X, problem.y, problem.n_classes
    lam, loss = problem.regularization, None
    tried: dict[float, float] = {}
    if problem.retune and len(X) > 1:
        lam, loss, tried = retune_regularization(
            kernel, X, y, n_classes, start=lam, floor=problem.floor, seed=problem.seed, workspace=workspace
        )
    V = _solve_promoting(kernel, X, y, n_classes, lam, workspace)
    return Solution(Embedding(kernel, X, V, lam), "cholesky", reason, loss, tuple(sorted(tried.items())))


def _solve_promoting(kernel: Kernel, X: Any, y: np.ndarray, n_classes: int, lam: float, workspace: Workspace) -> Array:
    """V in the precision that the solve needs; padded where a factorisation fails all the same.

    Weights stay in the precision they were computed in: rounded, large ones of both signs would lose their sum.
    """
    n = len(X)
    need = need_of_solve(kernel, X, n * lam)
    if need.missing:
        warn_of_padding(n, lam, need)
    diag = kernel.diag(X)
    scale = float(namespace_of(diag).mean(astype(diag, "float64")))
    wide = Need("float64").promoted(X)
    attempts = [(need.promoted(X), need.missing)]
    attempts += [(wide, need.missing)] if need.dtype == "float32" else []
    attempts += [(wide, need.missing + jitter * scale) for jitter in (1e-10, 1e-8, 1e-6, 1e-4)]
    for rows, jitter in attempts:
        Y = one_hot(y, n_classes, kernel.diag(rows))
        try:
            return solve_dual(kernel, rows, Y, lam, jitter, workspace)
        except NumericalError:
            continue
    raise NumericalError(
        f"the Gram matrix of all {n} rows stays singular in float64 at regularization {lam:.1e}; "
        "raise `regularization`, or leave `refit_regularization=True`",
        rows=n,
        regularization=lam,
        dtype="float64",
    )


def warn_of_padding(n: int, lam: float, need: Need) -> None:
    """Say that λ is below what double precision can carry, and what was solved instead."""
    least = lam + need.missing / n
    warnings.warn(
        f"regularization {lam:.1e} is too small for double precision: n x regularization is {n * lam:.1e} for {n} rows "
        f"against a Gram matrix of norm {need.norm:.1e}, and digits are lost below {n * least:.1e}. The fit is that of "
        f"regularization {least:.1e}; ask for this much or more, or leave `refit_regularization=True`",
        PrecisionWarning,
        stacklevel=2,
    )


def retune_regularization(
    kernel: Kernel,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    *,
    start: float,
    floor: float = 0.0,
    seed: int = 0,
    workspace: Workspace | None = None,
) -> tuple[float, float, dict[float, float]]:
    """The λ with the least leave-one-out log loss, that loss, and everything tried (λ in terms of all rows).

    Leave-one-out costs n³ for each λ. Beyond `LOO_ROWS` rows a random sample of so many is judged, at the same shift
    nλ: the shift plays the part of a noise variance, which does not depend on how many rows there are.
    """
    space, n = workspace or Workspace(), len(X)
    if n > LOO_ROWS:
        rows = np.sort(np.random.default_rng(seed).choice(n, LOO_ROWS, replace=False))
        X, y = select(X, rows), y[rows]
    variance = kernel.alpha(X) ** 2 or 1.0

    def evaluate(lams: list[float]) -> list[float]:
        return [leave_one_out_loss(kernel, X, y, n_classes, lam, n, variance, floor, space) for lam in lams]

    return search_regularization(evaluate, scale=variance / n, start=start)


def leave_one_out_loss(
    kernel: Kernel,
    X: Any,
    y: np.ndarray,
    n_classes: int,
    lam: float,
    n: int,
    variance: float,
    floor: float,
    workspace: Workspace | None = None,
) -> float:
    """Leave-one-out log loss of rows that stand for `n`, at the shift nλ; infinite where no precision will do.

    `variance` is the largest k(x, x).
    """
    need = need_of_solve(kernel, X, lam * n, variance)
    for rows in (need.promoted(X), Need("float64").promoted(X)):
        Y = one_hot(y, n_classes, kernel.diag(rows))
        try:
            P, _ = leave_one_out(kernel, rows, Y, lam * n / len(y), workspace)
        except NumericalError:
            continue
        return math.inf if need.missing else float(log_loss(Y, P, floor))
    return math.inf


def scale_to_data(
    kernel: Kernel, X: Any, y: np.ndarray, n_classes: int, *, floor: float, seed: int
) -> tuple[Kernel, float]:
    """A good place to start: length scales times one common factor, and λ, by leave-one-out on a sample of rows.

    The factors put the length scales (their geometric mean) around the median distance between rows; the kernel as
    given is tried too.
    """
    names = length_scale_names(kernel)
    if len(X) > _START_ROWS:
        rows = np.sort(np.random.default_rng([seed, 2]).choice(len(X), _START_ROWS, replace=False))
        X, y = select(X, rows), y[rows]
    best: tuple[float, float, Kernel] | None = None
    workspace = Workspace()
    factors = [1.0]
    if names and getattr(X, "ndim", 0) == 2:
        typical = np.exp(np.mean(np.concatenate([np.log(kernel.parameters[name]).ravel() for name in names])))
        factors += [f * median_length_scale(to_host(X), seed) / typical for f in _START_FACTORS]
    for factor in factors:
        trial = kernel.replace({name: kernel.parameters[name] * factor for name in names})
        start = best[1] if best else 1e-2 / len(X)
        lam, loss, _ = retune_regularization(trial, X, y, n_classes, start=start, floor=floor, workspace=workspace)
        if best is None or loss < best[0]:
            best = (loss, lam, trial)
    assert best is not None
    return best[2], best[1]


def search_regularization(
    evaluate: Callable[[list[float]], list[float]], *, scale: float, start: float
) -> tuple[float, float, dict[float, float]]:
    """Minimise a smooth, mostly single-valley function of log λ with few evaluations.

    Walks a decade grid downhill from the value nearest to `start`, down and up at once, then refines around the best
    point. `evaluate` is given all the λ that can be judged side by side.
    """
    tried: dict[float, float] = {}

    def judge(lams: list[float]) -> None:
        wanted = [lam for lam in dict.fromkeys(lams) if lam not in tried]
        if wanted:
            tried.update(zip(wanted, evaluate(wanted), strict=True))

    grid = [float(shift * scale) for shift in _SHIFTS]
    here = min(range(len(grid)), key=lambda i: abs(math.log(grid[i] / start)))
    walkers = [_Walker(direction, here) for direction in (-1, 1)]
    judge([grid[i] for i in range(here - 1, here + 2) if 0 <= i < len(grid)])
    while walkers:
        walkers = [walker for walker in walkers if walker.step(grid, tried)]
        judge([grid[walker.at + walker.direction] for walker in walkers])
    for width in _REFINEMENTS:
        centre = min(tried, key=lambda lam: tried[lam])
        judge([centre * 10.0 ** (sign * width) for sign in (-1, 1)])
    if not math.isfinite(min(tried.values())):
        raise NumericalError(
            "no regularisation made the Gram matrix positive definite; look for rows that are not finite"
        )
    lam = _best(tried)
    return lam, tried[lam], tried


class _Walker:
    """Goes one way along the grid for as long as it leads downhill."""

    def __init__(self, direction: int, at: int) -> None:
        self.direction, self.at, self.best = direction, at, math.inf
        self.patience = _PATIENCE

    def step(self, grid: list[float], tried: dict[float, float]) -> bool:
        """Take the next point, judged already; whether the one after it is wanted."""
        self.best = min(self.best, tried[grid[self.at]])
        if not 0 <= self.at + self.direction < len(grid):
            return False
        self.at += self.direction
        value = tried[grid[self.at]]
        # Upwards a draw is as good as a gain, since the larger λ is preferred; downwards only a gain counts.
        goes_on = value <= _nearly(self.best) if self.direction > 0 else value < self.best
        self.patience = _PATIENCE if goes_on else self.patience - 1
        return self.patience > 0 and 0 <= self.at + self.direction < len(grid)


def _best(tried: dict[float, float]) -> float:
    """The largest λ whose loss is the least but for rounding: where the data do not care, stay well conditioned."""
    least = min(tried.values())
    return max(lam for lam, loss in tried.items() if loss <= _nearly(least))


def _nearly(loss: float) -> float:
    return loss + 1e-4 * abs(loss) + 1e-7


# --- Nystrom ---------------------------------------------------------------------------------------


def _fit_nystrom(problem: _Problem, reason: str, centres: int | None) -> Solution:
    """Sums over all rows for centres chosen by pivoted Cholesky; λ by leave-one-out of a sample of the rows."""
    kernel, X, n, p = problem.kernel, problem.X, len(problem.X), centres or NYSTROM_CENTRES
    rng = np.random.default_rng([problem.seed, 6])
    among = np.sort(rng.permutation(n)[: max(_CENTRE_ROWS, _ROWS_PER_CENTRE * p)])
    candidates = select(X, among)
    if hasattr(candidates, "dtype"):
        candidates = to_host(candidates).astype(np.float64)
    C = select(X, among[choose_centres(kernel, candidates, p, "rpcholesky", problem.seed)])
    basis = Centres(kernel, C)
    accumulator = Accumulator(basis, problem.n_classes, kernel.diag(C))
    accumulator.add(X, problem.y)
    sums = accumulator.sums()
    system = System(sums.G, sums.B, basis.metric(), n, sums.noise)
    lam, loss = problem.regularization, None
    tried: dict[float, float] = {}
    if problem.retune:
        judged = np.sort(rng.permutation(n)[: judged_rows(p)])
        rows = select(X, judged)
        Z = basis.wide.rows(astype(rows, "float64") if hasattr(rows, "dtype") else rows)
        Y = one_hot(problem.y[judged], problem.n_classes, Z)
        lam, loss, tried = search_regularization(
            lambda lams: [system.leave_one_out(lam, Z, Y, problem.floor)[0] for lam in lams],
            scale=(kernel.alpha(C) ** 2 or 1.0) / n,
            start=lam,
        )
    embedding = Embedding(kernel, C, system.solve(lam), lam)
    return Solution(embedding, "nystrom", reason, loss, tuple(sorted(tried.items())))
