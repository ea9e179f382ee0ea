"""Block conjugate gradients: every column to the tolerance, whatever the columns have to do with each other."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core import cg
from kme_dist.core.cg import block_cg
from kme_dist.core.kernels import Gaussian

U = 1.1e-16
COLUMNS = 18


def with_spectrum(n, condition, rng):
    Q = np.linalg.qr(rng.normal(size=(n, n)))[0]
    A = (Q * np.logspace(0, -np.log10(condition), n)) @ Q.T
    return 0.5 * (A + A.T)


def gram(n, shift, rng):
    """K + shift I of a smooth kernel: eigenvalues from n downwards to the shift, where nearly all of them lie."""
    return Gaussian(length_scale=1.0).gram(rng.uniform(-2, 2, size=(n, 2))) + shift * np.eye(n)


def pivoted(A, shift, rank):
    """M⁻¹ of F Fᵀ + shift I, F by pivoted Cholesky of A - shift I."""
    K = A - shift * np.eye(len(A))
    F, left = np.zeros((len(A), 0)), np.diagonal(K).copy()
    for _ in range(rank):
        i = int(np.argmax(left))
        column = (K[:, i] - F @ F[i]) / np.sqrt(left[i])
        F, left = np.column_stack([F, column]), np.maximum(left - column**2, 0.0)
    return lambda R: (R - F @ np.linalg.solve(F.T @ F + shift * np.eye(rank), F.T @ R)) / shift


def related(kind, n, rng):
    """Right sides that bring plain block recurrences to a halt."""
    B = rng.normal(size=(n, COLUMNS))
    if kind == "rank of ten":
        return B[:, :10] @ rng.normal(size=(10, COLUMNS))
    if kind == "equal, zero and multiples":
        B[:, 1], B[:, 3], B[:, 4] = B[:, 0], -3e5 * B[:, 2], 0.0
    elif kind == "nearly equal":
        B = B[:, :1] + 1e-9 * B
    elif kind == "of all sizes":
        B *= np.logspace(-100, 100, COLUMNS)
    elif kind == "labels":
        B = np.eye(COLUMNS)[rng.integers(0, COLUMNS - 2, size=n)]
    elif kind == "smooth":
        B = np.exp(-((np.sort(rng.uniform(-2, 2, size=(n, 1)), axis=0) - np.linspace(-2, 2, COLUMNS)) ** 2))
    return B


KINDS = ("unrelated", "rank of ten", "equal, zero and multiples", "nearly equal", "of all sizes", "labels", "smooth")


def residuals(A, X, B):
    size = np.abs(B).max(axis=0)
    size = np.where(size > 0, size, 1.0)  # so that squares neither overflow nor vanish
    left, whole = np.linalg.norm((A @ X - B) / size, axis=0), np.linalg.norm(B / size, axis=0)
    return left / np.where(whole > 0, whole, 1.0)


def counted(A):
    calls = []
    return calls, lambda S: (calls.append(S.shape[1]), A @ S)[1]


def single_steps(A, b, tolerance, precondition=lambda r: r, most=5_000):
    """The textbook's conjugate gradients for one right side."""
    r, p, x = b.copy(), 0.0, np.zeros_like(b)
    before = 1.0
    for step in range(1, most):
        z = precondition(r[:, None])[:, 0]
        now = r @ z
        p = z + (now / before if step > 1 else 0.0) * p
        before, Ap = now, A @ p
        x, r = x + now / (p @ Ap) * p, r - now / (p @ Ap) * Ap
        if np.linalg.norm(r) <= tolerance * np.linalg.norm(b):
            return step
    return most


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize(("n", "shift"), [(60, 0.01), (200, 0.05)])
def test_related_columns_all_reach_the_tolerance(kind, preconditioned, n, shift, rng):
    """The case of the report is n = 60, a shift of 0.01, 18 columns: the plain recurrence stopped at 1e-4."""
    A, B = gram(n, shift, rng), related(kind, n, rng)
    calls, product = counted(A)
    found = block_cg(product, B, 1e-10, pivoted(A, shift, 20) if preconditioned else None)
    assert residuals(A, found.solution, B).max() <= 1.01e-10
    assert found.residual <= 1e-10
    assert found.residual == pytest.approx(residuals(A, found.solution, B).max(), rel=0.5)
    assert found.steps <= 20
    assert len(calls) <= found.steps + 2, "one product beyond the steps, or two where a second run was needed"
    assert not found.solution[:, ~B.any(axis=0)].any()


@pytest.mark.parametrize("preconditioned", [False, True])
def test_a_block_takes_no_more_steps_than_its_columns_alone(preconditioned, rng):
    A, B = gram(200, 0.05, rng), related("unrelated", 200, rng)
    precondition = pivoted(A, 0.05, 10) if preconditioned else (lambda R: R)
    alone = max(single_steps(A, b, 1e-10, precondition) for b in B.T)
    for m in (1, 2, 5, COLUMNS):
        assert block_cg(lambda S: A @ S, B[:, :m], 1e-10, precondition).steps <= alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("condition", [1e5, 1e8, 1e12])
def test_ill_conditioned_systems_are_solved_as_far_as_rounding_allows(kind, condition):
    """No method leaves less than about u |A| |x|, and what is left is stated.

    Several draws: a run may end with a residual larger than it began with, nearer in the norm of A all the same, and
    must not be thrown away.
    """
    for seed in range(8):
        rng = np.random.default_rng(seed)
        A, B = with_spectrum(150, condition, rng), related(kind, 150, rng)
        found = block_cg(lambda S, A=A: A @ S, B, 1e-8)
        X, size = found.solution, np.linalg.norm(B, axis=0)
        reach = 20 * U * np.linalg.norm(X, axis=0) / np.where(size > 0, size, 1.0)
        left = residuals(A, X, B)
        assert (left <= np.maximum(1.01e-8, reach)).all()
        assert found.residual == pytest.approx(left.max(), rel=0.5)
        assert found.steps <= 150


@pytest.mark.parametrize("m", [1, 2, 3])
def test_few_columns_end_within_the_dimension(m, rng):
    """Recurrences alone would need thousands of steps here: rounding brings old directions back."""
    A, B = with_spectrum(200, 1e8, rng), rng.normal(size=(200, m))
    found = block_cg(lambda S: A @ S, B, 1e-7)
    assert found.residual <= 1e-7
    assert found.steps <= -(-200 // m)


@pytest.mark.parametrize("kind", KINDS)
def test_without_memory_for_earlier_directions_only_steps_are_lost(kind, rng, monkeypatch):
    A, B = gram(200, 0.05, rng), related(kind, 200, rng)
    with_them = block_cg(lambda S: A @ S, B, 1e-10)
    monkeypatch.setattr(cg, "_KEPT_BYTES", 0)
    found = block_cg(lambda S: A @ S, B, 1e-10)
    assert found.residual <= 1e-10
    assert with_them.steps <= found.steps <= 25


def test_a_first_guess_saves_steps_and_a_bad_one_costs_none(rng):
    A, B = with_spectrum(200, 1e4, rng), rng.normal(size=(200, 4))
    X = np.linalg.solve(A, B)

    def guess(start):
        return start, A @ start

    cold = block_cg(lambda S: A @ S, B, 1e-8)
    near = block_cg(lambda S: A @ S, B, 1e-8, start=guess(X + 1e-6 * rng.normal(size=X.shape)))
    assert near.steps < cold.steps
    assert near.residual <= 1e-8
    there = block_cg(lambda S: A @ S, B, 1e-8, start=guess(X))
    assert (there.steps, there.residual <= 1e-8) == (0, True)
    mixed = block_cg(lambda S: A @ S, B, 1e-8, start=guess(np.column_stack([X[:, :2], 1e9 * X[:, 2:]])))
    assert mixed.residual <= 1e-8
    assert mixed.steps == block_cg(lambda S: A @ S, B[:, 2:], 1e-8).steps


def test_products_in_single_precision_are_borne(rng):
    A, B = gram(200, 0.05, rng), related("labels", 200, rng)
    single = (A - 0.05 * np.eye(200)).astype(np.float32)

    def product(S):
        return (single @ S.astype(np.float32)).astype(np.float64) + 0.05 * S

    found = block_cg(product, B, 1e-4, pivoted(A, 0.05, 20))
    assert found.residual <= 1e-4
    assert residuals(A, found.solution, B).max() <= 5e-4
    out_of_reach = block_cg(product, B, 1e-9, pivoted(A, 0.05, 20))
    assert 1e-9 < out_of_reach.residual <= 1e-4, "it comes as near as it can and says how near"
    assert out_of_reach.steps <= 100


def test_more_columns_than_rows(rng):
    A, B = with_spectrum(12, 1e6, rng), rng.normal(size=(12, 26))
    found = block_cg(lambda S: A @ S, B, 1e-9)
    assert found.residual <= 1e-9
    np.testing.assert_allclose(found.solution, np.linalg.solve(A, B), atol=1e-3 * np.abs(found.solution).max())


def test_steps_are_bounded_and_what_is_not_a_number_is_not_a_solution(rng):
    A, B = with_spectrum(200, 1e8, rng), rng.normal(size=(200, 2))
    found = block_cg(lambda S: A @ S, B, 1e-8, max_steps=7)
    assert found.steps == 7
    assert found.residual == pytest.approx(residuals(A, found.solution, B).max(), rel=1e-6)
    assert found.residual <= 1, "never worse than nothing"
    broken = block_cg(lambda S: A @ S * np.nan, B, 1e-8)
    assert (broken.steps, broken.residual) == (1, 1.0)
    nothing = block_cg(lambda S: A @ S, np.zeros((200, 2)), 1e-8)
    assert (nothing.steps, nothing.residual) == (0, 0.0)
    assert not nothing.solution.any()
    assert block_cg(lambda S: A @ S, np.zeros((200, 0)), 1e-8).solution.shape == (200, 0)
