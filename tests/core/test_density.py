"""Kernel means of Gaussians: closed forms against integrals by quadrature, derivatives against differences."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.density import Gaussians, Overlap, inner_products, log_density, matching_loss, overlap
from kme_dist.errors import ConfigError
from kme_dist.kernels import Gaussian, Laplace, Linear, Polynomial

KERNELS = [
    Gaussian(length_scale=0.8, scale=1.1),
    Gaussian(length_scale=[0.6, 1.4]),
    Linear(scale=1.2),
    Polynomial(degree=2),
    Polynomial(degree=3, offset=0.5),
]


def gaussians(rng, count, full=False):
    roots = rng.normal(size=(count, 2, 2)) * 0.6
    covariances = roots @ np.swapaxes(roots, 1, 2) if full else rng.uniform(0.1, 0.8, size=(count, 2))
    return Gaussians(rng.normal(size=(count, 2)), covariances)


def quadrature(mean, covariance, nodes=48):
    """Points and weights that integrate over N(mean, covariance)."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(x, x), axis=-1).reshape(-1, 2)
    weights = np.outer(w, w).ravel() / (2 * np.pi)
    return mean + grid @ np.linalg.cholesky(covariance + 1e-14 * np.eye(2)).T, weights


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
@pytest.mark.parametrize("full", [False, True])
def test_inner_products_are_double_integrals_of_the_kernel(kernel, full, rng):
    first, second = gaussians(rng, 2, full), gaussians(rng, 3, full)
    found = inner_products(kernel, first, second)
    for i in range(2):
        for j in range(3):
            X, a = quadrature(first.means[i], first.full[i])
            Z, b = quadrature(second.means[j], second.full[j])
            assert found[i, j] == pytest.approx(a @ kernel.gram(X, Z) @ b, rel=1e-9)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_a_point_is_a_gaussian_without_spread(kernel, rng):
    X, Z = rng.normal(size=(4, 2)), rng.normal(size=(3, 2))
    found = inner_products(kernel, Gaussians.points(X), Gaussians.points(Z))
    np.testing.assert_allclose(found, kernel.gram(X, Z), rtol=1e-10)
    full = inner_products(kernel, Gaussians.points(X), Gaussians(Z, np.zeros((3, 2, 2))))
    np.testing.assert_allclose(full, kernel.gram(X, Z), rtol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_matching_loss_is_the_squared_distance_but_for_a_constant(kernel, rng):
    mixture, shares = gaussians(rng, 3), np.array([0.2, 0.5, 0.3])
    X, beta = rng.normal(size=(7, 2)), rng.random(7)
    loss, _ = matching_loss(kernel, shares, mixture, overlap(kernel, mixture, X, beta))
    G = inner_products(kernel, mixture, mixture)
    h = inner_products(kernel, mixture, Gaussians.points(X)) @ beta
    assert loss == pytest.approx(shares @ G @ shares - 2 * shares @ h, rel=1e-10)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_gradient_of_the_matching_loss_matches_finite_differences(kernel, rng):
    mixture, shares = gaussians(rng, 3), np.array([0.2, 0.5, 0.3])
    X, beta = rng.normal(size=(7, 2)), rng.random(7)

    def loss(shares, means, variances):
        at = Gaussians(means, variances)
        return matching_loss(kernel, shares, at, overlap(kernel, at, X, beta))

    start = (shares, mixture.means, mixture.covariances)
    gradients = loss(*start)[1]
    for which, gradient in enumerate(gradients):
        for index in np.ndindex(start[which].shape):
            step = np.zeros_like(start[which])
            step[index] = 1e-6
            up = [value + step if i == which else value for i, value in enumerate(start)]
            down = [value - step if i == which else value for i, value in enumerate(start)]
            slope = (loss(*up)[0] - loss(*down)[0]) / 2e-6
            assert gradient[index] == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_overlaps_of_blocks_add_up(rng):
    kernel, mixture = KERNELS[0], gaussians(rng, 3)
    X, beta = rng.normal(size=(9, 2)), rng.random(9)
    whole = overlap(kernel, mixture, X, beta)
    parts = overlap(kernel, mixture, X[:4], beta[:4]).plus(overlap(kernel, mixture, X[4:], beta[4:]))
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    assert isinstance(parts, Overlap)


def test_log_density_integrates_to_one():
    mixture, shares = Gaussians(np.array([[-1.0], [2.0]]), np.array([[0.3], [1.0]])), np.array([0.4, 0.6])
    x = np.linspace(-9, 10, 4001)
    assert np.exp(log_density(x[:, None], shares, mixture)).sum() * (x[1] - x[0]) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_mixtures_are_matched_on_every_array_library(kernel, arrays, rng):
    diagonal, full, shares = gaussians(rng, 3), gaussians(rng, 2, full=True), np.array([0.2, 0.5, 0.3])
    X, beta = rng.normal(size=(7, 2)), rng.random(7)
    there, there_full = (Gaussians(arrays(g.means), arrays(g.covariances)) for g in (diagonal, full))
    found = inner_products(kernel, there, there_full)
    np.testing.assert_allclose(arrays.host(found), inner_products(kernel, diagonal, full), rtol=1e-10)
    h = overlap(kernel, there, arrays(X), arrays(beta))
    value, gradients = matching_loss(kernel, arrays(shares), there, h)
    expected, slopes = matching_loss(kernel, shares, diagonal, overlap(kernel, diagonal, X, beta))
    assert value == pytest.approx(expected, rel=1e-10)
    for gradient, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(arrays.host(gradient), slope, rtol=1e-9, atol=1e-12)
    logs = log_density(arrays(X), arrays(shares), there)
    np.testing.assert_allclose(arrays.host(logs), log_density(X, shares, diagonal), rtol=1e-10)


def test_other_kernels_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"Laplace.*closed form"):
        inner_products(Laplace(), Gaussians.points(np.zeros((1, 1))), Gaussians.points(np.zeros((1, 1))))
