"""Conditional mean embeddings as regressors, for targets with any kernel.   [CME]

    μ(x) = Σ_i a_i(x) L(y_i, ·),   a(x) = W k(x),   W = (K + nλI)⁻¹
    E[h(Y) | x] = h̄ + Σ_i a_i(x) (h(y_i) - h̄),   h̄ the mean of h over the training targets

The weights a(x) do not sum to one: λ shrinks Σ_i a_i(x) h(y_i) towards 0, and far from the data it is 0. A function
centred by its mean is shrunk towards that mean instead. μ(x) itself, with its values and errors in the target kernel's
Hilbert space, is the plain sum.

K and k are of the inputs, L of the targets. An embedding from any solver or sparsifier is a kernel, centres, targets
and weights between them: `Factored` (W applied by a Cholesky factor), `Explicit` (a matrix with one row for each target
and one column for each centre), or any other `Weights`. Explicit features φ(x) may replace the centres: then W has a
column for each feature.

Held-out pairs are evaluated in the target kernel's Hilbert space, with Gram matrices only:

    |L(y, ·) - μ(x)|² = L(y, y) - 2 l(y)ᵀ a + aᵀ L a

and its leave-one-out (or k-fold) sum has a closed form: with B = W and F the rows of a fold, the residuals of the fold
under the fit without it are B_FF⁻¹ (B Ψ)_F, where Ψ are the target features. So the sum is tr B_FF⁻² (B L B)_FF.

With a Kronecker-delta kernel on labels (`Delta`), a(x) summed over the rows of a class is the decision probability of
the multiclass conditional embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kme_dist.backend import Array, Factor, astype, cholesky, like, namespace_of, set_diagonal
from kme_dist.core.kernels.base import FeatureMap, Gradients, Kernel, add_gradients, row_blocks, row_count, take
from kme_dist.core.means import weighted_features
from kme_dist.errors import DataError

_ROWS = 2_048  # rows per call of a feature map


@dataclass(frozen=True, eq=False, repr=False)
class Delta(Kernel):
    """k(y, y') = scale² where y = y', else 0: the kernel of labels."""

    name = "delta"
    scale: Any = 1.0
    learned = ("scale",)

    def prepare(self, X: Any) -> np.ndarray:
        labels = np.asarray(X)
        return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels

    def evaluate(self, X: np.ndarray, X2: np.ndarray, out: Array = None) -> np.ndarray:
        equal: np.ndarray = X[:, None] == X2[None, :]
        return equal * float(self.scale) ** 2

    def diag(self, X: Any) -> np.ndarray:
        return np.full(row_count(X), float(self.scale) ** 2)

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        K = self.evaluate(X, X2) if K is None else K
        return {"scale": 2 * namespace_of(K_bar).sum(K_bar * K)}


# --- the embedding ---------------------------------------------------------------------------------------


class Weights(Protocol):
    """W as a linear operator, applied from either side."""

    def forward(self, K: Array) -> Array: ...
    def adjoint(self, H: Array) -> Array: ...


@dataclass(frozen=True)
class Factored:
    """W = A⁻¹ by the Cholesky factor of A = K + nλI."""

    factor: Factor

    def forward(self, K: Array) -> Array:
        return self.factor.solve(K)

    adjoint = forward  # A is symmetric


@dataclass(frozen=True)
class Explicit:
    """W as a matrix with a row for each target and a column for each centre."""

    matrix: Array

    def forward(self, K: Array) -> Array:
        return self.matrix @ K

    def adjoint(self, H: Array) -> Array:
        return self.matrix.T @ H


@dataclass(frozen=True)
class ConditionalEmbedding:
    """μ(x) = Σ_i [W k(centres, x)]_i L(targets_i, ·), or with φ(x) instead of k(centres, x)."""

    kernel: Kernel
    target_kernel: Kernel
    centres: Any  # None with features
    targets: Any
    weights: Weights
    regularization: float
    features: FeatureMap | None = None
    base: Array | None = None  # weights of the targets in the mean over all training rows; None: equal ones

    def basis(self, X: Any) -> Array:
        """k(centres, x) or φ(x) for every row of X, as columns."""
        return self.kernel.gram(self.centres, X) if self.features is None else self.features.forward(X).T

    def coefficients(self, X: Any) -> Array:
        """a(x) for every row of X, as columns: (targets, rows)."""
        return self.weights.forward(self.basis(X))

    def mean(self, H: Array) -> Array:
        """h̄, the mean over the training rows of a function with the values H at the targets."""
        self._check_values(H)
        xp = namespace_of(H)
        if self.base is None:
            return xp.mean(H, axis=0)
        base = like(self.base, H)
        return xp.sum((base if H.ndim == 1 else base[:, None]) * H, axis=0)

    def centred_expectation(self, X: Any, H: Array) -> Array:
        """h̄ + Σ_i a_i(x) (h(y_i) - h̄) from the values H of h at the targets."""
        centre = self.mean(H)
        return centre + self.expectation(X, H - centre)

    def expectation(self, X: Any, H: Array) -> Array:
        """E[h(Y) | x] from the values H of h at the targets; no (rows x targets) matrix is held."""
        self._check_values(H)
        V = self.weights.adjoint(H if H.ndim == 2 else H[:, None])
        if self.features is not None:
            parts = [self.features.forward(take(X, rows)) @ V for rows in row_blocks(row_count(X), _ROWS)]
            found = namespace_of(V).concat(parts, axis=0) if parts else V[:0, ...]
        else:
            found = weighted_features(self.kernel, X, self.centres, V)
        return found if H.ndim == 2 else found[:, 0]

    def _check_values(self, H: Array) -> None:
        if H.shape[0] != row_count(self.targets):
            raise DataError(f"h must have one value per target ({row_count(self.targets)}), got shape {H.shape}")

    def evaluate(self, X: Any, Y: Any) -> Array:
        """μ(x)(y) for every row of X (down) and of Y (across)."""
        return self.expectation(X, self.target_kernel.gram(self.targets, Y))

    def errors(self, X: Any, Y: Any) -> Array:
        """|L(y, ·) - μ(x)|² for every pair of rows (x, y)."""
        a, l = self.coefficients(X), self.target_kernel.gram(self.targets, Y)
        La = weighted_features(self.target_kernel, self.targets, self.targets, a)  # no (targets x targets) matrix
        xp = namespace_of(a)
        return self.target_kernel.diag(Y) + xp.sum(a * (La - 2 * l), axis=0)


def solve_embedding(
    kernel: Kernel, target_kernel: Kernel, X: Any, Y: Any, regularization: float
) -> ConditionalEmbedding:
    """The exact embedding, by one Cholesky factorisation of the inputs' Gram matrix."""
    diag = kernel.diag(X)
    K = kernel.gram(X)
    set_diagonal(K, diag + row_count(X) * regularization)
    return ConditionalEmbedding(kernel, target_kernel, X, Y, Factored(cholesky(K)), regularization)


def marginal_weights(L: Array, mean_features: Array, values: Array | None = None, mean: Array | None = None) -> Array:
    """Weights b of target centres D such that Σ_d b_d h(d) approximates the mean of h over all training rows.

    L is the Gram matrix of D and `mean_features` the mean of L(D, y) over the rows. Among the weights that sum to one
    and give the mean of numeric targets exactly (`values` of the centres, `mean` of the rows), these are the nearest to
    the mean embedding of the rows in the target kernel's Hilbert space: L⁻¹ l̄, corrected along L⁻¹C for the
    constraints Cᵀb = c.
    """
    n = len(L)
    factor = cholesky(np.asfortranarray(L + 1e-11 * np.trace(L) / n * np.eye(n)))
    free = factor.solve(mean_features[:, None])[:, 0]
    C = np.ones((n, 1))
    if values is not None and mean is not None:
        apart = values - mean  # as Σ b (d - ȳ) = 0 the constraint is well scaled whatever the mean of the targets
        size = np.abs(apart).max(axis=0)
        C = np.concatenate([C, apart / np.where(size > 0, size, 1.0)], axis=1)
    target = np.zeros(C.shape[1])
    target[0] = 1.0
    LC = factor.solve(C)
    for _ in range(2):  # the second pass corrects the rounding of the first
        free = free + LC @ (np.linalg.pinv(C.T @ LC, rcond=1e-12, hermitian=True) @ (target - C.T @ free))
    return free


def held_out_scores(
    K: Array, L: Array, shifts: Sequence[float], folds: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """Mean |L(y_i, ·) - μ(x_i)|² of every row under the fit without its fold, for every shift s = nλ.

    Exact: equal to refits with the same shift. One eigendecomposition of K serves all shifts; without folds every row
    is left out on its own.
    """
    xp, n = namespace_of(K), K.shape[0]
    values, Q = xp.linalg.eigh(astype(K, "float64"))
    values = xp.where(values > 0, values, values * 0)
    C = Q.T @ astype(L, "float64") @ Q
    scores = []
    for shift in shifts:
        d = 1 / (values + float(shift))
        Qd = Q * d[None, :]
        if folds is None:
            residuals = xp.sum((Qd @ C) * Qd, axis=1)  # diag B L B
            scores.append(float(xp.mean(residuals / xp.sum(Qd * Q, axis=1) ** 2)))
            continue
        total = 0.0
        for fold in folds:
            rows = like(fold, K, dtype=np.int64)
            part = Qd[rows, :]
            inverse = xp.linalg.solve(part @ Q[rows, :].T, part)  # B_FF⁻¹ (Q d)_F
            total += float(xp.sum((inverse @ C) * inverse))
        scores.append(total / n)
    return np.asarray(scores)


# --- learning the kernel of the inputs ------------------------------------------------------------------------


@dataclass(frozen=True)
class HeldOutObjective:
    """Value and gradient (by logarithms) of the held-out loss plus the weighted norm of the operator."""

    value: float
    loss: float
    norm: float
    gradient: dict[str, np.ndarray]


def held_out_objective(
    kernel: Kernel,
    X: Any,
    X_held: Any,
    grams: tuple[Array, Array, Array],
    regularization: float,
    complexity_weight: float,
) -> HeldOutObjective:
    """Σ_held |L(y, ·) - μ(x)|² + τ |U|, U = Ψ(K + nλI)⁻¹Φᵀ the embedding fitted to the rows of X.

    `grams` are L of the fitted targets, L between fitted (down) and held-out (across) targets, and diag L of the
    held-out ones. With A = K + sI, s = nλ, C = A⁻¹K_h the coefficients of the held-out rows, and G = A⁻¹LA⁻¹:

        loss = Σ diag - 2 tr L_hᵀC + tr CᵀLC,     S = d loss/dC = 2(LC - L_h)
        d loss/dK_h = A⁻¹S,     d loss/dA = -A⁻¹S Cᵀ
        |U|² = tr KG = tr A⁻¹L - s tr A⁻²L,     d|U|²/dA = -G + s(GA⁻¹ + A⁻¹G)

    |U| is the Hilbert-Schmidt norm of the operator: the analogue of the complexity term of classifiers, but without a
    generalisation bound, since the loss is not bounded by one.
    """
    L, L_held, diag_held = grams
    xp, n = namespace_of(L), row_count(X)
    s = n * regularization
    A, K_h = kernel.gram(X), kernel.gram(X, X_held)
    set_diagonal(A, kernel.diag(X) + s)
    factor = cholesky(A)
    C = factor.solve(K_h)
    LC = L @ C
    loss = float(xp.sum(diag_held) - 2 * xp.sum(L_held * C) + xp.sum(C * LC))
    S = 2 * (LC - L_held)
    AS = factor.solve(S)
    AL = factor.solve(L)
    G = factor.solve(AL.T)  # A⁻¹ L A⁻¹, symmetric
    AG = factor.solve(G)
    trace = _trace(AL) - s * _trace(G)
    norm = max(float(trace), 0.0) ** 0.5
    A_bar = -(AS @ C.T)
    s_direct = 0.0
    if complexity_weight and norm > 0:
        c = complexity_weight / (2 * norm)
        A_bar = A_bar + c * (s * (AG + AG.T) - G)
        s_direct = -c * float(_trace(G))
    by_shift = float(_trace(A_bar)) + s_direct
    found = add_gradients(dict(kernel.vjp(X, None, A_bar)), kernel.vjp(X, X_held, AS))
    gradient = {name: np.asarray(value, dtype=np.float64) for name, value in found.items()}
    gradient["regularization"] = np.asarray(by_shift * s)
    return HeldOutObjective(loss + complexity_weight * norm, loss, norm, gradient)


def _trace(A: Array) -> Array:
    return namespace_of(A).sum(A * like(np.eye(A.shape[0]), A))


# --- quantiles and samples from weights ---------------------------------------------------------------------


def conditional_quantiles(values: np.ndarray, coefficients: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Quantiles of scalar targets under weights a(x), (rows, levels).

    Negative weights are clipped and the rest normalised; rows without a positive weight get equal ones. The quantile is
    the smallest target at which the cumulative weight reaches the level.
    """
    order = np.argsort(values, kind="stable")
    mass = np.maximum(coefficients[order], 0.0)
    total = mass.sum(axis=0)
    mass = np.where(total > 0, mass / np.where(total > 0, total, 1.0), 1.0 / len(values))
    steps = np.cumsum(mass, axis=0)
    found = [
        np.searchsorted(steps[:, i], np.asarray(levels) * steps[-1, i] * (1 - 1e-12)) for i in range(steps.shape[1])
    ]
    return np.asarray(values[order])[np.minimum(found, len(values) - 1)]


def drawn_targets(coefficients: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Positions of random targets under clip-normalised weights a(x), columns of `coefficients`: (rows, size)."""
    steps = np.cumsum(np.maximum(coefficients, 0.0), axis=0)
    steps = np.where(steps[-1] > 0, steps, np.arange(1.0, len(steps) + 1)[:, None])
    u = rng.random((steps.shape[1], size)) * steps[-1][:, None]
    found = np.empty(u.shape, np.int64)
    for i in range(len(u)):
        found[i] = np.searchsorted(steps[:, i], u[i], side="right")
    return np.minimum(found, len(steps) - 1)


def herd(target_values: np.ndarray, L: np.ndarray, size: int) -> np.ndarray:
    """Indices of `size` candidates whose equally weighted mean approximates μ, by kernel herding.

    `target_values` is μ at the candidates, L their Gram matrix; the next candidate maximises
    μ(y) - (1/(t+1)) Σ_s≤t L(y, y_s).
    """
    chosen, total = np.empty(size, dtype=np.int64), np.zeros(len(L))
    for t in range(size):
        chosen[t] = int(np.argmax(target_values - total / (t + 1)))
        total += L[:, chosen[t]]
    return chosen
