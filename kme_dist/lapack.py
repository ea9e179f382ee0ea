"""The BLAS and LAPACK of SciPy for large matrices, called without the interpreter lock.

The wrappers in `scipy.linalg.blas` and `scipy.linalg.lapack` hold the lock while they compute, so threads that
factorise at the same time would take turns. The routines themselves are found through SciPy's interface for Cython, the
same ones with the same bits, and called with the lock released.

    potrf(A)                    # the Cholesky factor of A, over its lower triangle
    potrs(L, B)                 # A⁻¹ B over B
    trtrs(L, B)                 # L⁻¹ B over B
    potri(L), trtri(L)          # A⁻¹ and L⁻¹ over the lower triangle of L
    syrk(Z, out)                # Zᵀ Z, into the lower triangle of `out`
    symm(A, V, out)             # A V for the lower triangle of A
    subtract_product(A, B, C)   # C -= A Bᵀ

What is changed or written is in Fortran order, except C of `subtract_product`, which is in C order. Those of LAPACK
return its `info`: 0 where they succeeded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.linalg import cython_blas, cython_lapack

_LOWER = b"L"


def potrf(A: np.ndarray) -> int:
    return _info("potrf", A, _LOWER, len(A), A, _written(A))


def potri(L: np.ndarray) -> int:
    return _info("potri", L, _LOWER, len(L), L, _written(L))


def trtri(L: np.ndarray) -> int:
    return _info("trtri", L, _LOWER, b"N", len(L), L, _written(L))


def potrs(L: np.ndarray, B: np.ndarray) -> int:
    L = np.asfortranarray(L)
    return _info("potrs", L, _LOWER, len(L), _columns(B), L, _leading(L), B, _written(B, len(L)))


def trtrs(L: np.ndarray, B: np.ndarray, transposed: bool = False) -> int:
    L, side = np.asfortranarray(L), b"T" if transposed else b"N"
    return _info("trtrs", L, _LOWER, side, b"N", len(L), _columns(B), L, _leading(L), B, _written(B, len(L)))


def syrk(Z: np.ndarray, out: np.ndarray) -> None:
    Z = np.ascontiguousarray(Z)  # to BLAS, which reads columns, Zᵀ
    rows, size = Z.shape
    _blas("syrk", out, _LOWER, b"N", size, rows, 1.0, Z, _leading(Z.T), 0.0, out, _written(out, size))


def symm(A: np.ndarray, V: np.ndarray, out: np.ndarray) -> None:
    A, V = np.asfortranarray(A), np.asfortranarray(V)
    size, columns = V.shape
    beside = (A, _leading(A), V, _leading(V, len(A)))
    _blas("symm", out, b"L", _LOWER, size, columns, 1.0, *beside, 0.0, out, _written(out, size))


def subtract_product(A: np.ndarray, B: np.ndarray, C: np.ndarray) -> None:
    A, B = np.ascontiguousarray(A), np.ascontiguousarray(B)  # to BLAS Aᵀ and Bᵀ, so Cᵀ -= B Aᵀ
    (rows, inner), columns = A.shape, len(B)
    beside = (B, _leading(B.T), A, _leading(A.T, inner))
    _blas("gemm", C, b"T", b"N", columns, rows, inner, -1.0, *beside, 1.0, C, _written(C.T, columns))


# --- calling ------------------------------------------------------------------------------------------


def _info(name: str, like: np.ndarray, *arguments: Any) -> int:
    info = ctypes.c_int(0)
    _call(cython_lapack, name, like.dtype, arguments, ctypes.byref(info))
    return info.value


def _blas(name: str, like: np.ndarray, *arguments: Any) -> None:
    _call(cython_blas, name, like.dtype, arguments)


def _call(module: Any, name: str, dtype: np.dtype[Any], arguments: tuple[Any, ...], *last: Any) -> None:
    """Every argument by its address, as Fortran has it; `arguments` keeps the arrays alive meanwhile."""
    real = ctypes.c_float if dtype == np.float32 else ctypes.c_double
    assert dtype in (np.float32, np.float64)
    pointers: list[Any] = []
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            assert argument.dtype == dtype
            pointers.append(argument.ctypes.data)
        elif isinstance(argument, bytes):
            pointers.append(argument)
        else:
            pointers.append(ctypes.byref(real(argument) if isinstance(argument, float) else ctypes.c_int(argument)))
    _routine(module, name, dtype.char, len(arguments) + len(last))(*pointers, *last)


@functools.cache
def _routine(module: Any, name: str, character: str, arguments: int) -> Callable[..., None]:
    capsule = module.__pyx_capi__[{"f": "s", "d": "d"}[character] + name]
    of_capsule, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    of_capsule.restype, of_capsule.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # Functions of type CFUNCTYPE run with the lock released.
    function_type = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)
    return function_type(pointer_of(capsule, of_capsule(capsule)))


def _leading(A: np.ndarray, rows: int | None = None) -> int:
    """The leading dimension of A, which is in Fortran order and has `rows` rows."""
    assert A.flags.f_contiguous
    assert rows is None or len(A) == rows
    return max(len(A), 1)


def _written(A: np.ndarray, rows: int | None = None) -> int:
    """The same of a matrix that the routine changes; a square one without `rows`."""
    assert A.flags.writeable
    return _leading(A, A.shape[-1] if rows is None else rows)


def _columns(B: np.ndarray) -> int:
    return B.shape[1] if B.ndim == 2 else 1
