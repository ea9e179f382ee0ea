"""A strict stand-in for CuPy, for machines without a GPU.

It computes with NumPy and behaves like a device in all that makes host code break on one:

- its arrays never become NumPy arrays on their own, and never mix with them (TypeError); `.get()` is the way out;
- reductions return 0-d device arrays; whatever reads a value waits for the device, and is counted;
- the Cholesky factorisation never raises by itself: it hands back plausible garbage, unless `cupyx.errstate` asks;
  and it reports nothing at all for a matrix that holds NaN;
- integer indices beyond the end wrap around without a word;
- memory from `empty` is full of NaN; an assignment whose two sides overlap in memory is refused (undefined on a GPU);
- copies on a stream of their own happen as late as they may: when something waits for them;
- CUDA sources run: compiled by g++ with `tests/cuda_on_host.h`, so that their arithmetic is tested, too;
- only names and keywords that CuPy 14 has exist. `tests/test_backend.py` compares them with the real package where
  that is installed (it imports without a GPU).

It proves the contract, not the numerics of CUDA: tests marked `gpu` do that where there is a device.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from types import ModuleType, SimpleNamespace

import cuda_on_host
import numpy as np
import scipy.linalg

synchronisations = 0
largest_allocation = float("inf")  # bytes


class OutOfMemoryError(MemoryError):
    __module__ = "cupy.cuda.memory"


class ndarray:  # the real class is spelled like this
    __module__ = "cupy"
    __array_priority__ = 100
    __array_ufunc__ = None
    __slots__ = ("_memory",)
    __hash__ = None

    def __init__(self, memory):
        if memory.base is None and memory.nbytes > largest_allocation:
            raise OutOfMemoryError(f"Out of memory allocating {memory.nbytes:,} bytes")
        self._memory = memory

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`.")

    def __array_function__(self, *args, **kwargs):
        raise TypeError("a NumPy function was called on a device array")

    # --- reading a value waits for the device ---

    def get(self):
        _synchronise()
        return self._memory.copy(order="K")

    def item(self):
        _synchronise()
        return self._memory.item()

    def tolist(self):
        _synchronise()
        return self._memory.tolist()

    def __float__(self):
        return float(self.item())

    def __int__(self):
        return int(self.item())

    def __bool__(self):
        return bool(self.item())

    def __repr__(self):
        return f"strict_cupy(shape={self.shape}, dtype={self.dtype})"

    def set(self, arr, stream=None):
        assert isinstance(arr, np.ndarray)
        (stream or cupy.cuda.get_current_stream())._do("copy", lambda: np.copyto(self._memory, arr))

    # --- what is known without asking the device ---

    shape = property(lambda self: self._memory.shape)
    dtype = property(lambda self: self._memory.dtype)
    ndim = property(lambda self: self._memory.ndim)
    size = property(lambda self: self._memory.size)
    nbytes = property(lambda self: self._memory.nbytes)
    itemsize = property(lambda self: self._memory.itemsize)
    flags = property(lambda self: self._memory.flags)
    strides = property(lambda self: self._memory.strides)
    device = property(lambda self: "stand-in")
    T = property(lambda self: ndarray(self._memory.T))

    def __len__(self):
        return len(self._memory)

    def __iter__(self):
        return (ndarray(np.asarray(part)) for part in self._memory)

    # --- methods that the real class has ---

    def copy(self, order="C"):
        return ndarray(self._memory.copy(order=order))

    def astype(self, dtype, order="K", copy=True):
        return ndarray(self._memory.astype(dtype, order=order, copy=copy))

    def reshape(self, *shape, order="C"):
        return ndarray(self._memory.reshape(*shape, order=order))

    def sum(self, axis=None, dtype=None, out=None, keepdims=False):
        return cupy.sum(self, axis, dtype, out, keepdims)

    def mean(self, axis=None, dtype=None, out=None, keepdims=False):
        return cupy.mean(self, axis, dtype, out, keepdims)

    def max(self, axis=None, out=None, keepdims=False):
        return cupy.max(self, axis, out, keepdims)

    def min(self, axis=None, out=None, keepdims=False):
        return cupy.min(self, axis, out, keepdims)

    def all(self, axis=None, out=None, keepdims=False):
        return cupy.all(self, axis, out, keepdims)

    def argmax(self, axis=None, out=None, dtype=None, keepdims=False):
        return cupy.argmax(self, axis, dtype, out, keepdims)

    def __getitem__(self, key):
        return ndarray(np.asarray(self._memory[_index(key, self.shape)]))

    def __setitem__(self, key, value):
        key = _index(key, self.shape)
        if isinstance(value, ndarray):
            # An index array selects scattered elements, never a view that could overlap.
            target = self._memory[key]
            _refuse_overlap(target, value._memory)
        self._memory[key] = _device(value)


def _synchronise():
    global synchronisations
    synchronisations += 1


def _device(value):
    """The memory of a device array, or a scalar; host arrays are refused, as on a GPU."""
    if isinstance(value, ndarray):
        return value._memory
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {type(value)}")
    if value is None or isinstance(value, bool | int | float | np.generic):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


def _refuse_overlap(target, source):
    same = target.__array_interface__ == source.__array_interface__
    if not same and np.shares_memory(target, source):
        raise AssertionError("this assignment reads and writes overlapping device memory: undefined on a GPU")


def _index(key, shape):
    parts = key if isinstance(key, tuple) else (key,)
    found, axis = [], 0
    for part in parts:
        if isinstance(part, np.ndarray | list):
            raise IndexError(f"Unsupported index type {type(part)}")
        if isinstance(part, ndarray):
            part = part._memory
            if part.dtype.kind in "iu":
                part = part % shape[axis]  # never checked, wraps
        elif isinstance(part, int | np.integer) and not -shape[axis] <= part < shape[axis]:
            raise IndexError(f"Index {part} is out of bounds for axis {axis} with size {shape[axis]}")
        found.append(part)
        axis += part is not None and part is not Ellipsis
    return tuple(found)


def _wrapped(result, out=None):
    if out is not None:
        return out
    if isinstance(result, tuple):
        return tuple(_wrapped(part) for part in result)
    return ndarray(np.asarray(result))


def _operator(symbol, reflected=False):
    def apply(self, other):
        other = _device(other)
        return _wrapped(symbol(other, self._memory) if reflected else symbol(self._memory, other))

    return apply


def _in_place(ufunc):
    def apply(self, other):
        other = _device(other)
        if isinstance(other, np.ndarray):
            _refuse_overlap(self._memory, other)
        ufunc(self._memory, other, out=self._memory, casting="same_kind")
        return self

    return apply


for _name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod", "matmul", "and", "or"):
    _symbol = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(ndarray, f"__{_name}__", _operator(_symbol))
    setattr(ndarray, f"__r{_name}__", _operator(_symbol, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(ndarray, f"__{_name}__", _operator(getattr(operator, _name)))
for _name, _ufunc in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "pow": np.power,
}.items():
    setattr(ndarray, f"__i{_name}__", _in_place(_ufunc))
ndarray.__neg__ = lambda self: _wrapped(-self._memory)
ndarray.__abs__ = lambda self: _wrapped(abs(self._memory))
ndarray.__invert__ = lambda self: _wrapped(~self._memory)


# --- the functions of the module: CuPy's signatures, NumPy's work ----------------------------------

cupy = ModuleType("cupy", "strict stand-in, see tests/strict_cupy.py")
cupy.ndarray = ndarray
cupy.__version__ = "14.2.0"
for _name in ("float32", "float64", "int32", "int64", "bool"):
    setattr(cupy, _name, getattr(np, _name))


def _export(function):
    setattr(cupy, function.__name__, function)
    return function


def _elementwise(name):
    function = getattr(np, name)

    @functools.wraps(function)
    def apply(*operands, out=None, casting="same_kind", dtype=None):
        memories = [_device(operand) for operand in operands]
        if not any(isinstance(operand, ndarray) for operand in operands):
            raise TypeError(f"cupy.{name} needs a device array, got {[type(o) for o in operands]}")
        if out is None:
            return _wrapped(function(*memories, casting=casting, dtype=dtype))
        for memory in memories:
            if isinstance(memory, np.ndarray):
                _refuse_overlap(out._memory, memory)
        function(*memories, out=out._memory, casting=casting, dtype=dtype)
        return out

    apply.__name__ = name
    setattr(cupy, name, apply)


for _name in ("exp", "log", "sqrt", "abs", "sign", "cos", "sin", "tanh", "maximum", "minimum", "isfinite"):
    _elementwise(_name)


def _needs_array(a):
    if not isinstance(a, ndarray):
        raise TypeError(f"a device array is needed, got {type(a)}")
    return a._memory


def _reduction(name, takes_dtype):
    function = getattr(np, name)

    def with_dtype(a, axis=None, dtype=None, out=None, keepdims=False):
        more = {} if dtype is None else {"dtype": dtype}
        return _wrapped(function(_needs_array(a), axis=axis, keepdims=keepdims, **more), _nothing(out))

    def without_dtype(a, axis=None, out=None, keepdims=False):
        return _wrapped(function(_needs_array(a), axis=axis, keepdims=keepdims), _nothing(out))

    setattr(cupy, name, with_dtype if takes_dtype else without_dtype)


def _nothing(out):
    assert out is None, "the stand-in's reductions take no `out`"


for _name in ("sum", "mean", "prod"):
    _reduction(_name, takes_dtype=True)
for _name in ("max", "min", "all", "any"):
    _reduction(_name, takes_dtype=False)


@_export
def argmax(a, axis=None, dtype=None, out=None, keepdims=False):
    return _wrapped(np.argmax(_needs_array(a), axis=axis, keepdims=keepdims), _nothing(out))


@_export
def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    memory = a._memory if isinstance(a, ndarray) else np.array(a)  # a transfer is always a copy
    return ndarray(np.asarray(memory, dtype=dtype, order=order))


@_export
def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


@_export
def astype(x, dtype, /, *, copy=True):
    return ndarray(_needs_array(x).astype(dtype, copy=copy))


@_export
def concat(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    return _wrapped(np.concatenate([_needs_array(a) for a in tup], axis=axis), _nothing(out))


@_export
def stack(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    return _wrapped(np.stack([_needs_array(a) for a in tup], axis=axis), _nothing(out))


@_export
def broadcast_to(array, shape):
    return ndarray(np.broadcast_to(_needs_array(array), shape))


@_export
def where(condition, x=None, y=None):
    return _wrapped(np.where(_needs_array(condition), _device(x), _device(y)))


@_export
def tril(m, k=0):
    return ndarray(np.tril(_needs_array(m), k))


@_export
def triu(m, k=0):
    return ndarray(np.triu(_needs_array(m), k))


@_export
def diagonal(a, offset=0, axis1=0, axis2=1):
    return ndarray(_needs_array(a).diagonal(offset, axis1, axis2))


@_export
def reshape(a, newshape, order="C", *, copy=None):
    return ndarray(_needs_array(a).reshape(newshape, order=order))


@_export
def asfortranarray(a, dtype=None):
    return ndarray(np.asfortranarray(_needs_array(a), dtype))


@_export
def ascontiguousarray(a, dtype=None):
    return ndarray(np.ascontiguousarray(_needs_array(a), dtype))


@_export
def eye(N, M=None, k=0, dtype=float, order="C"):
    return ndarray(np.eye(N, M, k, dtype, order))


@_export
def ones(shape, dtype=float, order="C"):
    return ndarray(np.ones(shape, dtype, order))


@_export
def zeros(shape, dtype=float, order="C"):
    return ndarray(np.zeros(shape, dtype, order))


@_export
def empty(shape, dtype=float, order="C"):
    garbage = np.nan if np.dtype(dtype).kind == "f" else 77
    return ndarray(np.full(shape, garbage, dtype, order))


@_export
def arange(start, stop=None, step=1, dtype=None):
    return ndarray(np.arange(start, stop, step, dtype) if stop is not None else np.arange(start, dtype=dtype))


@_export
def is_available():
    return True


cupy.linalg = ModuleType("cupy.linalg")
_linalg_errors = "ignore"


def _cholesky(a):
    memory = _needs_array(a)
    (potrf,) = scipy.linalg.get_lapack_funcs(("potrf",), (memory,))  # single precision stays single, as on a GPU
    L, info = potrf(memory, lower=1, clean=1)
    if np.isnan(memory).any():
        info = 0  # the solver's report need not mention NaN
    if info and _linalg_errors == "raise":
        _synchronise()
        raise np.linalg.LinAlgError(f"Error reported by potrf in cuSOLVER. devInfo = {info}.")
    # Undefined content after a failure; a positive diagonal is the kind that gets away.
    return ndarray(np.tril(np.abs(L) + 1) if info else L)


def _solve(a, b):
    return ndarray(np.linalg.solve(_needs_array(a), _needs_array(b)).astype(a.dtype))


def _eigh(a, UPLO="L"):
    values, vectors = np.linalg.eigh(_needs_array(a), UPLO)
    return ndarray(values), ndarray(vectors)


def _qr(a, mode="reduced"):
    return tuple(ndarray(part) for part in np.linalg.qr(_needs_array(a), mode))


cupy.linalg.cholesky, cupy.linalg.solve, cupy.linalg.eigh, cupy.linalg.qr = _cholesky, _solve, _eigh, _qr


class RawModule:
    """Kernels from CUDA source, on the host. Arguments are checked as little as on a GPU."""

    def __init__(self, code=None, *, options=()):
        self._code, self._options = code, options

    def compile(self, log_stream=None):
        self._library = cuda_on_host.library(self._code, self._options)

    def get_function(self, name):
        kernel = getattr(self._library, name)

        def call(grid, block, args):
            assert all(isinstance(arg, ndarray | np.generic) for arg in args), "a Python number has no C type"
            memories = [arg._memory if isinstance(arg, ndarray) else arg for arg in args]
            cuda_on_host.launch(self._library, kernel, grid, block, memories)

        return call


cupy.RawModule = RawModule
cupy.cuda = ModuleType("cupy.cuda")
cupy.cuda.runtime = SimpleNamespace(
    memGetInfo=lambda: (6 << 30, 8 << 30),
    getDeviceCount=lambda: 1,
    getDeviceProperties=lambda index: {"name": b"stand-in", "totalGlobalMem": 8 << 30},
)


class Event:
    def __init__(self, stream, after):
        self._stream, self._after = stream, after

    def synchronize(self):
        self._stream._finish(self._after)


class Stream:
    """The work of a stream is done when something waits for it, or at once on the default stream. `log` tells it."""

    def __init__(self, null=False, non_blocking=False):
        self._null, self._waiting, self._done, self.log = null, [], 0, []
        streams.append(self)

    def _do(self, name, work):
        self.log.append(name)
        self._waiting.append(work)
        if self._null:
            self.synchronize()

    def _finish(self, count):
        while self._done < count:
            self._waiting[self._done]()
            self._done += 1

    def record(self, event=None):
        self.log.append("record")
        return Event(self, len(self._waiting))

    def wait_event(self, event):
        self._do("wait", event.synchronize)

    def synchronize(self):
        self._finish(len(self._waiting))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


streams = []
_default_stream = Stream(null=True)
cupy.cuda.Stream, cupy.cuda.get_current_stream = Stream, lambda: _default_stream
cupy.cuda.Device = lambda device=None: contextlib.nullcontext()


class MemoryPool:
    def __init__(self):
        self._limit = 0

    def set_limit(self, size=None, fraction=None):
        assert size is None or fraction is None
        self._limit = int((8 << 30) * fraction) if size is None else size

    get_limit = lambda self: self._limit  # noqa: E731
    free_bytes = lambda self: 1 << 30  # noqa: E731
    free_all_blocks = lambda self: None  # noqa: E731
    used_bytes = lambda self: 1 << 30  # noqa: E731


_pool = MemoryPool()
cupy.get_default_memory_pool = lambda: _pool

cupyx = ModuleType("cupyx")
cupyx.scipy = ModuleType("cupyx.scipy")
cupyx.scipy.linalg = ModuleType("cupyx.scipy.linalg")


@contextlib.contextmanager
def _errstate(*, linalg=None):
    global _linalg_errors
    before, _linalg_errors = _linalg_errors, linalg or _linalg_errors
    try:
        yield
    finally:
        _linalg_errors = before


cupyx.errstate = _errstate
cupyx.empty_pinned = lambda shape, dtype=float, order="C": np.full(shape, np.nan, dtype, order)


def _solve_triangular(a, b, trans=0, lower=False, unit_diagonal=False, overwrite_b=False, check_finite=False):
    if not isinstance(a, ndarray) or not isinstance(b, ndarray):
        raise np.linalg.LinAlgError("cupy.linalg only supports cupy.ndarray")
    (trtrs,) = scipy.linalg.get_lapack_funcs(("trtrs",), (a._memory,))
    code = {0: 0, "N": 0, 1: 1, "T": 1, 2: 2, "C": 2}[trans]
    x, _info = trtrs(a._memory, b._memory.astype(a.dtype), lower=lower, trans=code, unitdiag=unit_diagonal)
    return ndarray(x)  # a zero on the diagonal goes unreported, too


cupyx.scipy.linalg.solve_triangular = _solve_triangular

MODULES = {
    "cupy": cupy,
    "cupy.linalg": cupy.linalg,
    "cupy.cuda": cupy.cuda,
    "cupyx": cupyx,
    "cupyx.scipy": cupyx.scipy,
    "cupyx.scipy.linalg": cupyx.scipy.linalg,
}
