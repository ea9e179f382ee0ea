"""Learning objectives of multiclass conditional embeddings, with closed-form gradients.

Every function takes a kernel, the rows of a batch and their labels, and returns an `Objective`: the value q, its parts,
and the derivatives of q by the logarithm of every kernel parameter and of the regularisation λ. There is one Cholesky
factorisation per call, and no automatic differentiation: with

    A = K + nλI = L Lᵀ,   V = A⁻¹ Y,   P = K V = Y - nλ V,   r = α sqrt(trace(Vᵀ K V))

the derivative of q by K has rank 2m (m classes), so it is passed to the kernel as two thin factors, tile by tile, and
never formed as a matrix.

    rcb_objective            training risk + τ r                  [HNR, algorithm 1]; τ = 0 is empirical risk
    validation_objective     risk on the held-out part + τ r      [HNR, equation 13]
    loo_objective            leave-one-out risk + τ r, from the closed form P_i = Y_i - V_i / [A⁻¹]_ii
    feature_objective        the same for explicit features Z = φ(X)  [HNR, algorithm 2]; returns dq/dZ

HNR: Hsu, Nock, Ramos, "Hyperparameter Learning for Conditional Kernel Mean Embeddings with Rademacher Complexity
Bounds". `risk="sum"`, the default, reproduces the published figures: with the mean, as printed, the complexity term
outweighs the loss and the objective collapses.

Rows may have weights w_i, W = Σ w_i: then A = K + Wλ diag(1/w), P = Y - Wλ V/w, and the risk is Σ w_i L_i
(`kme_dist.core.risk`).

Single precision is used where nλ leaves it three digits (`kme_dist.core.precision`), else the batch is promoted to
double before it is factorised. If a factorisation still fails, a growing multiple of the identity is added before an
error is raised. `Objective.dtype` and `.jitter` record what was used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kme_dist.backend import (
    Array,
    Factor,
    astype,
    cholesky,
    diagonal,
    empty_square,
    is_cupy,
    like,
    namespace_of,
    precision,
    set_diagonal,
    to_host,
)
from kme_dist.core.kernels.base import (
    Gradients,
    Kernel,
    add_gradients,
    check_vectors,
    row_blocks,
    row_count,
    take,
    tile_rows,
)
from kme_dist.core.precision import Need, need_of_features, need_of_solve
from kme_dist.core.risk import (
    COMPLEXITY_WEIGHT,
    LOSS_FLOOR,
    Terms,
    checked_weights,
    clipped_loss,
    column,
    complexity_term,
    flat,
    hits,
    one_hot,
    per_row_shift,
    positive_rows,
    ratio,
    terms_of,
    total_weight,
)
from kme_dist.errors import ConfigError, DataError, NumericalError

__all__ = [
    "COMPLEXITY_WEIGHT",
    "LOSS_FLOOR",
    "Objective",
    "Workspace",
    "clipped_loss",
    "feature_objective",
    "generalisation_bound",
    "loo_objective",
    "one_hot",
    "rcb_objective",
    "validation_objective",
]

CONFIDENCE = 0.95
_JITTERS = (0.0, 1e-10, 1e-8, 1e-6, 1e-4)  # relative to the mean of the kernel's diagonal


@dataclass(frozen=True)
class Objective:
    """The value of a learning objective at a batch, all on the host.

    `value` = `risk` + complexity weight x `complexity`; `bound` is the right-hand side of the generalisation bound
    (mean risk + 4e r + sqrt(8 log(2/β)/n), at 95 %), a diagnostic that is not optimised. `gradient` is by the LOG of
    each parameter, "regularization" included. `jitter` is the amount added to the diagonal (usually 0).
    """

    value: float
    risk: float
    complexity: float
    bound: float
    gradient: dict[str, np.ndarray] = field(repr=False)
    accuracy: float
    dtype: str
    jitter: float = 0.0
    feature_gradient: Array = field(default=None, repr=False)


class Workspace:
    """One n x n buffer, reused by all calls with the same batch size."""

    def __init__(self) -> None:
        self._matrix: Array = None

    def square(self, n: int, reference: Array) -> Array:
        """An n x n matrix like `reference`, uninitialised."""
        held = self._matrix
        fits = (
            held is not None
            and held.shape[0] == n
            and held.dtype == reference.dtype
            and type(held) is type(reference)
            and held.device == reference.device
        )
        if not fits:
            self._matrix = None  # free the old buffer before allocating a new one
            self._matrix = empty_square(n, reference)
        return self._matrix


# --- the pieces that all objectives share ----------------------------------------------------------


def _alpha_term(kernel: Kernel, X: Any, alpha: float | None, reference: Array) -> tuple[Array, int | None]:
    """α as a 0-d array, and the row where the supremum is attained (None for a fixed α)."""
    if alpha is not None:
        return like(alpha, reference), None
    supremum, row = kernel.diag_supremum(X)
    return namespace_of(supremum).sqrt(supremum), row


def _alpha_pullback(kernel: Kernel, prepared: Any, row: int | None, alpha: Array, alpha_bar: Array) -> Gradients:
    """The direct part of the gradient: q depends on α, and α = sqrt(k(x*, x*)) on the parameters."""
    if row is None:
        return {}
    there = take(prepared, slice(row, row + 1))
    return kernel.pullback(there, there, None, ratio(alpha_bar, 2 * alpha)[None, None] + 0)


@dataclass(frozen=True)
class _Solved:
    """A batch after its one factorisation: the strict upper triangle of `K` still holds the Gram matrix."""

    prepared: Any
    K: Array
    diag: Array
    factor: Factor
    V: Array


def _rank_pullback(kernel: Kernel, solved: _Solved, H: Array) -> Gradients:
    """The kernel's gradients for K_bar = H Vᵀ, K symmetric."""
    xp, V = namespace_of(H), solved.V
    return pair_pullback(kernel, solved, xp.concat([H, V], axis=1), xp.concat([V, H], axis=1))


def pair_pullback(kernel: Kernel, solved: _Solved, left: Array, right: Array) -> Gradients:
    """The kernel's gradients for K_bar + K_barᵀ = left rightᵀ, a symmetric matrix that is never held as a whole.

    By symmetry each pair is visited once: tiles right of the diagonal take all of it, square tiles on the diagonal
    half.
    """
    xp = namespace_of(left)
    total: Gradients = {}
    n, prepared, K = left.shape[0], solved.prepared, solved.K
    for block in row_blocks(n, tile_rows(left)):
        rows, L = take(prepared, block), left[block, :]
        square = xp.triu(K[block, block], k=1)
        square = square + square.T
        set_diagonal(square, solved.diag[block])
        add_gradients(total, kernel.pullback(rows, rows, square, 0.5 * (L @ right[block, :].T)))
        rest = slice(block.stop, n)
        if block.stop < n:
            # (right leftᵀ)ᵀ: the transpose has the memory order of the tile of K on the host
            K_bar = (right[rest, :] @ L.T).T
            add_gradients(total, kernel.pullback(rows, take(prepared, rest), K[block, rest], K_bar))
    return total


def solve_batch(kernel: Kernel, X: Any, diag: Array, Y: Array, shift: Any, workspace: Workspace) -> _Solved:
    """Factorise K + shift I (or a shift for each row) in place and solve for V = A⁻¹ Y."""
    prepared = kernel.prepare(X)
    K = kernel.gram(X, out=workspace.square(row_count(X), diag), prepared=prepared)
    set_diagonal(K, diag + flat(shift))
    factor = cholesky(K)
    return _Solved(prepared, K, diag, factor, factor.solve(Y))


def gather(
    gradients: Gradients, by_log_lam: Array, scalars: Mapping[str, Array], kernel: Kernel
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Bring everything small to the host, in one transfer."""
    xp = namespace_of(by_log_lam)
    parameters, gradients = kernel.parameters, kernel.collect(gradients)
    missing = set(parameters) - set(gradients)
    if missing:
        raise ConfigError(f"pullback of {kernel!r} returned no gradient for {sorted(missing)}")
    pieces = [xp.reshape(gradients[name], (-1,)) for name in parameters]
    pieces += [xp.reshape(by_log_lam, (-1,)), *(xp.reshape(value, (-1,)) for value in scalars.values())]
    flat = to_host(xp.concat([astype(piece, "float64") for piece in pieces]))
    if not np.isfinite(flat).all():
        raise NumericalError("the objective or its gradient is not finite")
    gradient, start = {}, 0
    for name, value in [*parameters.items(), ("regularization", np.zeros(()))]:
        gradient[name] = flat[start : start + value.size].reshape(value.shape).copy()
        start += value.size
    return gradient, {name: float(flat[start + i]) for i, name in enumerate(scalars)}


def _assemble(
    n: float,
    terms: Terms,
    kernel: Kernel,
    gradients: Gradients,
    by_log_lam: Array,
    scalars: dict[str, Array],
    dtype: str,
) -> Objective:
    gradient, found = gather(gradients, by_log_lam, scalars, kernel)
    risk = found["loss"] * terms.per_row(n)
    mean_risk = found["loss"] / n
    r = found["complexity"]
    return Objective(
        value=risk + terms.tau * r,
        risk=risk,
        complexity=r,
        bound=generalisation_bound(mean_risk, r, n),
        gradient=gradient,
        accuracy=found["hits"] / n,
        dtype=dtype,
    )


def generalisation_bound(mean_risk: float, complexity: float, n: float, confidence: float = CONFIDENCE) -> float:
    """mean risk + 4e r + sqrt(8 log(2/β)/n), which holds with probability 1 - β.   [HNR, theorem 4]"""
    return mean_risk + 4 * math.e * complexity + math.sqrt(8 * math.log(2 / (1 - confidence)) / max(n, 1))


# --- precision: promote, then add jitter, then raise -----------------------------------------------


def with_promotion(
    compute: Callable[[Any, float], Objective],
    X: Any,
    diag_of: Callable[[Any], Array],
    regularization: float,
    need_of: Callable[[], Need],
    weights: np.ndarray | None = None,
) -> Objective:
    """Run `compute(X, jitter)` in the precision that the solve needs, then in double, then with growing jitter."""
    n = row_count(X)
    if n == 0:
        raise DataError("the batch has no rows")
    # Overflow appears as a failed factorisation or a gradient that is not finite: both are handled here.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        need = need_of()
        try:
            result = compute(need.promoted(X), need.missing)
            return Objective(**{**vars(result), "jitter": need.missing}) if need.missing else result
        except NumericalError:
            _refuse_missing(X)
        start = precision(diag_of(X))
        wide = astype(X, "float64") if hasattr(X, "dtype") and start == "float32" else X
        diag = diag_of(wide)
        # Shifts are divided by the weights of the rows, so that jitter is in their unit.
        unit = 1.0 if weights is None else float(np.mean(weights))
        scale = float(namespace_of(diag).mean(diag)) * unit
        if not math.isfinite(scale):
            raise DataError(f"the kernel of the batch ({n} rows) is not finite; scale the features down")
        for jitter in _JITTERS:
            if jitter * scale <= need.missing and (need.dtype == "float64" or wide is X):
                continue  # tried already
            try:
                result = compute(wide, jitter * scale)
                return Objective(**{**vars(result), "jitter": jitter * scale})
            except NumericalError:
                continue
    raise NumericalError(
        f"Gram matrix of {n} rows is not positive definite: the shift n x regularization is "
        f"{total_weight(weights, n) * regularization:.1e} against a kernel diagonal of {scale:.1e}, tried {start} and "
        f"float64 and jitter up to {_JITTERS[-1]:g} of the diagonal. Raise `regularization` above "
        f"{regularization:.1e}, check that the kernel is positive semi-definite and that all rows are finite.",
        rows=n,
        regularization=regularization,
        dtype="float64",
    )


def _refuse_missing(X: Any) -> None:
    """Raise a DataError that names the first entry that is NaN or infinite, if any."""
    host = to_host(X) if hasattr(X, "dtype") else np.empty(0)
    if host.dtype.kind != "f" or np.isfinite(host).all():
        return
    place = tuple(int(i) for i in np.argwhere(~np.isfinite(host))[0])
    where = "row {}, column {}".format(*place) if len(place) == 2 else f"entry {place}"
    raise DataError(f"{where} of the batch (counted from 0) is {host[place]}; fill in or drop missing values")


# --- the objectives --------------------------------------------------------------------------------


def rcb_objective(
    kernel: Kernel,
    X: Any,
    y: Any,
    *,
    regularization: float,
    n_classes: int,
    risk: str = "sum",
    complexity_weight: float = COMPLEXITY_WEIGHT,
    loss_floor: float = LOSS_FLOOR,
    alpha: float | None = None,
    workspace: Workspace | None = None,
    weights: Any = None,
) -> Objective:
    """Training risk plus complexity, q = Σ_i L(y_i, f(x_i)) + τ r.   [HNR, algorithm 1]

    Parameters
    ----------
    kernel : Kernel
    X : (n, d) array, NumPy or CuPy (or any sequence that the kernel accepts)
    y : (n,) integers 0..n_classes-1; classes may be missing
    regularization : λ; enters as n λ
    risk : "sum" (as in the published experiments) or "mean" (as printed)
    complexity_weight : τ; 4e by default, 0 for empirical risk minimisation
    alpha : sup sqrt k(x, x); by default that of the kernel, over the batch where it is unbounded
    workspace : memory to reuse between calls
    weights : one number >= 0 per row; W = Σ w takes the place of n, a row of weight 2 that of two equal rows
    """
    terms, lam = terms_of(risk, complexity_weight, loss_floor, regularization)
    space = workspace or Workspace()
    X, y, w = with_positive_weights(X, y, weights)
    n = total_weight(w, row_count(X))

    def compute(X: Any, jitter: float) -> Objective:
        diag = kernel.diag(X)
        shift = per_row_shift(n * lam + jitter, w, diag)
        Y = one_hot(y, n_classes, diag)
        _same_length(X, Y)
        solved = solve_batch(kernel, X, diag, Y, shift, space)
        factor, V = solved.factor, solved.V
        xp = namespace_of(V)
        P = Y - shift * V  # = K V, without the product
        loss, S = clipped_loss(Y, P, terms.floor, w)
        S *= terms.per_row(n)
        t = xp.sum(V * P)
        sup, row = _alpha_term(kernel, X, alpha, V)
        r, c, sup_bar = complexity_term(terms, sup, t)
        U = S + factor.solve(2 * c * P - shift * S)  # one solve with m columns serves both terms
        H = S + c * V - U
        gradients = _rank_pullback(kernel, solved, H)
        if terms.tau:
            add_gradients(gradients, _alpha_pullback(kernel, solved.prepared, row, sup, sup_bar))
        by_log_lam = -n * lam * xp.sum(U * V * per_row_shift(1.0, w, V))
        scalars = {"loss": loss, "complexity": r, "hits": hits(Y, P, w)}
        return _assemble(n, terms, kernel, gradients, by_log_lam, scalars, precision(diag))

    return with_promotion(compute, X, kernel.diag, lam, lambda: need_of_solve(kernel, X, n * lam, weights=w), w)


def validation_objective(
    kernel: Kernel,
    X: Any,
    y: Any,
    *,
    train_rows: int,
    regularization: float,
    n_classes: int,
    risk: str = "sum",
    complexity_weight: float = 1.0,
    loss_floor: float = LOSS_FLOOR,
    alpha: float | None = None,
    workspace: Workspace | None = None,
    weights: Any = None,
) -> Objective:
    """Risk on held-out rows plus complexity: V solved on the first `train_rows`, risk of the others.   [HNR, (13)]"""
    terms, lam = terms_of(risk, complexity_weight, loss_floor, regularization)
    space = workspace or Workspace()
    if weights is not None:
        train_rows = int(np.count_nonzero(np.asarray(weights)[:train_rows]))
    X, y, w = with_positive_weights(X, y, weights)
    w_T, w_D = (None, None) if w is None else (w[:train_rows], w[train_rows:])
    n_T, n_D = total_weight(w_T, train_rows), total_weight(w_D, row_count(X) - train_rows)
    if not 0 < train_rows < row_count(X):
        raise ConfigError(
            f"train_rows={train_rows}: must be between 1 and {row_count(X) - 1} (batch of {row_count(X)})"
        )

    def compute(X: Any, jitter: float) -> Objective:
        train, held = take(X, slice(0, train_rows)), take(X, slice(train_rows, row_count(X)))
        Y = one_hot(y, n_classes, kernel.diag(X))
        _same_length(X, Y)
        Y_T, Y_D = Y[:train_rows, :], Y[train_rows:, :]
        diag = kernel.diag(train)
        shift = per_row_shift(n_T * lam + jitter, w_T, diag)
        solved = solve_batch(kernel, train, diag, Y_T, shift, space)
        factor, V, prepared = solved.factor, solved.V, solved.prepared
        xp = namespace_of(V)
        prepared_held = kernel.prepare_beside(held, prepared)
        cross = kernel.evaluate(prepared_held, prepared)  # K_DT
        P_D, P_T = cross @ V, Y_T - shift * V
        loss, S = clipped_loss(Y_D, P_D, terms.floor, w_D)
        S *= terms.per_row(n_D)
        t = xp.sum(V * P_T)
        sup, row = _alpha_term(kernel, train, alpha, V)
        r, c, sup_bar = complexity_term(terms, sup, t)
        U = factor.solve(cross.T @ S + 2 * c * P_T)
        gradients = _rank_pullback(kernel, solved, c * V - U)
        add_gradients(gradients, kernel.pullback(prepared_held, prepared, cross, S @ V.T))
        if terms.tau:
            add_gradients(gradients, _alpha_pullback(kernel, prepared, row, sup, sup_bar))
        by_log_lam = -n_T * lam * xp.sum(U * V * per_row_shift(1.0, w_T, V))
        scalars = {"loss": loss, "complexity": r, "hits": hits(Y_D, P_D, w_D)}
        return _assemble(n_D, terms, kernel, gradients, by_log_lam, scalars, precision(diag))

    def need() -> Need:
        return need_of_solve(kernel, take(X, slice(0, train_rows)), n_T * lam, weights=w_T)

    return with_promotion(compute, X, kernel.diag, lam, need, w_T)


def loo_objective(
    kernel: Kernel,
    X: Any,
    y: Any,
    *,
    regularization: float,
    n_classes: int,
    risk: str = "sum",
    complexity_weight: float = 1.0,
    loss_floor: float = LOSS_FLOOR,
    alpha: float | None = None,
    workspace: Workspace | None = None,
    weights: Any = None,
) -> Objective:
    """Leave-one-out risk plus complexity, without n refits: P_i = Y_i - V_i / [A⁻¹]_ii.

    The derivative of the diagonal of A⁻¹ requires A⁻¹ itself: about nine times the work of `rcb_objective`, and two
    more n x n matrices.
    """
    terms, lam = terms_of(risk, complexity_weight, loss_floor, regularization)
    space = workspace or Workspace()
    X, y, w = with_positive_weights(X, y, weights)
    n = total_weight(w, row_count(X))

    def compute(X: Any, jitter: float) -> Objective:
        diag = kernel.diag(X)
        shift = per_row_shift(n * lam + jitter, w, diag)
        Y = one_hot(y, n_classes, diag)
        _same_length(X, Y)
        solved = solve_batch(kernel, X, diag, Y, shift, space)
        factor, V, prepared = solved.factor, solved.V, solved.prepared
        xp = namespace_of(V)
        inverse = factor.solve(like(np.eye(row_count(X)), V))
        D = diagonal(inverse)[:, None]
        P = Y - shift * V
        loo = Y - V / D
        loss, S = clipped_loss(Y, loo, terms.floor, w)
        S *= terms.per_row(n)
        t = xp.sum(V * P)
        sup, row = _alpha_term(kernel, X, alpha, V)
        r, c, sup_bar = complexity_term(terms, sup, t)
        U = factor.solve(2 * c * P - S / D)
        D_bar = xp.sum(S * V, axis=1, keepdims=True) / (D * D)
        # A_bar = -A⁻¹ diag(D_bar) A⁻¹ - U Vᵀ; K_bar adds the direct part c V Vᵀ
        A_bar = -(inverse @ (D_bar * inverse)) - U @ V.T
        by_log_lam = n * lam * xp.sum(diagonal(A_bar) * flat(per_row_shift(1.0, w, V)))
        gradients = kernel.pullback(prepared, prepared, None, A_bar + c * (V @ V.T))
        if terms.tau:
            add_gradients(gradients, _alpha_pullback(kernel, prepared, row, sup, sup_bar))
        scalars = {"loss": loss, "complexity": r, "hits": hits(Y, loo, w)}
        return _assemble(n, terms, kernel, gradients, by_log_lam, scalars, precision(diag))

    return with_promotion(compute, X, kernel.diag, lam, lambda: need_of_solve(kernel, X, n * lam, weights=w), w)


class ExplicitFeatures(Kernel):
    """Placeholder for a kernel with explicit features, whose parameters belong to the caller."""


def feature_objective(
    Z: Array,
    y: Any,
    *,
    regularization: float,
    n_classes: int,
    risk: str = "sum",
    complexity_weight: float = COMPLEXITY_WEIGHT,
    loss_floor: float = LOSS_FLOOR,
    alpha: float | None = 1.0,
    weights: Any = None,
) -> Objective:
    """Training risk plus complexity for explicit features, in p x p instead of n x n.   [HNR, algorithm 2]

        G = ZᵀZ + nλI,  W = G⁻¹ ZᵀY,  P = Z W,  r = α |W|_F        (with weights: Zᵀ diag(w) Z, Zᵀ diag(w) Y)

    `feature_gradient` is dq/dZ (n x p), in the precision of Z, for the vjp of the feature map; `gradient` holds the
    derivative by log λ. `alpha=1` as in the published runs; `alpha=None` takes the supremum max_i |φ(x_i)| over the
    batch.
    """
    terms, lam = terms_of(risk, complexity_weight, loss_floor, regularization)
    given = precision(check_vectors(Z, ExplicitFeatures(), None))
    w = checked_weights(weights, Z.shape[0])
    n = total_weight(w, Z.shape[0])

    def compute(Z: Any, jitter: float) -> Objective:
        xp, rows = namespace_of(Z), column(w, Z)
        Y = one_hot(y, n_classes, Z)
        _same_length(Z, Y)
        Zw = Z if w is None else Z * rows
        G = _as_square(Zw.T @ Z)
        set_diagonal(G, diagonal(G) + (n * lam + jitter))
        factor = cholesky(G)
        W = factor.solve(Zw.T @ Y)
        P = Z @ W
        loss, S = clipped_loss(Y, P, terms.floor, w)
        S *= terms.per_row(n)
        squares = xp.sum(Z * Z, axis=1) if w is None else xp.sum(Z * Z * (rows > 0), axis=1)
        row = None if alpha is not None else int(xp.argmax(squares))
        sup = like(alpha, Z) if row is None else xp.sqrt(squares[row])
        r, c, sup_bar = complexity_term(terms, sup, xp.sum(W * W))
        U = factor.solve(Z.T @ S + 2 * c * W)
        Z_bar = (S - Zw @ U) @ W.T + (rows * (Y - P)) @ U.T
        if row is not None and terms.tau:
            Z_bar[row, :] = Z_bar[row, :] + ratio(sup_bar, sup) * Z[row, :]
        by_log_lam = -n * lam * xp.sum(U * W)
        scalars = {"loss": loss, "complexity": r, "hits": hits(Y, P, w)}
        result = _assemble(n, terms, ExplicitFeatures(), {}, by_log_lam, scalars, precision(Z))
        return Objective(**{**vars(result), "feature_gradient": astype(Z_bar, given)})

    return with_promotion(
        compute,
        Z,
        lambda Z: namespace_of(Z).sum(Z * Z, axis=1),
        lam,
        lambda: need_of_features(Z, n * lam, w),
        w,
    )


def _as_square(G: Array) -> Array:
    return np.asfortranarray(G) if isinstance(G, np.ndarray) else (G.copy() if is_cupy(G) else G)


def with_positive_weights(X: Any, y: Any, weights: Any) -> tuple[Any, Any, np.ndarray | None]:
    """Rows, labels and weights, without the rows of weight 0."""
    return (X, y, None) if weights is None else positive_rows(X, to_host(y), weights)


def _same_length(X: Any, Y: Array) -> None:
    if row_count(X) != Y.shape[0]:
        raise DataError(f"got {row_count(X)} rows but {Y.shape[0]} labels; give one label per row")
