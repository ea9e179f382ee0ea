"""NumPy or CuPy, decided by the data.

The mathematics in `kme_dist.core` asks `namespace_of(X)` for the array module and writes `xp.`; this module holds
only what the two libraries do differently: factorisation, triangular solves, in-place work, transfers, memory. It is
the only importer of cupy, and imports it when a device is first used, so that a machine without a GPU never loads it.

Host memory layout: square matrices are Fortran-ordered so that LAPACK factorises them in place. Single precision is
factorised in single precision (numpy.linalg would silently compute in double and hide failures that a GPU shows).

Any other array library that follows the array API standard also works, without the in-place savings. The tests use
that to run the mathematics on a strict implementation of the standard.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from kme_dist import lapack
from kme_dist.errors import ConfigError, NumericalError, warn
from kme_dist.meter import metered

T = TypeVar("T")
Array = Any  # a NumPy, CuPy or array-API array: these libraries share no static type


def namespace_of(array: Array) -> Any:
    """The module whose functions work on `array`: numpy for host arrays, cupy for device arrays."""
    if isinstance(array, np.ndarray | np.generic):
        return np
    if is_cupy(array):
        return _cupy()
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return np


def is_sparse(array: Any) -> bool:
    """Whether these are rows in scipy's CSR format."""
    return hasattr(array, "indptr")


def is_cupy(array: Array) -> bool:
    return type(array).__module__.split(".")[0] == "cupy"


def _cupy() -> ModuleType:
    # Already imported whenever a device array exists; `sys.modules` keeps stand-ins replaceable in tests.
    found = sys.modules.get("cupy")
    if found is not None:
        return found
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            "backend 'cupy' requires the package cupy, which is not installed; "
            "install kme-dist[gpu] or choose backend='numpy'"
        ) from error
    return cupy  # type: ignore[no-any-return]


def gpu_available() -> bool:
    """True when cupy is installed and finds a device (cupy can be imported without one)."""
    try:
        return bool(_cupy().is_available())
    except ConfigError:
        return False


def resolve(backend: str) -> str:
    """Resolve the setting "auto" | "numpy" | "cupy" to "numpy" or "cupy"; ConfigError without a usable device."""
    if backend == "auto":
        return "cupy" if gpu_available() else "numpy"
    if backend == "cupy" and not gpu_available():
        raise ConfigError(
            "backend 'cupy' was requested, but no usable CUDA device was found; "
            "run `kme-dist doctor` for details or choose backend='numpy'"
        )
    if backend not in ("numpy", "cupy"):
        raise ConfigError(f"backend {backend!r} is unknown; choose 'auto', 'numpy' or 'cupy'")
    return backend


# --- moving data ---------------------------------------------------------------------------------


def to_device(array: Array, backend: str) -> Array:
    """Copy an array to the device of `backend`, if it is not there; rows that are not numbers stay as they are."""
    if isinstance(array, list):
        return array
    if backend == "cupy":
        return _cupy().asarray(array)
    return to_host(array)


def to_host(array: Array) -> np.ndarray:
    """A NumPy copy or view; for device arrays this waits for the device."""
    if isinstance(array, np.ndarray) or is_sparse(array):
        return array  # type: ignore[no-any-return]
    if is_cupy(array):
        return array.get()  # type: ignore[no-any-return]
    if hasattr(array, "__array_namespace__") and hasattr(array, "to_device"):
        xp = array.__array_namespace__()
        cpu = getattr(xp, "Device", None)
        return np.asarray(array.to_device(cpu("CPU_DEVICE")) if cpu else array)
    return np.asarray(array)


def like(values: Array, reference: Array, dtype: Any = None) -> Array:
    """Host values (parameters, labels, index ranges) as an array on the device of `reference`."""
    xp = namespace_of(reference)
    if xp is np:
        return np.asarray(values, dtype=dtype or reference.dtype)
    if is_cupy(reference):
        return xp.asarray(np.asarray(values), dtype=dtype or reference.dtype)
    kind = reference.dtype if dtype is None else getattr(xp, np.dtype(dtype).name)
    return xp.asarray(np.array(values), dtype=kind, device=reference.device)


def astype(array: Array, dtype: str) -> Array:
    """`array` in single or double precision ("float32" or "float64")."""
    xp = namespace_of(array)
    kind = getattr(xp, dtype)
    if is_sparse(array):
        return array.astype(kind, copy=False)
    return array if array.dtype == kind else xp.astype(array, kind)


def precision(array: Array) -> str:
    """ "float32" or "float64"."""
    return "float32" if array.dtype == namespace_of(array).float32 else "float64"


def empty_square(n: int, reference: Array) -> Array:
    """An uninitialised n x n matrix in the memory order that `cholesky` expects."""
    xp = namespace_of(reference)
    if xp is np:
        return np.empty((n, n), dtype=reference.dtype, order="F")
    if is_cupy(reference):
        return xp.empty((n, n), dtype=reference.dtype)
    return xp.zeros((n, n), dtype=reference.dtype, device=reference.device)


def free_bytes(backend: str) -> int:
    """Memory that can still be allocated on the device of `backend`."""
    if backend == "cupy":
        cupy = _cupy()
        free, _total = cupy.cuda.runtime.memGetInfo()
        pool = cupy.get_default_memory_pool()
        available, limit = int(free) + int(pool.free_bytes()), int(pool.get_limit())
        return min(available, limit - int(pool.used_bytes())) if limit else available
    return _host_free_bytes()


def limit_device_memory(limit: int | float) -> None:
    """Let CuPy allocate at most this many bytes, or this fraction of the device (0.8), in this process."""
    size = {"fraction": limit} if isinstance(limit, float) else {"size": limit}
    _cupy().get_default_memory_pool().set_limit(**size)


def release_memory() -> None:
    """Give the unused blocks of CuPy's pool back: they may be too small for what is needed next."""
    if "cupy" in sys.modules:
        _cupy().get_default_memory_pool().free_all_blocks()


def _host_free_bytes() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 4 << 30  # unknown (not Linux): assume a small machine


def synchronise(backend: str) -> None:
    """Wait until the device of `backend` has done all that was queued by this thread."""
    if backend == "cupy":
        _cupy().cuda.get_current_stream().synchronize()


# --- transfers that overlap with computing ---------------------------------------------------------


def moved_ahead(batches: Iterable[tuple[Array, T]], backend: str) -> Iterator[tuple[Array, T]]:
    """The batches (rows, anything) with their rows on the device of `backend`.

    On a GPU the next batch is read by a thread, and copied from pinned memory on a stream of its own, while the caller
    computes with this one. Two buffers take turns: rows are valid until the next batch is requested. On the host
    batches pass through one by one, as they are requested.
    """
    if backend != "cupy":
        yield from ((to_device(rows, backend) if hasattr(rows, "dtype") else rows, more) for rows, more in batches)
        return
    cupy, source = _cupy(), iter(batches)
    device, computing = cupy.cuda.Device(), cupy.cuda.get_current_stream()
    copying = cupy.cuda.Stream(non_blocking=True)
    buffer, other = _Buffer(), _Buffer()

    def move(into: _Buffer) -> tuple[Array, T] | None:
        with device:  # a thread starts on device 0
            if (found := next(source, None)) is None:
                return None
            rows, more = found
            return (into.fill(rows, copying) if hasattr(rows, "dtype") else rows), more

    with ThreadPoolExecutor(1) as reader:
        try:
            moving = reader.submit(move, buffer)
            while (batch := moving.result()) is not None:
                moving = reader.submit(move, other)
                if buffer.copied is not None:  # None: rows that are no array stay on the host
                    computing.wait_event(buffer.copied)
                yield batch
                buffer.used = computing.record()
                buffer, other = other, buffer
        finally:
            computing.synchronize()  # the buffers return to the memory pool: nothing may still read them


class _Buffer:
    """Pinned host memory and device memory for one batch."""

    def __init__(self) -> None:
        self.host: Any = None
        self.device: Array = None
        self.copied: Any = None  # event: the copy to the device has ended
        self.used: Any = None  # event: the work on the rows has ended

    def fill(self, rows: np.ndarray, stream: Any) -> Array:
        """Start copying rows to the device."""
        if self.copied is not None:
            self.copied.synchronize()  # before the pinned memory changes
        if self.used is not None:
            stream.wait_event(self.used)  # before the device memory does
        if not self._holds(rows):
            self.host = _cupyx().empty_pinned(rows.shape, rows.dtype)
            with stream:
                self.device = _cupy().empty(rows.shape, rows.dtype)
        host, device = self.host[: len(rows)], self.device[: len(rows)]
        host[...] = rows
        device.set(host, stream=stream)
        self.copied = stream.record()
        return device

    def _holds(self, rows: np.ndarray) -> bool:
        own = self.host
        return own is not None and own.dtype == rows.dtype and own.shape[1:] == rows.shape[1:] and len(own) >= len(rows)


# --- in-place work -------------------------------------------------------------------------------


def matmul(A: Array, B: Array, out: Array = None) -> Array:
    """A @ B, into `out` when given; dense also for sparse A and B."""
    if out is None:
        found = A @ B
        return found.toarray() if is_sparse(found) else found
    if isinstance(out, np.ndarray) and isinstance(A, np.ndarray) and isinstance(B, np.ndarray):
        return np.matmul(A, B, out=out)
    out[...] = matmul(A, B)
    return out


def by_columns(A: Array) -> Array:
    """A in the memory order that products of tiles with few columns read best: on a device, column after column."""
    return namespace_of(A).asfortranarray(A) if is_cupy(A) else A


def inplace(function: str, A: Array) -> Array:
    """Apply a one-argument function of the namespace ("exp", "sqrt", ...), over A itself where possible."""
    xp = namespace_of(A)
    if xp is np or is_cupy(A):
        return getattr(xp, function)(A, out=A)
    return getattr(xp, function)(A)


def clamp_min(A: Array, bound: float) -> Array:
    """max(A, bound), over A itself where possible."""
    xp = namespace_of(A)
    if xp is np or is_cupy(A):
        return xp.maximum(A, A.dtype.type(bound), out=A)
    return xp.clip(A, min=bound)


def set_diagonal(A: Array, values: Array) -> None:
    """A[i, i] = values[i]"""
    n = A.shape[0]
    if isinstance(A, np.ndarray):
        np.einsum("ii->i", A)[...] = values
    elif is_cupy(A):
        index = namespace_of(A).arange(n)
        A[index, index] = values
    else:
        xp = namespace_of(A)
        eye = xp.eye(n, dtype=xp.bool, device=A.device)
        A[...] = xp.where(eye, values[:, None], A)


def diagonal(A: Array) -> Array:
    """The main diagonal of a square matrix, as a new array."""
    xp = namespace_of(A)
    if isinstance(A, np.ndarray) or is_cupy(A):
        return xp.diagonal(A).copy()
    return xp.asarray(xp.linalg.diagonal(A), copy=True)


# --- kernels in CUDA -----------------------------------------------------------------------------


def cuda_source(name: str) -> str:
    """A CUDA source of this package."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def compiled(name: str, options: tuple[str, ...]) -> Any:
    """A CUDA source as a CuPy module, built when first used; None (with a warning) where it does not compile."""
    return _module(_cupy(), name, options)


@functools.cache
def _module(cupy: ModuleType, name: str, options: tuple[str, ...]) -> Any:
    module = cupy.RawModule(code=cuda_source(name), options=("--std=c++17", *options))
    try:
        module.compile()
    except Exception as error:  # of the compiler, or a missing library: which ones depends on CuPy's version
        warn(f"{name} does not compile here, so tiles are computed slower: {error}")
        return None
    return module


# --- factorisation -------------------------------------------------------------------------------


class Factor:
    """The Cholesky factor L of A = L Lᵀ, ready to solve.

    `lower` holds L in its lower triangle; above the diagonal its content is undefined (on the host: that of A, so that
    a Gram matrix and the factor of its shifted copy share one n x n block of memory).
    """

    def __init__(self, lower: Array) -> None:
        self.lower = lower

    def solve(self, B: Array) -> Array:
        """A⁻¹ B, by two triangular solves."""
        if isinstance(self.lower, np.ndarray):
            X = np.array(B, dtype=self.lower.dtype, order="F")
            lapack.potrs(self.lower, X)
            return X
        return self.half_solve(self.half_solve(B), transposed=True)

    def half_solve(self, B: Array, transposed: bool = False) -> Array:
        """L⁻¹ B (or L⁻ᵀ B), by one triangular solve; |L⁻¹ b|² = bᵀ A⁻¹ b."""
        if isinstance(self.lower, np.ndarray):
            X = np.array(B, self.lower.dtype, order="F")
            if info := lapack.trtrs(self.lower, X, transposed):
                raise NumericalError(f"LAPACK trtrs found a zero on the diagonal at {info}")
            return X
        if is_cupy(self.lower):
            return _cupy_solve_triangular()(self.lower, B, lower=True, trans="T" if transposed else "N")
        xp = namespace_of(self.lower)
        L = xp.tril(self.lower)
        return xp.linalg.solve(L.T if transposed else L, B)

    def last_columns(self, count: int) -> Array:
        """The last rows and columns of L⁻¹, `count` each; all other entries of these columns are 0.

        [A⁻¹]_ii = |L⁻¹ e_i|², so the last entries of the diagonal of A⁻¹ cost count³/3 operations.
        """
        corner = self.lower[-count:, -count:]
        if isinstance(corner, np.ndarray):
            inverse = np.array(corner, order="F")
            if info := lapack.trtri(inverse):
                raise NumericalError(f"LAPACK trtri found a zero on the diagonal at {info}")
            return np.tril(inverse)
        return Factor(corner).half_solve(like(np.eye(count), self.lower))

    def inverse_diagonal(self) -> Array:
        """The diagonal of A⁻¹; overwrites the factor on the host, which is the cheapest way."""
        if isinstance(self.lower, np.ndarray):
            with metered("factorise"):
                info = lapack.potri(self.lower)
            if info:
                raise NumericalError(f"LAPACK potri failed with code {info}")
            return np.diagonal(self.lower).copy()
        xp = namespace_of(self.lower)
        n = self.lower.shape[0]
        eye = like(np.eye(n), self.lower)
        return xp.sum(self.half_solve(eye) ** 2, axis=0)


def _cupy_solve_triangular() -> Any:
    # Imported here because it loads the CUDA libraries.
    return importlib.import_module("cupyx.scipy.linalg").solve_triangular


def _cupyx() -> ModuleType:
    return importlib.import_module("cupyx")


def cholesky(A: Array) -> Factor:
    """Factorise the symmetric matrix in A's lower triangle; the strict upper triangle is neither read nor changed.

    On the host the factor replaces the lower triangle of A. A matrix that is not positive definite raises
    NumericalError on every backend: CuPy's routine would silently return garbage.
    """
    with metered("factorise"):
        return Factor(_lower_factor(A))


def _lower_factor(A: Array) -> Array:
    if isinstance(A, np.ndarray):
        L = A if A.flags.f_contiguous else np.asfortranarray(A)
        # LAPACK's test of each pivot misses a NaN in the last rows, so the diagonal is checked too.
        if lapack.potrf(L) or not np.isfinite(np.diagonal(L)).all():
            raise _not_positive_definite(A.shape[0], A.dtype)
        return L
    xp = namespace_of(A)
    if is_cupy(A):
        # By default CuPy ignores the solver's status, and the status does not cover NaN. Checking both costs two
        # synchronisations.
        try:
            with _cupyx().errstate(linalg="raise"):
                L = xp.linalg.cholesky(A)
        except np.linalg.LinAlgError as error:
            raise _not_positive_definite(A.shape[0], A.dtype) from error
        if not bool(xp.all(xp.isfinite(xp.diagonal(L)))):
            raise _not_positive_definite(A.shape[0], A.dtype)
        return L
    try:
        L = xp.linalg.cholesky(xp.tril(A) + xp.tril(A, k=-1).T)
    except np.linalg.LinAlgError as error:
        raise _not_positive_definite(A.shape[0], A.dtype) from error
    if not bool(xp.all(xp.isfinite(diagonal(L)))):
        raise _not_positive_definite(A.shape[0], A.dtype)
    return L


def _not_positive_definite(n: int, dtype: Any) -> NumericalError:
    name = str(dtype).rsplit(".", 1)[-1]
    return NumericalError(f"matrix of {n} rows is not positive definite in {name}", rows=n, dtype=name)


# --- threads and devices -------------------------------------------------------------------------


@contextlib.contextmanager
def blas_threads(count: int | None) -> Iterator[None]:
    """Limit BLAS to `count` threads inside the block (None: no limit).

    Everything that affects what is learned runs on one thread: the bits do not depend on the number of cores,
    factorisations of a batch gain nothing from a second thread, and OpenBLAS stalls when one of its threads has to wait
    for a core.

    The limit is that of the process: when blocks of several threads overlap, the first to enter sets it and the last to
    leave restores it.
    """
    if count is None:
        yield
    elif count != 1:
        with _blas().limit(limits=count, user_api="blas"):
            yield
    else:
        _one_thread.enter()
        try:
            yield
        finally:
            _one_thread.leave()


def computed_once(kept: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Keep the latest results of a function; threads that ask for the same one at the same time wait for it."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        lock, cached = threading.Lock(), functools.lru_cache(maxsize=kept)(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> T:
            with lock:
                return cached(*arguments)

        call.cache_clear = cached.cache_clear  # type: ignore[attr-defined]
        return call

    return decorate


def available_cores() -> int:
    """Cores that this process may use (in a container or under taskset fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count() -> int:
    """Threads for work in this process: a core each, or fewer if OMP_NUM_THREADS says so (Dask and joblib set it for
    their workers, so that processes do not compete)."""
    limit = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return min(available_cores(), int(limit)) if limit.isdigit() and int(limit) else available_cores()


class _OneThread:
    """Counts the blocks that limit BLAS to one thread, over all threads of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: list[tuple[Any, int]] = []

    def enter(self) -> None:
        with self._lock:
            libraries = [library for library in _blas().lib_controllers if library.user_api == "blas"]
            if not self._inside:
                self._before = [(library, library.num_threads) for library in libraries]
            _set_threads([(library, 1) for library in libraries])  # every time: other code may have changed it
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                _set_threads(self._before)


def _set_threads(counts: list[tuple[Any, int]]) -> None:
    for library, count in counts:
        if library.num_threads != count:
            # threadpoolctl lets only one thread of a process set the number; here any thread may.
            release = getattr(type(library), "clear_controlling_thread", None)
            if release is not None:
                release(force=True)
            library.set_num_threads(count)
            if release is not None:
                release(force=True)


_one_thread = _OneThread()


@functools.cache
def _blas() -> Any:
    """The BLAS libraries of this process, searched once, since the search takes longer than a small step."""
    import scipy.linalg  # noqa: F401  its BLAS must be loaded to be found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def gpu_report() -> dict[str, Any]:
    """The GPU section of `kme-dist doctor`: CuPy's version, the devices, a small self-test."""
    report: dict[str, Any] = {
        "cupy": None,
        "devices": [],
        "self_test": "not run: cupy is not installed",
    }
    try:
        cupy = _cupy()
    except ConfigError:
        return report
    report["cupy"] = cupy.__version__
    if not cupy.is_available():
        report["self_test"] = "not run: cupy finds no CUDA device or driver"
        return report
    for index in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(index)
        report["devices"].append(
            {"name": properties["name"].decode(), "memory_bytes": int(properties["totalGlobalMem"])}
        )
    matrix = cupy.eye(8, dtype=cupy.float32) * 4
    solution = cholesky(matrix).solve(cupy.ones((8, 1), dtype=cupy.float32))
    report["self_test"] = "passed" if bool(abs(solution - 0.25).max() < 1e-6) else "FAILED"
    return report
