"""The kernel two-sample test: are two samples from the same distribution? In memory or out of core.

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> same = mmd_test(rng.normal(size=(80, 2)), rng.normal(size=(90, 2)))
>>> other = mmd_test(rng.normal(size=(80, 2)), rng.normal(1.0, 1.0, size=(90, 2)))
>>> same.p_value > 0.05, other.p_value < 0.05
(True, True)

Samples are arrays, lists of objects that the kernel accepts, or data sets, read by the workers of `client`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import norm

from kme_dist.core.kernels import Kernel
from kme_dist.core.means import tile_sums
from kme_dist.core.mmd import block_values, linear_values, spectral_null, unbiased
from kme_dist.data.frames import column_names, is_table
from kme_dist.data.rows import RowsRef, rows_of
from kme_dist.errors import ConfigError, DataError, counted
from kme_dist.models.means import check_finite, kernel_for
from kme_dist.models.objects import check_objects
from kme_dist.models.settings import RandomState, drawn_seed, fraction, seed
from kme_dist.run.executors import Executor
from kme_dist.run.means import block_pairs
from kme_dist.run.workers import executor_for

_BLOCK_ROWS = 2_048
_SPECTRAL_ROWS = 1_000
_NULLS = {"unbiased": ("permutation", "spectral"), "block": ("normal",), "linear": ("normal",)}


@dataclass(frozen=True)
class MMDTest:
    """The estimate of MMD² and its p-value under the null that both samples have the same distribution."""

    statistic: float
    p_value: float
    method: str
    null: str
    kernel: Kernel
    null_values: np.ndarray = field(repr=False)  # draws of the statistic under the null; empty for a normal one

    def rejects(self, level: float = 0.05) -> bool:
        """Whether the null hypothesis is rejected at this level, between 0 and 1."""
        fraction().check("level", level)
        return self.p_value <= level


def mmd_test(
    X: Any,
    Y: Any,
    kernel: str | Kernel = "gaussian",
    *,
    method: str = "unbiased",
    null: str | None = None,
    permutations: int = 200,
    block_size: int | None = None,
    client: Any = None,
    random_state: RandomState = 0,
) -> MMDTest:
    """Kernel two-sample test.

    Parameters
    ----------
    kernel : a kernel, or a name whose length scale is the median distance between rows of both samples.
    method : "unbiased" (all pairs, O(n²)), "block" (O(n · block_size)) or "linear" (O(n)).
    null : of "unbiased": "permutation" (exact level; all relabellings in one pass over the tiles) or "spectral" (from
        eigenvalues, asymptotic). The others are normal.
    permutations : relabellings, or draws of the spectral null.
    block_size : for "block"; None: the square root of the smaller sample's size.
    """
    if method not in _NULLS:
        raise ConfigError(f"method={method!r} is unknown; choose one of {', '.join(_NULLS)}")
    null = _NULLS[method][0] if null is None else null
    if null not in _NULLS[method]:
        raise ConfigError(f"null={null!r}: for method {method!r} choose {' or '.join(map(repr, _NULLS[method]))}")
    seed().check("random_state", random_state)
    if permutations < 1:
        raise ConfigError(f"permutations={permutations}: must be an integer >= 1")
    first, second = rows_of(X), rows_of(Y)
    m, n = first.count, second.count
    if min(m, n) < 2:
        raise DataError(f"a two-sample test requires at least two rows per sample, got {m} and {n}")
    widths = _features(first), _features(second)
    if widths[0] != widths[1]:
        shown = ["no numeric features" if width is None else counted(width, "feature") for width in widths]
        raise DataError(f"the first sample has {shown[0]}, the second {shown[1]}; they must have the same columns")
    _check_names(X, Y)
    for name, sample in (("first", first), ("second", second)):
        sample.check_squares(f"the {name} sample")
        if sample.in_memory:
            try:
                check_objects(kernel, sample.read()[0])
            except DataError as error:
                raise DataError(f"the {name} sample: {error}") from None
    drawn = drawn_seed(random_state)
    pooled = _pooled(first, second, _SPECTRAL_ROWS, drawn)
    found = kernel_for(kernel, rows_of(pooled), drawn)
    executor = executor_for(client)
    if method == "unbiased":
        rng = np.random.default_rng([drawn, 2])
        labels = _labels(m, n, permutations if null == "permutation" else 0, rng)
        values = _relabelled(found, first, second, labels, executor)
        check_finite(values, found, "the statistic")
        statistic = float(values[0])
        if null == "permutation":
            draws = values[1:]
            p_value = (1 + int(np.sum(draws >= statistic))) / (1 + len(draws))
        else:
            draws = spectral_null(np.asarray(found.gram(pooled), dtype=np.float64), m, n, permutations, rng)
            p_value = (1 + int(np.sum(draws >= statistic))) / (1 + len(draws))
        return MMDTest(statistic, p_value, method, null, found, draws)
    size = 2 if method == "linear" else block_size or max(2, math.isqrt(min(m, n)))
    if not 2 <= size <= min(m, n):
        raise ConfigError(f"block_size={size}: must be an integer from 2 to the smaller sample's {min(m, n)} rows")
    rows = max(size, _BLOCK_ROWS // size * size)
    pairs = list(zip(first.parts(rows), second.parts(rows), strict=False))
    calls = [(found, left, right, size, method) for left, right in pairs]
    count, mean, squares = executor.map_reduce(_blocks, calls, _merge, name="mmd-blocks")
    check_finite((mean, squares), found, "the statistic")
    if count < 2:
        raise DataError(f"method={method!r} requires at least two blocks of {size} rows per sample; choose 'unbiased'")
    spread = math.sqrt(squares / (count - 1) / count)
    p_value = float(norm.sf(mean / spread)) if spread > 0 else float(mean <= 0)
    return MMDTest(float(mean), p_value, method, null, found, np.zeros(0))


def _features(rows: RowsRef) -> int | None:
    """The number of features; None for non-numeric rows."""
    return rows.source.features or None


def _check_names(X: Any, Y: Any) -> None:
    names = [column_names(part) if is_table(part) else None for part in (X, Y)]
    if None not in names and names[0] != names[1]:
        raise DataError(f"the samples have columns {names[0]!r} and {names[1]!r}; reorder them: Y[X.columns]")


def _pooled(first: RowsRef, second: RowsRef, size: int, seed: int) -> Any:
    """Rows of both samples, in proportion."""
    share = first.count / (first.count + second.count)
    wanted = max(1, min(size - 1, round(size * share)))
    a, b = first.sample(wanted, seed)[0], second.sample(max(1, size - wanted), seed)[0]
    return np.concatenate([a, b]) if isinstance(a, np.ndarray) else [*a, *b]


def _labels(m: int, n: int, permutations: int, rng: np.random.Generator) -> np.ndarray:
    """Packed bits (m + n, permutations + 1): which rows count as the first sample; the first column is the truth."""
    truth = np.arange(m + n) < m
    columns = [truth, *(rng.permutation(truth) for _ in range(permutations))]
    return np.packbits(np.stack(columns, axis=1), axis=1)


def _relabelled(kernel: Kernel, first: RowsRef, second: RowsRef, labels: np.ndarray, executor: Executor) -> np.ndarray:
    """The unbiased statistic of every labelling, from one pass over all pairs of rows."""
    m, n = first.count, second.count
    blocks, at = [], 0
    for block in [*first.parts(_BLOCK_ROWS), *second.parts(_BLOCK_ROWS)]:
        blocks.append((block, labels[at : at + len(block)]))
        at += len(block)
    calls = [(kernel, *blocks[i], *((None, None) if i == j else blocks[j])) for i, j in block_pairs(len(blocks))]
    total, diagonals, forms = executor.map_reduce(_labelled, calls, _sum_three, name="mmd-tiles")
    S_xx, S_yy = forms[0], forms[1]
    values = unbiased(S_xx - diagonals[0], S_yy - diagonals[1], (total - S_xx - S_yy) / 2, m, n)
    return np.asarray(values)[: _width(labels, m)]


def _width(labels: np.ndarray, m: int) -> int:
    """The number of unpacked columns that are labellings: padding has no ones."""
    return int(np.sum(np.unpackbits(labels, axis=1).sum(axis=0, dtype=np.int64) == m))


Sums = tuple[float, np.ndarray, np.ndarray]


def _labelled(
    kernel: Kernel, left: RowsRef, left_bits: np.ndarray, right: RowsRef | None, right_bits: np.ndarray | None
) -> Sums:
    X = left.read()[0]
    A = np.unpackbits(left_bits, axis=1).astype(np.float64)
    inside = np.concatenate([A, 1 - A], axis=1)
    if right is None or right_bits is None:
        total, forms = tile_sums(kernel, X, left=inside)
        diagonals = np.asarray(kernel.diag(X), dtype=np.float64) @ inside
        return total, diagonals.reshape(2, -1), forms.reshape(2, -1)
    B = np.unpackbits(right_bits, axis=1).astype(np.float64)
    total, forms = tile_sums(kernel, X, right.read()[0], inside, np.concatenate([B, 1 - B], axis=1))
    return 2 * total, np.zeros((2, A.shape[1])), 2 * forms.reshape(2, -1)


def _sum_three(left: Sums, right: Sums) -> Sums:
    return left[0] + right[0], left[1] + right[1], left[2] + right[2]


Moments = tuple[int, float, float]  # count, mean, sum of squared deviations


def _blocks(kernel: Kernel, left: RowsRef, right: RowsRef, size: int, method: str) -> Moments:
    X, Y = left.read()[0], right.read()[0]
    values = linear_values(kernel, X, Y) if method == "linear" else block_values(kernel, X, Y, size)
    if not len(values):
        return 0, 0.0, 0.0
    mean = float(values.mean())
    return len(values), mean, float(np.sum((values - mean) ** 2))


def _merge(left: Moments, right: Moments) -> Moments:
    count = left[0] + right[0]
    if not count:
        return 0, 0.0, 0.0
    delta = right[1] - left[1]
    mean = left[1] + delta * right[0] / count
    return count, mean, left[2] + right[2] + delta**2 * left[0] * right[0] / count
