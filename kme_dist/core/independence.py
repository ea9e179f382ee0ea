"""Dependence between two variables, with or without a third: HSIC, and the covariance of residual features.

With K and L the Gram matrices of x and y, H = I - 11ᵀ/n, and K̃, L̃ the same with a zero diagonal,

    HSIC = |E k(x, ·) ⊗ l(y, ·) - μ_x ⊗ μ_y|²              the squared norm of the cross-covariance operator
    biased      tr KHLH / n²
    unbiased    [tr K̃L̃ + 1ᵀK̃1 1ᵀL̃1 / ((n-1)(n-2)) - 2/(n-2) 1ᵀK̃L̃1] / (n(n-3))

Both follow from Σ K_ij L_ij, the row sums of K and L and their diagonals, so tiles suffice. Under independence
n HSIC (biased) is near a gamma law with the mean and variance of `gamma_law` (Gretton et al. 2008). A permutation of
the rows of y within blocks of rows permutes the tiles of L, so one pass over the tiles gives every permuted statistic;
permutations within blocks form a group, so the level of the test is exact.

Given z, the residual features r_x = k(x, ·) - E[k(x, ·) | z] and r_y, from conditional embeddings, are uncorrelated at
every z if x and y are independent given z. The statistic is the squared norm of their covariance, weighted by a kernel
of z so that covariances of opposite sign at different z do not cancel:

    T = |E r_x ⊗ r_y ⊗ w(z, ·)|² = E <r_x, r_x'> <r_y, r_y'> w(z, z')

without the diagonal terms. Under the null the summands M_ij ε_i ε_j with random signs ε have the same law (a wild
bootstrap of a degenerate U-statistic), and all draws are quadratic forms of the same tiles. This is the generalised
covariance measure (Shah and Peters 2020) in Hilbert spaces, and with w and products of kernels the statistic of KCIT
(Zhang et al. 2011).

Residuals of different rows are not independent: a regression of p degrees of freedom makes them share p of n
directions, the same ones for x and y if both regressions are alike, and the product of two such covariances is
positive on average. With r = A l(y, ·), A = I - P the residual operator of the regression, and noise of size d_i at row
i, E <r_i, r_j> = (A diag(d) Aᵀ)_ij =: C_ij. The mean of T under the null is E C_ij C'_ij w_ij; it is subtracted, with
d_i estimated by |r_i|² / Σ_k A_ik². (Without it 7 to 10 % of tests at the level 5 % reject with 50 to 100 rows.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import gamma

from kme_dist.backend import Array, astype, cholesky
from kme_dist.core.kernels.base import Kernel, row_blocks, row_count, take
from kme_dist.core.means import TILE_ROWS, orthonormal
from kme_dist.core.sums import Sums

_LEAST_LEFT = 1e-3  # of Σ_k A_ik², below which a row explains itself


def biased(S_KL: Any, S_rows: Any, S_K: float, S_L: float, n: int) -> Any:
    """From Σ_ij K_ij L_ij, Σ_i (K1)_i (L1)_i, Σ K and Σ L."""
    return (S_KL - 2 * S_rows / n + S_K * S_L / n**2) / n**2


def unbiased(S_KL: Any, S_rows: Any, S_K: float, S_L: float, n: int) -> Any:
    """The same sums, of Gram matrices with a zero diagonal."""
    return (S_KL + S_K * S_L / ((n - 1) * (n - 2)) - 2 * S_rows / (n - 2)) / (n * (n - 3))


@dataclass(frozen=True)
class RowSums:
    """Row sums and diagonal of a Gram matrix."""

    sums: np.ndarray
    diagonal: np.ndarray

    @property
    def total(self) -> float:
        return float(self.sums.sum())

    @property
    def hollow(self) -> RowSums:
        """Of the matrix with a zero diagonal."""
        return RowSums(self.sums - self.diagonal, self.diagonal * 0)


def statistics(K: RowSums, L: RowSums, forms: np.ndarray, orders: np.ndarray, method: str) -> np.ndarray:
    """HSIC for every order of the rows of y: `forms` are Σ K_ij L_o(i)o(j), `orders` the permutations as rows."""
    n, formula = len(K.sums), biased
    if method == "unbiased":
        forms = forms - np.stack([K.diagonal @ L.diagonal[order] for order in orders])
        K, L, formula = K.hollow, L.hollow, unbiased
    along = np.stack([K.sums @ L.sums[order] for order in orders])
    return np.asarray(formula(forms, along, K.total, L.total, n))


@dataclass(frozen=True)
class GammaLaw:
    """A gamma distribution given by its mean and variance."""

    mean: float
    variance: float

    def p_value(self, statistic: float) -> float:
        if not (self.mean > 0 and self.variance > 0):  # a constant variable is independent of all others
            return 1.0
        return float(gamma.sf(statistic, self.mean**2 / self.variance, scale=self.variance / self.mean))


def gamma_law(K: RowSums, L: RowSums, squares: float) -> GammaLaw:
    """The law of the biased estimate under independence; `squares` is Σ_{i≠j} ((HKH)_ij (HLH)_ij)²."""
    n = len(K.sums)
    spread = [part.diagonal.mean() - part.hollow.total / (n * (n - 1)) for part in (K, L)]
    factor = 2 * (n - 4) * (n - 5) / (n * (n - 1) * (n - 2) * (n - 3))
    return GammaLaw(float(spread[0] * spread[1]) / n, factor * squares / (n * (n - 1)))


# --- given a third variable ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class WithOnes:
    """t(y) = (l(D, y), 1): the right-hand sides of a regression, and the sums that centre them."""

    kernel: Kernel
    points: Any

    @property
    def size(self) -> int:
        return row_count(self.points) + 1

    def rows(self, y: Any, reference: Array) -> Array:
        return np.concatenate([astype(self.kernel.gram(y, self.points), "float64"), np.ones((row_count(y), 1))], axis=1)


@dataclass(frozen=True)
class ResidualFeatures:
    """Coordinates of l(y, ·) - E[l(y, ·) | z] along an orthonormal basis of the span of target centres D.

    Tᵀ (l(D, y) - l̄) - Fᵀ k(C, z), where l̄ is the mean over all rows; without it the ridge regression would shrink the
    mean, too, and all residuals would share what is left of it. (Dividing by 1 - leverage, as for leave-one-out, makes
    the test reject too often.)
    """

    kernel: Kernel
    centres: Any
    target_kernel: Kernel
    targets: Any
    mean: np.ndarray  # l̄
    T: np.ndarray  # maps l(D, y) to coordinates
    F: np.ndarray  # the regression of the coordinates on k(C, z)
    whitening: np.ndarray  # maps k(C, z) to q with P_ij = q_iᵀ (q_j - q̄) + 1/n
    middle: np.ndarray  # q̄
    own: np.ndarray  # Σ_k ψ_k ψ_kᵀ, see `Noise`
    count: int  # n

    @classmethod
    def of(cls, kernel: Kernel, C: Any, target_kernel: Kernel, D: Any, sums: Sums, shift: float) -> ResidualFeatures:
        """From G = Σ k(C, z) k(C, z)ᵀ and B = Σ k(C, z) (l(D, y), 1)ᵀ; `shift` is nλ."""
        T = orthonormal(target_kernel, D)
        mean = sums.totals[:-1] / sums.rows
        A = sums.symmetric() + shift * np.asarray(kernel.gram(C), dtype=np.float64)
        # Centres that nearly coincide make A singular; the padding is below the precision of the sums.
        factor = cholesky(np.asfortranarray(A + 1e-11 * np.trace(A) / len(A) * np.eye(len(A))))
        F = factor.solve((sums.B[:, :-1] - sums.B[:, -1:] * mean) @ T)
        whitening = np.asarray(factor.half_solve(np.eye(len(A))))
        middle = whitening @ sums.B[:, -1] / sums.rows
        own = np.zeros((len(A) + 1, len(A) + 1))
        own[:-1, :-1] = whitening @ sums.symmetric() @ whitening.T - sums.rows * np.outer(middle, middle)
        own[-1, -1] = 1 / sums.rows
        return cls(kernel, C, target_kernel, D, mean, T, np.asarray(F), whitening, middle, own, sums.rows)

    def rows(self, Y: Any, Z: Any) -> np.ndarray:
        along = (np.asarray(self.target_kernel.gram(Y, self.targets), dtype=np.float64) - self.mean) @ self.T
        return np.asarray(along - np.asarray(self.kernel.gram(Z, self.centres), dtype=np.float64) @ self.F)

    def noise(self, R: np.ndarray, Z: Any) -> Noise:
        """Of rows with residuals R."""
        q = np.asarray(self.kernel.gram(Z, self.centres), dtype=np.float64) @ self.whitening.T
        phi = np.concatenate([q, np.ones((len(q), 1))], axis=1)
        psi = np.concatenate([q - self.middle, np.full((len(q), 1), 1 / self.count)], axis=1)
        left = 1 - 2 * np.sum(phi * psi, axis=1) + np.sum((phi @ self.own) * phi, axis=1)  # Σ_k A_ik²
        return Noise(phi, psi, np.sum(R * R, axis=1) / np.maximum(left, _LEAST_LEFT))


@dataclass(frozen=True)
class Noise:
    """Some rows of P = ΦΨᵀ, and the size of the noise there: C_ij = φ_iᵀ Ω φ_j - d_j φ_iᵀψ_j - d_i ψ_iᵀφ_j for i ≠ j,
    with Ω = Σ_k d_k ψ_k ψ_kᵀ over all rows."""

    phi: np.ndarray
    psi: np.ndarray
    d: np.ndarray

    def moments(self) -> np.ndarray:
        """Their part of Ω."""
        return np.asarray(self.psi.T @ (self.d[:, None] * self.psi))

    def sides(self, Omega: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """U and V with C = U Vᵀ off the diagonal."""
        scaled = self.d[:, None] * self.psi
        return np.concatenate([self.phi, -scaled], axis=1), np.concatenate(
            [self.phi @ Omega - scaled, self.phi], axis=1
        )


@dataclass(frozen=True)
class Tested:
    """Residual features of x and y of some rows, what they share by themselves (U and V of either), and signs."""

    residuals: tuple[np.ndarray, np.ndarray]
    shared: tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
    signs: np.ndarray


def signed_sums(weight: Kernel, left: Tested, right: Tested | None, Z: Any, Z2: Any) -> np.ndarray:
    """Σ_{i≠j} ε_ib M_ij ε_jb for every column b of signs of two sets of rows, then Σ_{i≠j} C_ij C'_ij w_ij.

    Without `right` both sets are the same, and the diagonal is left out.
    """
    same, other = right is None, left if right is None else right
    E, E2 = left.signs, other.signs
    total = np.zeros(E.shape[1] + 1)
    columns = weight.prepare(Z if same else Z2)
    rows = columns if same else weight.prepare_beside(Z, columns)
    for J in row_blocks(len(E2), TILE_ROWS):
        for I in row_blocks(len(E), TILE_ROWS):
            w = np.array(weight.evaluate(take(rows, I), take(columns, J)), dtype=np.float64)
            if same and I.start == J.start:
                np.fill_diagonal(w, 0.0)
            expected = w.copy()
            for own, beside, (U, _), (_, V) in zip(
                left.residuals, other.residuals, left.shared, other.shared, strict=True
            ):
                w *= own[I] @ beside[J].T
                expected *= U[I] @ V[J].T
            total[:-1] += np.sum(E[I] * (w @ E2[J]), axis=0)
            total[-1] += expected.sum()
    return total
