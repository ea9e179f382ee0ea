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
from kme_dist.errors import ConfigError, DataError, NumericalError

COMPLEXITY_WEIGHT = 4 * math.e
LOSS_FLOOR = 1e-15
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


def one_hot(y: Any, n_classes: int, reference: Array) -> Array:
    """Labels 0..m-1 as an n x m matrix, on the device and in the precision of `reference`."""
    if not isinstance(n_classes, int | np.integer) or n_classes < 1:
        raise ConfigError(f"n_classes={n_classes!r}: must be an integer >= 1")
    labels = to_host(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"labels must be integers 0..{n_classes - 1}, got {labels.dtype} of shape {labels.shape}")
    if labels.size and (labels.min() < 0 or labels.max() >= n_classes):
        raise DataError(f"labels must be in 0..{n_classes - 1}, got {labels.min()}..{labels.max()}")
    return like(labels[:, None] == np.arange(n_classes)[None, :], reference)


def clipped_loss(Y: Array, P: Array, floor: float) -> tuple[Array, Array]:
    """Σ_i L_i with L_i = -log clip(P_i,y_i, floor, 1), and its derivative S by P.   [HNR, equation 7]"""
    xp = namespace_of(P)
    p = xp.sum(Y * P, axis=1, keepdims=True)
    inside = (p > floor) & (p < 1)
    safe = xp.where(inside, p, p * 0 + 1)
    # below the floor the loss is -log(floor), above one it is 0; `safe` = 1 covers the latter
    loss = xp.where(p > floor, -xp.log(safe), p * 0 - math.log(floor))
    S = xp.where(inside, -1 / safe, p * 0) * Y
    return xp.sum(loss), S


def _hits(Y: Array, P: Array) -> Array:
    """The number of rows whose true class has the largest probability."""
    xp = namespace_of(P)
    best = xp.max(P, axis=1, keepdims=True)
    return xp.sum(astype(xp.sum(Y * P, axis=1, keepdims=True) >= best, precision(P)))


@dataclass(frozen=True)
class _Weights:
    """How the parts of the objective are combined."""

    risk: str
    tau: float
    floor: float

    def __post_init__(self) -> None:
        if self.risk not in ("sum", "mean"):
            raise ConfigError(f"risk={self.risk!r} is unknown; choose 'sum' or 'mean'")
        if not self.tau >= 0:
            raise ConfigError(f"complexity_weight={self.tau!r}: must be a number >= 0")
        if not 0 < self.floor < 1:
            raise ConfigError(f"loss_floor={self.floor!r}: must be a number between 0 and 1")

    def per_row(self, n: int) -> float:
        return 1.0 if self.risk == "sum" else 1.0 / n


def _number(name: str, value: Any) -> float:
    """A plain float: a NumPy scalar of double precision would turn single-precision arrays into double ones."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name}={value!r}: must be a number") from None


def _settings(risk: str, complexity_weight: Any, loss_floor: Any, regularization: Any) -> tuple[_Weights, float]:
    """The weights of the objective and λ, checked."""
    weights = _Weights(risk, _number("complexity_weight", complexity_weight), _number("loss_floor", loss_floor))
    lam = _number("regularization", regularization)
    if not 0 < lam < math.inf:
        raise ConfigError(f"regularization={regularization!r}: must be a positive number")
    return weights, lam


def _over(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, 0 where the denominator is not positive."""
    xp = namespace_of(denominator)
    positive = denominator > 0
    return xp.where(positive, numerator / xp.where(positive, denominator, denominator * 0 + 1), denominator * 0)


def _complexity_term(weights: _Weights, alpha: Array, t: Array) -> tuple[Array, Array, Array]:
    """r = α sqrt(t), c = τ α / (2 sqrt t), and the direct derivative dq/dα = τ sqrt(t); all 0 where t vanishes."""
    xp = namespace_of(t)
    root = xp.sqrt(xp.where(t > 0, t, t * 0))
    return alpha * root, _over(weights.tau * alpha, 2 * root), weights.tau * root


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
    return kernel.pullback(there, there, None, _over(alpha_bar, 2 * alpha)[None, None] + 0)


@dataclass(frozen=True)
class _Solved:
    """A batch after its one factorisation: the strict upper triangle of `K` still holds the Gram matrix."""

    prepared: Any
    K: Array
    diag: Array
    factor: Factor
    V: Array


def _rank_pullback(kernel: Kernel, solved: _Solved, H: Array) -> Gradients:
    """The kernel's gradients for K_bar = H Vᵀ, K symmetric.

    By symmetry each pair is visited once: tiles right of the diagonal take H_J V_Iᵀ + V_J H_Iᵀ, square tiles on the
    diagonal half of that.
    """
    xp = namespace_of(H)
    n, prepared, K, V = H.shape[0], solved.prepared, solved.K, solved.V
    left, right = xp.concat([H, V], axis=1), xp.concat([V, H], axis=1)
    total: Gradients = {}
    for block in row_blocks(n, tile_rows(H)):
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


def _solve_batch(kernel: Kernel, X: Any, diag: Array, Y: Array, shift: float, workspace: Workspace) -> _Solved:
    """Factorise K + shift I in place and solve for V = A⁻¹ Y."""
    prepared = kernel.prepare(X)
    K = kernel.gram(X, out=workspace.square(row_count(X), diag), prepared=prepared)
    set_diagonal(K, diag + shift)
    factor = cholesky(K)
    return _Solved(prepared, K, diag, factor, factor.solve(Y))


def _gather(
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
    n: int,
    weights: _Weights,
    kernel: Kernel,
    gradients: Gradients,
    by_log_lam: Array,
    scalars: dict[str, Array],
    dtype: str,
) -> Objective:
    gradient, found = _gather(gradients, by_log_lam, scalars, kernel)
    risk = found["loss"] * weights.per_row(n)
    mean_risk = found["loss"] / max(n, 1)
    r = found["complexity"]
    return Objective(
        value=risk + weights.tau * r,
        risk=risk,
        complexity=r,
        bound=generalisation_bound(mean_risk, r, n),
        gradient=gradient,
        accuracy=found["hits"] / max(n, 1),
        dtype=dtype,
    )


def generalisation_bound(mean_risk: float, complexity: float, n: int, confidence: float = CONFIDENCE) -> float:
    """mean risk + 4e r + sqrt(8 log(2/β)/n), which holds with probability 1 - β.   [HNR, theorem 4]"""
    return mean_risk + 4 * math.e * complexity + math.sqrt(8 * math.log(2 / (1 - confidence)) / max(n, 1))


# --- precision: promote, then add jitter, then raise -----------------------------------------------


def _with_promotion(
    compute: Callable[[Any, float], Objective],
    X: Any,
    diag_of: Callable[[Any], Array],
    regularization: float,
    need_of: Callable[[], Need],
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
        scale = float(namespace_of(diag).mean(diag))
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
        f"{n * regularization:.1e} against a kernel diagonal of {scale:.1e}, tried {start} and float64 and "
        f"jitter up to {_JITTERS[-1]:g} of the diagonal. Raise `regularization` above {regularization:.1e}, "
        "check that the kernel is positive semi-definite and that all rows are finite.",
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
    """
    weights, lam = _settings(risk, complexity_weight, loss_floor, regularization)
    space = workspace or Workspace()

    def compute(X: Any, jitter: float) -> Objective:
        n = row_count(X)
        shift = n * lam + jitter
        diag = kernel.diag(X)
        Y = one_hot(y, n_classes, diag)
        _same_length(X, Y)
        solved = _solve_batch(kernel, X, diag, Y, shift, space)
        factor, V = solved.factor, solved.V
        xp = namespace_of(V)
        P = Y - shift * V  # = K V, without the product
        loss, S = clipped_loss(Y, P, weights.floor)
        S *= weights.per_row(n)
        t = xp.sum(V * P)
        sup, row = _alpha_term(kernel, X, alpha, V)
        r, c, sup_bar = _complexity_term(weights, sup, t)
        U = S + factor.solve(2 * c * P - shift * S)  # one solve with m columns serves both terms
        H = S + c * V - U
        gradients = _rank_pullback(kernel, solved, H)
        if weights.tau:
            add_gradients(gradients, _alpha_pullback(kernel, solved.prepared, row, sup, sup_bar))
        by_log_lam = -n * lam * xp.sum(U * V)
        scalars = {"loss": loss, "complexity": r, "hits": _hits(Y, P)}
        return _assemble(n, weights, kernel, gradients, by_log_lam, scalars, precision(diag))

    return _with_promotion(compute, X, kernel.diag, lam, lambda: need_of_solve(kernel, X, row_count(X) * lam))


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
) -> Objective:
    """Risk on held-out rows plus complexity: V solved on the first `train_rows`, risk of the others.   [HNR, (13)]"""
    weights, lam = _settings(risk, complexity_weight, loss_floor, regularization)
    space = workspace or Workspace()
    if not 0 < train_rows < row_count(X):
        raise ConfigError(
            f"train_rows={train_rows}: must be between 1 and {row_count(X) - 1} (batch of {row_count(X)})"
        )

    def compute(X: Any, jitter: float) -> Objective:
        train, held = take(X, slice(0, train_rows)), take(X, slice(train_rows, row_count(X)))
        n_T, n_D = train_rows, row_count(held)
        shift = n_T * lam + jitter
        Y = one_hot(y, n_classes, kernel.diag(X))
        _same_length(X, Y)
        Y_T, Y_D = Y[:train_rows, :], Y[train_rows:, :]
        diag = kernel.diag(train)
        solved = _solve_batch(kernel, train, diag, Y_T, shift, space)
        factor, V, prepared = solved.factor, solved.V, solved.prepared
        xp = namespace_of(V)
        prepared_held = kernel.prepare_beside(held, prepared)
        cross = kernel.evaluate(prepared_held, prepared)  # K_DT
        P_D, P_T = cross @ V, Y_T - shift * V
        loss, S = clipped_loss(Y_D, P_D, weights.floor)
        S *= weights.per_row(n_D)
        t = xp.sum(V * P_T)
        sup, row = _alpha_term(kernel, train, alpha, V)
        r, c, sup_bar = _complexity_term(weights, sup, t)
        U = factor.solve(cross.T @ S + 2 * c * P_T)
        gradients = _rank_pullback(kernel, solved, c * V - U)
        add_gradients(gradients, kernel.pullback(prepared_held, prepared, cross, S @ V.T))
        if weights.tau:
            add_gradients(gradients, _alpha_pullback(kernel, prepared, row, sup, sup_bar))
        by_log_lam = -n_T * lam * xp.sum(U * V)
        scalars = {"loss": loss, "complexity": r, "hits": _hits(Y_D, P_D)}
        return _assemble(n_D, weights, kernel, gradients, by_log_lam, scalars, precision(diag))

    def need() -> Need:
        return need_of_solve(kernel, take(X, slice(0, train_rows)), train_rows * lam)

    return _with_promotion(compute, X, kernel.diag, lam, need)


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
) -> Objective:
    """Leave-one-out risk plus complexity, without n refits: P_i = Y_i - V_i / [A⁻¹]_ii.

    The derivative of the diagonal of A⁻¹ requires A⁻¹ itself: about nine times the work of `rcb_objective`, and two
    more n x n matrices.
    """
    weights, lam = _settings(risk, complexity_weight, loss_floor, regularization)
    space = workspace or Workspace()

    def compute(X: Any, jitter: float) -> Objective:
        n = row_count(X)
        shift = n * lam + jitter
        diag = kernel.diag(X)
        Y = one_hot(y, n_classes, diag)
        _same_length(X, Y)
        solved = _solve_batch(kernel, X, diag, Y, shift, space)
        factor, V, prepared = solved.factor, solved.V, solved.prepared
        xp = namespace_of(V)
        inverse = factor.solve(like(np.eye(n), V))
        D = diagonal(inverse)[:, None]
        P = Y - shift * V
        loo = Y - V / D
        loss, S = clipped_loss(Y, loo, weights.floor)
        S *= weights.per_row(n)
        t = xp.sum(V * P)
        sup, row = _alpha_term(kernel, X, alpha, V)
        r, c, sup_bar = _complexity_term(weights, sup, t)
        U = factor.solve(2 * c * P - S / D)
        D_bar = xp.sum(S * V, axis=1, keepdims=True) / (D * D)
        # A_bar = -A⁻¹ diag(D_bar) A⁻¹ - U Vᵀ; K_bar adds the direct part c V Vᵀ
        A_bar = -(inverse @ (D_bar * inverse)) - U @ V.T
        by_log_lam = n * lam * xp.sum(diagonal(A_bar))
        gradients = kernel.pullback(prepared, prepared, None, A_bar + c * (V @ V.T))
        if weights.tau:
            add_gradients(gradients, _alpha_pullback(kernel, prepared, row, sup, sup_bar))
        scalars = {"loss": loss, "complexity": r, "hits": _hits(Y, loo)}
        return _assemble(n, weights, kernel, gradients, by_log_lam, scalars, precision(diag))

    return _with_promotion(compute, X, kernel.diag, lam, lambda: need_of_solve(kernel, X, row_count(X) * lam))


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
) -> Objective:
    """Training risk plus complexity for explicit features, in p x p instead of n x n.   [HNR, algorithm 2]

        G = ZᵀZ + nλI,  W = G⁻¹ ZᵀY,  P = Z W,  r = α |W|_F

    `feature_gradient` is dq/dZ (n x p), in the precision of Z, for the vjp of the feature map; `gradient` holds the
    derivative by log λ. `alpha=1` as in the published runs; `alpha=None` takes the supremum max_i |φ(x_i)| over the
    batch.
    """
    weights, lam = _settings(risk, complexity_weight, loss_floor, regularization)
    given = precision(check_vectors(Z, ExplicitFeatures(), None))

    def compute(Z: Any, jitter: float) -> Objective:
        xp = namespace_of(Z)
        n = Z.shape[0]
        Y = one_hot(y, n_classes, Z)
        _same_length(Z, Y)
        G = _as_square(Z.T @ Z)
        set_diagonal(G, diagonal(G) + (n * lam + jitter))
        factor = cholesky(G)
        W = factor.solve(Z.T @ Y)
        P = Z @ W
        loss, S = clipped_loss(Y, P, weights.floor)
        S *= weights.per_row(n)
        squares = xp.sum(Z * Z, axis=1)
        row = None if alpha is not None else int(xp.argmax(squares))
        sup = like(alpha, Z) if row is None else xp.sqrt(squares[row])
        r, c, sup_bar = _complexity_term(weights, sup, xp.sum(W * W))
        U = factor.solve(Z.T @ S + 2 * c * W)
        Z_bar = (S - Z @ U) @ W.T + (Y - P) @ U.T
        if row is not None and weights.tau:
            Z_bar[row, :] = Z_bar[row, :] + _over(sup_bar, sup) * Z[row, :]
        by_log_lam = -n * lam * xp.sum(U * W)
        scalars = {"loss": loss, "complexity": r, "hits": _hits(Y, P)}
        result = _assemble(n, weights, ExplicitFeatures(), {}, by_log_lam, scalars, precision(Z))
        return Objective(**{**vars(result), "feature_gradient": astype(Z_bar, given)})

    return _with_promotion(
        compute,
        Z,
        lambda Z: namespace_of(Z).sum(Z * Z, axis=1),
        lam,
        lambda: need_of_features(Z, Z.shape[0] * lam),
    )


def _as_square(G: Array) -> Array:
    return np.asfortranarray(G) if isinstance(G, np.ndarray) else (G.copy() if is_cupy(G) else G)


def _same_length(X: Any, Y: Array) -> None:
    if row_count(X) != Y.shape[0]:
        raise DataError(f"got {row_count(X)} rows but {Y.shape[0]} labels; give one label per row")
