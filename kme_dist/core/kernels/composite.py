"""Kernels made of kernels: sums, products, scaling, convex combinations, kernels on features."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import (
    Array,
    namespace_of,
)
from kme_dist.core.kernels.base import (
    Gradients,
    Kernel,
    add_gradients,
    row_count,
)
from kme_dist.errors import ConfigError


@dataclass(frozen=True, eq=False, repr=False)
class Composite(Kernel):
    """A kernel made of parts; parameters of part i carry the prefix "i."."""

    parts: tuple[Kernel, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not self.parts or not all(isinstance(part, Kernel) for part in self.parts):
            raise ConfigError(f"{type(self).__name__} expects kernels as parts, got {self.parts!r}")
        super().__post_init__()

    @classmethod
    def flatten(cls, kernel: Kernel) -> tuple[Kernel, ...]:
        """The parts of a kernel of the same class, else the kernel itself: (a + b) + c has three parts."""
        return kernel.parts if type(kernel) is cls else (kernel,)

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return all(part.bounded for part in self.parts)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        own = super().parameters
        for i, part in enumerate(self.parts):
            own.update({f"{i}.{name}": value for name, value in part.parameters.items()})
        return own

    def _replaced(self, changes: Mapping[str, Any]) -> Kernel:
        parts = [
            part.replace({k[len(f"{i}.") :]: v for k, v in changes.items() if k.startswith(f"{i}.")})
            for i, part in enumerate(self.parts)
        ]
        own = {name: changes[name] for name in self.learned if name in changes}
        return dataclasses.replace(self, parts=tuple(parts), **own)

    def _settings(self) -> dict[str, Any]:
        """Parts are k1, k2, ..., as in scikit-learn's kernels."""
        own = {name: value for name, value in super()._settings().items() if name != "parts"}
        return {f"k{i}": part for i, part in enumerate(self.parts, start=1)} | own

    def _with_settings(self, own: Mapping[str, Any]) -> Kernel:
        parts = tuple(own.get(f"k{i}", part) for i, part in enumerate(self.parts, start=1))
        return dataclasses.replace(self, parts=parts, **{n: v for n, v in own.items() if hasattr(self, n)})

    def prepare(self, X: Any) -> Any:
        return tuple(part.prepare(X) for part in self.parts)

    def prepare_beside(self, X: Any, prepared: Any) -> Any:
        return tuple(part.prepare_beside(X, prepared[i]) for i, part in enumerate(self.parts))

    def _tiles(self, X: Any, X2: Any) -> list[Array]:
        return [part.evaluate(X[i], X2[i]) for i, part in enumerate(self.parts)]

    def part_bars(self, tiles: list[Array], K_bar: Array) -> list[Array]:
        """dK/dK_i applied to K_bar, for every part."""
        raise ConfigError(f"{type(self).__name__} must define part_bars(tiles, K_bar)")

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        tiles = self._tiles(X, X2)
        gradients = self.own_pullback(tiles, K_bar)
        for i, bar in enumerate(self.part_bars(tiles, K_bar)):
            part = self.parts[i].pullback(X[i], X2[i], tiles[i], bar)
            gradients.update({f"{i}.{name}": value for name, value in part.items()})
        return gradients

    def own_pullback(self, tiles: list[Array], K_bar: Array) -> Gradients:
        return {}

    def collect(self, gradients: Gradients) -> Gradients:
        collected = {name: value for name, value in gradients.items() if name in self.learned}
        for i, part in enumerate(self.parts):
            own = {n[len(f"{i}.") :]: value for n, value in gradients.items() if n.startswith(f"{i}.")}
            collected.update({f"{i}.{name}": value for name, value in part.collect(own).items()})
        return collected

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        bars = self.part_bars(self._tiles(X, X2), K_bar)
        pairs = [p.input_pullback(X[i], X2[i], bars[i]) for i, p in enumerate(self.parts)]
        return sum(first for first, _ in pairs), sum(second for _, second in pairs)

    def to_config(self) -> dict[str, Any]:
        config = super().to_config()
        return {**config, "parts": [part.to_config() for part in self.parts]}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.parts))})"


@dataclass(frozen=True, eq=False, repr=False)
class Sum(Composite):
    """k = Σ_i k_i."""

    name = "sum"

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        K = self.parts[0].evaluate(X[0], X2[0], out)
        for i, part in enumerate(self.parts[1:], start=1):
            K += part.evaluate(X[i], X2[i])
        return K

    def diag(self, X: Any) -> Array:
        return sum(part.diag(X) for part in self.parts)

    def part_bars(self, tiles: list[Array], K_bar: Array) -> list[Array]:
        return [K_bar + 0 for _ in tiles]


@dataclass(frozen=True, eq=False, repr=False)
class Product(Composite):
    """k = Π_i k_i."""

    name = "product"

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        K = self.parts[0].evaluate(X[0], X2[0], out)
        for i, part in enumerate(self.parts[1:], start=1):
            K *= part.evaluate(X[i], X2[i])
        return K

    def diag(self, X: Any) -> Array:
        return math.prod(part.diag(X) for part in self.parts)

    def part_bars(self, tiles: list[Array], K_bar: Array) -> list[Array]:
        return [K_bar * math.prod(tile for j, tile in enumerate(tiles) if j != i) for i in range(len(tiles))]


@dataclass(frozen=True, eq=False, repr=False)
class Scaled(Composite):
    """scale² k, with one part: the result of `c * k`, with c = scale²."""

    name = "scaled"
    scale: Any = 1.0
    learned = ("scale",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.parts) != 1:
            raise ConfigError(f"Scaled takes one kernel, got {len(self.parts)}")

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        K = self.parts[0].evaluate(X[0], X2[0], out)
        K *= float(self.scale) ** 2
        return K

    def diag(self, X: Any) -> Array:
        return self.parts[0].diag(X) * float(self.scale) ** 2

    def part_bars(self, tiles: list[Array], K_bar: Array) -> list[Array]:
        return [K_bar * float(self.scale) ** 2]

    def own_pullback(self, tiles: list[Array], K_bar: Array) -> Gradients:
        return {"scale": 2 * float(self.scale) ** 2 * namespace_of(K_bar).sum(K_bar * tiles[0])}


@dataclass(frozen=True, eq=False, repr=False)
class ConvexCombination(Composite):
    """k = Σ_i w_i k_i / Σ_j w_j: weights that sum to one for any parameters."""

    name = "convex_combination"
    weights: Any = None
    learned = ("weights",)

    def __post_init__(self) -> None:
        if self.weights is None:
            object.__setattr__(self, "weights", np.ones(len(self.parts)))
        super().__post_init__()
        if self.weights.shape != (len(self.parts),):
            raise ConfigError(
                f"ConvexCombination of {len(self.parts)} kernels: weights must have one entry per kernel, got shape "
                f"{self.weights.shape}"
            )

    @property
    def shares(self) -> list[float]:
        return [float(weight) for weight in self.weights / self.weights.sum()]

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        tiles = self._tiles(X, X2)
        return sum(share * tile for share, tile in zip(self.shares, tiles, strict=True))

    def diag(self, X: Any) -> Array:
        return sum(s * part.diag(X) for s, part in zip(self.shares, self.parts, strict=True))

    def part_bars(self, tiles: list[Array], K_bar: Array) -> list[Array]:
        return [K_bar * share for share in self.shares]

    def own_pullback(self, tiles: list[Array], K_bar: Array) -> Gradients:
        xp = namespace_of(K_bar)
        K = sum(share * tile for share, tile in zip(self.shares, tiles, strict=True))
        by_part = [share * xp.sum(K_bar * (tile - K)) for share, tile in zip(self.shares, tiles, strict=True)]
        return {"weights": xp.stack(by_part)}


def convex_combination(*kernels: Kernel, weights: Sequence[float] | None = None) -> Kernel:
    """The convex combination of kernels, by default with equal weights (learned like any parameter)."""
    return ConvexCombination(parts=kernels, weights=weights)


@dataclass(frozen=True)
class _Rows:
    """A slice of rows, and the array it was taken from."""

    whole: Any
    start: int
    stop: int

    def __getitem__(self, rows: slice) -> _Rows:
        start, stop, _ = rows.indices(self.stop - self.start)
        return _Rows(self.whole, self.start + start, self.start + max(start, stop))


class _Cotangents:
    """Cotangents of features, summed over tiles; a sum is accumulated in its first term, which is not shared."""

    def __init__(self, *pieces: tuple[_Rows, Array]) -> None:
        self._held: dict[int, tuple[Any, Array]] = {}
        self._pieces = list(pieces)

    def __add__(self, other: _Cotangents) -> _Cotangents:
        for rows, Z_bar in (*self._pieces, *other._pieces):
            if id(rows.whole) not in self._held:
                zeros = Z_bar[:1, :] * 0
                size = (row_count(rows.whole), Z_bar.shape[1])
                self._held[id(rows.whole)] = rows.whole, namespace_of(Z_bar).broadcast_to(zeros, size) + 0
            self._held[id(rows.whole)][1][rows.start : rows.stop, :] += Z_bar
        self._pieces = []
        return self

    def gradients(self, features: Any) -> Gradients:
        total: Gradients = {}
        for X, Z_bar in (self + _Cotangents())._held.values():
            add_gradients(total, features.vjp(X, Z_bar))
        return total


@dataclass(frozen=True, eq=False, repr=False)
class OnFeatures(Kernel):
    """k(φ(x), φ(x')): any kernel of vectors on top of a feature map, both learned together.

    `features` must have `forward(X)`, `vjp(X, Z_bar)`, `parameters` and `replace`; its parameters have the prefix
    "features." and are not learned as logarithms (a network's weights may be negative). The derivative passes through φ
    once, however many tiles a Gram matrix has.
    """

    name = "on_features"
    kernel: Any = None
    features: Any = None

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return bool(self.kernel.bounded)

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        own = dict(self.kernel.parameters)
        own.update({f"features.{name}": v for name, v in self.features.parameters.items()})
        return own

    def _replaced(self, changes: Mapping[str, Any]) -> Kernel:
        prefix = "features."
        inner = {n[len(prefix) :]: v for n, v in changes.items() if n.startswith(prefix)}
        outer = {n: v for n, v in changes.items() if not n.startswith(prefix)}
        features = self.features.replace(**inner) if inner else self.features
        return OnFeatures(self.kernel.replace(outer), features)

    def prepare(self, X: Any) -> Any:
        return _Rows(X, 0, row_count(X)), self.kernel.prepare(self.features.forward(X))

    def prepare_beside(self, X: Any, prepared: Any) -> Any:
        return _Rows(X, 0, row_count(X)), self.kernel.prepare_beside(self.features.forward(X), prepared[1])

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> Array:
        return self.kernel.evaluate(X[1], X2[1], out)

    def diag(self, X: Any) -> Array:
        return self.kernel.diag(self.features.forward(X))

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        Z_bar, Z2_bar = self.kernel.input_pullback(X[1], X2[1], K_bar + 0)
        gradients = dict(self.kernel.pullback(X[1], X2[1], K, K_bar))
        gradients["features"] = _Cotangents((X[0], Z_bar), (X2[0], Z2_bar))
        return gradients

    def collect(self, gradients: Gradients) -> Gradients:
        inner = gradients["features"].gradients(self.features)
        own = self.kernel.collect({name: value for name, value in gradients.items() if name != "features"})
        return {**own, **{f"features.{name}": value for name, value in inner.items()}}

    def to_config(self) -> dict[str, Any]:
        """With the map's arrays as lists: two kernels are equal when their maps are."""
        config: dict[str, Any] = {"name": self.name, "kernel": self.kernel.to_config()}
        if not hasattr(self.features, "to_config"):
            return {**config, "features": {name: np.asarray(v).tolist() for name, v in self.parameters.items()}}
        arrays = {name: value.tolist() for name, value in self.features.arrays.items()}
        return {**config, "features": {**self.features.to_config(), "arrays": arrays}}

    def __repr__(self) -> str:
        return f"OnFeatures({self.kernel!r}, {self.features!r})"
