"""Passes of the independence tests over tiles of rows, on any executor: O(n²) work, memory of a few tiles.

    hsic_sums(kernel, target_kernel, x, y, permutations=200, seed=0, executor=...)   Σ K_ij L_ij, also permuted
    squared_sum(kernel, target_kernel, x, y, found, executor=...)                    for the gamma law
    residual_features(...), signed_draws(...)                                        the test given z

A `Variable` is the rows of one variable: an array, a list, columns of a data set, or its labels. A task reads the rows
of two blocks and returns a few numbers for each of the permutations or draws, which it makes itself from the seed and
the numbers of its blocks; so nothing of the size of the sample is sent but row sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kme_dist.core.independence import Noise, ResidualFeatures, RowSums, Tested, WithOnes, signed_sums
from kme_dist.core.kernels.base import Kernel, select
from kme_dist.core.sums import Centres, Sums, sum_rows
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.plan import BatchPlan
from kme_dist.data.rows import RowsRef
from kme_dist.run.conditional import as_targets
from kme_dist.run.executors import Executor
from kme_dist.run.means import BLOCK_ROWS, block_pairs

TILE_ROWS = 512  # rows of a block within which rows are permuted: tiles that stay in a cache while they are
_SIGNED_ROWS = 2_048


@dataclass(frozen=True)
class Variable:
    """The rows of one variable; `numbers` selects some of them, in this order."""

    rows: RowsRef
    labels: bool = False  # the labels of the rows instead of the rows
    numbers: np.ndarray | None = None

    @property
    def count(self) -> int:
        return self.rows.count if self.numbers is None else len(self.numbers)

    def read(self) -> Any:
        return self._chosen(*(self.rows.read() if self.numbers is None else self.rows.take(self.numbers)))

    def sample(self, size: int, seed: int) -> Any:
        """At most `size` random rows: rows of the same numbers of every variable with this many, wherever they are."""
        if size >= self.count:
            return self.read()
        drawn = BatchPlan(((0, self.count),), size, seed, "rows", "sampling").batch(0).rows
        assert drawn is not None
        drawn.sort()
        return replace(self, numbers=drawn if self.numbers is None else self.numbers[drawn]).read()

    def _chosen(self, X: Any, y: Any) -> Any:
        if not self.labels:
            return X
        classes = self.rows.source.classes
        return y if classes is None else np.asarray(classes)[y]

    @property
    def shuffled_at_ingest(self) -> bool:
        return not self.rows.in_memory and self.rows.source.shuffled is not None

    def shuffled(self, order: np.ndarray) -> Variable:
        """In this order: rows in memory are copied, rows on disk are read by their numbers."""
        if self.rows.in_memory and not self.labels:
            return Variable(RowsRef.of(ArrayRows(select(self.read(), order), None)))
        return replace(self, numbers=order)

    def parts(self, size: int) -> list[Variable]:
        if self.numbers is None:
            return [replace(self, rows=part) for part in self.rows.parts(size)]
        return [replace(self, numbers=self.numbers[at : at + size]) for at in range(0, self.count, size)]


def in_random_order(variables: Sequence[Variable], seed: int) -> list[Variable]:
    """The same random order of all of them. If all were shuffled at ingest they stay as they are; one that stays beside
    another that does not would be paired with rows of other observations."""
    if all(variable.shuffled_at_ingest for variable in variables):
        return list(variables)
    order = np.random.default_rng([seed, 8]).permutation(variables[0].count)
    return [variable.shuffled(order) for variable in variables]


# --- HSIC ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HSICSums:
    """Row sums of K and L, and Σ_ij K_ij L_o(i)o(j) for the identity and for every permutation o."""

    K: RowSums
    L: RowSums
    forms: np.ndarray
    orders: np.ndarray  # (permutations + 1, n)


# Of a pair of blocks: forms, and per block (row sums of K, of L, diagonals of K and L)
_Part = tuple[np.ndarray, dict[int, np.ndarray]]


def block_orders(seed: int, block: int, size: int, permutations: int) -> np.ndarray:
    """The identity and random orders of the rows of a block: (permutations + 1, size)."""
    rng = np.random.default_rng([seed, 6, block])
    return np.stack([np.arange(size), *(rng.permutation(size) for _ in range(permutations))])


def _tiles(
    kernels: tuple[Kernel, Kernel], left: Sequence[Variable], right: Sequence[Variable] | None
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """K and L of two blocks of rows, and both diagonals where the blocks are the same."""
    grams, diagonals = [], []
    for i, kernel in enumerate(kernels):
        rows = as_targets(left[i].read(), kernel)
        other = None if right is None else as_targets(right[i].read(), kernel)
        grams.append(np.asarray(kernel.gram(rows) if right is None else kernel.gram(rows, other), dtype=np.float64))
        diagonals.append(np.asarray(kernel.diag(rows), dtype=np.float64))
    return grams[0], grams[1], diagonals


def _hsic_part(
    kernels: tuple[Kernel, Kernel],
    i: int,
    left: Sequence[Variable],
    j: int,
    right: Sequence[Variable] | None,
    permutations: int,
    seed: int,
) -> _Part:
    K, L, diagonals = _tiles(kernels, left, right)
    rows, columns = (block_orders(seed, block, size, permutations) for block, size in ((i, len(K)), (j, K.shape[1])))
    flat, permuted, forms = K.reshape(-1), np.empty_like(L), np.empty(permutations + 1)
    for b, (o, q) in enumerate(zip(rows, columns, strict=True)):
        np.take(L[o], q, axis=1, out=permuted, mode="clip")
        forms[b] = flat @ permuted.reshape(-1)
    if right is None:
        return forms, {i: np.stack([K.sum(axis=1), L.sum(axis=1), *diagonals])}
    nothing = np.zeros(len(K)), np.zeros(K.shape[1])
    sums = {
        i: np.stack([K.sum(axis=1), L.sum(axis=1), nothing[0], nothing[0]]),
        j: np.stack([K.sum(axis=0), L.sum(axis=0), nothing[1], nothing[1]]),
    }
    return 2 * forms, sums


def _add_parts(left: _Part, right: _Part) -> _Part:
    sums = dict(left[1])
    for block, values in right[1].items():
        sums[block] = sums[block] + values if block in sums else values
    return left[0] + right[0], sums


def hsic_sums(
    kernels: tuple[Kernel, Kernel], x: Variable, y: Variable, *, permutations: int, seed: int, executor: Executor
) -> HSICSums:
    """One pass over all pairs of rows. The variables must be in random order if they are permuted."""
    blocks = list(zip(x.parts(TILE_ROWS), y.parts(TILE_ROWS), strict=True))
    calls = [
        (kernels, i, blocks[i], j, None if i == j else blocks[j], permutations, seed)
        for i, j in block_pairs(len(blocks))
    ]
    forms, sums = executor.map_reduce(_hsic_part, calls, _add_parts, name="hsic-tiles")
    joined = np.concatenate([sums[block] for block in range(len(blocks))], axis=1)
    starts = np.cumsum([0] + [block[0].count for block in blocks])
    orders = np.concatenate(
        [starts[b] + block_orders(seed, b, block[0].count, permutations) for b, block in enumerate(blocks)], axis=1
    )
    return HSICSums(RowSums(joined[0], joined[2]), RowSums(joined[1], joined[3]), forms, orders)


def _squares(
    kernels: tuple[Kernel, Kernel],
    left: Sequence[Variable],
    right: Sequence[Variable] | None,
    sums: tuple[np.ndarray, np.ndarray],
    means: tuple[float, float],
) -> float:
    K, L, _ = _tiles(kernels, left, right)
    for tile, along, mean in zip((K, L), sums, means, strict=True):
        tile -= along[: len(tile), None]
        tile -= along[None, len(along) - tile.shape[1] :]
        tile += mean
    products = K * L
    if right is None:
        np.fill_diagonal(products, 0.0)
    return (1 if right is None else 2) * float(np.sum(products * products))


def _add(left: Any, right: Any) -> Any:
    return left + right


def squared_sum(
    kernels: tuple[Kernel, Kernel], x: Variable, y: Variable, found: HSICSums, *, executor: Executor
) -> float:
    """Σ_{i≠j} ((HKH)_ij (HLH)_ij)², from a second pass with the row sums of the first."""
    n = x.count
    blocks = list(zip(x.parts(TILE_ROWS), y.parts(TILE_ROWS), strict=True))
    means = tuple(part.total / n**2 for part in (found.K, found.L))

    def along(i: int, j: int) -> tuple[np.ndarray, ...]:
        spans = [slice(b * TILE_ROWS, (b + 1) * TILE_ROWS) for b in ((i,) if i == j else (i, j))]
        return tuple(np.concatenate([part.sums[span] / n for span in spans]) for part in (found.K, found.L))

    calls = [
        (kernels, blocks[i], None if i == j else blocks[j], along(i, j), means) for i, j in block_pairs(len(blocks))
    ]
    return float(executor.map_reduce(_squares, calls, _add, name="hsic-variance"))


# --- given a third variable ---------------------------------------------------------------------------------


def _regression_sums(basis: Centres, targets: WithOnes, y: Variable, z: Variable) -> Sums:
    Z = z.read()
    if isinstance(Z, np.ndarray) and Z.dtype.kind != "f":  # labels: the sums are in double precision
        Z = Z.tolist()
    return sum_rows(basis, Z, as_targets(y.read(), targets.kernel), targets, _SIGNED_ROWS)


def residual_features(
    kernel: Kernel, C: Any, target_kernel: Kernel, D: Any, y: Variable, z: Variable, lam: float, *, executor: Executor
) -> ResidualFeatures:
    """The regression of l(y, ·), projected on D, on k(C, z): one pass over the rows."""
    basis, targets = Centres(kernel, C), WithOnes(target_kernel, D)
    calls = [(basis, targets, *part) for part in zip(y.parts(BLOCK_ROWS), z.parts(BLOCK_ROWS), strict=True)]
    sums = executor.map_reduce(_regression_sums, calls, _add, name="independence-moments")
    return ResidualFeatures.of(kernel, C, target_kernel, D, sums, z.count * lam)


def random_signs(seed: int, block: int, size: int, draws: int) -> np.ndarray:
    """A column of ones, then `draws` columns of random signs."""
    signs = 2.0 * np.random.default_rng([seed, 7, block]).integers(0, 2, size=(size, draws)) - 1.0
    return np.concatenate([np.ones((size, 1)), signs], axis=1)


_Pair = tuple[ResidualFeatures, ResidualFeatures]


def _read(residuals: _Pair, variables: Sequence[Variable]) -> tuple[list[np.ndarray], list[Noise], Any]:
    """Residuals of x and y of some rows, their noise, and z."""
    Z = variables[2].read()
    found = [
        residual.rows(as_targets(own.read(), residual.target_kernel), Z)
        for residual, own in zip(residuals, variables[:2], strict=True)
    ]
    return found, [residual.noise(R, Z) for residual, R in zip(residuals, found, strict=True)], Z


def _noise_moments(residuals: _Pair, variables: Sequence[Variable]) -> np.ndarray:
    x, y = _read(residuals, variables)[1]
    return _stacked(x.moments(), y.moments())


def _stacked(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Two square matrices as one array; their sizes may differ."""
    return np.concatenate([x.reshape(-1), y.reshape(-1)])


def _signed(
    residuals: _Pair,
    moments: np.ndarray,
    weight: Kernel,
    draws: int,
    seed: int,
    i: int,
    left: Sequence[Variable],
    j: int,
    right: Sequence[Variable] | None,
) -> np.ndarray:
    sizes = [len(residual.own) for residual in residuals]
    Omegas = [part.reshape(size, size) for part, size in zip(np.split(moments, [sizes[0] ** 2]), sizes, strict=True)]

    def tested(block: int, variables: Sequence[Variable]) -> tuple[Tested, Any]:
        (x, y), noise, Z = _read(residuals, variables)
        of_x, of_y = (own.sides(Omega) for own, Omega in zip(noise, Omegas, strict=True))
        return Tested((x, y), (of_x, of_y), random_signs(seed, block, len(x), draws)), Z

    own, Z = tested(i, left)
    if right is None:
        return signed_sums(weight, own, None, Z, None)
    other, Z2 = tested(j, right)
    return 2 * signed_sums(weight, own, other, Z, Z2)


def signed_draws(
    residuals: _Pair,
    weight: Kernel,
    variables: tuple[Variable, Variable, Variable],
    *,
    draws: int,
    seed: int,
    executor: Executor,
) -> np.ndarray:
    """The statistic, then `draws` of it under random signs, from one pass over the rows and one over all pairs."""
    blocks = list(zip(*(variable.parts(_SIGNED_ROWS) for variable in variables), strict=True))
    moments = executor.map_reduce(
        _noise_moments, [(residuals, block) for block in blocks], _add, name="independence-noise"
    )
    calls = [
        (residuals, moments, weight, draws, seed, i, blocks[i], j, None if i == j else blocks[j])
        for i, j in block_pairs(len(blocks))
    ]
    n = variables[2].count
    total = np.asarray(executor.map_reduce(_signed, calls, _add, name="independence-tiles"))
    total[0] -= total[-1]
    return total[:-1] / (n * (n - 1))
