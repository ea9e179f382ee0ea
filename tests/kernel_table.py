"""Every kernel and composite that the tests of the mathematics run over, and kernels as a user would write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import autograd.numpy as anp
import numpy as np

from kme_dist.backend import like, namespace_of
from kme_dist.core.kernels import (
    Bags,
    Cosine,
    Gaussian,
    Kernel,
    Laplace,
    Linear,
    Matern,
    OnFeatures,
    Periodic,
    Polynomial,
    RationalQuadratic,
    Spectrum,
    convex_combination,
    spectral_mixture,
)

D = 3  # features of the rows that all kernels of vectors are tested on
ARD = (0.7, 1.3, 2.1)


@dataclass(frozen=True, eq=False, repr=False)
class Tanimoto(Kernel):
    """A user's own kernel: similarity of vectors of positive numbers, with one learned parameter."""

    scale: Any = 1.0
    learned = ("scale",)

    def evaluate(self, X, X2, out=None):
        xp = namespace_of(X)
        dot = X @ X2.T
        norms = xp.sum(X * X, axis=1)[:, None] + xp.sum(X2 * X2, axis=1)[None, :]
        return float(self.scale) ** 2 * dot / (norms - dot)

    def diag(self, X):
        return X[:, 0] * 0 + float(self.scale) ** 2

    def pullback(self, X, X2, K, K_bar):
        K = self.evaluate(X, X2) if K is None else K
        return {"scale": 2 * namespace_of(K).sum(K_bar * K)}

    def oracle(self, values, X, X2):
        dot = X @ X2.T
        norms = anp.sum(X**2, axis=1)[:, None] + anp.sum(X2**2, axis=1)[None, :]
        return values["scale"] ** 2 * dot / (norms - dot)


@dataclass(frozen=True)
class TanhLayer:
    """A user's own feature map: one dense layer, tanh(X W + b); weights of any sign."""

    weight: Any
    bias: Any

    @property
    def parameters(self):
        return {"weight": self.weight, "bias": self.bias}

    def replace(self, **values):
        return TanhLayer(**{**self.parameters, **values})

    def forward(self, X):
        xp = namespace_of(X)
        A = X @ like(self.weight, X) + like(self.bias, X)[None, :]
        return xp.tanh(A)

    def vjp(self, X, Z_bar):
        xp = namespace_of(X)
        A_bar = Z_bar * (1 - self.forward(X) ** 2)
        return {"weight": X.T @ A_bar, "bias": xp.sum(A_bar, axis=0)}

    def oracle(self, values, X):
        return anp.tanh(X @ values["weight"] + values["bias"])


def tanh_layer():
    rng = np.random.default_rng(5)
    return TanhLayer(rng.normal(size=(D, 4)) * 0.5, rng.normal(size=4) * 0.1)


VECTOR_KERNELS = {
    "gaussian": Gaussian(length_scale=0.8, scale=1.7),
    "gaussian ARD": Gaussian(length_scale=ARD, scale=0.6),
    "laplace": Laplace(length_scale=0.9, scale=1.2),
    "laplace ARD": Laplace(length_scale=ARD),
    "matern 1/2": Matern(nu=0.5, length_scale=1.1, scale=0.8),
    "matern 1/2 ARD": Matern(nu=0.5, length_scale=ARD),
    "matern 3/2": Matern(nu=1.5, length_scale=ARD, scale=1.3),
    "matern 5/2": Matern(nu=2.5, length_scale=ARD, scale=1.3),
    "rational quadratic": RationalQuadratic(length_scale=ARD, scale=0.9, shape=0.7),
    "periodic": Periodic(length_scale=1.4, scale=1.1, period=2.3),
    "periodic ARD": Periodic(length_scale=ARD, period=(1.9, 2.7, 3.1)),
    "cosine": Cosine(frequency=0.9, scale=1.2),
    "cosine ARD": Cosine(frequency=ARD),
    "linear": Linear(scale=1.3),
    "linear ARD": Linear(length_scale=ARD),
    "quadratic": Polynomial(degree=2, scale=0.7, offset=0.5),
    "cubic ARD": Polynomial(degree=3, scale=0.4, offset=1.5, length_scale=ARD),
    "sum": Gaussian(length_scale=ARD) + Linear(scale=0.4) + Matern(nu=2.5),
    "product": Gaussian(length_scale=ARD, scale=1.2) * Polynomial(degree=2) * Laplace(length_scale=2.0),
    "scaled": 0.3 * RationalQuadratic(length_scale=ARD),
    "convex combination": convex_combination(
        Gaussian(), Matern(nu=0.5, length_scale=ARD), Linear(), weights=[1, 2, 0.5]
    ),
    "spectral mixture": spectral_mixture([0.6, 0.4], [ARD, (0.2, 0.3, 0.1)], [0.9, (1.1, 2.0, 0.7)]),
    "nested": 2.0 * (Gaussian() + 0.5 * (Linear() * Periodic(period=3.0))),
}
OWN_KERNELS = {"own": Tanimoto(scale=1.4), "own in a sum": Tanimoto(scale=0.7) + 0.5 * Gaussian(length_scale=ARD)}
FEATURE_KERNELS = {
    "gaussian on features": OnFeatures(Gaussian(length_scale=0.9, scale=1.2), tanh_layer()),
    "laplace on features": OnFeatures(Laplace(length_scale=(0.5, 1.0, 1.5, 2.0)), tanh_layer()),
    "matern on features": OnFeatures(Matern(nu=2.5), tanh_layer()),
    "periodic on features": OnFeatures(Periodic(period=(2.0, 3.0, 2.5, 1.5)), tanh_layer()),
    "cosine on features": OnFeatures(Cosine(frequency=1.5) + Linear(length_scale=1.5), tanh_layer()),
    "composite on features": OnFeatures(0.4 * (Gaussian() * Polynomial(degree=2)), tanh_layer()),
}
DIFFERENTIABLE = {**VECTOR_KERNELS, **OWN_KERNELS, **FEATURE_KERNELS}
STRING_KERNELS = {
    "spectrum": Spectrum(p=2, scale=1.3),
    "spectrum of counts": Spectrum(p=3, scale=0.6, normalize=False),
    "sum of spectra": Spectrum(p=1) + Spectrum(p=2, scale=0.5),
}
BAG_KERNELS = {
    "bags": Bags(Gaussian(length_scale=ARD, scale=1.2)),
    "sum of bags": Bags(Linear(scale=0.3)) + Bags(Matern(nu=1.5, length_scale=0.8)),
}


def vectors(n, seed=1):
    """n rows of D positive features (positive so that every kernel of the table accepts them)."""
    return np.random.default_rng(seed).uniform(0.1, 2.0, size=(n, D))


def strings(n, seed=2):
    """n strings over four letters, some of them too short to have a substring of three letters."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("acgt"), size=size)) for size in rng.integers(1, 12, size=n)]


def bags(n, seed=4):
    """n bags of one to five vectors."""
    sizes = np.random.default_rng(seed).integers(1, 6, size=n)
    return [vectors(size, [seed, i]) for i, size in enumerate(sizes)]


def labels(n, m=3, seed=3):
    y = np.random.default_rng(seed).integers(0, m, size=n)
    y[:m] = np.arange(m)[:n]
    return y
