"""Fitting conditional embeddings with every solver, and learning the input kernel.

    solve_embedding(kernel, target_kernel, X, Y, lam)       exact, in memory (kme_dist.core.conditional)
    Inverse(pairs, kernel, lam, "tiled" | "pcg", ...)        exact, out of core: W = (K + nλI)⁻¹ as an operator
    project(weights, target_kernel, Y, D)                   the same, on target centres D
    left_out(embedding, weights, Y, seed)                   leave-one-out residuals of rows
    fit_sums(kernel, target_kernel, pairs, lam, basis, D)   centres or features of inputs, in one pass
    learn_kernel(ConditionalLearner(kernel, target_kernel), X, Y, lam, ...)  input kernel by held-out loss

W is n x n, so `Inverse` never forms it. A prediction needs W applied to a matrix with few columns: to h(Y) for
E[h(Y) | x] = k(x)ᵀ W h(Y), to L(Y, y) for μ(x)(y). Such right sides are solved on demand. With target centres D the
right side L(Y, D) is known in advance, and only L_DD⁻¹ L_DY W is kept.

Centres and features need only sums over rows, G = Σ z zᵀ and B = Σ z l(D, y)ᵀ with z = k(C, x) or φ(x), computed block
by block on any executor; then W = L_DD⁻¹ Bᵀ (G + nλM)⁻¹, M = K_CC or I. A data set on disk is never loaded as a whole.
With labels as targets and every label a centre the projection is exact.

λ is retuned on all rows where a closed form exists. With l(y) = R⁻¹ L(D, y), L_DD = R Rᵀ, the coordinates of
L(y, ·) along the target centres, the leave-one-out residual of row i along them is

    (l(y_i) - f(x_i)) / (1 - z_iᵀ (G + nλM)⁻¹ z_i)         sums: the leverage of a row
    (W l(Y))_i / W_ii                                    conjugate gradients: columns of W for some rows

and the component orthogonal to them does not depend on λ. Both are exact for each row; a random sample of rows is
evaluated. Quantiles and intervals use the same residuals of the targets themselves: of up to 1,000 rows ("cholesky",
"nystrom", "features") or up to 512 ("tiled" and "pcg", where each takes a column of W), sampled if there are more.

Functions are centred by their mean over the rows, a sum like the others. With target centres it is kept as weights of
these, which reproduce the mean of numeric targets exactly (`marginal_weights`).
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.backend import Factor, blas_threads, cholesky
from kme_dist.core import optim
from kme_dist.core.conditional import (
    ConditionalEmbedding,
    Delta,
    Explicit,
    Weights,
    held_out_objective,
    marginal_weights,
)
from kme_dist.core.intervals import LeftOut
from kme_dist.core.kernels.base import (
    Kernel,
    row_blocks,
    row_count,
    select,
)
from kme_dist.core.objective import Objective
from kme_dist.core.regularization import search_regularization
from kme_dist.core.squared import Distinct
from kme_dist.core.sums import Basis, FeatureBasis, Sums, TargetCentres, sum_rows
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import Dataset
from kme_dist.data.ingest import ingest
from kme_dist.data.places import Place
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.errors import ConfigError, DataError, NumericalError, counted
from kme_dist.run.executors import Executor
from kme_dist.run.fit import Problem, Room
from kme_dist.run.fit.panels import Panels, make_panels
from kme_dist.run.fit.pcg import GramSystem, Preconditioner, default_rank
from kme_dist.run.fit.tiled import Tiles, apply_inverse, factorise
from kme_dist.run.learn import Batches, learn
from kme_dist.run.learners import LearnSettings, Record, assemble, log_parameters
from kme_dist.run.means import BLOCK_ROWS
from kme_dist.run.scratch import Scratch

_SLAB_ROWS = 2_048  # of z and l(D, y), both wide, held at a time
_LEVERAGE_ROWS = 2_000  # evaluated by leave-one-out from leverages
_COLUMN_ROWS = 256  # and from columns of W
_LOOSE = 1e-3  # tolerance of conjugate gradients while searching λ
_LEARNED_ROWS = 400  # per batch when learning the input kernel
_WIDE = 128  # right sides solved together by conjugate gradients
_RESIDUAL_ROWS = 1_000  # evaluated for quantiles and intervals
_LEAST_COLUMNS, _MOST_COLUMNS, _COLUMN_BYTES = 64, 512, 2**28  # the same if each takes a solve and n numbers
_KEPT_SOLUTIONS = 8  # each of at most _WIDE columns


@dataclass(frozen=True)
class Pairs:
    """Inputs and targets, row by row: two tables, two sets of columns of a data set, or a data set and its labels."""

    inputs: RowsRef
    targets: RowsRef | None  # None: the labels of the inputs

    @classmethod
    def of(cls, data: Dataset, targets: Any, scaling: str | None) -> Pairs:
        """The rows of a data set; `targets` names the column or columns to predict from the others (None: labels)."""
        if targets is None and data.y is None:
            raise DataError(f"{data.path} has no labels; name the target columns, e.g. fit(data, ['price'])")
        columns = () if targets is None else column_positions(data, targets)
        inputs = tuple(i for i in range(data.features) if i not in columns)
        if not inputs:
            raise DataError(f"all {counted(data.features, 'column')} of {data.path} are targets; leave some as inputs")
        whole = Scaling.of(data.split_statistics(data.training_split()), scaling)
        scale = Scaling(whole.shift[list(inputs)], whole.factor[list(inputs)])
        rows = RowsRef.of(data, scaling=scale, dtype="float64", columns=inputs)
        return cls(rows, RowsRef.of(data, dtype="float64", columns=columns) if columns else None)

    @classmethod
    def in_tables(cls, X: Any, Y: Any) -> Pairs:
        """Inputs and targets in memory, already validated."""
        return cls(RowsRef.of(ArrayRows(X, None)), RowsRef.of(ArrayRows(Y, None)))

    @property
    def count(self) -> int:
        return self.inputs.count

    @property
    def in_memory(self) -> bool:
        return self.inputs.in_memory

    def parts(self, size: int = BLOCK_ROWS) -> list[Pairs]:
        """All pairs in order, one part per task."""
        rest = [None] * len(self.inputs.blocks(size)) if self.targets is None else self.targets.parts(size)
        return [Pairs(rows, own) for rows, own in zip(self.inputs.parts(size), rest, strict=True)]

    def read(self) -> tuple[Any, Any]:
        """All pairs, in memory."""
        X, y = self.inputs.read()
        return X, self._named(y) if self.targets is None else self.targets.read()[0]

    def sample(self, size: int, seed: int) -> tuple[Any, Any]:
        """At most `size` pairs, for choosing centres and parameters."""
        drawn = self.inputs.draw(size, seed)
        X, y = self.inputs.read_drawn(drawn)
        return X, self._named(y) if self.targets is None else self.targets.read_drawn(drawn)[0]

    def _named(self, y: np.ndarray) -> np.ndarray:
        classes = self.inputs.source.classes
        return y if classes is None else np.asarray(classes)[y]


def column_positions(data: Dataset, given: Any) -> tuple[int, ...]:
    """The numbers of columns given by their names or numbers: one, or a list of them."""
    columns = given.tolist() if isinstance(given, np.ndarray) else given
    columns = list(columns) if isinstance(columns, list | tuple) else [columns]
    shown = ", ".join(data.feature_names[:20])
    if not columns or not all(isinstance(column, str | int | np.integer) for column in columns):
        what = "no columns" if not columns else f"{type(given).__name__} values"
        raise ConfigError(f"columns of {data.path} are named by texts or numbers, got {what}; it has {shown}")
    return tuple(_column_position(data, column, shown) for column in columns)


def _column_position(data: Dataset, column: str | int, shown: str) -> int:
    if isinstance(column, int | np.integer) and 0 <= column < data.features:
        return int(column)
    if column in data.feature_names:
        return data.feature_names.index(str(column))
    count = f"; columns are counted from 0 to {data.features - 1}" if isinstance(column, int | np.integer) else ""
    raise ConfigError(f"{data.path} has no column {column!r}; it has {shown}{count}")


@dataclass(frozen=True)
class _Sums:
    """Over rows: G = Σ z zᵀ, B = Σ z l(D, y)ᵀ and Σ l(D, y); and Σ y where targets are numbers."""

    sums: Sums
    targets: np.ndarray

    def plus(self, other: _Sums) -> _Sums:
        return _Sums(self.sums + other.sums, self.targets + other.targets)


def _moments(basis: Basis, target_kernel: Kernel, D: Any, pairs: Pairs) -> _Sums:
    X, Y = pairs.read()
    Y = as_targets(Y, target_kernel)
    sums = sum_rows(basis, X, Y, TargetCentres(target_kernel, D), tile_rows=_SLAB_ROWS)
    return _Sums(sums, Y.sum(axis=0) if are_numbers(Y, target_kernel) else np.zeros(0))


def are_numbers(Y: Any, target_kernel: Kernel) -> bool:
    """Whether targets are numeric, with means and residuals; labels have probabilities."""
    return isinstance(Y, np.ndarray) and Y.dtype.kind in "biuf" and not isinstance(target_kernel, Delta)


def as_targets(Y: Any, target_kernel: Kernel) -> Any:
    """Scalar targets as one column, for kernels of vectors; labels and strings unchanged."""
    if isinstance(target_kernel, Delta):
        return np.asarray(Y)
    if isinstance(Y, np.ndarray) and Y.dtype.kind in "biuf":
        Y = np.ascontiguousarray(Y, dtype=np.float64)
        return Y[:, None] if Y.ndim == 1 else Y
    return Y


# --- centres and features: sums over rows ----------------------------------------------------------------------


def fit_sums(
    kernel: Kernel,
    target_kernel: Kernel,
    pairs: Pairs,
    regularization: float,
    basis: Basis,
    target_centres: Any,
    *,
    executor: Executor,
    keep_targets: bool = False,
    retune: bool = False,
    seed: int = 0,
    variance: float = 1.0,
) -> tuple[ConditionalEmbedding, dict[float, float], LeftOut | None]:
    """One pass over the rows, then systems of the size of the basis on the driver. Returns the embedding, the error of
    each λ tried, and, for numeric targets, leave-one-out residuals of a sample of rows.

    `keep_targets` keeps every target (pairs in memory) instead of projecting on the centres, then used only for λ.
    `variance` is the factor of the kernel that the basis leaves out (scale², for random features of a scaled kernel).
    """
    calls = [(basis, target_kernel, target_centres, part) for part in pairs.parts()]
    total: _Sums = executor.map_reduce(_moments, calls, _Sums.plus, name="embedding-moments")
    G, B = total.sums.G, total.sums.B  # only the lower triangle of G, which a factorisation reads
    n, metric = pairs.count, basis.metric()
    M = np.eye(basis.size) if metric is None else np.asarray(metric, dtype=np.float64)
    tried: dict[float, float] = {}
    with blas_threads(1):
        if retune:
            X, Y = pairs.sample(_LEVERAGE_ROWS, seed)
            Y = as_targets(Y, target_kernel)
            Z = np.asarray(basis.rows(X), dtype=np.float64)

            def evaluate(lams: list[float]) -> list[float]:
                return [
                    _leverage_error(G, B, M, n * lam / variance, Z, target_kernel, Y, target_centres) for lam in lams
                ]

            scale = float(np.mean(kernel.diag(X))) or 1.0
            regularization, _, tried = search_regularization(evaluate, scale=scale / n, start=regularization)
        A = G + n * regularization / variance * M
        targets, base = target_centres, None
        if keep_targets:
            X, targets = pairs.read()
            targets = as_targets(targets, target_kernel)
            weights = padded_solve(A, np.asarray(basis.rows(X), dtype=np.float64).T).T
        else:
            L = np.asarray(target_kernel.gram(target_centres), dtype=np.float64)
            weights = padded_solve(L, padded_solve(A, B).T)
            base = _base(L, total.sums.totals / n, target_centres, total.targets / n, target_kernel)
        features = basis.features if isinstance(basis, FeatureBasis) else None
        centres = None if features is not None else basis.points  # type: ignore[attr-defined]
        found = ConditionalEmbedding(
            kernel, target_kernel, centres, targets, Explicit(np.ascontiguousarray(weights)), regularization, features,
            base,
        )  # fmt: skip
        return found, tried, _left_out_of_sums(found, pairs, basis, A, seed)


def _base(L: np.ndarray, mean_features: np.ndarray, D: Any, mean: np.ndarray, target_kernel: Kernel) -> np.ndarray:
    """Weights of the target centres in the mean over all rows."""
    if are_numbers(D, target_kernel):
        return np.asarray(marginal_weights(L, mean_features, D, mean))
    return np.asarray(marginal_weights(L, mean_features))


def _left_out_of_sums(
    model: ConditionalEmbedding, pairs: Pairs, basis: Basis, A: np.ndarray, seed: int
) -> LeftOut | None:
    """(y - f(x)) / (1 - h), h = zᵀ A⁻¹ z the leverage, for a sample of rows under the full fit."""
    X, Y = pairs.sample(_RESIDUAL_ROWS, seed)
    Y = as_targets(Y, model.target_kernel)
    if not are_numbers(Y, model.target_kernel):
        return None
    Z = np.asarray(basis.rows(X), dtype=np.float64)
    columns = padded_solve(A, Z.T)
    room = np.maximum(1 - np.sum(columns * Z.T, axis=0), 1e-6)
    errors = Y - np.asarray(model.centred_expectation(X, model.targets))
    return LeftOut.of(columns, Z, errors / room[:, None])


def _leverage_error(
    G: np.ndarray, B: np.ndarray, M: np.ndarray, shift: float, Z: np.ndarray, target_kernel: Kernel, Y: Any, D: Any
) -> float:
    """Mean leave-one-out error of some pairs (Z, Y) under the full fit; infinite if the system is singular."""
    root = padded_factor(np.asarray(target_kernel.gram(D), dtype=np.float64))
    try:
        factor = padded_factor(G + shift * M)
    except NumericalError:
        return math.inf
    along = root.half_solve(target_kernel.gram(D, Y)).T
    half = factor.half_solve(Z.T)
    room = np.maximum(1 - np.sum(half * half, axis=0), 1e-6)
    residuals = (along - half.T @ factor.half_solve(root.half_solve(B.T).T)) / room[:, None]
    return _mean_error(target_kernel, Y, along, residuals)


def _mean_error(target_kernel: Kernel, Y: Any, along: np.ndarray, residuals: np.ndarray) -> float:
    across = np.maximum(np.asarray(target_kernel.diag(Y), dtype=np.float64) - np.sum(along**2, axis=1), 0.0)
    return float(np.mean(across + np.sum(residuals**2, axis=1)))


def padded_factor(A: np.ndarray) -> Factor:
    """The Cholesky factor of a positive definite A that may be numerically singular."""
    # Gram matrices of near-equal centres are numerically singular; the padding is below the precision of the sums.
    return cholesky(np.asfortranarray(A + 1e-11 * np.trace(A) / len(A) * np.eye(len(A))))


def padded_solve(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """A⁻¹ B for such an A."""
    return np.ascontiguousarray(padded_factor(A).solve(B))


# --- exact and out of core: tiles, conjugate gradients ---------------------------------------------------------


class Inverse:
    """W = (K + nλI)⁻¹ by "tiled" or "pcg", applied on demand; solutions of `adjoint` are cached.

    Inputs in memory are first stored in a temporary folder, those of a data set are read in place; the tiles of the
    factor, or the preconditioner, are stored beside them for the lifetime of this object.
    """

    def __init__(
        self,
        pairs: Pairs,
        kernel: Kernel,
        regularization: float,
        solver: str,
        *,
        executor: Executor,
        tolerance: float,
        seed: int = 0,
        tile_rows: int | None = None,
        memory: int | None = None,
    ) -> None:
        self.pairs, self.kernel, self.regularization, self.solver = pairs, kernel, regularization, solver
        self.executor, self.tolerance, self.seed = executor, tolerance, seed
        self.tile_rows, self.memory = tile_rows, memory
        self.solutions: dict[str, np.ndarray] = {}

    def forward(self, K: Any) -> np.ndarray:
        return self.solve(np.asarray(K, dtype=np.float64))

    def adjoint(self, H: Any) -> np.ndarray:
        H = np.ascontiguousarray(H, dtype=np.float64)
        key = hashlib.sha256(repr(H.shape).encode() + H.tobytes()).hexdigest()[:16]
        if key in self.solutions:
            return self.solutions[key]
        found = self.solve(H)
        if H.shape[1] <= _WIDE:
            while len(self.solutions) >= _KEPT_SOLUTIONS:
                self.solutions.pop(next(iter(self.solutions)))
            self.solutions[key] = found
        return found

    def solve(self, B: np.ndarray) -> np.ndarray:
        """W B."""
        if self.solver == "tiled":
            with blas_threads(1):
                return apply_inverse(self._tiles, B, self._problem)
        found, residual = self._gradients(B, self.regularization, self.tolerance)
        if residual > self.tolerance:
            raise NumericalError(
                f"solver='pcg' reached a residual of {residual:.1e} at regularization {self.regularization:.1e}, above "
                f"the tolerance of {self.tolerance:.1e}; raise `regularization` or `tolerance`, or use "
                "solver='tiled' or 'nystrom'",
                rows=self.pairs.count, regularization=self.regularization, dtype="float64",
            )  # fmt: skip
        return found

    def prepare(self) -> None:
        """Factorise now rather than at the first query."""
        _ = self._tiles if self.solver == "tiled" else self._panels

    def retune(self, target_kernel: Kernel, Y: Any, D: Any) -> dict[float, float]:
        """Choose λ by leave-one-out of some rows under the full fit ("pcg"); returns the error of each λ tried."""
        n = self.pairs.count
        chosen = np.random.default_rng([self.seed, 8]).choice(n, min(n, _COLUMN_ROWS), replace=False)
        E = np.zeros((n, len(chosen)))
        E[chosen, np.arange(len(chosen))] = 1.0
        root = padded_factor(np.asarray(target_kernel.gram(D), dtype=np.float64))
        along = root.half_solve(target_kernel.gram(D, Y)).T

        def evaluate(lam: float) -> float:
            columns, residual = self._gradients(E, lam, _LOOSE)
            own = columns[chosen, np.arange(len(chosen))]
            if residual > _LOOSE or not (own > 0).all():
                return math.inf
            return _mean_error(target_kernel, select(Y, chosen), along[chosen], columns.T @ along / own[:, None])

        few, _ = self._problem.rows.read(0, min(n, 1_000))
        scale = float(np.mean(self.kernel.diag(few))) or 1.0
        self.regularization, _, tried = search_regularization(
            lambda lams: [evaluate(lam) for lam in lams], scale=scale / n, start=self.regularization
        )
        return tried

    def _gradients(self, B: np.ndarray, lam: float, tolerance: float) -> tuple[np.ndarray, float]:
        """W B by conjugate gradients, and the largest relative residual.

        Linearly dependent right sides would make the block rank-deficient, so an orthonormal basis of them is solved.
        """
        panels, F = self._panels
        size = np.linalg.norm(B, axis=0)
        U, s, Vt = np.linalg.svd(B / np.where(size > 0, size, 1.0), full_matrices=False)
        kept = int(np.sum(s > 1e-13 * max(s.max(initial=0.0), 1e-300)))
        parts, worst = [np.zeros((len(B), 0))], 0.0
        system = GramSystem(panels, self._problem, F, lam)
        for columns in row_blocks(kept, _WIDE):
            rights = np.ascontiguousarray(U[:, columns])
            found, _, residual = system.solve(rights, tolerance)
            parts.append(found)
            worst = max(worst, residual)
        return (np.concatenate(parts, axis=1) * s[:kept]) @ Vt[:kept] * size, worst

    @property
    def _problem(self) -> Problem:
        rows, scratch = self._stored
        room = Room.of(self.executor, scratch, self.memory)
        return Problem(
            rows, self.kernel, self.executor, scratch, room.task, seed=self.seed, tolerance=self.tolerance,
            tile_rows=self.tile_rows,
        )  # fmt: skip

    @functools.cached_property
    def _stored(self) -> tuple[RowsRef, Scratch]:
        rows, token = self.pairs.inputs, os.urandom(6).hex()
        if not rows.in_memory:
            home = Place.of(rows.path)
            place = home.sibling(f".{home.name}.embedding-{token}")  # where workers can reach it
        else:
            X, _ = rows.read()
            if not isinstance(X, np.ndarray):
                raise ConfigError(f"solver={self.solver!r} requires numeric inputs; use solver='cholesky' or 'nystrom'")
            folder = Path(tempfile.mkdtemp(prefix="kme-dist-"))
            place = Place.of(folder)
            rows = RowsRef.of(ingest(X, folder / "rows.zarr", dtype="float64"), dtype="float64")
        weakref.finalize(self, Place.delete_all, place)
        return rows, Scratch(place)

    @functools.cached_property
    def _tiles(self) -> Tiles:
        with blas_threads(1):
            return factorise(self._problem, self.regularization)[0]

    @functools.cached_property
    def _panels(self) -> tuple[Panels, Preconditioner]:
        panels = make_panels(self._problem, "float64")
        return panels, Preconditioner.build(panels, self._problem, rank=default_rank(self.pairs.count))


def project(weights: Weights, target_kernel: Kernel, Y: Any, D: Any) -> tuple[Explicit, np.ndarray]:
    """L_DD⁻¹ L_DY W: weights on the target centres D; and the weights of the mean over all rows."""
    L_YD = np.asarray(target_kernel.gram(Y, D), dtype=np.float64)
    L = np.asarray(target_kernel.gram(D), dtype=np.float64)
    mean = Y.mean(axis=0) if are_numbers(Y, target_kernel) else np.zeros(0)
    found = padded_solve(L, np.asarray(weights.adjoint(L_YD)).T)
    return Explicit(found), _base(L, L_YD.mean(axis=0), D, mean, target_kernel)


def left_out(model: ConditionalEmbedding, weights: Weights, Y: np.ndarray, seed: int) -> LeftOut:
    """Leave-one-out residuals of an exact embedding with W = (K + nλI)⁻¹, from columns of W for a sample of rows.

    V_i / W_ii, V = W (y - ȳ), is the residual of row i under the fit to the others (with the mean of all). If the
    model projected its targets (`Y` are the original ones), its residuals are divided by 1 - h_i = nλ W_ii instead.
    """
    n = row_count(Y)
    chosen, columns, own = sampled_columns(weights, n, model.regularization, seed)
    X = select(model.centres, chosen)
    if model.weights is weights:
        residuals = np.asarray(weights.adjoint(Y - model.mean(Y)))[chosen] / own[:, None]
    else:
        errors = Y[chosen] - np.asarray(model.centred_expectation(X, model.targets))
        residuals = errors / (n * model.regularization * own)[:, None]
    return LeftOut.of(columns, np.asarray(model.basis(X), dtype=np.float64).T, residuals)


def sampled_columns(
    weights: Weights, n: int, regularization: float, seed: int, distinct: Distinct | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows to leave out, their columns of W = (K + nλI)⁻¹, and their entries of its diagonal.

    Copies, the same row of `distinct`, are left out together: W 1_g, and the mean of its entries in g, take the place
    of column and entry. Of equal rows that are left out in parts it is the share r of W 1_g, and r of that mean with
    1 - r of 1/nλ.
    """
    w = None if distinct is None else distinct.weights
    first = np.arange(n) if distinct is None or distinct.first is None else distinct.first
    size = min(len(first), _RESIDUAL_ROWS)
    if isinstance(weights, Inverse):
        size = min(size, max(_LEAST_COLUMNS, min(_MOST_COLUMNS, _COLUMN_BYTES // (8 * n))))
    drawn = np.arange(len(first))
    if size < len(first):
        p = None if w is None else w / w.sum()
        drawn = np.sort(np.random.default_rng([seed, 9]).choice(len(first), size, replace=False, p=p))
    chosen, E, share = first[drawn], np.zeros((n, size)), np.ones(size)
    E[chosen, np.arange(size)] = 1.0
    if distinct is not None and distinct.place is not None and w is not None:
        E = (distinct.place[:, None] == distinct.place[chosen]).astype(np.float64)
        share = w[drawn] / E.sum(axis=0)
    columns = np.asarray(weights.forward(E)) * share
    own = columns[chosen, np.arange(size)] + (1 - share) / (n * regularization)
    if not (own > 0).all():
        raise NumericalError(
            f"the diagonal of (K + nλI)⁻¹ is lost to rounding at regularization {regularization:.1e}; raise "
            "`regularization`", rows=n, regularization=regularization, dtype="float64",
        )  # fmt: skip
    return chosen, columns, own


# --- learning the input kernel -------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConditionalLearner:
    """Learns the input kernel by the loss of held-out pairs of a batch; see `held_out_objective`."""

    kernel: Kernel
    target_kernel: Kernel
    complexity_weight: float = 0.1
    train_share: float = 0.8
    seed: int = 0

    def evaluate(
        self, parameters: optim.Named, X: Any, y: np.ndarray, number: int, weights: np.ndarray | None = None
    ) -> Objective:
        """Pairs have no weights."""
        kernel, lam = assemble(self.kernel, parameters)
        n = row_count(X)
        cut = min(max(round(self.train_share * n), 1), n - 1)
        order = np.random.default_rng([self.seed, 7, number]).permutation(n)
        fitted, held = order[:cut], order[cut:]
        Y = list(y) if y.dtype.kind == "O" else y
        Y_fit, Y_held = select(Y, fitted), select(Y, held)
        grams = (
            self.target_kernel.gram(Y_fit), self.target_kernel.gram(Y_fit, Y_held), self.target_kernel.diag(Y_held)
        )  # fmt: skip
        found = held_out_objective(kernel, select(X, fitted), select(X, held), grams, lam, self.complexity_weight)
        loss, none = found.loss / len(held), float("nan")
        return Objective(found.value, loss, found.norm, none, found.gradient, none, "float64")

    def describe(self) -> dict[str, Any]:
        return {"kernel": self.kernel.to_config(), "target_kernel": self.target_kernel.to_config()}


def learn_kernel(
    learner: ConditionalLearner,
    X: Any,
    Y: Any,
    regularization: float,
    *,
    steps: int,
    learning_rate: float,
    executor: Executor | None = None,
    callback: Callable[[Record], None] | None = None,
) -> tuple[Kernel, float, list[Record]]:
    """Adam on the logarithms of the kernel's parameters and λ, over batches of the pairs."""
    n = row_count(X)
    if n < 4:
        raise DataError(f"learning a kernel requires at least 4 pairs, got {n}")
    if not isinstance(Y, np.ndarray):
        values = np.empty(n, dtype=object)
        values[:] = Y
        Y = values
    settings = LearnSettings(steps=steps, learning_rate=learning_rate, seed=learner.seed)
    outcome = learn(
        learner,
        Batches.of(ArrayRows(X, Y), batch_size=_LEARNED_ROWS, seed=learner.seed, dtype="float64"),
        log_parameters(learner.kernel, regularization),
        settings,
        executor=executor,
        callback=None if callback is None else lambda record, _: callback(record),
        phase="held-out",
    )
    return *assemble(learner.kernel, outcome.parameters), outcome.history
