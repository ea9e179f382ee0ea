"""The classes of explicit feature maps; `kme_dist.core.features` draws and restores them, and describes their use."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from kme_dist.backend import Array, like, namespace_of
from kme_dist.core.kernels.base import Gradients
from kme_dist.errors import ConfigError, DataError


def _is_single(value: Any) -> bool:
    return getattr(value, "dtype", None) == np.float32


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
                array = np.array(value, dtype=np.float32 if _is_single(value) else np.float64)
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


ACTIVATIONS = ("relu", "tanh", "gelu", "cosine", "softmax", "identity")
_GELU, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _activate(name: str, A: Array) -> tuple[Array, Callable[[Array], Array]]:
    """f(A), and from the cotangent of f(A) that of A."""
    xp = namespace_of(A)
    if name == "relu":
        Z = np.maximum(A, 0) if isinstance(A, np.ndarray) else xp.where(A > 0, A, A * 0)
        # NumPy multiplies by a mask eight times faster than it selects.
        return Z, lambda Z_bar: Z_bar * (Z > 0) if xp is np else xp.where(Z > 0, Z_bar, Z_bar * 0)
    if name == "tanh":
        T = xp.tanh(A)
        return T, lambda Z_bar: Z_bar * (1 - T * T)
    if name == "cosine":
        return xp.cos(A), lambda Z_bar: Z_bar * -xp.sin(A)
    if name == "softmax":
        E = xp.exp(A - xp.max(A, axis=1, keepdims=True))
        P = E / xp.sum(E, axis=1, keepdims=True)
        return P, lambda Z_bar: P * (Z_bar - xp.sum(P * Z_bar, axis=1, keepdims=True))
    if name == "gelu":  # the tanh form: the array API standard has no error function
        T = xp.tanh(_GELU * (A + _CUBIC * A * A * A))
        return 0.5 * A * (1 + T), lambda Z_bar: Z_bar * (
            0.5 * (1 + T) + 0.5 * A * (1 - T * T) * _GELU * (1 + 3 * _CUBIC * A * A)
        )  # fmt: skip
    return A, lambda Z_bar: Z_bar


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
        A = X @ W
        A += like(self.bias, X)[None, :]
        Z, pull_activation = _activate(self.activation, A)

        def pull(Z_bar: Array, inputs: bool = False) -> tuple[Gradients, Array]:
            A_bar = pull_activation(Z_bar)
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


def of_part(i: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of part i, without its prefix."""
    return {name.split(".", 1)[1]: value for name, value in values.items() if name.startswith(f"{i}.")}


@dataclass(frozen=True, eq=False, repr=False)
class _Parts(Features):
    """Several maps; parameters of part i carry the prefix "i."."""

    parts: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts:
            raise ConfigError(f"a {self.name} must have at least one feature map")

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        return {f"{i}.{name}": value for i, part in enumerate(self.parts) for name, value in part.parameters.items()}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {f"{i}.{name}": value for i, part in enumerate(self.parts) for name, value in part.arrays.items()}

    def _replaced(self, values: Mapping[str, Any]) -> Self:
        parts = [part.replace(**of_part(i, values)) for i, part in enumerate(self.parts)]
        return dataclasses.replace(self, parts=tuple(parts))

    def sampled(self, key: Sequence[int]) -> Self:
        return dataclasses.replace(self, parts=tuple(part.sampled((*key, i)) for i, part in enumerate(self.parts)))

    def to_config(self) -> dict[str, Any]:
        return {"name": self.name, "parts": [part.to_config() for part in self.parts]}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.parts))})"


@dataclass(frozen=True, eq=False, repr=False)
class Stack(_Parts):
    """One map after the other."""

    name = "stack"

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


@dataclass(frozen=True, eq=False, repr=False)
class Joint(_Parts):
    """Maps side by side: the features of all of them."""

    name = "joint"

    def linearise(self, X: Array) -> tuple[Array, Pull]:
        pairs = [part.linearise(X) for part in self.parts]
        ends = list(itertools.accumulate((Z.shape[1] for Z, _ in pairs), initial=0))

        def pull(Z_bar: Array, inputs: bool = False) -> tuple[Gradients, Array]:
            gradients: Gradients = {}
            X_bar = None
            for i, (_, pull_part) in enumerate(pairs):
                found, own = pull_part(Z_bar[:, ends[i] : ends[i + 1]], inputs=inputs)
                gradients.update({f"{i}.{name}": value for name, value in found.items()})
                X_bar = own if X_bar is None else X_bar + own if inputs else None
            return gradients, X_bar

        return namespace_of(X).concat([Z for Z, _ in pairs], axis=1), pull

    def forward(self, X: Array) -> Array:
        return namespace_of(X).concat([part.forward(X) for part in self.parts], axis=1)
