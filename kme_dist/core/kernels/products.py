"""Kernels of the inner product, and of strings."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import (
    Array,
    like,
    matmul,
    namespace_of,
)
from kme_dist.core.kernels.base import (
    Gradients,
    Kernel,
    by_shape,
    check_vectors,
)
from kme_dist.core.kernels.sparse import cross_sums, divided, squared_norms
from kme_dist.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False, repr=False)
class Polynomial(Kernel):
    """k(x, x') = scale² (Σ_d x_d x'_d / length_scale_d² + offset)^degree; without length_scale, plain x·x'."""

    name = "polynomial"
    degree: int = 2
    scale: Any = 1.0
    offset: Any = 1.0
    length_scale: Any = None
    learned = ("scale", "offset", "length_scale")
    bounded = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.degree, int) or self.degree < 1:
            raise ConfigError(f"{type(self).__name__}(degree={self.degree!r}): must be an integer >= 1")

    def prepare(self, X: Array) -> Array:
        check_vectors(X, self, self.length_scale)
        return X if self.length_scale is None else divided(X, self.length_scale)

    def _offset(self) -> float:
        return 0.0 if self.offset is None else float(self.offset)

    def _base(self, X: Array, X2: Array, out: Array = None) -> Array:
        base = matmul(X, X2.T, out)
        if self._offset():
            base += self._offset()
        return base

    def evaluate(self, X: Array, X2: Array, out: Array = None) -> Array:
        K = self._base(X, X2, out)
        if self.degree > 1:
            K **= self.degree
        K *= float(self.scale) ** 2
        return K

    def diag(self, X: Array) -> Array:
        Z = self.prepare(X)
        base = squared_norms(Z)[:, 0] + self._offset()
        return float(self.scale) ** 2 * base**self.degree

    def _base_bar(self, X: Array, X2: Array, K_bar: Array) -> Array:
        slope = self.degree * float(self.scale) ** 2
        if self.degree == 1:
            return K_bar * slope
        return K_bar * (slope * self._base(X, X2) ** (self.degree - 1))

    def pullback(self, X: Array, X2: Array, K: Array | None, K_bar: Array) -> Gradients:
        xp = namespace_of(K_bar)
        K = self.evaluate(X, X2) if K is None else K
        gradients = {"scale": 2 * xp.sum(K_bar * K)}
        B_bar = self._base_bar(X, X2, K_bar)
        if self.offset is not None:
            gradients["offset"] = self._offset() * xp.sum(B_bar)
        if self.length_scale is not None:
            gradients["length_scale"] = by_shape(-2 * cross_sums(B_bar, X, X2), self.length_scale)
        return gradients

    def input_pullback(self, X: Array, X2: Array, K_bar: Array) -> tuple[Array, Array]:
        B_bar = self._base_bar(X, X2, K_bar)
        ell = 1.0 if self.length_scale is None else like(self.length_scale, X)
        return (B_bar @ X2) / ell, (B_bar.T @ X) / ell


@dataclass(frozen=True, eq=False, repr=False)
class Linear(Polynomial):
    """k(x, x') = scale² Σ_d x_d x'_d / length_scale_d²; without length_scale, scale² x·x'."""

    name = "linear"
    degree: int = dataclasses.field(default=1, init=False)
    offset: Any = dataclasses.field(default=None, init=False)

    def to_config(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_config().items() if name != "degree"}


@dataclass(frozen=True, eq=False, repr=False)
class Spectrum(Kernel):
    """The p-spectrum kernel of strings and other sequences: how many substrings of length p two of them share.

    Sequences are lists or tuples of words, numbers or anything else that can be compared for equality.
    k(s, t) = scale² <c(s), c(t)>, c counting every substring of length p; with `normalize` each count vector has
    length one, so that k(s, s) = scale² (a string shorter than p has no substrings and only resembles equal strings).
    """

    name = "spectrum"
    p: int = 3
    scale: Any = 1.0
    normalize: bool = True
    learned = ("scale",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.p, int) or self.p < 1:
            raise ConfigError(f"Spectrum(p={self.p!r}): must be an integer >= 1")

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return self.normalize

    def prepare(self, X: Any) -> list[dict[Any, float]]:
        counts = []
        for given in X:
            if not isinstance(given, str | list | tuple):
                raise DataError(f"Spectrum expects strings, got {type(given).__name__}")
            text = given if isinstance(given, str) else tuple(given)
            count: Counter[Any] = Counter(text[i : i + self.p] for i in range(len(text) - self.p + 1))
            if self.normalize and not count:
                count[text] = 1
            size = math.sqrt(sum(v * v for v in count.values())) if self.normalize else 1.0
            counts.append({key: value / size for key, value in count.items()})
        return counts

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> np.ndarray:
        from scipy.sparse import csr_array

        index: dict[Any, int] = {}

        def matrix(counts: list[dict[Any, float]]) -> Any:
            columns = [index.setdefault(key, len(index)) for count in counts for key in count]
            values = [value for count in counts for value in count.values()]
            starts = np.cumsum([0, *(len(count) for count in counts)])
            return values, columns, starts

        left, right = matrix(X), matrix(X2)
        width = max(len(index), 1)
        A = csr_array(left, shape=(len(X), width), dtype=np.float64)
        B = csr_array(right, shape=(len(X2), width), dtype=np.float64)
        K: np.ndarray = (A @ B.T).toarray() * float(self.scale) ** 2
        return K

    def diag(self, X: Any) -> np.ndarray:
        if self.normalize:
            return np.full(len(X), float(self.scale) ** 2)
        squares = [sum(v * v for v in count.values()) for count in self.prepare(X)]
        return np.asarray(squares, dtype=np.float64) * float(self.scale) ** 2

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        K = self.evaluate(X, X2) if K is None else K
        return {"scale": 2 * namespace_of(K_bar).sum(K_bar * K)}
