"""Routines of BLAS and LAPACK against NumPy, and with other threads running meanwhile."""

import sys
import threading
import time

import numpy as np
import pytest

from kme_dist import lapack

N, COLUMNS = 90, 7


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    return request.param


def fortran(values, dtype):
    return np.array(values, dtype, order="F")


def positive(dtype):
    rows = np.random.default_rng(0).normal(size=(3 * N, N))
    return fortran(rows.T @ rows / (3 * N) + np.eye(N), dtype)


def factor(dtype):
    """The factor, with garbage above the diagonal."""
    L = np.linalg.cholesky(positive("float64"))
    return fortran(L + np.triu(np.full((N, N), 1e6), 1), dtype)


def right(dtype, seed=1, columns=COLUMNS):
    return fortran(np.random.default_rng(seed).normal(size=(N, columns)), dtype)


def agree(found, expected, dtype):
    tolerance = 50 * N * np.finfo(dtype).eps
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def test_potrf_factorises_the_lower_triangle_in_place_and_leaves_the_rest(dtype):
    A = positive(dtype)
    above = A[np.triu_indices(N, 1)].copy()
    assert lapack.potrf(A) == 0
    agree(np.tril(A), np.linalg.cholesky(positive("float64")), dtype)
    np.testing.assert_array_equal(A[np.triu_indices(N, 1)], above)


def test_potrf_names_the_first_pivot_that_is_not_positive(dtype):
    A = positive(dtype)
    A[4, 4] = -1.0
    assert lapack.potrf(A) == 5


@pytest.mark.parametrize("columns", [COLUMNS, 0])
def test_potrs_solves_with_the_matrix_of_a_factor(dtype, columns):
    B = right(dtype, columns=columns)
    X = B.copy(order="F")
    assert lapack.potrs(factor(dtype), X) == 0
    assert X.shape == B.shape
    if columns:
        agree(X, np.linalg.solve(positive("float64"), B), dtype)


def test_a_right_hand_side_may_be_a_vector(dtype):
    b = right(dtype)[:, 0].copy()
    x = b.copy()
    assert lapack.potrs(factor(dtype), x) == 0
    agree(x, np.linalg.solve(positive("float64"), b), dtype)


@pytest.mark.parametrize("transposed", [False, True])
def test_trtrs_solves_with_the_factor_itself(dtype, transposed):
    L, B = np.tril(factor("float64")), right(dtype)
    X = B.copy(order="F")
    assert lapack.trtrs(factor(dtype), X, transposed) == 0
    agree(X, np.linalg.solve(L.T if transposed else L, B), dtype)


def test_trtri_and_potri_invert_the_factor_and_its_matrix(dtype):
    L, both = np.tril(factor("float64")), (factor(dtype), factor(dtype))
    assert (lapack.trtri(both[0]), lapack.potri(both[1])) == (0, 0)
    agree(np.tril(both[0]), np.linalg.inv(L), dtype)
    agree(np.tril(both[1]), np.tril(np.linalg.inv(positive("float64"))), dtype)


@pytest.mark.parametrize("order", ["C", "F"])
def test_syrk_is_the_lower_triangle_of_a_matrix_of_products(dtype, order):
    Z, out = np.array(right(dtype), order=order), np.full((COLUMNS, COLUMNS), 3.0, dtype, order="F")
    lapack.syrk(Z, out)
    agree(np.tril(out), np.tril(Z.T @ Z), dtype)
    assert (out[np.triu_indices(COLUMNS, 1)] == 3.0).all()


def test_symm_reads_the_lower_triangle_only(dtype):
    full, V = positive(dtype), right(dtype)
    lower = np.tril(full) + np.triu(np.full((N, N), np.nan, dtype), 1)
    out = np.empty((N, COLUMNS), dtype, order="F")
    lapack.symm(lower, V, out)
    agree(out, full @ V, dtype)


def test_a_product_is_subtracted_in_place(dtype):
    A, B = right(dtype, seed=2), right(dtype, seed=3)[:20]
    C = np.random.default_rng(4).normal(size=(N, 20)).astype(dtype)
    expected = C - A @ B.T
    lapack.subtract_product(A, B, C)
    agree(C, expected, dtype)


@pytest.mark.parametrize(
    "call",
    [
        lambda: lapack.potrf(np.eye(3)[:, :2]),
        lambda: lapack.potrf(np.arange(9.0).reshape(3, 3)),  # in C order
        lambda: lapack.potrs(np.eye(3), np.zeros((2, 1), order="F")),
        lambda: lapack.potrs(np.eye(3), np.zeros((3, 1), "float32", order="F")),
        lambda: lapack.syrk(np.zeros((5, 3)), np.zeros((2, 2), order="F")),
    ],
)
def test_shapes_orders_and_precisions_are_checked_before_fortran_is_called(call):
    with pytest.raises(AssertionError):
        call()


def test_other_threads_run_while_a_matrix_is_factorised():
    A = fortran(np.eye(1_500) + 1.0, "float64")
    turns, seen = 0, []

    def factorise():
        before = turns
        lapack.potrf(A)
        seen.append(turns - before)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e3)  # a thread gives way only where it releases the lock itself
    try:
        thread = threading.Thread(target=factorise)
        thread.start()
        while thread.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert seen[0] > 10
