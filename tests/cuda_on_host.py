"""CUDA source compiled for the host by g++, with the threads of a block as fibres (`cuda_on_host.h`)."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np

HEADER = Path(__file__).with_name("cuda_on_host.h")
COMPILER = shutil.which("g++")


@functools.cache
def library(source: str, options: tuple[str, ...]) -> ctypes.CDLL:
    """The kernels of `source`; RuntimeError with the compiler's log where it does not compile."""
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "kernels.so"
        flags = ["-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-include", str(HEADER), "-x", "c++", "-"]
        done = subprocess.run(
            [COMPILER or "g++", *options, *flags, "-o", str(built)],
            input=source,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        return ctypes.CDLL(str(built))


_one_at_a_time = threading.Lock()
_C_TYPES = {np.int64: ctypes.c_longlong, np.int32: ctypes.c_int, np.float64: ctypes.c_double}


def launch(kernels: ctypes.CDLL, kernel, grid, block, arguments) -> None:
    """Run all blocks; AssertionError if the threads of one do not reach the same barriers."""
    assert all(size > 0 for size in (*grid, *block)), f"invalid configuration: grid {grid}, block {block}"
    values = [
        ctypes.c_void_p(value.ctypes.data) if isinstance(value, np.ndarray) else _C_TYPES[type(value)](value)
        for value in arguments
    ]
    grid = (*grid, 1)[:2]
    sizes = [ctypes.c_int(size) for size in (*grid, *block)]
    with _one_at_a_time:  # the indices of threads and blocks are global variables, and ctypes lets other threads run
        failed = kernels.launch(ctypes.cast(kernel, ctypes.c_void_p), *sizes, *values)
    assert not failed, "some threads of a block skip a barrier"
