"""ρ, the mean of all k(x_i, x_j), over 200 000 rows by tiles, against the minimum of work.

    python -m benchmarks.means                       # 200 000 x 54 rows from a data set on disk, single precision
    python -m benchmarks.means --rows 20000          # a quick look

The minimum of work for a tile is one matrix product and one exponential; it is timed on tiles of the same shape during
the same run, so that both see the same load. Memory is the growth of this process between a tenth of the rows and all
of them. On 5 000 rows the sum is compared with the direct one in double precision. One BLAS thread.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

import kme_dist as kme
from benchmarks.machine import load_average
from kme_dist.core.means import TILE_ROWS
from kme_dist.data.rows import rows_of
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.means import BLOCK_ROWS, gram_moments

FEATURES = 54
BARE_TILES = 60  # timed between two blocks


class Interleaved(SerialExecutor):
    """Runs the calls one after another and times the bare work between them."""

    def __init__(self, dtype):
        super().__init__()
        rng = np.random.default_rng(1)
        # The product has two more columns than there are features, for the squared norms.
        self.A, self.B = rng.random((2, TILE_ROWS, FEATURES + 2)).astype(dtype)
        self.A, self.out = self.A - 0.5, np.empty((TILE_ROWS, TILE_ROWS), dtype)
        self.bare, self.busy, self.pairs, self.bare_pairs = 0.0, 0.0, 0.0, 0

    def tile(self):
        np.matmul(self.A, self.B.T, out=self.out)
        np.exp(self.out, out=self.out)

    def map(self, function, calls, *, name):
        def timed(kernel, left, right):
            began = time.perf_counter()
            result = function(kernel, left, right)
            self.busy += time.perf_counter() - began
            self.pairs += len(left) * len(right) if right is not None else len(left) ** 2 / 2
            began = time.perf_counter()
            for _ in range(BARE_TILES):
                self.tile()
            self.bare += time.perf_counter() - began
            self.bare_pairs += BARE_TILES * TILE_ROWS**2
            return result

        return super().map(timed, calls, name=name)


def made_up(count, dtype):
    rng = np.random.default_rng(0)
    centres = rng.random((7, FEATURES))
    return (centres[rng.integers(0, 7, count)] + 0.2 * rng.standard_normal((count, FEATURES))).astype(dtype)


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def against_direct(kernel):
    X = made_up(5_000, np.float64)
    found = gram_moments(kernel, rows_of(X), executor=SerialExecutor(), block_rows=1_300).rho
    squares = (X / kernel.length_scale) ** 2
    direct = 0.0
    for i in range(len(X)):
        distances = (
            squares[i].sum() + squares.sum(axis=1) - 2 * (X / kernel.length_scale) @ (X[i] / kernel.length_scale)
        )
        direct += np.exp(-0.5 * distances).sum()
    direct /= len(X) ** 2
    return abs(found - direct) / direct


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    arguments = parser.parse_args(argv)
    kernel = kme.kernels.Gaussian(length_scale=1.0)
    print(f"5000 rows against the direct sum: relative difference {against_direct(kernel):.1e}")
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "rows.zarr"
        source = Path(folder) / "rows.npy"
        np.save(source, made_up(arguments.rows, np.float32))
        data = kme.ingest(source, stored)
        source.unlink()
        few = rows_of(data, arguments.dtype, None).part(0, arguments.rows // 10)
        gram_moments(kernel, few, executor=Interleaved(arguments.dtype))
        before = peak_bytes()
        executor = Interleaved(arguments.dtype)
        found = gram_moments(kernel, rows_of(data, arguments.dtype), executor=executor)
        grown = peak_bytes() - before
    ours, bare = executor.busy / executor.pairs, executor.bare / executor.bare_pairs
    print(
        f"{arguments.rows} x {FEATURES} rows, {arguments.dtype}, blocks of {BLOCK_ROWS}, load {load_average()}\n"
        f"  rho {found.rho:.8f} in {executor.busy:.1f} s\n"
        f"  ours {1e9 * ours:.2f} ns a pair, bare product and exponential {1e9 * bare:.2f} ns: "
        f"{100 * bare / ours:.0f} % of the bare rate\n"
        f"  memory {grown / 1e6:.0f} MB above that of {arguments.rows // 10} rows, peak {peak_bytes() / 1e6:.0f} MB"
    )


if __name__ == "__main__":
    main()
