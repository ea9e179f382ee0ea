"""The fit on tens of thousands of centres by preconditioned conjugate gradients (solver "falkon").

A step is one pass over the rows: tasks compute kernel tiles, use them twice and drop them, and return a p x m matrix
each, added by a fixed tree. The preconditioner is two triangular factors of size p (`kme_dist.core.falkon`), computed
and stored in tiles, so that a worker holds a few tiles whatever p is. Values of λ share the passes: each has columns
and a second factor of its own.

Some rows are held out. Their loss decides between the values of λ and ends the steps, since fewer steps act like a
larger λ; afterwards they serve for calibration. The state is stored after every step: a killed fit resumes with its
next step, to the same bits.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kme_dist.backend import Factor, cholesky
from kme_dist.core.calibration import calibrated_losses
from kme_dist.core.embedding import Embedding
from kme_dist.core.falkon import (
    TILE_ROWS,
    Precondition,
    State,
    advance,
    begin,
    kernel_product,
    normal_product,
    right_side,
)
from kme_dist.core.objective import one_hot
from kme_dist.core.regularization import LOO_ROWS
from kme_dist.core.sums import Centres
from kme_dist.data.dataset import Span
from kme_dist.data.plan import BatchRef
from kme_dist.data.rows import RowsRef
from kme_dist.errors import ConfigError, NumericalError
from kme_dist.failpoints import passing
from kme_dist.run.fit.additive import BasisRef, among, basis_of, publish
from kme_dist.run.fit.centres import choice_bytes, choice_pass, choose_points
from kme_dist.run.fit.exact import leave_one_out_of_sample
from kme_dist.run.fit.problem import (
    EXPONENTIAL,
    Cost,
    LeftOut,
    Problem,
    ProgressLine,
    Size,
    Solved,
    Standardises,
    fingerprint,
)
from kme_dist.run.scaling_model import Pass
from kme_dist.run.scratch import Scratch

_TILE = 2_048  # rows and columns of a tile of the factors
_ENTRIES = 2**27  # kernel values that a task computes
_TASK_ROWS = (1_024, 65_536)
_MOST_TASKS = 16_384  # of a pass: a thousand workers have about 16 each, and the scheduler less than a minute of work
_HELD_OUT = (4_000, 0.05)  # rows: at most the first, and at most this share of all
_FEWEST_HELD_OUT = 100
_FRACTIONS = (1.0, 0.1)  # of the given λ, which was tuned for all rows as centres: with fewer of them less is needed
_TYPICAL_STEPS, MOST_STEPS = 12, 40
_PATIENCE, _GAIN = 2, 2e-3  # steps without a relative gain of the held-out loss
_HELD = "held-rows"  # in the scratch folder: the numbers of the rows held out, or ranges of them
_JITTER = {"float32": 3e-7, "float64": 1e-13}  # times p, on the diagonal of K in the preconditioner


def cost(size: Size) -> Cost:
    """The choice of centres, or a tile of rows, a few tiles of the factors and the columns of a step per task; all
    factors in the scratch."""
    p, columns = size.basis, size.columns * len(_FRACTIONS)
    factors = 2 + len(_FRACTIONS)
    step = TILE_ROWS * p * size.item + 6 * _TILE**2 * size.item + 6 * p * columns * 8 + p * size.width * 16
    return Cost(
        memory=max(step, choice_bytes(size)),
        scratch=factors * (p * p + p * _TILE) // 2 * size.item,
        flops=_TYPICAL_STEPS * float(size.rows) * p * (2 * size.width + 4 * columns + EXPONENTIAL)
        + (2 + len(_FRACTIONS)) * p**3 / 3,
    )


def passes(size: Size) -> tuple[Pass, ...]:
    """The centres, the factors by columns of tiles, then one pass over the rows for each step and the right side."""
    n, p, columns = size.rows, size.basis, size.columns * len(_FRACTIONS)
    tiles, factors = -(-p // _TILE), 1 + len(_FRACTIONS)
    tasks = -(-n // task_rows(p, n))
    return (
        choice_pass(size),
        Pass(factors * -(-tiles // 2), flops=factors * p**3 / 3 / tiles, repeats=tiles),
        Pass(tiles * (tiles + 1) // 2, flops=p**3 / 3, exps=0.5 * p * p),
        Pass(
            tasks,
            float(n) * size.width * size.item,
            float(n) * p * (2 * size.width + 4 * columns),
            exps=float(n) * p,
            result_bytes=8.0 * p * columns,
            repeats=_TYPICAL_STEPS + 1,
        ),
        Pass(len(_FRACTIONS), flops=8.0 * p * p * columns, repeats=_TYPICAL_STEPS),
    )


def task_rows(centres: int, rows: int) -> int:
    """Rows of a task: a number of kernel values, in whole tiles; more if the scheduler would have too many tasks."""
    few = min(max(_ENTRIES // centres, _TASK_ROWS[0]), _TASK_ROWS[1])
    return max(few, -(-rows // _MOST_TASKS)) // TILE_ROWS * TILE_ROWS


def prepare(problem: Problem) -> Falkon:
    """Choose the centres; sums and factors wait for λ."""
    if not problem.rows.source.features:
        raise ConfigError("solver='falkon' requires rows of numbers; use solver='cholesky' for texts and other rows")
    if problem.tolerance < 1e-6:  # more than tiles in single precision can give
        problem = replace(problem, rows=problem.rows.in_precision("float64"))
    chosen = choose_points(problem)
    return Falkon(problem, chosen.points, chosen.rates, chosen.facts)


# --- on a worker ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Triangle:
    """A lower triangular factor in tiles, in the scratch folder."""

    scratch: Scratch
    name: str
    blocks: tuple[Span, ...]

    def has(self, i: int, j: int) -> bool:
        return self.scratch.has(f"{self.name}-{i}-{j}")

    def tile(self, i: int, j: int) -> np.ndarray:
        return self.scratch.load(f"{self.name}-{i}-{j}")

    def store(self, tile: np.ndarray, i: int, j: int) -> None:
        self.scratch.save(f"{self.name}-{i}-{j}", tile)

    def factor(self, A: np.ndarray, i: int, j: int) -> None:
        """Tile (i, j) of the factor, from that of the matrix (overwritten) and the finished tiles to its left."""
        for k in range(j):
            left, right = self._pair((i, k), (j, k))
            A -= left @ right.T
        if i == j:
            self.store(cholesky(np.asfortranarray(A)).lower, i, j)
        else:
            corner = Factor(np.asfortranarray(self.tile(j, j)))
            self.store(np.ascontiguousarray(corner.half_solve(A.T).T), i, j)

    def _pair(self, one: tuple[int, int], other: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Two tiles; the same one is loaded once. NumPy multiplies an array with itself by another routine than two
        equal ones, to other bits, and only in memory a tile is the same array each time."""
        tile = self.tile(*one)
        return tile, tile if one == other else self.tile(*other)

    def products(self, i: int, j: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For the product of the transposed factor with itself: k, and the tiles (k, i) and (k, j)."""
        for k in range(i, len(self.blocks)):
            left, right = self._pair((k, i), (k, j))
            left = np.tril(left) if i == k else left
            yield k, left, left if i == j else right

    def solve(self, B: np.ndarray, *, transposed: bool = False) -> np.ndarray:
        """L⁻¹ B or L⁻ᵀ B; reads every tile once."""
        rest = [np.array(B[start:stop]) for start, stop in self.blocks]
        order = range(len(rest))
        for j in reversed(order) if transposed else order:
            corner = Factor(np.asfortranarray(self.tile(j, j)))
            rest[j] = corner.half_solve(rest[j], transposed=transposed)
            for i in range(j) if transposed else range(j + 1, len(rest)):
                rest[i] -= (self.tile(j, i).T if transposed else self.tile(i, j)) @ rest[j]
        return np.concatenate(rest)


def factor_gram(factor: Triangle, ref: BasisRef, jitter: float, i: int, j: int) -> None:
    """Tile (i, j) of L with L Lᵀ = K + jitter I."""
    if factor.has(i, j):
        return
    basis = basis_of(ref)
    X, X2 = (basis.points[start:stop] for start, stop in (factor.blocks[i], factor.blocks[j]))
    A = np.array(basis.kernel.gram(X) if i == j else basis.kernel.gram(X, X2))
    _add_to_diagonal(A, jitter if i == j else 0.0)
    factor.factor(A, i, j)


def square_tile(square: Triangle, factor: Triangle, rates: np.ndarray | None, i: int, j: int) -> None:
    """Tile (i, j) of Lᵀ D L / p."""
    if square.has(i, j):
        return
    size, total = factor.blocks[-1][1], None
    for k, left, right in factor.products(i, j):
        if rates is not None:
            right = right / rates[slice(*factor.blocks[k])].astype(right.dtype)[:, None]
        part = left.T @ right
        total = part if total is None else total + part
    assert total is not None
    square.store(total / total.dtype.type(size), i, j)


def factor_square(factor: Triangle, square: Triangle, lam: float, i: int, j: int) -> None:
    """Tile (i, j) of R with R Rᵀ = Lᵀ D L / p + λI."""
    if factor.has(i, j):
        return
    A = np.array(square.tile(i, j))
    _add_to_diagonal(A, lam if i == j else 0.0)
    factor.factor(A, i, j)


def _add_to_diagonal(A: np.ndarray, value: float) -> None:
    if value:
        np.einsum("ii->i", A)[...] += A.dtype.type(value)


def precondition_columns(L: Triangle, R: Triangle, name: str, columns: tuple[int, int]) -> np.ndarray:
    """L⁻ᵀ R⁻ᵀ R⁻¹ L⁻¹ for some columns of a stored matrix."""
    B = np.array(L.scratch.load(name)[:, slice(*columns)])
    size = np.linalg.norm(B, axis=0)
    size = np.where(size > 0, size, 1.0)  # single precision has a narrow range
    Z = (B / size).astype(L.tile(0, 0).dtype)
    Z = R.solve(R.solve(L.solve(Z)), transposed=True)
    return np.asarray(L.solve(Z, transposed=True).astype(np.float64) * size)


def multiply_rows(rows: RowsRef, ref: BasisRef, span: Span, name: str) -> np.ndarray:
    """Zᵀ diag(w) Z S for rows of a span that are not held out."""
    passing("fit.before_part")
    X, _, w = fitted_rows(rows, span, ref.scratch)
    return normal_product(basis_of(ref), X, np.array(ref.scratch.load(name)), w)


def begin_rows(
    rows: RowsRef, ref: BasisRef, span: Span, target: Standardises | None = None
) -> tuple[np.ndarray, float]:
    """Zᵀ diag(w) Y for rows of a span that are not held out, and their Σ w; Y are classes, or numbers of a `target`."""
    X, y, w = fitted_rows(rows, span, ref.scratch)
    Y = np.asarray(one_hot(y, rows.n_classes, np.zeros(0))) if target is None else target.standardised(y)
    return right_side(basis_of(ref), X, Y, w), float(len(y) if w is None else w.sum())


def add_sides(left: tuple[np.ndarray, float], right: tuple[np.ndarray, float]) -> tuple[np.ndarray, float]:
    return left[0] + right[0], left[1] + right[1]


def multiply_stored(ref: BasisRef, what: str, span: Span, name: str) -> np.ndarray:
    """k(X, C) S for rows of a stored X: centres, or rows held out."""
    X = np.asarray(ref.scratch.load(what)[slice(*span)])
    return kernel_product(basis_of(ref), X, np.array(ref.scratch.load(name)))


def fitted_rows(rows: RowsRef, span: Span, scratch: Scratch) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """Rows of a span, their labels and weights, without those held out or of weight 0.

    Which rows are held out is in the scratch folder: a scheduler would keep a copy of them with every call.
    """
    X, y = rows.read(*span)
    w = rows.weights(*span, unit=False)
    kept = ~_is_held(rows, span, np.asarray(scratch.load(_HELD))) if scratch.has(_HELD) else np.ones(len(y), bool)
    kept &= True if w is None else w > 0
    if not kept.all():
        X, y, w = X[kept], y[kept], None if w is None else w[kept]
    return X, y, w


def _is_held(rows: RowsRef, span: Span, held: np.ndarray) -> np.ndarray:
    """By the numbers of rows in the source, or by sorted ranges of them."""
    if held.ndim == 2:
        return among(rows, *span, tuple((int(low), int(high)) for low, high in held))
    numbers = np.concatenate([np.arange(low, high) for low, high in rows.stored(*span)])
    return np.isin(numbers, held)


# --- the fit ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """The state of a fit after some steps."""

    steps: int
    state: State
    F: np.ndarray  # decisions of the rows held out
    losses: np.ndarray  # (steps, values of λ), of the rows held out
    best: np.ndarray  # V of every λ at its lowest loss
    best_F: np.ndarray

    def save(self, scratch: Scratch) -> None:
        """As one array, so that it is replaced at once."""
        s = self.state
        parts = (s.V, s.R, s.P, s.norms, s.start, self.F, self.best, self.best_F, self.losses)
        scratch.save("progress", np.concatenate([[float(self.steps)], *(np.ravel(part) for part in parts)]))

    @classmethod
    def load(cls, scratch: Scratch, size: int, columns: int, held: int, lams: int) -> Progress:
        flat, at = np.array(scratch.load("progress")), 1
        steps, parts = int(flat[0]), []
        shapes = [(size, columns)] * 3 + [(columns,)] * 2
        for shape in [*shapes, (held, columns), (size, columns), (held, columns), (steps, lams)]:
            count = int(np.prod(shape))
            parts.append(flat[at : at + count].reshape(shape).copy())  # aligned, as it was before it was stored
            at += count
        V, R, P, norms, start, F, best, best_F, losses = parts
        return cls(steps, State(V, R, P, norms, start), F, losses, best, best_F)


@dataclass(frozen=True)
class Falkon:
    """(ZᵀwZ/W + λK) V = ZᵀwY/W, prepared."""

    problem: Problem
    points: np.ndarray
    rates: np.ndarray | None  # at which the centres were sampled, with the mean 1; None: uniform
    facts: dict[str, Any]
    statistics: None = None

    @property
    def evaluated_rows(self) -> int:
        """λ is searched beforehand, on a sample of rows; the solve compares it with a lower one."""
        rows = self.problem.rows
        return min(rows.positive, LOO_ROWS) if self.problem.target is None and rows.positive > 1 else 0

    @property
    def scale(self) -> float:
        return (self.problem.kernel.alpha(self.points) ** 2 or 1.0) / self.problem.rows.positive

    def leave_one_out(self, lams: list[float]) -> list[float]:
        return leave_one_out_of_sample(self.problem, lams, self.problem.kernel.alpha(self.points) ** 2 or 1.0)

    def solve(self, lam: float) -> Solved:
        work = _Work(self, [lam * share for share in (_FRACTIONS if self.problem.retune else (1.0,))])
        try:
            found = work.run()
        except NumericalError:
            work.scratch.clear()
            raise
        which, m = work.chosen(found), self.problem.columns
        own = slice(which * m, (which + 1) * m)
        V, lam = found.best[:, own], work.lams[which]
        y, w = work.held_labels
        rows = None if self.problem.target is None else work.held_rows
        left_out = LeftOut(found.best_F[:, own], y, w, rows) if len(y) else None
        facts = {
            "held_out_rows": len(y),
            "lambdas": dict(zip(map("{:.3g}".format, work.lams), work.least(found).tolist(), strict=True)),
        }
        stored = work.scratch.bytes()
        work.scratch.clear()
        embedding = Embedding(self.problem.kernel, self.points, V, lam)
        residual = float(found.state.residuals[own].max())
        loss = float(work.least(found)[which]) if len(y) else None
        return Solved(
            V, embedding, found.steps, stored, facts, residual, left_out=left_out, regularization=lam, loss=loss
        )

    def residual(self, solved: Solved, lam: float) -> float:
        """That of the recurrence, under the preconditioner: steps end by held-out loss, long before rounding counts."""
        assert solved.residual is not None
        return solved.residual

    def close(self) -> None:
        """Nothing to remove; only an interrupted fit leaves files, from which the next one resumes."""


class _Work:
    """One solve: its names in the scratch folder, and the rounds over the executor."""

    def __init__(self, prepared: Falkon, lams: list[float]) -> None:
        self.problem, self.points, self.rates = prepared.problem, prepared.points, prepared.rates
        self.lams, self.run_round = lams, prepared.problem.executor.map
        points = hashlib.sha256(np.ascontiguousarray(self.points).tobytes()).hexdigest()
        name = fingerprint(
            self.problem, lams=lams, centres=points, seed=self.problem.seed, held=self.problem.sampled,
            tile=self._tile, floor=self.problem.floor,
        )  # fmt: skip
        self.scratch = self.problem.scratch.child(f"falkon-{name}")
        self.ref = publish(Centres(self.problem.kernel, self.points), self.scratch, "numpy", token=name)
        rows, most = self.problem.rows, min(_HELD_OUT[0], int(_HELD_OUT[1] * self.problem.rows.count))
        fewest = _FEWEST_HELD_OUT
        if self.problem.target is not None:  # intervals come from rows held out
            fewest, most = 1, max(most, min(_FEWEST_HELD_OUT, rows.count // 5))
        self.held = rows.draw(most, self.problem.seed) if most >= fewest else None
        if self.problem.sampled:
            self.held = BatchRef(0, self.problem.sampled)
        self.columns = self.problem.columns * len(lams)
        self.spans = rows.blocks(task_rows(len(self.points), rows.count))

    @property
    def _tile(self) -> int:
        return self.problem.tile_rows or _TILE

    def _blocks(self, count: int) -> list[Span]:
        return [(start, min(start + self._tile, count)) for start in range(0, count, self._tile)]

    # --- rows held out ---

    @functools.cached_property
    def _held(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        rows = self.problem.rows
        if self.held is None:
            return self.points[:0], np.zeros(0, np.int64), None
        X, y = rows.read_drawn(self.held)
        return X, y, rows.drawn_weights(self.held) if rows.weighted else None

    @property
    def held_rows(self) -> np.ndarray:
        return self._held[0]

    @property
    def held_labels(self) -> tuple[np.ndarray, np.ndarray | None]:
        return self._held[1], self._held[2]

    def losses(self, F: np.ndarray) -> list[float]:
        """Log losses of the rows held out, calibrated to them, or squared errors, by λ."""
        y, w = self.held_labels
        m, floor, target = self.problem.columns, self.problem.floor, self.problem.target
        parts = (F[:, i * m : (i + 1) * m] for i in range(len(self.lams)))
        if target is not None:
            Y = target.standardised(y)
            return [float(np.average(np.mean((part - Y) ** 2, axis=1), weights=w)) for part in parts]
        return [float(np.average(calibrated_losses(part, y, floor, w), weights=w)) if len(y) else 0.0 for part in parts]

    def least(self, found: Progress) -> np.ndarray:
        return np.asarray(found.losses.min(axis=0))

    def chosen(self, found: Progress) -> int:
        return int(np.argmin(self.least(found)))

    # --- steps ---

    def run(self) -> Progress:
        """Step until the loss of the rows held out no longer falls, or the residual is below the tolerance."""
        precondition, weight = self._preconditioner(), 0.0
        self.scratch.save("held", np.asarray(self._held[0]))  # sparse rows as dense ones, like the centres
        if self.held is not None:
            self.scratch.save(_HELD, np.array(sorted(self.held.spans)) if self.held.rows is None else self.held.rows)
        held, size = len(self._held[1]), len(self.points)
        if self.scratch.has("progress"):
            found = Progress.load(self.scratch, size, self.columns, held, len(self.lams))
            weight = float(self.scratch.load("weight")[0])
            self.problem.report(f"fit: resumes after step {found.steps}")
        else:
            calls = [(self.problem.rows, self.ref, span, self.problem.target) for span in self.spans]
            B, weight = self.problem.executor.map_reduce(begin_rows, calls, add_sides, name="right-side")
            self.scratch.save("weight", np.array([weight]))
            state = begin(np.tile(B / weight, (1, len(self.lams))), precondition)
            F = np.zeros((held, self.columns))
            found = Progress(0, state, F, np.zeros((0, len(self.lams))), state.V, F)
        while self._continues(found):
            found = self._step(found, precondition, weight)
            found.save(self.scratch)
            told = "; ".join(f"λ {lam:.1e}: {loss:.4f}" for lam, loss in zip(self.lams, found.losses[-1], strict=True))
            what = "log loss" if self.problem.target is None else "squared error"
            line = f"fit: step {found.steps}, residual {found.state.residuals.max():.1e}, held-out {what} {told}"
            self.problem.report(ProgressLine(line, found.steps, MOST_STEPS))
        return found

    def _continues(self, found: Progress) -> bool:
        if found.steps >= MOST_STEPS or not found.state.residuals.max() > self.problem.tolerance:
            return False
        if found.steps <= _PATIENCE or not len(self._held[1]):
            return True
        least = found.losses.min(axis=1)
        return bool(least[-_PATIENCE:].min() < (1 - _GAIN) * least[:-_PATIENCE].min())

    def _step(self, found: Progress, precondition: Precondition, weight: float) -> Progress:
        state, name, m = found.state, f"P-{found.steps}", self.problem.columns
        self.scratch.save(name, state.P)
        calls = [(self.problem.rows, self.ref, span, name) for span in self.spans]
        product = self.problem.executor.map_reduce(multiply_rows, calls, np.add, name="normal-product") / weight
        KP, HP = self._stored_products(name)
        product += KP * np.repeat(self.lams, m)
        self.scratch.delete(name)
        state, step = advance(state, product, precondition)
        F = found.F + step * HP
        losses = np.concatenate([found.losses, [self.losses(F)]])
        better = np.repeat(losses[-1] <= losses.min(axis=0), m)  # without rows held out: always
        best, best_F = np.where(better, state.V, found.best), np.where(better, F, found.best_F)
        return Progress(found.steps + 1, state, F, losses, best, best_F)

    def _stored_products(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """K P, and k(rows held out, C) P."""
        sizes = {f"centres-{self.ref.token}": len(self.points), "held": len(self._held[1])}
        calls = [(self.ref, what, span, name) for what, size in sizes.items() for span in self._blocks(size)]
        found = np.concatenate(self.run_round(multiply_stored, calls, name="kernel-product"))
        return found[: len(self.points)], found[len(self.points) :]

    # --- the preconditioner ---

    def _preconditioner(self) -> Precondition:
        blocks = tuple(self._blocks(len(self.points)))
        L = self._gram_factor(blocks)
        square = Triangle(self.scratch, "square", blocks)
        below = [(i, j) for j in range(len(blocks)) for i in range(j, len(blocks))]
        Rs = [Triangle(self.scratch, f"R{number}", blocks) for number in range(len(self.lams))]
        last = len(blocks) - 1
        if not all(R.has(last, last) for R in Rs):
            self.run_round(square_tile, [(square, L, self.rates, i, j) for i, j in below], name="square-tile")
            self._columns(factor_square, [(R, square, lam) for R, lam in zip(Rs, self.lams, strict=True)], blocks)
        for i, j in below:
            self.scratch.delete(f"square-{i}-{j}")
        m = self.problem.columns

        def apply(B: np.ndarray) -> np.ndarray:
            columns = [(number * m, (number + 1) * m) for number in range(len(Rs))]
            self.scratch.save("residual", B)
            calls = [(L, R, "residual", own) for R, own in zip(Rs, columns, strict=True)]
            return np.concatenate(self.run_round(precondition_columns, calls, name="precondition"), axis=1)

        return apply

    def _gram_factor(self, blocks: tuple[Span, ...]) -> Triangle:
        """L, with as much jitter as it takes."""
        kernel, dtype = self.problem.kernel, self.points.dtype.name
        jitter = _JITTER[dtype] * len(self.points) * (kernel.alpha(self.points) ** 2 or 1.0)
        for attempt in range(6):
            L = Triangle(self.scratch, f"L{attempt}", blocks)
            try:
                self._columns(factor_gram, [(L, self.ref, jitter * 10**attempt)], blocks)
            except NumericalError:
                continue
            return L
        raise NumericalError(
            f"the Gram matrix of {len(self.points)} centres is not positive definite in {dtype}; check that all rows "
            "are finite, or use dtype='float64'", dtype=dtype,
        )  # fmt: skip

    def _columns(self, task: Any, first: list[tuple[Any, ...]], blocks: tuple[Span, ...]) -> None:
        """A factorisation for each of `first`, column by column: the diagonal tile, then those below it."""
        for j in range(len(blocks)):
            self.run_round(task, [(*given, j, j) for given in first], name="factor-diagonal")
            calls = [(*given, i, j) for given in first for i in range(j + 1, len(blocks))]
            if calls:
                self.run_round(task, calls, name="factor-tile")
            self.problem.report(f"fit: preconditioner, column {j + 1} of {len(blocks)}")
