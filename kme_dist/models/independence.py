"""Kernel tests of independence, and of independence given a third variable. In memory or out of core.

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> z, noise = rng.normal(size=(200, 1)), rng.normal(size=(2, 200, 1))
>>> x, y = z + 0.5 * noise[0], z**2 + 0.5 * noise[1]
>>> hsic_test(x, y).rejects(), conditional_independence_test(x, y, z).rejects()
(True, False)

Variables are arrays, lists of objects that a kernel accepts, data sets, or, with `data=`, columns of one data set
or data frame (None: the labels of the data set). With a `client` the tiles are computed by its workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kme_dist.backend import blas_threads
from kme_dist.core.conditional import Delta
from kme_dist.core.independence import gamma_law, statistics
from kme_dist.core.kernels import Kernel
from kme_dist.core.kernels.base import select
from kme_dist.core.pivots import choose_centres
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import Dataset, RowSource
from kme_dist.data.frames import column_names, is_table
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.data.statistics import Statistics
from kme_dist.data.validation import as_values, check_not_path, check_only_texts
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.cme_choice import input_kernels, score_kernels, target_kernel
from kme_dist.models.means import check_finite
from kme_dist.models.objects import check_objects
from kme_dist.models.settings import RandomState, drawn_seed, fraction, integer, seed
from kme_dist.run.conditional import as_targets, column_positions
from kme_dist.run.executors import Executor
from kme_dist.run.independence import Variable, hsic_sums, in_random_order, residual_features, signed_draws, squared_sum
from kme_dist.run.workers import executor_for

_KERNEL_ROWS = 2_000  # rows for the median distance
_SELECTION_ROWS = 1_000  # rows to choose the regressions with
_CHOICE_ROWS = 20_000  # rows to choose centres from
_NULLS = {"unbiased": ("permutation",), "biased": ("permutation", "gamma")}
_LEAST_ROWS = 6  # the gamma law needs more than five


@dataclass(frozen=True)
class IndependenceTest:
    """A measure of dependence and its p-value under the null that the variables are independent (given the third)."""

    statistic: float
    p_value: float
    method: str
    null: str
    kernels: tuple[Kernel, ...]
    null_values: np.ndarray = field(repr=False)  # draws of the statistic under the null; empty for a gamma law

    def rejects(self, level: float = 0.05) -> bool:
        """Whether the null hypothesis is rejected at this level, between 0 and 1."""
        fraction().check("level", level)
        return self.p_value <= level


def hsic_test(
    X: Any,
    Y: Any,
    kernel: str | Kernel = "gaussian",
    target_kernel: str | Kernel = "gaussian",
    *,
    data: Any = None,
    method: str = "unbiased",
    null: str | None = None,
    permutations: int = 200,
    client: Any = None,
    random_state: RandomState = 0,
) -> IndependenceTest:
    """Are X and Y independent? The Hilbert-Schmidt independence criterion of their kernels.

    Parameters
    ----------
    X, Y : the variables, with the same number of rows: arrays, lists or data sets; with `data`, a data set or a data
        frame, names of columns (None: the labels of the data set).
    kernel, target_kernel : of X and of Y; a name gets the median distance as its length scale, "delta" is for labels.
    method : the estimate of HSIC, "unbiased" or "biased" (tr KHLH / n², never negative).
    null : "permutation" (exact level: rows are permuted within random blocks of 512, all permutations in one pass over
        the tiles), or for "biased" also "gamma" (asymptotic, a second pass instead of permutations).
    permutations : their number.
    """
    if method not in _NULLS:
        raise ConfigError(f"method={method!r} is unknown; choose one of {', '.join(_NULLS)}")
    null = _NULLS[method][0] if null is None else null
    if null not in _NULLS[method]:
        raise ConfigError(f"null={null!r}: for method {method!r} choose {' or '.join(map(repr, _NULLS[method]))}")
    drawn, executor = _checked(permutations, random_state, client)
    x, y = _variables({"X": X, "Y": Y}, data, (kernel, target_kernel), ("kernel", "target_kernel"), None)
    found = (_kernel(kernel, x, drawn), _kernel(target_kernel, y, drawn))
    x, y = in_random_order((x, y), drawn)
    count = permutations if null == "permutation" else 0
    sums = hsic_sums(found, x, y, permutations=count, seed=drawn, executor=executor)
    values = statistics(sums.K, sums.L, sums.forms, sums.orders, method)
    check_finite(values, found, "the statistic")
    statistic = float(values[0])
    if null == "permutation":
        rounding = 1e-13 * abs(sums.K.total * sums.L.total) / x.count**4
        return IndependenceTest(statistic, _share(values, rounding), method, null, found, values[1:])
    law = gamma_law(sums.K, sums.L, squared_sum(found, x, y, sums, executor=executor))
    return IndependenceTest(statistic, law.p_value(statistic), method, null, found, np.zeros(0))


def conditional_independence_test(
    X: Any,
    Y: Any,
    Z: Any,
    kernel: str | Kernel = "gaussian",
    target_kernels: tuple[str | Kernel, str | Kernel] = ("gaussian", "gaussian"),
    *,
    data: Any = None,
    draws: int = 500,
    centres: int = 500,
    target_centres: int = 100,
    client: Any = None,
    random_state: RandomState = 0,
) -> IndependenceTest:
    """Are X and Y independent given Z? The covariance of what conditional embeddings leave of either, at every z.

    l(x, ·) and l(y, ·) are regressed on z by conditional mean embeddings whose kernel and λ minimise the leave-one-out
    error. The statistic is the squared norm of the covariance of their residuals, weighted by a kernel of z (see
    `kme_dist.core.independence`) minus what two regressions on the same z share by chance; its null law comes from
    random signs of the products. The level holds as far as the regressions remove the influence of z.

    Parameters
    ----------
    X, Y, Z : as in `hsic_test`; numbers are standardised.
    kernel : of Z: a name (length scale by leave-one-out) or a kernel.
    target_kernels : of X and of Y, as in `hsic_test`.
    draws : of the null law.
    centres, target_centres : rows of Z, and of X and Y, on which the regressions are projected; all rows if fewer.
    """
    integer(1).check("centres", centres)
    integer(1).check("target_centres", target_centres)
    drawn, executor = _checked(draws, random_state, client)
    settings = ("target_kernels[0]", "target_kernels[1]", "kernel")
    x, y, z = _variables({"X": X, "Y": Y, "Z": Z}, data, (*target_kernels, kernel), settings, "standard")
    if z.labels and isinstance(kernel, str) and kernel != "delta":
        raise ConfigError(f"Z has labels: kernel={kernel!r} must be 'delta', or a kernel of labels")
    some, pool = (z.sample(size, drawn) for size in (_SELECTION_ROWS, _CHOICE_ROWS))
    candidates = [Delta()] if kernel == "delta" else input_kernels(kernel, None, some, drawn)
    residuals = []
    with blas_threads(1):
        for own, given in zip((x, y), target_kernels, strict=True):
            by = _kernel(given, own, drawn)
            targets = as_targets(own.sample(_SELECTION_ROWS, drawn), by)
            scores = score_kernels(
                candidates, by, some, targets, rows=z.count, regularization=None, folds=None, seed=drawn, centred=True
            )
            chosen, lam, _ = min(scores, key=lambda score: score[2])
            C = select(pool, choose_centres(chosen, pool, centres, "rpcholesky", drawn))
            targets = as_targets(own.sample(_CHOICE_ROWS, drawn), by)
            D = select(targets, choose_centres(by, targets, target_centres, "rpcholesky", drawn))
            residuals.append(residual_features(chosen, C, by, D, own, z, lam, executor=executor))
    weight = candidates[len(candidates) // 2] if len(candidates) > 1 else candidates[0]
    values = signed_draws(
        (residuals[0], residuals[1]), weight, (x, y, z), draws=draws, seed=drawn, executor=executor
    )  # fmt: skip
    found = (residuals[0].target_kernel, residuals[1].target_kernel, residuals[0].kernel, residuals[1].kernel)
    check_finite(values, found, "the statistic")
    return IndependenceTest(float(values[0]), _share(values, 1e-20), "residuals", "signs", found, values[1:])


def _checked(draws: int, random_state: RandomState, client: Any) -> tuple[int, Executor]:
    integer(1).check("permutations", draws)
    seed().check("random_state", random_state)
    return drawn_seed(random_state), executor_for(client)


def _share(values: np.ndarray, rounding: float) -> float:
    """The p-value of the first value among draws of it; values that differ by rounding only are equal."""
    return (1 + int(np.sum(values[1:] >= values[0] - rounding))) / len(values)


def _kernel(given: str | Kernel, variable: Variable, drawn: int) -> Kernel:
    return target_kernel(given, variable.sample(_KERNEL_ROWS, drawn), drawn)


def _variables(
    given: dict[str, Any], data: Any, kernels: Sequence[Any], settings: Sequence[str], scaling: str | None
) -> list[Variable]:
    """The variables by name, checked against each other and their kernels."""
    if is_table(data):
        given, data = {name: _columns(data, value, name) for name, value in given.items()}, None
    elif data is not None and not isinstance(data, Dataset):
        raise ConfigError(
            f"data must be an open data set, kme_dist.open_dataset(path), or a data frame, got a "
            f"{type(data).__name__}; pass one of these with names of columns, or arrays without `data`"
        )
    found = [_variable(value, data, scaling, name) for name, value in given.items()]
    counts = {name: variable.count for name, variable in zip(given, found, strict=True)}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise DataError(f"variables must have the same number of rows, one for each observation; got {shown}")
    if found[0].count < _LEAST_ROWS:
        raise DataError(f"a test of independence requires at least {_LEAST_ROWS} rows, got {found[0].count}")
    for name, setting, variable, kernel in zip(given, settings, found, kernels, strict=True):
        if kernel != "delta" and not isinstance(kernel, Delta) and variable.rows.in_memory:
            try:
                check_objects(kernel, variable.rows.read()[0], setting=setting, labels=True)
            except DataError as error:
                raise DataError(f"{name}: {error}") from None
    return found


def _columns(table: Any, names: Any, variable: str) -> Any:
    """One column of a table as values, several as a matrix."""
    chosen = list(names) if isinstance(names, list | tuple) else [names]
    known = column_names(table)
    unknown = [name for name in chosen if not isinstance(name, str) or name not in known]
    if unknown or not chosen:
        raise ConfigError(
            f"{variable}={names!r}: with `data` a table, pass the name of a column or a list of names; it has "
            f"{', '.join(known[:20])}"
        )
    values = [np.asarray(table[name]) for name in chosen]
    return values[0] if len(values) == 1 else np.column_stack(values)


def _variable(given: Any, data: Dataset | None, scaling: str | None, name: str = "the variable") -> Variable:
    if data is not None:
        if given is None:
            if data.y is None:
                raise DataError(f"{data.path} has no labels; name columns instead of None")
            return Variable(RowsRef.of(data, dtype="float64"), labels=True)
        columns = column_positions(data, given)
        scale = None
        if scaling is not None:
            whole = Scaling.of(data.split_statistics(data.training_split()), scaling)
            scale = Scaling(whole.shift[list(columns)], whole.factor[list(columns)])
        return Variable(RowsRef.of(data, scaling=scale, dtype="float64", columns=columns))
    check_not_path(given)
    if isinstance(given, RowSource):
        return Variable(RowsRef.of(given, scaling=scaling, dtype="float64"))
    check_only_texts(given)
    values = as_values(given, name)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        values = values.astype(np.float64).reshape(len(values), -1)
        Statistics.of(values).check_squares(name, (), "divide the column by a constant", "" if scaling else "float64")
        if scaling is not None:
            values = Scaling.learn(values, scaling).apply(values, "float64")
    return Variable(RowsRef.of(ArrayRows(values, None)))
