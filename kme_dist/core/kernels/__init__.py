"""Kernels as immutable values.

A kernel is a small frozen record: its fields are the parameters θ, its methods the mathematics.

>>> import numpy as np
>>> k = Gaussian(length_scale=[0.5, 2.0]) + 0.1 * Linear()
>>> X = np.array([[0.0, 1.0], [1.0, 0.0]])
>>> k.gram(X).shape
(2, 2)
>>> sorted(k.parameters)
['0.length_scale', '0.scale', '1.0.scale', '1.scale']

Interface of every kernel:

    gram(X, X2=None)        K_ij = k(x_i, x2_j); without X2 symmetric with an exact diagonal
    diag(X)                 k(x_i, x_i)
    alpha(X)                sqrt(sup_x k(x, x)); over the rows of X where the kernel is unbounded
    vjp(X, X2, K_bar)       sum_ij K_bar_ij dK_ij/d log θ, by parameter name
    parameters, replace()   the positive parameters by name, and a copy with other values
    get_params(), with_params()  all settings by name, as in scikit-learn, and a copy with other values
    +, *, convex_combination, scalar *

Your own kernel is a subclass with the formula for a tile of pairs; everything else (symmetric Gram matrices by tiles,
gradients of every objective, learning, saving) follows from it:

    @dataclass(frozen=True, eq=False, repr=False)
    class Tanimoto(Kernel):
        scale: Any = 1.0
        learned = ("scale",)

        def evaluate(self, X, X2, out=None):
            dot = X @ X2.T
            norms = (X**2).sum(axis=1)[:, None] + (X2**2).sum(axis=1)[None, :]
            return float(self.scale) ** 2 * dot / (norms - dot)

        def diag(self, X):
            return float(self.scale) ** 2 * (X[:, 0] * 0 + 1)

        def pullback(self, X, X2, K, K_bar):
            K = self.evaluate(X, X2) if K is None else K
            return {"scale": 2 * (K_bar * K).sum()}

Parameters are positive, live on the host in double precision, and gradients are by their logarithms. Composite
kernels prefix the names of part i with "i.".
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kme_dist.core.kernels.bags import Bags
from kme_dist.core.kernels.base import (
    FeatureMap,
    Kernel,
)
from kme_dist.core.kernels.composite import (
    Composite,
    ConvexCombination,
    OnFeatures,
    Product,
    Scaled,
    Sum,
    convex_combination,
)
from kme_dist.core.kernels.products import Linear, Polynomial, Spectrum
from kme_dist.core.kernels.stationary import (
    Cosine,
    Gaussian,
    Laplace,
    Matern,
    Periodic,
    RationalQuadratic,
    Stationary,
)
from kme_dist.errors import ConfigError

__all__ = [
    "Bags",
    "Composite",
    "ConvexCombination",
    "Cosine",
    "FeatureMap",
    "Gaussian",
    "Kernel",
    "Laplace",
    "Linear",
    "Matern",
    "OnFeatures",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Scaled",
    "Spectrum",
    "Stationary",
    "Sum",
    "convex_combination",
    "from_config",
    "spectral_mixture",
]


def spectral_mixture(weights: Sequence[float], frequencies: Sequence[Any], length_scales: Sequence[Any]) -> Kernel:
    """Σ_i weights_i · Gaussian(length_scales_i) · Cosine(frequencies_i): any stationary spectrum, part by part."""
    components = [
        Gaussian(length_scale=ell, scale=math.sqrt(weight)) * Cosine(frequency=frequency)
        for weight, frequency, ell in zip(weights, frequencies, length_scales, strict=True)
    ]
    return Sum(tuple(components))


_BUILT_IN = (
    Gaussian,
    Laplace,
    Matern,
    RationalQuadratic,
    Periodic,
    Cosine,
    Linear,
    Polynomial,
    Spectrum,
    Sum,
    Product,
    Scaled,
    ConvexCombination,
    Bags,
)
# What other libraries call them: named in the error, since their parameters differ (gamma = 1 / (2 length_scale²)).
_OTHER_NAMES = {
    "rbf": "gaussian",
    "squared_exponential": "gaussian",
    "exponential": "matern",
    "poly": "polynomial",
    "rq": "rational_quadratic",
    "exp_sine_squared": "periodic",
    "dot_product": "linear",
}


def from_config(
    config: str | Mapping[str, Any] | Kernel,
    n_features: int | None = None,
    own: Mapping[str, type[Kernel]] | None = None,
) -> Kernel:
    """Build a kernel from its name or from plain data such as `to_config` returns.

    "gaussian", or {"name": "gaussian", "ard": True}, gives one length scale per feature when `n_features` is known.
    `own` adds the user's classes by class name; nothing else can be named, so a config never runs code.
    """
    if isinstance(config, Kernel):
        return config
    if isinstance(config, str):
        config = {"name": config, "ard": True}
    if not isinstance(config, Mapping):
        raise ConfigError(f"kernel {config!r}: must be a name, a mapping with a name, or a kernel")
    settings = dict(config)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"kernel {dict(config)!r}: `name` must be a text, e.g. {{name: gaussian}}; got {name!r}")
    known: dict[str, type[Kernel]] = {kind.name: kind for kind in _BUILT_IN}
    known.update(own or {})
    if name not in known:
        other = _OTHER_NAMES.get(name.lower().replace("-", "_").replace(" ", "_"))
        near = [other] if other else difflib.get_close_matches(name, list(known), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"kernel {name!r} is unknown{hint} (known: {', '.join(sorted(known))})")
    ard = settings.pop("ard", False)
    if "parts" in settings:
        if not isinstance(settings["parts"], list | tuple):
            raise ConfigError(f"kernel {name!r}: `parts` must be a list of kernels, got {settings['parts']!r}")
        settings["parts"] = tuple(from_config(part, n_features, own) for part in settings["parts"])
    kind = known[name]
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    unknown = sorted(set(settings) - names)
    if unknown:
        raise ConfigError(f"kernel {name!r} has no setting {unknown[0]!r}; it has {sorted(names)}")
    if ard and n_features is not None and {"length_scale", "frequency"} & names:
        vector = "length_scale" if "length_scale" in names else "frequency"
        value = settings.get(vector, 1.0)
        # Anything but a number is passed on for the kernel to check.
        settings[vector] = np.full(n_features, float(value)) if isinstance(value, int | float) else value
    return kind(**settings)
