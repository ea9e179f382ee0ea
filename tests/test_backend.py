"""One source, many array libraries: what the backend evens out, and how strict the stand-in for CuPy is."""

from __future__ import annotations

import importlib.util
import inspect
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import scipy.linalg
import strict_cupy
from threadpoolctl import threadpool_info, threadpool_limits

from kme_dist import backend, errors


def positive_definite(n, dtype, seed=0):
    A = np.random.default_rng(seed).normal(size=(n, n))
    return (A @ A.T / n + np.eye(n)).astype(dtype)


TOLERANCE = {"float64": 1e-10, "float32": 1e-4}


# --- factorisation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 12])
def test_the_last_columns_of_the_inverse_factor_come_from_its_corner(arrays, dtype, count):
    A = positive_definite(12, dtype)
    inverse = np.linalg.inv(np.linalg.cholesky(A.astype(float)))
    found = arrays.host(backend.cholesky(arrays(np.array(A, order="F"))).last_columns(count))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, inverse[-count:, -count:], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    np.testing.assert_allclose(
        (found.astype(float) ** 2).sum(axis=0),
        np.diag(np.linalg.inv(A.astype(float)))[-count:],
        rtol=TOLERANCE[dtype] * 10,
    )


def test_factor_solves(arrays, dtype, rng):
    A, B = positive_definite(12, dtype), rng.normal(size=(12, 3)).astype(dtype)
    exact = np.linalg.solve(A.astype(float), B.astype(float))
    factor = backend.cholesky(arrays(np.array(A, order="F")))
    found = arrays.host(factor.solve(arrays(B)))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    half = arrays.host(factor.half_solve(arrays(B)))
    np.testing.assert_allclose((half**2).sum(axis=0), (B * exact).sum(axis=0), rtol=TOLERANCE[dtype])


def test_right_hand_sides_survive(arrays, dtype, rng):
    B = rng.normal(size=(6, 2)).astype(dtype)
    data = arrays(B.copy())
    factor = backend.cholesky(arrays(positive_definite(6, dtype)))
    factor.solve(data)
    factor.half_solve(data)
    assert (arrays.host(data) == B).all()


def test_inverse_diagonal(arrays, dtype):
    A = positive_definite(9, dtype)
    found = arrays.host(backend.cholesky(arrays(np.array(A, order="F"))).inverse_diagonal())
    np.testing.assert_allclose(found, np.linalg.inv(A.astype(float)).diagonal(), rtol=TOLERANCE[dtype])


def test_upper_triangle_is_neither_read_nor_changed(arrays, dtype, rng):
    A = positive_definite(10, dtype)
    above = np.triu(np.ones((10, 10), dtype=bool), 1)
    marked = np.array(A, order="F")
    marked[above] = 7.0
    data, B = arrays(marked), rng.normal(size=(10, 2)).astype(dtype)
    found = arrays.host(backend.cholesky(data).solve(arrays(B)))
    np.testing.assert_allclose(found, np.linalg.solve(A.astype(float), B), rtol=0, atol=TOLERANCE[dtype])
    assert (arrays.host(data)[above] == 7.0).all()


def test_host_factorisation_takes_no_second_matrix():
    A = np.array(positive_definite(8, "float64"), order="F")
    assert np.shares_memory(backend.cholesky(A).lower, A)


def bad_matrices(dtype):
    negative = positive_definite(8, dtype)
    negative[3, 3] = -1.0
    singular = np.ones((8, 8), dtype=dtype)
    first, last, inside = (positive_definite(8, dtype) for _ in range(3))
    first[0, 0] = last[7, 7] = np.nan
    inside[5, 2] = inside[2, 5] = np.nan
    return {"negative": negative, "singular": singular, "NaN first": first, "NaN last": last, "NaN inside": inside}


@pytest.mark.parametrize("kind", bad_matrices("float64"))
def test_failed_factorisation_is_the_same_error_everywhere(kind, arrays, dtype):
    with pytest.raises(errors.NumericalError, match=f"matrix of 8 rows is not positive definite in {dtype}") as caught:
        backend.cholesky(arrays(bad_matrices(dtype)[kind]))
    assert (caught.value.rows, caught.value.dtype) == (8, dtype)


def test_single_precision_is_factorised_in_single_precision():
    """numpy.linalg computes in double and would hide what fails on a GPU."""
    x = np.random.default_rng(0).normal(size=(300, 3))
    K = np.exp(-((x[:, None] - x[None]) ** 2).sum(axis=2) / 2).astype(np.float32)
    K += np.float32(1e-6) * np.eye(300, dtype=np.float32)
    np.linalg.cholesky(K)
    with pytest.raises(errors.NumericalError):
        backend.cholesky(K)


# --- small differences -----------------------------------------------------------------------------


def test_diagonals(arrays, dtype):
    A = arrays(np.arange(16.0).reshape(4, 4), dtype)
    assert arrays.host(backend.diagonal(A)).tolist() == [0, 5, 10, 15]
    backend.set_diagonal(A, arrays([9, 8, 7, 6], dtype))
    expected = np.arange(16.0).reshape(4, 4)
    np.fill_diagonal(expected, [9, 8, 7, 6])
    assert (arrays.host(A) == expected).all()


def test_diagonal_is_a_copy(arrays):
    A = arrays(np.eye(3))
    d = backend.diagonal(A)
    backend.set_diagonal(A, arrays([5.0, 5.0, 5.0]))
    assert (arrays.host(d) == 1).all()


def test_values_move_beside_a_reference(arrays, dtype):
    reference = arrays(np.zeros(2), dtype)
    for values in (3.0, [1, 2], np.array([True, False]), np.float64(2.5)):
        found = arrays.host(backend.like(values, reference))
        assert found.dtype == dtype
        assert (found == np.asarray(values)).all()
    assert arrays.host(backend.like([1, 2], reference, dtype=np.int64)).dtype.kind == "i"


def test_precision_is_told_and_changed(arrays, dtype):
    A = arrays(np.ones((2, 2)), dtype)
    assert backend.precision(A) == dtype
    assert backend.astype(A, dtype) is A
    for other in ("float32", "float64"):
        assert backend.precision(backend.astype(A, other)) == other


def test_round_trip_to_the_host(arrays):
    values = np.arange(6.0).reshape(2, 3)
    assert (backend.to_host(arrays(values)) == values).all()


def test_in_place_helpers(arrays, dtype):
    values = np.array([[-1.0, 0.5], [2.0, 0.0]], dtype=dtype)
    assert (arrays.host(backend.clamp_min(arrays(values.copy()), 0.25)) == np.maximum(values, 0.25)).all()
    np.testing.assert_allclose(arrays.host(backend.inplace("exp", arrays(values.copy()))), np.exp(values), rtol=1e-6)
    out = arrays(np.zeros((2, 2)), dtype)
    assert backend.matmul(arrays(values), arrays(values), out=out) is out
    np.testing.assert_allclose(arrays.host(out), values @ values, rtol=1e-6)


def test_workspace_matrix_has_the_layout_that_factorises_in_place(arrays, dtype):
    A = backend.empty_square(4, arrays(np.zeros(1), dtype))
    assert A.shape == (4, 4)
    assert backend.precision(A) == dtype
    if isinstance(A, np.ndarray):
        assert A.flags.f_contiguous


# --- choosing a backend ----------------------------------------------------------------------------


@pytest.fixture
def no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)  # what a failed import leaves


def test_without_cupy_the_host_computes(no_cupy):
    assert not backend.gpu_available()
    assert backend.resolve("auto") == "numpy"
    with pytest.raises(errors.ConfigError, match="no usable CUDA device"):
        backend.resolve("cupy")
    with pytest.raises(errors.ConfigError, match=r"install kme-dist\[gpu\]"):
        backend.to_device(np.zeros(3), "cupy")
    assert "not installed" in backend.gpu_report()["self_test"]


def test_cupy_without_a_device_is_no_gpu(device, monkeypatch):
    monkeypatch.setattr(strict_cupy.cupy, "is_available", lambda: False)
    assert backend.resolve("auto") == "numpy"
    assert "finds no CUDA device" in backend.gpu_report()["self_test"]


def test_with_a_device_it_is_chosen(device):
    assert backend.resolve("auto") == "cupy"
    assert backend.resolve("numpy") == "numpy"
    assert isinstance(backend.to_device(np.zeros(3), "cupy"), strict_cupy.ndarray)
    assert isinstance(backend.to_device(device(np.zeros(3)), "numpy"), np.ndarray)
    assert backend.free_bytes("cupy") == 7 << 30
    report = backend.gpu_report()
    assert report["self_test"] == "passed"
    assert report["devices"] == [{"name": "stand-in", "memory_bytes": 8 << 30}]


def test_unknown_backend_is_refused():
    with pytest.raises(errors.ConfigError, match="backend 'torch' is unknown"):
        backend.resolve("torch")


def test_free_memory_of_the_host_is_known():
    assert backend.free_bytes("numpy") > 1 << 20


def test_blas_can_be_held_to_one_thread():
    from threadpoolctl import threadpool_info

    with backend.blas_threads(1):
        assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}
    with backend.blas_threads(None):
        pass


def test_importing_the_mathematics_does_not_import_cupy():
    program = "import sys, kme_dist.core.objective, kme_dist.core.embedding; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=120).returncode == 0


@pytest.mark.parametrize(
    "error",
    [
        errors.ConfigError("a"),
        errors.DataError("b"),
        errors.NumericalError("c", rows=3, regularization=0.1, dtype="float32"),
        errors.CorruptError("d"),
        errors.RetryError("e"),
    ],
)
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert isinstance(copy, errors.KMEError)


def test_errors_are_the_matching_builtins_too():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.DataError, ValueError)
    assert issubclass(errors.NumericalError, ArithmeticError)
    codes = {errors.ConfigError: 2, errors.DataError: 2, errors.NumericalError: 3}
    codes |= {errors.CorruptError: 65, errors.RetryError: 75, errors.KMEError: 1}
    assert all(kind.exit_code == code for kind, code in codes.items())


# --- the stand-in is as strict as it says ----------------------------------------------------------


@pytest.mark.parametrize(
    "mistake",
    [
        lambda a, h: np.asarray(a),
        lambda a, h: np.array(a),
        lambda a, h: np.exp(a),
        lambda a, h: np.sum(a),
        lambda a, h: np.concatenate([a, a]),
        lambda a, h: a + h,
        lambda a, h: h + a,
        lambda a, h: h @ a,
        lambda a, h: a.__setitem__(slice(None), h),
        lambda a, h: h.__setitem__(slice(None), a),
        lambda a, h: strict_cupy.cupy.concat([a, h]),
        lambda a, h: strict_cupy.cupy.exp(h),
        lambda a, h: strict_cupy.cupy.where(a > 0, a, h),
        lambda a, h: scipy.linalg.cholesky(a),
    ],
)
def test_stand_in_refuses_to_mix_with_the_host(mistake):
    with pytest.raises(TypeError):
        mistake(strict_cupy.cupy.asarray(np.eye(3)), np.eye(3))


def test_stand_in_behaves_like_a_device():
    cupy = strict_cupy.cupy
    a = cupy.asarray(np.arange(4.0))
    assert isinstance(a.sum(), strict_cupy.ndarray)
    assert a.sum().shape == ()
    before = strict_cupy.synchronisations
    assert float(a.sum()) == 6
    assert bool((a >= 0).all())
    assert strict_cupy.synchronisations == before + 2
    assert a[cupy.asarray(np.array([5, 1]))].get().tolist() == [1, 1]
    assert np.isnan(cupy.empty((2,)).get()).all()
    garbage = cupy.linalg.cholesky(cupy.asarray(-np.eye(3)))
    assert (garbage.get().diagonal() > 0).all()
    square = cupy.asarray(np.arange(9.0).reshape(3, 3))
    with pytest.raises(AssertionError, match="overlapping"):
        square[:, :] = square.T
    assert not hasattr(cupy, "geomspace")


def test_stand_in_has_no_name_or_keyword_that_cupy_lacks():
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    import cupy
    import cupyx

    pairs = [(strict_cupy.cupy, cupy), (strict_cupy.cupy.linalg, cupy.linalg), (strict_cupy.ndarray, cupy.ndarray)]
    for stand_in, real in pairs:
        for name in (name for name in vars(stand_in) if not name.startswith("_")):
            assert hasattr(real, name), name
            ours = getattr(stand_in, name)
            if not inspect.isfunction(ours) or isinstance(getattr(real, name), cupy.ufunc):
                continue
            try:
                theirs = inspect.signature(getattr(real, name)).parameters
            except ValueError:  # compiled without a signature
                continue
            assert set(inspect.signature(ours).parameters) <= set(theirs), name
    for name in ("Stream", "MemoryPool"):
        ours = getattr(strict_cupy, name)
        theirs = getattr(cupy.cuda, name)
        assert {method for method in vars(ours) if not method.startswith("_")} - {"log"} <= set(dir(theirs)), name
    assert hasattr(cupy.cuda.Event, "synchronize")
    assert callable(cupy.cuda.get_current_stream)
    assert callable(cupyx.empty_pinned)
    assert {"compile", "get_function"} <= set(dir(cupy.RawModule))
    assert hasattr(cupyx, "errstate")
    assert cupy.ndarray.__module__ == "cupy"


# --- transfers and memory --------------------------------------------------------------------------


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def card(request):
    return request.getfixturevalue("device" if request.param == "stand-in" else "gpu")


def test_batches_move_ahead_of_their_use_and_arrive_intact(card):
    """Of all sizes; the stand-in copies as late as it may, so a batch that nobody waited for is NaN or another one."""
    batches = [(np.full((rows, 3), float(number)), number) for number, rows in enumerate([4, 2, 4, 9, 1, 0, 5])]
    requested, seen = [], []

    def read():
        for batch in batches:
            requested.append(batch[1])
            yield batch

    for rows, number in backend.moved_ahead(read(), "cupy"):
        assert card.host(rows).tolist() == batches[number][0].tolist()
        seen.append(number)
    assert seen == requested == list(range(7))


def test_device_memory_is_refilled_only_after_the_work_on_it(device):
    list(backend.moved_ahead(((np.full((2, 1), float(n)), n) for n in range(5)), "cupy"))
    copying = strict_cupy.streams[-1]
    assert copying.log == ["copy", "record"] * 2 + ["wait", "copy", "record"] * 3


def test_types_of_batches_may_change_and_what_is_no_array_stays(card):
    batches = [np.ones((2, 3)), np.ones((2, 4), "float32"), ["a", "b"], np.zeros((1, 4), "float32")]
    found = [
        card.host(rows).copy() if hasattr(rows, "dtype") else rows
        for rows, _ in backend.moved_ahead(((batch, None) for batch in batches), "cupy")
    ]
    for ours, theirs in zip(found, batches, strict=True):
        assert np.array_equal(ours, theirs)
        assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)


def test_a_batch_that_cannot_be_read_raises_and_an_early_end_waits(device):
    def read():
        yield np.zeros((1, 1)), 0
        raise errors.DataError("chunk 1 is corrupt")

    moved = backend.moved_ahead(read(), "cupy")
    next(moved)
    with pytest.raises(errors.DataError, match="chunk 1"):
        next(moved)
    moved = backend.moved_ahead(((np.zeros((1, 1)), n) for n in range(9)), "cupy")
    next(moved)
    moved.close()


def test_on_the_host_batches_pass_through_when_they_are_requested():
    requested = []

    def read():
        for number in range(3):
            requested.append(number)
            yield np.full(2, number), number

    for rows, number in backend.moved_ahead(read(), "numpy"):
        assert requested[-1] == number == rows[0]


def test_a_limit_of_device_memory_counts_as_free_memory(device, monkeypatch):
    monkeypatch.setattr(strict_cupy, "_pool", strict_cupy.MemoryPool())
    assert backend.free_bytes("cupy") == 7 << 30
    backend.limit_device_memory(3 << 30)
    assert backend.free_bytes("cupy") == 2 << 30
    backend.limit_device_memory(0.5)
    assert backend.free_bytes("cupy") == 3 << 30


def test_one_blas_thread_holds_until_the_last_block_that_asked_for_it_ends():
    """The number of threads belongs to the process, and workers may share one."""

    def threads():
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    with threadpool_limits(2, user_api="blas"):
        first, second = backend.blas_threads(1), backend.blas_threads(1)
        first.__enter__()
        second.__enter__()
        assert threads() == {1}
        first.__exit__(None, None, None)
        assert threads() == {1}, "another thread is still at work"
        second.__exit__(None, None, None)
        assert threads() == {2}
        seen = []

        def elsewhere():
            with backend.blas_threads(1):
                seen.append(threads())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen == [{1}], "whichever thread asks"
        assert threads() == {2}


def test_threads_that_ask_for_the_same_result_wait_for_one_of_them():
    made, both = [], threading.Barrier(2)

    @backend.computed_once(1)
    def slow(number):
        made.append(number)
        time.sleep(0.05)
        return object()

    def ask():
        both.wait(timeout=60)
        return slow(3)

    with ThreadPoolExecutor(2) as pool:
        one, two = (future.result() for future in [pool.submit(ask), pool.submit(ask)])
    assert one is two
    assert made == [3]
    assert slow(4) is not one
    assert slow(3) is not one, "only the latest is kept"
