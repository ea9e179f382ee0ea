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
    from_config                 any of them by name: {"name": "random_fourier", "features": 500, "kernel": "laplace"}

A map has `parameters` (host arrays in double precision, of any sign), `replace(**values)`, `forward(X)`,
`vjp(X, Z_bar)` for the parameters, `input_vjp(X, Z_bar)` for the rows, and `linearise(X)` for features and derivatives
in one pass. Rows may be NumPy or CuPy; results stay on their device and in their precision. Randomness depends on
seeds only: dropout is off until `sampled(key)` fixes the masks.

ASKL: Li, Liu, Wang, "Automated Spectral Kernel Learning".
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from kme_dist.backend import Array, like, namespace_of
from kme_dist.core.kernels.base import Gradients
from kme_dist.errors import ConfigError, DataError

# From the cotangent of the features: the gradients of the parameters and, on request, the cotangent of the rows.
Pull = Callable[..., tuple[Gradients, Array]]


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """Base of all feature maps; a subclass gives `linearise` and names its arrays."""

    name: ClassVar[str] = ""
    learned: ClassVar[tuple[str, ...]] = ()
    """Fields that are parameters."""
    drawn: ClassVar[tuple[str, ...]] = ()
    """Fields that are arrays, drawn once and not learned."""

    def __post_init__(self) -> None:
        for name in (*self.learned, *self.drawn):
            value = getattr(self, name)
            if value is not None:
                array = np.array(value, dtype=np.float64)
                array.setflags(write=False)
                object.__setattr__(self, name, array)

    def linearise(self, X: Array) -> tuple[Array, Pull]:
        """φ(X), and pull(Z_bar, inputs=False) -> (gradients, X_bar or None)."""
        raise ConfigError(f"{type(self).__name__} must define linearise(X)")

    def forward(self, X: Array) -> Array:
        """Z = φ(X), one row of features for each row."""
        return self.linearise(X)[0]

    def vjp(self, X: Array, Z_bar: Array) -> Gradients:
        """Σ_ij Z_bar_ij dZ_ij/dθ, for each parameter by name."""
        return self.linearise(X)[1](Z_bar)[0]

    def input_vjp(self, X: Array, Z_bar: Array) -> Array:
        """Σ_ij Z_bar_ij dZ_ij/dX: an array like X."""
        return self.linearise(X)[1](Z_bar, inputs=True)[1]

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """The learned arrays by name."""
        return {name: value for name in self.learned if (value := getattr(self, name)) is not None}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Every array, learned or drawn: together with `to_config` everything to be stored."""
        return {name: value for name in (*self.learned, *self.drawn) if (value := getattr(self, name)) is not None}

    def replace(self, **values: Any) -> Self:
        """The same map with some of its parameters changed."""
        unknown = sorted(set(values) - set(self.parameters))
        if unknown:
            raise ConfigError(f"{self!r} has no parameter {unknown[0]!r}; it has {sorted(self.parameters)}")
        return self._replaced(values)

    def _replaced(self, values: Mapping[str, Any]) -> Self:
        for name, value in values.items():
            if np.shape(value) != self.parameters[name].shape:
                raise ConfigError(f"{name} has shape {self.parameters[name].shape}, the new one has {np.shape(value)}")
        return dataclasses.replace(self, **values)

    def sampled(self, key: Sequence[int]) -> Self:
        """The map with the dropout masks of `key`; the same map if it has no dropout."""
        return self

    def to_config(self) -> dict[str, Any]:
        """Plain data without arrays: `from_config(config, arrays=map.arrays)` builds an equal map."""
        held = {*self.learned, *self.drawn}
        shown = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in held}
        return {"name": self.name, **{name: value for name, value in shown.items() if value is not None}}

    def __repr__(self) -> str:
        settings = {name: value for name, value in self.to_config().items() if name != "name"}
        shapes = {name: value.shape for name, value in self.arrays.items()}
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in {**settings, **shapes}.items())})"


def _check_rows(X: Array, features: int | None, who: Features) -> None:
    if getattr(X, "ndim", None) != 2 or (features is not None and X.shape[1] != features):
        expected = "(rows, features)" if features is None else f"(rows, {features})"
        raise DataError(f"{type(who).__name__} expects shape {expected}, got {getattr(X, 'shape', None)}")


@dataclass(frozen=True, eq=False, repr=False)
class Identity(Features):
    """φ(x) = x."""

    name = "identity"

    def linearise(self, X: Array) -> tuple[Array, Pull]:
        return X, lambda Z_bar, inputs=False: ({}, Z_bar)


@dataclass(frozen=True, eq=False, repr=False)
class Polynomial(Features):
    """All monomials up to a degree, weighted so that φ(x)·φ(x') = (x·x' + offset)^degree."""

    name = "polynomial"
    degree: int = 2
    offset: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.degree, int) or not 1 <= self.degree <= 6 or not self.offset >= 0:
            raise ConfigError(
                f"polynomial features: degree must be an integer from 1 to 6 and offset >= 0, got {self.degree} and "
                f"{self.offset}"
            )

    def linearise(self, X: Array) -> tuple[Array, Pull]:
        _check_rows(X, None, self)
        xp, d = namespace_of(X), X.shape[1]
        chosen = np.array(list(itertools.combinations_with_replacement(range(d + 1), self.degree)))
        counts = [[math.factorial(int(c)) for c in np.bincount(row, minlength=d + 1)] for row in chosen]
        weights = np.array([math.sqrt(math.factorial(self.degree) / math.prod(row)) for row in counts])
        ones = X[:, :1] * 0 + math.sqrt(self.offset)
        extended = xp.concat([X, ones], axis=1)
        # Columns are selected by products with 0/1 matrices: exact, and available in every array library.
        pick = [like(np.arange(d + 1)[:, None] == chosen[None, :, k], X) for k in range(self.degree)]
        factors = [extended @ E for E in pick]
        weight = like(weights, X)[None, :]
        Z = weight * math.prod(factors[1:], start=factors[0])

        def pull(Z_bar: Array, inputs: bool = False) -> tuple[Gradients, Array]:
            if not inputs:
                return {}, None
            bar = Z_bar * weight
            total = sum(
                (bar * math.prod(factors[:k] + factors[k + 1 :])) @ E.T for k, E in enumerate(pick)
            )  # fmt: skip
            return {}, total[:, :d]

        return Z, pull


@dataclass(frozen=True, eq=False, repr=False)
class Spectral(Features):
    """Cosines of random or learned frequencies.   [ASKL, equations 5 and 6]

    With a = xᵀΩ, a' = xᵀΩ' (columns of `first` and `second`):

        form           second None, stationary   non-stationary
        "2D"           [cos a, sin a] / √D       [cos a + cos a', sin a + sin a'] / 2√D     2D features, no phases
        "D"            √(2/D) cos(a + b)         [cos(a + b) + cos(a' + b)] / √(2D)         one b for both cosines
        "independent"  (the same)                [cos(a + b) + cos(a' + b')] / √(2D)        as printed

    "2D", and "D" on average over b ~ U[0, 2π], have the intended kernel: at x and y the mean over frequencies of
    ¼ [cos(a_x - a_y) + cos(a'_x - a'_y) + cos(a_x - a'_y) + cos(a'_x - a_y)]. With an independent b', as printed in the
    paper, the last two terms are 0 on average, and the rest is stationary.
    """

    name = "spectral"
    learned = ("first", "second")
    drawn = ("phases", "second_phases")
    first: Any = None
    second: Any = None
    phases: Any = None
    second_phases: Any = None
    """None: the phases are those of the first set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first is None or self.first.ndim != 2:
            raise ConfigError("spectral features: `first` must be a matrix with one column per frequency")
        if self.second is not None and self.second.shape != self.first.shape:
            raise ConfigError(f"the two sets of frequencies differ in shape: {self.first.shape}, {self.second.shape}")
        if self.second_phases is not None and (self.second is None or self.phases is None):
            raise ConfigError("`second_phases` requires `second` and `phases`")

    def linearise(self, X: Array) -> tuple[Array, Pull]:
        _check_rows(X, self.first.shape[0], self)
        xp, D, two = namespace_of(X), self.first.shape[1], self.second is not None
        bare = self.phases is None
        size = (1 / (2 if two else 1) if bare else math.sqrt(0.5 if two else 2.0)) / math.sqrt(D)
        sets = [("first", like(self.first, X), self.phases)]
        if two:
            own = self.phases if self.second_phases is None else self.second_phases
            sets.append(("second", like(self.second, X), own))
        angles = [X @ omega if b is None else X @ omega + like(b, X)[None, :] for _, omega, b in sets]
        cosines = [xp.cos(a) for a in angles]
        sines = [xp.sin(a) for a in angles] if bare else None
        Z = (cosines[0] + cosines[1] if two else cosines[0]) * size
        if sines is not None:
            Z = xp.concat([Z, sum(sines[1:], start=sines[0]) * size], axis=1)

        def pull(Z_bar: Array, inputs: bool = False) -> tuple[Gradients, Array]:
            gradients, X_bar = {}, None
            down = Z_bar[:, :D] * -size
            # With phases only the gradient needs sines, so they are computed here and not in the forward pass.
            for (name, omega, _), cosine, sine in zip(sets, cosines, sines or map(xp.sin, angles), strict=True):
                bar = down * sine
                if bare:
                    bar = bar + Z_bar[:, D:] * (cosine * size)
                gradients[name] = X.T @ bar
                if inputs:
                    X_bar = bar @ omega.T if X_bar is None else X_bar + bar @ omega.T
            return gradients, X_bar

        return Z, pull

    def to_config(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "features": int(self.first.shape[1]),
            "stationary": self.second is None,
            "form": "2D" if self.phases is None else "D" if self.second_phases is None else "independent",
        }


ACTIVATIONS = ("relu", "tanh", "gelu", "cosine", "identity")
_GELU, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _activate(name: str, A: Array) -> tuple[Array, Callable[[], Array]]:
    """f(A), and a function that gives f'(A)."""
    xp = namespace_of(A)
    if name == "relu":
        active = A > 0
        return xp.where(active, A, A * 0), lambda: xp.where(active, A * 0 + 1, A * 0)
    if name == "tanh":
        T = xp.tanh(A)
        return T, lambda: 1 - T * T
    if name == "cosine":
        return xp.cos(A), lambda: -xp.sin(A)
    if name == "gelu":  # the tanh form: the array API standard has no error function
        T = xp.tanh(_GELU * (A + _CUBIC * A * A * A))
        return 0.5 * A * (1 + T), lambda: (
            0.5 * (1 + T) + 0.5 * A * (1 - T * T) * _GELU * (1 + 3 * _CUBIC * A * A)
        )  # fmt: skip
    return A, lambda: A * 0 + 1


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Features):
    """One layer, f(x W + b)."""

    name = "dense"
    learned = ("weight", "bias")
    weight: Any = None
    bias: Any = None
    activation: str = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise ConfigError(f"activation={self.activation!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
        if self.weight is None or self.weight.ndim != 2 or self.bias.shape != self.weight.shape[1:]:
            raise ConfigError("dense layer: weight must have shape (inputs, units), bias shape (units,)")

    def linearise(self, X: Array) -> tuple[Array, Pull]:
        _check_rows(X, self.weight.shape[0], self)
        xp, W = namespace_of(X), like(self.weight, X)
        Z, slope = _activate(self.activation, X @ W + like(self.bias, X)[None, :])

        def pull(Z_bar: Array, inputs: bool = False) -> tuple[Gradients, Array]:
            A_bar = Z_bar * slope()
            gradients = {"weight": X.T @ A_bar, "bias": xp.sum(A_bar, axis=0)}
            return gradients, (A_bar @ W.T if inputs else None)

        return Z, pull

    def to_config(self) -> dict[str, Any]:
        return {"name": self.name, "units": int(self.weight.shape[1]), "activation": self.activation}


def dropout_mask(rate: float, key: Sequence[int], reference: Array) -> Array:
    """0 with probability `rate`, else 1/(1 - rate): an array like `reference`, a function of `key`."""
    rng = np.random.default_rng(list(key))
    kept = rng.random(reference.shape, dtype=np.float32) >= rate
    return like(kept / (1 - rate), reference)


@dataclass(frozen=True, eq=False, repr=False)
class Dropout(Features):
    """Random features set to 0 during learning; the identity until `sampled(key)` fixes the mask."""

    name = "dropout"
    rate: float = 0.5
    key: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.rate < 1:
            raise ConfigError(f"dropout rate={self.rate!r}: must be a number >= 0 and < 1")

    def sampled(self, key: Sequence[int]) -> Self:
        return dataclasses.replace(self, key=tuple(int(k) for k in key))

    def linearise(self, X: Array) -> tuple[Array, Pull]:
        if self.key is None or self.rate == 0:
            return X, lambda Z_bar, inputs=False: ({}, Z_bar)
        mask = dropout_mask(self.rate, self.key, X)
        return X * mask, lambda Z_bar, inputs=False: ({}, Z_bar * mask)

    def to_config(self) -> dict[str, Any]:
        return {"name": self.name, "rate": self.rate}


def _of_part(i: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of part i, without its prefix."""
    return {name.split(".", 1)[1]: value for name, value in values.items() if name.startswith(f"{i}.")}


@dataclass(frozen=True, eq=False, repr=False)
class Stack(Features):
    """One map after the other; parameters of part i carry the prefix "i."."""

    name = "stack"
    parts: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ConfigError("a stack must have at least one feature map")

    def linearise(self, X: Array) -> tuple[Array, Pull]:
        Z, pulls = X, []
        for part in self.parts:
            Z, pull_part = part.linearise(Z)
            pulls.append(pull_part)

        def pull(Z_bar: Array, inputs: bool = False) -> tuple[Gradients, Array]:
            gradients: Gradients = {}
            for i in reversed(range(len(pulls))):
                found, Z_bar = pulls[i](Z_bar, inputs=inputs or i > 0)
                gradients.update({f"{i}.{name}": value for name, value in found.items()})
            return gradients, Z_bar

        return Z, pull

    def forward(self, X: Array) -> Array:
        for part in self.parts:
            X = part.forward(X)
        return X

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        return {f"{i}.{name}": value for i, part in enumerate(self.parts) for name, value in part.parameters.items()}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {f"{i}.{name}": value for i, part in enumerate(self.parts) for name, value in part.arrays.items()}

    def _replaced(self, values: Mapping[str, Any]) -> Self:
        own = [
            {n.split(".", 1)[1]: v for n, v in values.items() if n.startswith(f"{i}.")} for i in range(len(self.parts))
        ]
        parts = [part.replace(**changes) for part, changes in zip(self.parts, own, strict=True)]
        return dataclasses.replace(self, parts=tuple(parts))

    def sampled(self, key: Sequence[int]) -> Self:
        return dataclasses.replace(self, parts=tuple(part.sampled((*key, i)) for i, part in enumerate(self.parts)))

    def to_config(self) -> dict[str, Any]:
        return {"name": self.name, "parts": [part.to_config() for part in self.parts]}

    def __repr__(self) -> str:
        return f"Stack({', '.join(map(repr, self.parts))})"


# --- drawing maps -----------------------------------------------------------------------------------


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
    known = ("stack", *_PLAIN, *_DRAWN)
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"feature map {name!r} is unknown{hint} (known: {', '.join(known)})")
    try:
        if name in _PLAIN:
            return _PLAIN[name](**settings)
        if name == "stack":
            return _stack_from_config(settings["parts"], n_features, seed, arrays)
        if arrays is not None:
            kinds: dict[str, type[Features]] = {"dense": Dense, "spectral": Spectral}
            activation = {"activation": settings["activation"]} if name == "dense" else {}
            return kinds[name](**arrays, **activation)
        if n_features is None:
            raise ConfigError(f"feature map {name!r}: n_features is required to draw it")
        return _DRAWN[name](n_features, **settings, seed=seed)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"feature map {name!r}: invalid settings {settings}: {error}") from error


def _stack_from_config(
    configs: Sequence[Any], n_features: int | None, seed: int, arrays: Mapping[str, np.ndarray] | None
) -> Stack:
    parts: list[Any] = []
    for i, config in enumerate(configs):
        part = from_config(config, n_features, seed + i, None if arrays is None else _of_part(i, arrays))
        if n_features is not None and arrays is None:
            n_features = int(part.forward(np.zeros((1, n_features))).shape[1])
        parts.append(part)
    return Stack(tuple(parts))
