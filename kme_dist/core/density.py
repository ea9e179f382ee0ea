"""Kernel means of Gaussians in closed form, and mixtures fitted by matching kernel means.   [KMSE, section 6.2.2]

The mean of k(x, ·) over N(m, Σ) and its inner product with that over N(m', Σ'), with a = m·m' + c,
v = tr ΣΣ' + mᵀΣ'm + m'ᵀΣm':

    Gaussian       Π ℓ_d · |T|^(-1/2) exp(-½ (m - m')ᵀ T⁻¹ (m - m')),   T = diag ℓ² + Σ + Σ'
    linear         a
    polynomial 2   a² + v
    polynomial 3   a³ + 3 a v + 6 mᵀΣ'Σ m'

each times scale². A point is a Gaussian of zero covariance, so the same formulas give μ_P(x). (The table of the paper
swaps the covariances of the last term, which is equal where they commute.)

A mixture Σ π_i N(m_i, diag v_i) is fitted to an estimate Σ β_n k(x_n, ·) by minimising πᵀGπ - 2 πᵀh, G_ij = <μ_i, μ_j>,
h_i = Σ_n β_n μ_i(x_n): the squared distance of the two means up to a constant. h and its derivatives are sums over
rows, so the rows may come in any number of blocks. Results stay where means, covariances and rows are, on the host or
on a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kme_dist.backend import Array, cholesky, diagonal, like, namespace_of
from kme_dist.core.kernels import Gaussian, Kernel, Polynomial
from kme_dist.core.kernels.base import row_blocks
from kme_dist.errors import ConfigError

_POINTS = 2_048  # rows of a slab of (components, rows, features)


@dataclass(frozen=True)
class Gaussians:
    """Several Gaussians: means (k, d), covariances (k, d, d) or, diagonal, (k, d)."""

    means: Array
    covariances: Array

    @classmethod
    def points(cls, X: Array) -> Gaussians:
        """Rows as Gaussians of zero covariance."""
        return cls(X, X * 0)

    @property
    def full(self) -> Array:
        """Covariances (k, d, d)."""
        if self.covariances.ndim == 3:
            return self.covariances
        return self.covariances[:, :, None] * like(np.eye(self.means.shape[1]), self.means)[None, :, :]


def check_kernel(kernel: Kernel) -> Kernel:
    """Refuse kernels whose Gaussian means have no closed form here."""
    plain = isinstance(kernel, Polynomial) and kernel.length_scale is None and kernel.degree <= 3
    if type(kernel) is Gaussian or plain:
        return kernel
    raise ConfigError(
        f"{kernel!r}: the kernel mean of a Gaussian has a closed form only for Gaussian, Linear, and Polynomial "
        "kernels of degree 2 and 3 without length scales"
    )


def inner_products(kernel: Kernel, first: Gaussians, second: Gaussians) -> Array:
    """<μ_i, μ_j> for every Gaussian of `first` (down) and of `second` (across)."""
    check_kernel(kernel)
    if first.covariances.ndim == 2 and second.covariances.ndim == 2:
        return _pairs(kernel, first.means, first.covariances, second.means, second.covariances).values
    S, S2 = first.full, second.full
    found = [
        [_pair(kernel, first.means[i, :], S[i, ...], second.means[j, :], S2[j, ...]) for j in range(S2.shape[0])]
        for i in range(S.shape[0])
    ]
    return like(np.asarray(found), first.means)


def _pair(kernel: Kernel, m: Array, S: Array, m2: Array, S2: Array) -> float:
    xp, variance = namespace_of(m), float(kernel.scale) ** 2  # type: ignore[attr-defined]
    if isinstance(kernel, Gaussian):
        ell2 = _squared_scales(kernel, m)
        T = S + S2 + ell2[:, None] * like(np.eye(m.shape[0]), m)
        factor = cholesky(T)
        half = factor.half_solve((m - m2)[:, None])
        log_root = xp.sum(xp.log(diagonal(factor.lower))) - 0.5 * xp.sum(xp.log(ell2))
        return variance * float(xp.exp(-log_root - 0.5 * xp.sum(half * half)))
    a, v = m @ m2 + kernel._offset(), xp.sum(S * S2) + m @ S2 @ m + m2 @ S @ m2  # type: ignore[attr-defined]
    match kernel.degree:  # type: ignore[attr-defined]
        case 1:
            value = a
        case 2:
            value = a**2 + v
        case _:
            value = a**3 + 3 * a * v + 6 * (m @ S2 @ S @ m2)
    return variance * float(value)


def _squared_scales(kernel: Gaussian, reference: Array) -> Array:
    """ℓ² of every feature."""
    return like(np.broadcast_to(np.asarray(kernel.length_scale, np.float64) ** 2, reference.shape[-1:]), reference)


class _Pairs(NamedTuple):
    values: Array  # (k, k2)
    by_mean: Array  # (k, k2, d): derivative by the mean of the first
    by_variance: Array  # (k, k2, d): by its (diagonal) covariance


def _pairs(kernel: Kernel, m: Array, v: Array, m2: Array, v2: Array) -> _Pairs:
    """Inner products of Gaussians with diagonal covariances, and their derivatives."""
    xp, variance = namespace_of(m), float(kernel.scale) ** 2  # type: ignore[attr-defined]
    M, V, M2, V2 = m[:, None, :], v[:, None, :], m2[None, :, :], v2[None, :, :]
    if isinstance(kernel, Gaussian):
        ell2 = _squared_scales(kernel, m)[None, None, :]
        T, difference = ell2 + V + V2, M - M2
        scaled = difference / T
        g = variance * xp.exp(-0.5 * xp.sum(xp.log(T / ell2) + difference * scaled, axis=2))
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

    values: Array
    by_mean: Array
    by_variance: Array

    def plus(self, other: Overlap) -> Overlap:
        return Overlap(*(a + b for a, b in zip(self, other, strict=True)))


def overlap(kernel: Kernel, mixture: Gaussians, X: Array, weights: Array) -> Overlap:
    """h of the Gaussians of a mixture with the weighted rows of X, slab by slab."""
    m = mixture.means
    total = Overlap(m[:, 0] * 0, m * 0, m * 0)
    for rows in row_blocks(X.shape[0], _POINTS):
        points, beta = X[rows, :], weights[rows]
        part = _pairs(kernel, m, mixture.covariances, points, points * 0)
        along = beta[None, None, :]
        total = total.plus(
            Overlap(part.values @ beta, (along @ part.by_mean)[:, 0, :], (along @ part.by_variance)[:, 0, :])
        )
    return total


def matching_loss(
    kernel: Kernel, shares: Array, mixture: Gaussians, h: Overlap
) -> tuple[float, tuple[Array, Array, Array]]:
    """πᵀGπ - 2 πᵀh, and its derivatives by π, means and variances."""
    m, v = mixture.means, mixture.covariances
    G = _pairs(kernel, m, v, m, v)
    value = float(shares @ G.values @ shares - 2 * (shares @ h.values))
    weights = (shares[:, None] * shares[None, :])[:, None, :]
    # G is symmetric: both arguments contribute equally.
    by_mean = 2 * (weights @ G.by_mean)[:, 0, :] - 2 * shares[:, None] * h.by_mean
    by_variance = 2 * (weights @ G.by_variance)[:, 0, :] - 2 * shares[:, None] * h.by_variance
    return value, (2 * (G.values @ shares - h.values), by_mean, by_variance)


def log_density(X: Array, shares: Array, mixture: Gaussians) -> Array:
    """log Σ_i π_i N(x; m_i, diag v_i) for every row."""
    xp, m, v = namespace_of(X), mixture.means, mixture.covariances
    squares = xp.sum((X[:, None, :] - m[None, :, :]) ** 2 / v[None, :, :], axis=2)
    logs = (xp.log(shares) - 0.5 * xp.sum(xp.log(2 * math.pi * v), axis=1))[None, :] - 0.5 * squares
    top = xp.max(logs, axis=1, keepdims=True)
    return top[:, 0] + xp.log(xp.sum(xp.exp(logs - top), axis=1))
