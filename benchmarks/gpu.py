"""What to measure first on a GPU, each figure beside its roofline: python -m benchmarks.gpu [--card a100]

The rooflines are those of docs/scale.md: bytes over the bandwidth of the memory, or operations over the peak rate,
whichever takes longer. Without a device everything runs on NumPy in a tiny size, which checks the benchmark only.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kme_dist import backend
from kme_dist.core.embedding import Decision, Embedding
from kme_dist.core.kernels import Gaussian
from kme_dist.core.kernels.base import row_blocks
from kme_dist.core.objective import rcb_objective


@dataclass(frozen=True)
class Card:
    """Peaks of a data sheet: operations/s in float32 and float64, bytes/s of the memory and of the bus, one way."""

    name: str
    float32: float
    float64: float
    memory: float
    bus: float

    def seconds(self, flops: float = 0.0, moved: float = 0.0, dtype: str = "float32") -> tuple[float, str]:
        """The least time for this work, and its bound."""
        by_flops, by_memory = flops / getattr(self, dtype), moved / self.memory
        return (by_flops, "operations") if by_flops > by_memory else (by_memory, "memory")


CARDS = {
    "a100": Card("A100 SXM 80 GB", 19.5e12, 19.5e12, 2.039e12, 32e9),
    "h100": Card("H100 SXM", 66.9e12, 66.9e12, 3.35e12, 64e9),
}
EXP_FLOPS = 10  # of an exponential in float32, with the clamp


@dataclass(frozen=True)
class Sizes:
    rows: int = 4096  # of a tile
    centres: int = 8192
    features: tuple[int, ...] = (16, 54, 784)
    classes: int = 10
    batch: int = 8192
    predicted: int = 1 << 20
    repeats: int = 20


TINY = Sizes(rows=37, centres=130, features=(5,), classes=3, batch=40, predicted=500, repeats=1)


@dataclass(frozen=True)
class Measured:
    title: str
    seconds: float
    amount: float
    unit: str
    roofline: tuple[float, str]

    def line(self) -> str:
        least, bound = self.roofline
        rate, most = self.amount / self.seconds, self.amount / least
        return f"{self.title:<42} {rate:9.3g} {self.unit:<8} of {most:9.3g} by {bound:<10} {least / self.seconds:6.1%}"


class Bench:
    def __init__(self, device: str, card: Card, sizes: Sizes) -> None:
        self.device, self.card, self.sizes = device, card, sizes
        self._rng = np.random.default_rng(0)

    def array(self, *shape: int, dtype: str = "float32") -> backend.Array:
        return backend.to_device(self._rng.normal(size=shape).astype(dtype), self.device)

    def seconds(self, function: Callable[[], object]) -> float:
        """Mean time of a call; work on a device is queued, so the queue is emptied before and after."""
        function()
        backend.synchronise(self.device)
        began = time.perf_counter()
        for _ in range(self.sizes.repeats):
            function()
        backend.synchronise(self.device)
        return (time.perf_counter() - began) / self.sizes.repeats

    def tiles(self, d: int) -> Iterator[Measured]:
        """One tile: the product, alone and padded to a multiple of 4 features; with the epilogue; times V."""
        T, M, m = self.sizes.rows, self.sizes.centres, self.sizes.classes
        kernel, X, Z = Gaussian(float(np.sqrt(d))), self.array(T, d), self.array(M, d)
        columns = kernel.prepare(Z)
        rows, V = kernel.prepare_beside(X, columns), backend.by_columns(self.array(M, m))
        entries, written = float(T * M), 4.0 * T * M
        for width in sorted({d + 2, -(-(d + 2) // 4) * 4}):
            A, B = self.array(T, width), self.array(M, width)
            flops, took = 2 * entries * width, self.seconds(lambda A=A, B=B: A @ B.T)
            bound = self.card.seconds(flops, written)
            yield Measured(f"product, d = {d}, {width} wide", took, flops / 1e12, "TFLOP/s", bound)
        product = 2 * entries * (d + 2)
        took = self.seconds(lambda: kernel.evaluate(rows, columns))
        least = self._after(product, EXP_FLOPS * entries, 2 * written)
        yield Measured(f"tile, d = {d}", took, entries / 1e9, "G/s", least)
        took = self.seconds(lambda: kernel.times(rows, columns, V))
        least = self._after(product, (EXP_FLOPS + 2 * m) * entries, written)
        yield Measured(f"tile times V, d = {d}, m = {m}", took, entries / 1e9, "G/s", least)

    def _after(self, product: float, flops: float, moved: float) -> tuple[float, str]:
        """The product, which writes the tile, then the epilogue: two kernels, one after the other."""
        T, M = self.sizes.rows, self.sizes.centres
        first, second = self.card.seconds(product, 4.0 * T * M), self.card.seconds(flops, moved)
        return first[0] + second[0], max(first, second)[1]

    def factorisation(self) -> Iterator[Measured]:
        n = self.sizes.batch
        for dtype in ("float32", "float64"):
            A = self.array(n, 8, dtype=dtype)
            K = A @ A.T
            backend.set_diagonal(K, backend.diagonal(K) + n)
            took = self.seconds(lambda K=K: backend.cholesky(K + 0))
            flops = n**3 / 3
            bound = self.card.seconds(flops, K.nbytes, dtype)
            yield Measured(f"Cholesky, n = {n}, {dtype}", took, flops / 1e12, "TFLOP/s", bound)

    def step(self) -> Measured:
        n, d, m = self.sizes.batch, self.sizes.features[0], self.sizes.classes
        kernel, X = Gaussian(np.full(d, np.sqrt(d))), self.array(n, d)
        y = self._rng.integers(0, m, n)
        took = self.seconds(lambda: rcb_objective(kernel, X, y, regularization=1e-3, n_classes=m))
        flops = n**3 / 3 + 8.0 * n * n * m + 6.0 * n * n * d
        return Measured(f"step of learning, n = {n}, d = {d}", took, 1.0, "steps/s", self.card.seconds(flops))

    def prediction(self) -> Iterator[Measured]:
        """Rows/s from the host's memory: with transfers one ahead, and one after the other."""
        n, d, m = self.sizes.predicted, self.sizes.features[-1], self.sizes.classes
        centres, V = self.array(self.sizes.centres, d), self.array(self.sizes.centres, m)
        decide = Decision(Embedding(Gaussian(float(np.sqrt(d))), centres, V, 1e-3), "float32", "float32")
        X = self._rng.normal(size=(n, d)).astype("float32")
        blocks = [X[part] for part in row_blocks(n, self.sizes.rows)]
        entries = float(n) * self.sizes.centres
        least = self.card.seconds(entries * (2 * (d + 2) + EXP_FLOPS + 2 * m), 8 * entries)
        copied = X.nbytes / self.card.bus
        together = (copied, "bus") if copied > least[0] else least

        def ahead() -> None:
            for rows, _ in backend.moved_ahead(((block, None) for block in blocks), self.device):
                backend.to_host(decide(rows))

        def in_turn() -> None:
            for block in blocks:
                backend.to_host(decide(backend.to_device(block, self.device)))

        yield Measured(f"prediction, d = {d}, copies overlap", self.seconds(ahead), n, "rows/s", together)
        apart = (least[0] + copied, together[1])
        yield Measured(f"prediction, d = {d}, copies in turn", self.seconds(in_turn), n, "rows/s", apart)

    def run(self) -> Iterator[Measured]:
        for d in self.sizes.features:
            yield from self.tiles(d)
        yield from self.factorisation()
        yield self.step()
        yield from self.prediction()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--card", choices=CARDS, default="a100", help="whose peaks the figures are compared with")
    card = CARDS[parser.parse_args(arguments).card]
    if not backend.gpu_available():
        count = sum(1 for _ in Bench("numpy", card, TINY).run())
        print(f"no CUDA device: {count} measurements ran on NumPy in a tiny size, nothing was measured")
        return
    print(f"measured, and at most by the data sheet of the {card.name}")
    for measured in Bench("cupy", card, Sizes()).run():
        print(measured.line(), flush=True)


if __name__ == "__main__":
    main()
