"""Explicit feature maps φ_θ as immutable values: forward, and the vector-Jacobian products that learning needs.

>>> import numpy as np
>>> phi = dense_network(4, hidden=(8, 3), activation="tanh", seed=0)
>>> X = np.ones((5, 4))
>>> phi.forward(X).shape, sorted(phi.parameters)
((5, 3), ['0.bias', '0.weight', '1.bias', '1.weight'])
>>> sorted(phi.vjp(X, np.ones((5, 3)))) == sorted(phi.parameters)
True

    Identity, Polynomial        φ(x)·φ(x') = (x·x' + offset)^degree, exactly
    Spectral                    random Fourier features, and the non-stationary map of ASKL; see `random_fourier`
    Dense, Dropout, Stack       networks, part after part; see `dense_network`
    Joint                       maps side by side
    from_config                 any of them by name: {"name": "random_fourier", "features": 500, "kernel": "laplace"}

A map has `parameters` (host arrays of any sign, in double precision unless given in single), `replace(**values)`,
`forward(X)`, `vjp(X, Z_bar)` for the parameters, `input_vjp(X, Z_bar)` for the rows, and `linearise(X)` for features
and derivatives in one pass. Rows may be NumPy or CuPy; results stay on their device and in their precision. Randomness
depends on seeds only: dropout is off until `sampled(key)` fixes the masks.

ASKL: Li, Liu, Wang, "Automated Spectral Kernel Learning".
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kme_dist.core.maps import (
    ACTIVATIONS,
    Dense,
    Dropout,
    Features,
    Identity,
    Joint,
    Polynomial,
    Spectral,
    Stack,
    dropout_mask,
    of_part,
)
from kme_dist.errors import ConfigError

__all__ = [
    "ACTIVATIONS",
    "FORMS",
    "SAMPLERS",
    "Dense",
    "Dropout",
    "Features",
    "Identity",
    "Joint",
    "Polynomial",
    "Spectral",
    "Stack",
    "dense_network",
    "dropout_mask",
    "from_config",
    "random_fourier",
    "sample_frequencies",
    "spectral",
    "truncated_normal",
]


def truncated_normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> np.ndarray:
    """Normal numbers, redrawn where they exceed two standard deviations."""
    values = rng.standard_normal(shape)
    while (far := np.abs(values) > 2).any():
        values[far] = rng.standard_normal(int(far.sum()))
    return values * deviation


def dense_network(
    n_features: int,
    hidden: Sequence[int] = (96, 32),
    activation: str = "relu",
    dropout: float = 0.0,
    seed: int = 0,
    deviation: float = 0.1,
    bias: float = 0.1,
) -> Stack:
    """Dense layers with an activation after each, including the last; dropout between layers, not after the last.

    Initialised as the published networks: weights truncated normal with deviation 0.1, biases 0.1.
    """
    if not hidden or not all(isinstance(units, int | np.integer) and units > 0 for units in hidden):
        raise ConfigError(f"hidden={hidden!r}: must be the sizes of one or more layers, e.g. (96, 32)")
    parts: list[Features] = []
    rng, width = np.random.default_rng(seed), int(n_features)
    for i, units in enumerate(hidden):
        if i and dropout:
            parts.append(Dropout(dropout))
        parts.append(Dense(truncated_normal(rng, (width, int(units)), deviation), np.full(units, bias), activation))
        width = int(units)
    return Stack(tuple(parts))


SAMPLERS = ("gaussian", "laplace", "matern")


def sample_frequencies(
    n_features: int,
    features: int,
    kernel: str = "gaussian",
    length_scale: Any = 1.0,
    nu: float = 1.5,
    orthogonal: bool = False,
    rng: np.random.Generator | None = None,
) -> np.ndarray:
    """Frequencies (n_features, features) from the spectral density of a stationary kernel.

    Normal for the Gaussian kernel, Cauchy in each feature for Laplace (city-block distance), Student's t with 2ν
    degrees of freedom for Matérn. `orthogonal` makes the directions of each block of n_features frequencies
    orthogonal, with lengths as before: the same kernel on average, with less noise.
    """
    if kernel not in SAMPLERS:
        raise ConfigError(f"kernel={kernel!r} has no sampler; choose one of {', '.join(SAMPLERS)}")
    if features < 1:
        raise ConfigError(f"features={features}: must be an integer >= 1")
    rng = rng or np.random.default_rng(0)
    width = np.broadcast_to(np.asarray(length_scale, np.float64), (n_features,))[:, None]
    if kernel == "laplace":
        if orthogonal:
            raise ConfigError("orthogonal frequencies require an isotropic density: kernel 'gaussian' or 'matern'")
        return np.asarray(rng.standard_cauchy((n_features, features)) / width)
    if orthogonal:
        blocks = [
            np.linalg.qr(rng.standard_normal((n_features, n_features)))[0] for _ in range(-(-features // n_features))
        ]
        directions = np.concatenate(blocks, axis=1)[:, :features]
        omega = directions * np.sqrt(rng.chisquare(n_features, features))
    else:
        omega = rng.standard_normal((n_features, features))
    if kernel == "matern":
        omega = omega * np.sqrt(2 * nu / rng.chisquare(2 * nu, features))
    return np.asarray(omega / width)


FORMS = {
    "2D": "cosines and sines",
    "D": "cosines with phases",
    "independent": "cosines with separate phases for each of two sets",
}


def _phases(form: str, features: int, rng: np.random.Generator, known: Sequence[str]) -> np.ndarray | None:
    if form not in known:
        choices = " or ".join(f"{name!r} ({FORMS[name]})" for name in known)
        raise ConfigError(f"form={form!r} is unknown; choose {choices}")
    return None if form == "2D" else rng.uniform(0, 2 * math.pi, features)


def random_fourier(
    n_features: int,
    features: int = 500,
    kernel: str = "gaussian",
    length_scale: Any = 1.0,
    nu: float = 1.5,
    orthogonal: bool = False,
    form: str = "2D",
    seed: int = 0,
) -> Spectral:
    """Random Fourier features: φ(x)·φ(x') tends to the kernel as `features` grows."""
    rng = np.random.default_rng(seed)
    omega = sample_frequencies(n_features, features, kernel, length_scale, nu, orthogonal, rng)
    return Spectral(omega, phases=_phases(form, features, rng, ("2D", "D")))


def spectral(
    n_features: int,
    features: int = 500,
    deviation: float = 1.0,
    stationary: bool = False,
    form: str = "D",
    seed: int = 0,
) -> Spectral:
    """The map of ASKL with normal frequencies, non-stationary by default. See `Spectral` for the forms."""
    rng = np.random.default_rng(seed)
    first = sample_frequencies(n_features, features, length_scale=1 / deviation, rng=rng)
    phases = _phases(form, features, rng, tuple(FORMS))
    if stationary:
        return Spectral(first, phases=phases)
    second = sample_frequencies(n_features, features, length_scale=1 / deviation, rng=rng)
    own = _phases(form, features, rng, tuple(FORMS)) if form == "independent" else None
    return Spectral(first, second, phases, own)


def _dense(n_features: int, units: int = 32, activation: str = "relu", seed: int = 0) -> Dense:
    layer = dense_network(n_features, (units,), activation, seed=seed).parts[0]
    assert isinstance(layer, Dense)
    return layer


_DRAWN: dict[str, Callable[..., Any]] = {
    "dense": _dense,
    "dense_network": dense_network,
    "random_fourier": random_fourier,
    "spectral": spectral,
}
_PLAIN = {"identity": Identity, "polynomial": Polynomial, "dropout": Dropout}


def from_config(
    config: str | Mapping[str, Any] | Features,
    n_features: int | None = None,
    seed: int = 0,
    arrays: Mapping[str, np.ndarray] | None = None,
) -> Any:
    """A feature map from its name or from plain data; drawn from `seed`, or restored from stored `arrays`.

    Only the maps named in this module can be built, so a config never runs code.
    """
    if hasattr(config, "linearise"):
        return config
    settings = {"name": config} if isinstance(config, str) else dict(config)
    name = settings.pop("name", None)
    known = ("stack", "joint", *_PLAIN, *_DRAWN)
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"feature map {name!r} is unknown{hint} (known: {', '.join(known)})")
    try:
        if name in _PLAIN:
            return _PLAIN[name](**settings)
        if name in ("stack", "joint"):
            return _parts_from_config(name, settings["parts"], n_features, seed, arrays)
        if arrays is not None:
            kinds: dict[str, type[Features]] = {"dense": Dense, "spectral": Spectral}
            activation = {"activation": settings["activation"]} if name == "dense" else {}
            return kinds[name](**arrays, **activation)
        if n_features is None:
            raise ConfigError(f"feature map {name!r}: n_features is required to draw it")
        return _DRAWN[name](n_features, **settings, seed=seed)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"feature map {name!r}: invalid settings {settings}: {error}") from error


def _parts_from_config(
    name: str, configs: Sequence[Any], n_features: int | None, seed: int, arrays: Mapping[str, np.ndarray] | None
) -> Stack | Joint:
    parts: list[Any] = []
    for i, config in enumerate(configs):
        part = from_config(config, n_features, seed + i, None if arrays is None else of_part(i, arrays))
        if name == "stack" and n_features is not None and arrays is None:
            n_features = int(part.forward(np.zeros((1, n_features))).shape[1])
        parts.append(part)
    return Stack(tuple(parts)) if name == "stack" else Joint(tuple(parts))
