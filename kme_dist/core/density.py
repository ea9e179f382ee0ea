"""Kernel means of Gaussians in closed form, and mixtures fitted by matching kernel means.   [KMSE, section 6.2.2]

The mean of k(x, ·) over N(m, Σ) and its inner product with that over N(m', Σ'), with a = m·m' + c,
v = tr ΣΣ' + mᵀΣ'm + m'ᵀΣm':

    Gaussian       Π ℓ_d · |T|^(-1/2) exp(-½ (m - m')ᵀ T⁻¹ (m - m')),   T = diag ℓ² + Σ + Σ'
    linear         a
    polynomial 2   a² + v
    polynomial 3   a³ + 3 a v + 6 mᵀΣ'Σ m'

each times scale². A point is a Gaussian without spread, so the same formulas give μ_P(x). (The table of the paper has
the covariances of the last term the other way round, which is the same where they commute.)

A mixture Σ π_i N(m_i, diag v_i) is fitted to an estimate Σ β_n k(x_n, ·) by minimising πᵀGπ - 2 πᵀh, G_ij = <μ_i, μ_j>,
h_i = Σ_n β_n μ_i(x_n): the squared distance of the two means but for a constant. h and its derivatives are sums over
rows, so the rows may come in any number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kme_dist.core.kernels import Gaussian, Kernel, Polynomial
from kme_dist.core.kernels.base import row_blocks
from kme_dist.errors import ConfigError

_POINTS = 2_048  # rows of a slab of (components, rows, features)


@dataclass(frozen=True)
class Gaussians:
    """Several Gaussians: means (k, d), covariances (k, d, d) or, diagonal, (k, d)."""

    means: np.ndarray
    covariances: np.ndarray

    @classmethod
    def points(cls, X: np.ndarray) -> Gaussians:
        """Rows as Gaussians without spread."""
        return cls(X, np.zeros_like(X))

    @property
    def full(self) -> np.ndarray:
        """Covariances (k, d, d)."""
        if self.covariances.ndim == 3:
            return self.covariances
        return self.covariances[:, :, None] * np.eye(self.means.shape[1])


def check_kernel(kernel: Kernel) -> Kernel:
    """Refuse kernels whose Gaussian means have no closed form here."""
    plain = isinstance(kernel, Polynomial) and kernel.length_scale is None and kernel.degree <= 3
    if type(kernel) is Gaussian or plain:
        return kernel
    raise ConfigError(
        f"{kernel!r}: the kernel mean of a Gaussian is known in closed form for Gaussian, Linear, and Polynomial "
        "kernels of degree 2 and 3 without length scales"
    )


def inner_products(kernel: Kernel, first: Gaussians, second: Gaussians) -> np.ndarray:
    """<μ_i, μ_j> for every Gaussian of `first` (down) and of `second` (across)."""
    check_kernel(kernel)
    if first.covariances.ndim == 2 and second.covariances.ndim == 2:
        return _pairs(kernel, first.means, first.covariances, second.means, second.covariances).values
    found = np.empty((len(first.means), len(second.means)))
    S, S2 = first.full, second.full
    for i, m in enumerate(first.means):
        for j, m2 in enumerate(second.means):
            found[i, j] = _pair(kernel, m, S[i], m2, S2[j])
    return found


def _pair(kernel: Kernel, m: np.ndarray, S: np.ndarray, m2: np.ndarray, S2: np.ndarray) -> float:
    variance = float(kernel.scale) ** 2  # type: ignore[attr-defined]
    if isinstance(kernel, Gaussian):
        ell2 = np.broadcast_to(np.asarray(kernel.length_scale, np.float64) ** 2, m.shape)
        T = np.diag(ell2) + S + S2
        difference = m - m2
        log_det = np.linalg.slogdet(T)[1] - np.sum(np.log(ell2))
        return variance * float(np.exp(-0.5 * (log_det + difference @ np.linalg.solve(T, difference))))
    a, v = m @ m2 + kernel._offset(), np.sum(S * S2) + m @ S2 @ m + m2 @ S @ m2  # type: ignore[attr-defined]
    match kernel.degree:  # type: ignore[attr-defined]
        case 1:
            value = a
        case 2:
            value = a**2 + v
        case _:
            value = a**3 + 3 * a * v + 6 * m @ S2 @ S @ m2
    return variance * float(value)


class _Pairs(NamedTuple):
    values: np.ndarray  # (k, k2)
    by_mean: np.ndarray  # (k, k2, d): derivative by the mean of the first
    by_variance: np.ndarray  # (k, k2, d): by its (diagonal) covariance


def _pairs(kernel: Kernel, m: np.ndarray, v: np.ndarray, m2: np.ndarray, v2: np.ndarray) -> _Pairs:
    """Inner products of Gaussians with diagonal covariances, and their derivatives."""
    variance = float(kernel.scale) ** 2  # type: ignore[attr-defined]
    M, V, M2, V2 = m[:, None, :], v[:, None, :], m2[None, :, :], v2[None, :, :]
    if isinstance(kernel, Gaussian):
        ell2 = np.broadcast_to(np.asarray(kernel.length_scale, np.float64) ** 2, m.shape[1:])
        T, difference = ell2 + V + V2, M - M2
        scaled = difference / T
        g = variance * np.exp(-0.5 * np.sum(np.log(T / ell2) + difference * scaled, axis=2))
        return _Pairs(g, -g[:, :, None] * scaled, 0.5 * g[:, :, None] * (scaled * scaled - 1 / T))
    degree, c = kernel.degree, kernel._offset()  # type: ignore[attr-defined]
    a = (m @ m2.T + c)[:, :, None]
    if degree == 1:
        return _Pairs(variance * a[:, :, 0], variance * M2 + 0 * M, 0 * (M + M2))
    spread = (v @ v2.T + (m * m) @ v2.T + v @ (m2 * m2).T)[:, :, None]
    if degree == 2:
        return _Pairs(
            variance * (a * a + spread)[:, :, 0],
            variance * (2 * a * M2 + 2 * M * V2),
            variance * (V2 + M2 * M2 + 0 * M),
        )
    crossed = ((m * v) @ (m2 * v2).T)[:, :, None]
    return _Pairs(
        variance * (a**3 + 3 * a * spread + 6 * crossed)[:, :, 0],
        variance * (3 * (a * a + spread) * M2 + 6 * a * M * V2 + 6 * V * V2 * M2),
        variance * (3 * a * (V2 + M2 * M2) + 6 * M * V2 * M2),
    )


class Overlap(NamedTuple):
    """h_i = Σ_n β_n μ_i(x_n) and its derivatives; overlaps of blocks of rows add up."""

    values: np.ndarray
    by_mean: np.ndarray
    by_variance: np.ndarray

    def plus(self, other: Overlap) -> Overlap:
        return Overlap(*(a + b for a, b in zip(self, other, strict=True)))


def overlap(kernel: Kernel, mixture: Gaussians, X: np.ndarray, weights: np.ndarray) -> Overlap:
    """h of the Gaussians of a mixture with the weighted rows of X, slab by slab."""
    k, d = mixture.means.shape
    total = Overlap(np.zeros(k), np.zeros((k, d)), np.zeros((k, d)))
    for rows in row_blocks(len(X), _POINTS):
        points, beta = X[rows], weights[rows]
        part = _pairs(kernel, mixture.means, mixture.covariances, points, np.zeros_like(points))
        total = total.plus(
            Overlap(
                part.values @ beta,
                np.einsum("knd,n->kd", part.by_mean, beta),
                np.einsum("knd,n->kd", part.by_variance, beta),
            )
        )
    return total


def matching_loss(
    kernel: Kernel, shares: np.ndarray, mixture: Gaussians, h: Overlap
) -> tuple[float, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """πᵀGπ - 2 πᵀh, and its derivatives by π, means and variances."""
    m, v = mixture.means, mixture.covariances
    G = _pairs(kernel, m, v, m, v)
    value = float(shares @ G.values @ shares - 2 * shares @ h.values)
    weights = shares[:, None] * shares[None, :]
    # G is symmetric: what the second argument adds equals what the first does.
    by_mean = 2 * np.einsum("kjd,kj->kd", G.by_mean, weights) - 2 * shares[:, None] * h.by_mean
    by_variance = 2 * np.einsum("kjd,kj->kd", G.by_variance, weights) - 2 * shares[:, None] * h.by_variance
    return value, (2 * (G.values @ shares - h.values), by_mean, by_variance)


def log_density(X: np.ndarray, shares: np.ndarray, mixture: Gaussians) -> np.ndarray:
    """log Σ_i π_i N(x; m_i, diag v_i) for every row."""
    m, v = mixture.means, mixture.covariances
    squares = np.sum((X[:, None, :] - m[None]) ** 2 / v[None], axis=2)
    logs = np.log(shares) - 0.5 * (squares + np.sum(np.log(2 * np.pi * v), axis=1))
    top = logs.max(axis=1, keepdims=True)
    return np.asarray(top[:, 0] + np.log(np.sum(np.exp(logs - top), axis=1)))
