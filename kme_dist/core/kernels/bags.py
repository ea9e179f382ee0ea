"""A kernel of bags: the inner product of the kernel means of two sets of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import Array, to_host
from kme_dist.core.kernels.base import Gradients, Kernel, add_gradients, row_count, take
from kme_dist.core.kernels.composite import Composite
from kme_dist.errors import ConfigError, DataError

_POINTS = 2_048  # of the bags in one tile of the inner kernel, on each side


class _Prepared:
    """Bags after `prepare`: their rows, prepared for the inner kernel, one bag after another."""

    def __init__(self, rows: Any, edges: np.ndarray) -> None:
        self.rows, self.edges = rows, edges

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.edges)

    def __getitem__(self, bags: slice) -> _Prepared:
        start, stop, _ = bags.indices(len(self))
        edges = self.edges[start : max(start, stop) + 1]
        return _Prepared(take(self.rows, slice(int(edges[0]), int(edges[-1]))), edges - edges[0])

    def parts(self) -> Iterator[slice]:
        """Consecutive bags with at most `_POINTS` rows together, at least one bag at a time."""
        start = 0
        while start < len(self):
            most = int(np.searchsorted(self.edges, self.edges[start] + _POINTS, side="right")) - 1
            yield slice(start, max(start + 1, most))
            start = max(start + 1, most)


@dataclass(frozen=True, eq=False, repr=False)
class Bags(Composite):
    """k(A, B) = <μ_A, μ_B> = 1/(|A| |B|) Σ_ij κ(a_i, b_j), κ the one part: `Bags(Gaussian())`.

    A row is a bag: a matrix with one row for each of its members, or a list of texts for a kernel of texts. Bags may be
    of any size >= 1.
    """

    name = "bags"

    def __init__(self, part: Kernel | None = None, *, parts: Sequence[Kernel] = ()) -> None:
        object.__setattr__(self, "parts", tuple(parts) if part is None else (part,))
        self.__post_init__()
        if len(self.parts) != 1:
            raise ConfigError(f"Bags expects one kernel of the members, got {len(self.parts)}")

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        return False  # |μ_A|² depends on the bag

    def prepare(self, X: Any) -> _Prepared:
        if not isinstance(X, list | tuple):
            raise DataError(f"Bags expects a list of bags, got {type(X).__name__}")
        sizes = [row_count(bag) for bag in X]
        if 0 in sizes:
            raise DataError(f"bag {sizes.index(0)} is empty; a bag must have at least one member")
        return _Prepared(self.parts[0].prepare(_together(X)), np.cumsum([0, *sizes]))

    def prepare_beside(self, X: Any, prepared: Any) -> _Prepared:
        sizes = [row_count(bag) for bag in X]
        return _Prepared(self.parts[0].prepare_beside(_together(X), prepared.rows), np.cumsum([0, *sizes]))

    def evaluate(self, X: Any, X2: Any, out: Array = None) -> np.ndarray:
        K = np.empty((len(X), len(X2)))
        for rows in X.parts():
            few = X[rows]
            for columns in X2.parts():
                other = X2[columns]
                tile = np.asarray(to_host(self.parts[0].evaluate(few.rows, other.rows)), np.float64)
                tile = np.add.reduceat(tile, few.edges[:-1], axis=0)
                K[rows, columns] = np.add.reduceat(tile, other.edges[:-1], axis=1)
        K /= X.sizes[:, None] * X2.sizes[None, :].astype(np.float64)
        return K

    def diag(self, X: Any) -> np.ndarray:
        prepared = self.prepare(X)
        return np.concatenate([self.evaluate(prepared[i : i + 1], prepared[i : i + 1])[0] for i in range(len(X))])

    def pullback(self, X: Any, X2: Any, K: Array | None, K_bar: Array) -> Gradients:
        total: Gradients = {}
        shares = K_bar / (X.sizes[:, None] * X2.sizes[None, :])
        for rows in X.parts():
            few = X[rows]
            for columns in X2.parts():
                other = X2[columns]
                bar = np.repeat(np.repeat(shares[rows, columns], few.sizes, axis=0), other.sizes, axis=1)
                add_gradients(total, self.parts[0].pullback(few.rows, other.rows, None, bar))
        return {f"0.{name}": value for name, value in total.items()}

    def input_pullback(self, X: Any, X2: Any, K_bar: Array) -> tuple[Array, Array]:
        raise ConfigError("Bags is not differentiable in its inputs")


def _together(bags: Any) -> Any:
    """The members of all bags, one bag after another."""
    if len(bags) and isinstance(bags[0], list | tuple) and isinstance(bags[0][0], str):
        return [member for bag in bags for member in bag]
    found = [np.asarray(bag, dtype=getattr(bag, "dtype", np.float64)) for bag in bags]
    widths = {bag.shape[1:] for bag in found}
    if len(widths) > 1 or any(bag.ndim != 2 for bag in found):
        raise DataError(f"bags must be matrices with one row for each member, got rows of shapes {sorted(widths)[:4]}")
    return np.concatenate(found) if found else np.zeros((0, 0))
