"""The final fit on all rows, and the regularisation that suits them.

A kernel learned on batches is right for the full data far more often than the λ learned beside it: the best λ falls as
rows are added. So λ is chosen again on all rows by leave-one-out log loss, in closed form.

    cholesky    exact: (K + nλI)⁻¹ Y. Leave-one-out costs one factorisation and one inversion for each λ tried.
    nystrom     p centres, any n: one pass for KᵀK and KᵀY, a p x p eigendecomposition in double precision that serves
                every λ, one more pass for leave-one-out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import (
    Array,
    astype,
    cholesky,
    empty_square,
    free_bytes,
    like,
    namespace_of,
    precision,
    set_diagonal,
    to_host,
)
from kme_dist.core.embedding import Embedding, leave_one_out, log_loss, solve_dual
from kme_dist.core.kernels.base import Kernel, row_blocks
from kme_dist.core.objective import Workspace, one_hot
from kme_dist.errors import ConfigError, NumericalError
from kme_dist.run.learn import length_scale_names, median_length_scale, select

# n λ / α² over which λ is sought: from "trust every label" to "average over everything".
_SHIFTS = 10.0 ** np.arange(-6.0, 2.5, 1.0)
_REFINEMENTS = (0.5, 0.25)  # decades to either side of the best so far
_PATIENCE = 1  # decades uphill before the walk turns back
_LOO_ROWS = 4_000  # leave-one-out on more rows than this uses a sample
_START_ROWS = 1_500
_START_FACTORS = (0.2, 0.35, 0.6, 1.0, 1.7)  # times the median distance
_EXACT_ROWS = 12_000  # beyond this `auto` prefers centres over the exact solve
_NYSTROM_CENTRES = 2_000
_CHUNK_ROWS = 8_192


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
        if n <= _EXACT_ROWS and needed < 0.5 * available:
            return "cholesky", f"{n} rows fit one exact factorisation ({needed / 1e6:.0f} MB)"
        return "nystrom", f"an exact factorisation of {n} rows would take {needed / 1e9:.1f} GB"
    if solver == "cholesky":
        if needed > available:
            raise ConfigError(
                f"solver='cholesky' needs {needed / 1e9:.1f} GB for {n} rows, {available / 1e9:.1f} GB are free; "
                "use solver='nystrom' with `centres`"
            )
        return "cholesky", "asked for"
    if solver == "nystrom":
        return "nystrom", "asked for"
    raise ConfigError(f"solver={solver!r} is unknown; choose 'auto', 'cholesky' or 'nystrom'")


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
    if solver == "nystrom":
        return _fit_nystrom(problem, reason, centres)
    return _fit_cholesky(problem, reason, workspace or Workspace())


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
    """V in the data's precision; in double, then padded, where the factorisation fails."""
    diag = kernel.diag(X)
    scale = float(namespace_of(diag).mean(astype(diag, "float64")))
    choices = _precisions(X, lam / (scale or 1.0))
    attempts = [(rows, 0.0) for rows in choices]
    attempts += [(choices[-1], jitter * scale) for jitter in (1e-10, 1e-8, 1e-6, 1e-4)]
    for rows, jitter in attempts:
        Y = one_hot(y, n_classes, kernel.diag(rows))
        try:
            return astype(solve_dual(kernel, rows, Y, lam, jitter, workspace), precision(diag))
        except NumericalError:
            continue
    raise NumericalError(
        f"the Gram matrix of all {len(X)} rows stays singular in float64 at regularization {lam:.1e}; "
        "raise `regularization`, or leave `refit_regularization=True`",
        rows=len(X),
        regularization=lam,
        dtype="float64",
    )


def _precisions(X: Any, relative: float) -> tuple[Any, ...]:
    """The rows in the precisions worth trying at λ / k(x, x) = `relative`: K + nλI may have a condition of 1/relative,
    of which single precision, with its seven digits, can bear 1e5."""
    if not hasattr(X, "dtype"):
        return (X,)
    wide = astype(X, "float64")
    return (X, wide) if relative > 1e-5 and wide is not X else (wide,)


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

    Leave-one-out costs n³ for each λ. Beyond `_LOO_ROWS` rows a random sample of so many is judged, at the same shift
    nλ: the shift plays the part of a noise variance, which does not depend on how many rows there are.
    """
    space, n = workspace or Workspace(), len(X)
    if n > _LOO_ROWS:
        rows = np.sort(np.random.default_rng(seed).choice(n, _LOO_ROWS, replace=False))
        X, y = select(X, rows), y[rows]
    sample = len(X)
    variance = kernel.alpha(X) ** 2 or 1.0

    def evaluate(lam: float) -> float:
        for rows in _precisions(X, lam / variance):
            Y = one_hot(y, n_classes, kernel.diag(rows))
            try:
                P, _ = leave_one_out(kernel, rows, Y, lam * n / sample, space)
            except NumericalError:
                continue
            return float(log_loss(Y, P, floor))
        return math.inf

    return search_regularization(evaluate, scale=variance / n, start=start)


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
    evaluate: Callable[[float], float], *, scale: float, start: float
) -> tuple[float, float, dict[float, float]]:
    """Minimise a smooth, mostly single-valley function of log λ with few evaluations.

    Walks a decade grid downhill from the value nearest to `start`, then refines around the best point.
    """
    tried: dict[float, float] = {}

    def at(lam: float) -> float:
        if lam not in tried:
            tried[lam] = evaluate(lam)
        return tried[lam]

    grid = [float(shift * scale) for shift in _SHIFTS]
    here = min(range(len(grid)), key=lambda i: abs(math.log(grid[i] / start)))
    for direction in (-1, 1):
        patience, i, best = _PATIENCE, here, at(grid[here])
        while patience and 0 <= i + direction < len(grid):
            i += direction
            value = at(grid[i])
            # Upwards a draw is as good as a gain, since the larger λ is preferred; downwards only a gain counts.
            goes_on = value <= _nearly(best) if direction > 0 else value < best
            patience = _PATIENCE if goes_on else patience - 1
            best = min(best, value)
    for width in _REFINEMENTS:
        centre = min(tried, key=lambda lam: tried[lam])
        for sign in (-1, 1):
            at(centre * 10.0 ** (sign * width))
    if not math.isfinite(min(tried.values())):
        raise NumericalError(
            "no regularisation made the Gram matrix positive definite; look for rows that are not finite"
        )
    lam = _best(tried)
    return lam, tried[lam], tried


def _best(tried: dict[float, float]) -> float:
    """The largest λ whose loss is the least but for rounding: where the data do not care, stay well conditioned."""
    least = min(tried.values())
    return max(lam for lam, loss in tried.items() if loss <= _nearly(least))


def _nearly(loss: float) -> float:
    return loss + 1e-4 * abs(loss) + 1e-7


# --- Nystrom ---------------------------------------------------------------------------------------


def _fit_nystrom(problem: _Problem, reason: str, centres: int | None) -> Solution:
    """Centres drawn uniformly; φ(x) = L⁻¹ k(centres, x) with L Lᵀ = K(centres, centres), then ridge regression on φ."""
    kernel, X, n = problem.kernel, problem.X, len(problem.X)
    p = min(centres or _NYSTROM_CENTRES, n)
    C = select(X, np.sort(np.random.default_rng(problem.seed).choice(n, p, replace=False)))
    diag = kernel.diag(C)
    wide = astype(diag, "float64")
    xp = namespace_of(diag)
    K_cc = empty_square(p, wide)
    K_cc[...] = astype(kernel.gram(C), "float64")
    # Float32 Gram entries carry an error of about 1e-7: directions below it are noise, not kernel.
    noise = (1e-6 if precision(diag) == "float32" else 1e-12) * float(xp.mean(wide))
    set_diagonal(K_cc, wide + p * noise / 10)
    factor = cholesky(K_cc)

    def features(rows: slice) -> tuple[Array, Array]:
        """Φᵀ (p x rows) and one-hot labels of a chunk."""
        K = astype(kernel.gram(X[rows], C), "float64")
        return factor.half_solve(K.T), one_hot(problem.y[rows], problem.n_classes, K)

    G = B = 0
    for chunk in row_blocks(n, _CHUNK_ROWS):
        Phi, Y = features(chunk)
        G, B = G + Phi @ Phi.T, B + Phi @ Y
    eigenvalues, U = xp.linalg.eigh(G)
    eigenvalues = xp.where(eigenvalues > 0, eigenvalues, eigenvalues * 0)
    UtB = U.T @ B
    lam, loss = problem.regularization, None
    tried: dict[float, float] = {}
    if problem.retune:
        shifts = 10.0 ** np.arange(-6.0, 2.1, 0.25) * (kernel.alpha(C) ** 2 or 1.0)
        inverses = 1 / (eigenvalues[:, None] + like(shifts, eigenvalues)[None, :])
        losses = np.zeros(len(shifts))
        for chunk in row_blocks(n, _CHUNK_ROWS):
            Phi, Y = features(chunk)
            Q = Phi.T @ U
            leverages = (Q * Q) @ inverses  # one column per λ
            for i in range(len(shifts)):
                P = Q @ (inverses[:, i : i + 1] * UtB)
                leverage = leverages[:, i : i + 1]
                room = xp.where(leverage < 1 - 1e-6, 1 - leverage, leverage * 0 + 1e-6)
                losses[i] += float(log_loss(Y, Y - (Y - P) / room, problem.floor)) * Y.shape[0] / n
        tried = {float(shift) / n: float(value) for shift, value in zip(shifts, losses, strict=True)}
        lam = _best(tried)
        loss = tried[lam]
    V = factor.half_solve(U @ (UtB / (eigenvalues + n * lam)[:, None]), transposed=True)
    embedding = Embedding(kernel, C, astype(V, precision(diag)), lam)
    return Solution(embedding, "nystrom", reason, loss, tuple(sorted(tried.items())))
