"""Fitting conditional embeddings: the exact one, centres for any number of rows, and learning the input kernel.

    solve_embedding(kernel, target_kernel, X, Y, lam)                  exact (kme_dist.core.conditional)
    fit_nystrom(kernel, target_kernel, pairs, lam, C, D, executor=...)  centres C of inputs, D of targets, one pass
    learn_kernel(kernel, target_kernel, X, Y, lam, settings)            input kernel by held-out loss, step by step

With centres, G = Σ k(C, x_i) k(C, x_i)ᵀ and B = Σ k(C, x_i) l(D, y_i)ᵀ are sums over rows, taken block by block on any
executor; then W = L_DD⁻¹ Bᵀ (G + nλK_CC)⁻¹ projects the Nyström embedding on the target centres. A data set on disk is
never held in memory. With labels as targets and every label a centre the projection loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.backend import blas_threads, cholesky
from kme_dist.core import optim
from kme_dist.core.conditional import ConditionalEmbedding, Delta, Explicit, held_out_objective
from kme_dist.core.kernels.base import Kernel, row_blocks, row_count, take
from kme_dist.data.dataset import Dataset
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.executors import Executor
from kme_dist.run.learn import Record, select
from kme_dist.run.means import BLOCK_ROWS, Block, Sample
from kme_dist.run.scaling import Scaling

_SLAB_ROWS = 2_048


@dataclass(frozen=True)
class Pairs:
    """Inputs and targets, in memory or as columns of one data set."""

    sample: Sample
    targets: Any  # in memory: the targets; of a data set: positions of its target columns, () for its labels
    inputs: tuple[int, ...] = ()  # of a data set: positions of its input columns
    scale: Scaling | None = None

    @classmethod
    def of(cls, data: Dataset, targets: Sequence[str | int] | None, scaling: str | None) -> Pairs:
        """The rows of a data set; `targets` names columns that are predicted from the others (None: its labels)."""
        sample = Sample.of(data, "float64")
        if targets is None:
            if data.y is None:
                raise DataError(f"{data.path} has no labels; name the target columns, e.g. fit(data, ['price'])")
            columns: tuple[int, ...] = ()
        else:
            columns = tuple(_position(data, name) for name in targets)
        inputs = tuple(i for i in range(data.features) if i not in columns)
        split = "train" if "train" in data.splits else None
        whole = Scaling.of(data.split_statistics(split), scaling)
        return cls(sample, columns, inputs, Scaling(whole.shift[list(inputs)], whole.factor[list(inputs)]))

    @property
    def count(self) -> int:
        return self.sample.count

    def blocks(self, size: int = BLOCK_ROWS) -> list[tuple[Block, Any, Pairs]]:
        """What a task is told: rows, targets where they are in memory, and how to take both apart where not."""
        alone = Pairs(Sample(0), self.targets if self.sample.path else None, self.inputs, self.scale)
        parts = self.sample.blocks(size)
        spans = row_blocks(self.count, size)
        return [
            (block, None if self.sample.path else take(self.targets, rows), alone)
            for block, rows in zip(parts, spans, strict=True)
        ]

    def some(self, size: int, seed: int) -> tuple[Any, Any]:
        """At most `size` pairs, for choosing centres and parameters."""
        if not self.sample.path:
            if self.count <= size:
                return self.sample.memory, self.targets
            rows = np.sort(np.random.default_rng(seed).choice(self.count, size, replace=False))
            return select(self.sample.memory, rows), select(self.targets, rows)
        return read_pair(self.sample.scattered(size, seed), None, self)


def _position(data: Dataset, column: str | int) -> int:
    if isinstance(column, int) and 0 <= column < data.features:
        return column
    if column in data.feature_names:
        return data.feature_names.index(str(column))
    raise ConfigError(f"{data.path} has no column {column!r}; it has {', '.join(data.feature_names[:20])}")


def read_pair(block: Block, targets: Any, pairs: Pairs) -> tuple[Any, Any]:
    """Inputs and targets of a block."""
    if not block.path:
        return block.rows, targets
    X, y = block.read_labelled()
    inputs = X[:, list(pairs.inputs)]
    if pairs.scale is not None:
        inputs = pairs.scale.apply(inputs, "float64")
    if pairs.targets:
        return inputs, X[:, list(pairs.targets)]
    return inputs, y


def _moments(
    kernel: Kernel, target_kernel: Kernel, C: Any, D: Any, block: Block, targets: Any, pairs: Pairs
) -> tuple[np.ndarray, np.ndarray]:
    X, Y = read_pair(block, targets, pairs)
    Y = as_targets(Y, target_kernel)
    centres = kernel.prepare(C)
    G = np.zeros((row_count(C), row_count(C)))
    B = np.zeros((row_count(C), row_count(D)))
    for rows in row_blocks(row_count(X), _SLAB_ROWS):
        K = np.asarray(kernel.evaluate(kernel.prepare(take(X, rows)), centres), dtype=np.float64)
        G += K.T @ K
        B += K.T @ target_kernel.gram(take(Y, rows), D)
    return G, B


def _join(left: tuple[np.ndarray, np.ndarray], right: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return left[0] + right[0], left[1] + right[1]


def as_targets(Y: Any, target_kernel: Kernel) -> Any:
    """Scalar targets as one column, for kernels of vectors; labels and texts as they are."""
    if isinstance(target_kernel, Delta):
        return np.asarray(Y)
    if isinstance(Y, np.ndarray) and Y.dtype.kind in "biuf":
        Y = Y.astype(np.float64)
        return Y[:, None] if Y.ndim == 1 else Y
    return Y


def fit_nystrom(
    kernel: Kernel,
    target_kernel: Kernel,
    pairs: Pairs,
    regularization: float,
    centres: Any,
    target_centres: Any,
    *,
    executor: Executor,
) -> ConditionalEmbedding:
    """One pass over the rows, then two small systems on the driver."""
    calls = [(kernel, target_kernel, centres, target_centres, *block) for block in pairs.blocks()]
    G, B = executor.map_reduce(_moments, calls, _join, name="embedding-moments")
    with blas_threads(1):
        K_cc = np.asarray(kernel.gram(centres), dtype=np.float64)
        A = G + pairs.count * regularization * K_cc
        V = padded_solve(A, B)  # centres x target centres
        weights = padded_solve(np.asarray(target_kernel.gram(target_centres), dtype=np.float64), V.T)
    return ConditionalEmbedding(kernel, target_kernel, centres, target_centres, Explicit(weights), regularization)


def padded_solve(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """A⁻¹ B for a positive definite A that may be singular to rounding."""
    # Gram matrices of near-equal centres are singular to rounding; the padding is below what the sums can resolve.
    padded = np.asfortranarray(A + 1e-11 * np.trace(A) / len(A) * np.eye(len(A)))
    return np.ascontiguousarray(cholesky(padded).solve(B))


# --- learning the input kernel -------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelLearning:
    """How the input kernel is learned; see `held_out_objective` for what is learned from."""

    steps: int = 200
    learning_rate: float = 0.1
    complexity_weight: float = 0.1
    batch_size: int = 400
    train_share: float = 0.8
    seed: int = 0


def learn_kernel(
    kernel: Kernel,
    target_kernel: Kernel,
    X: Any,
    Y: Any,
    regularization: float,
    settings: KernelLearning,
    callback: Callable[[Record], None] | None = None,
) -> tuple[Kernel, float, list[Record]]:
    """Adam on the logarithms of the kernel's parameters and λ; batch and split of step t follow from the seed and t."""
    n = row_count(X)
    if n < 4:
        raise DataError(f"learning a kernel needs at least 4 pairs to hold some out, got {n}")
    parameters = optim.to_log({**kernel.parameters, "regularization": np.asarray(regularization)})
    optimizer = optim.adam()
    state = optimizer.init(parameters)
    history: list[Record] = []
    lam = regularization
    for step in range(settings.steps):
        rng = np.random.default_rng([settings.seed, 7, step])
        batch = rng.permutation(n)[: settings.batch_size]
        cut = min(max(round(settings.train_share * len(batch)), 1), len(batch) - 1)
        fitted, held = batch[:cut], batch[cut:]
        Y_fit, Y_held = select(Y, fitted), select(Y, held)
        grams = (target_kernel.gram(Y_fit), target_kernel.gram(Y_fit, Y_held), target_kernel.diag(Y_held))
        began = time.perf_counter()
        found = held_out_objective(kernel, select(X, fitted), select(X, held), grams, lam, settings.complexity_weight)
        change, state = optimizer.update(found.gradient, state, settings.learning_rate)
        parameters = {name: value + change[name] for name, value in parameters.items()}
        values = optim.from_log(parameters)
        lam = float(values.pop("regularization"))
        kernel = kernel.replace(values)
        record = {
            "step": step + 1,
            "steps": settings.steps,
            "objective": found.value,
            "loss": found.loss / len(held),
            "norm": found.norm,
            "regularization": lam,
            "seconds": time.perf_counter() - began,
        }
        history.append(record)
        if callback is not None:
            callback(record)
    return kernel, lam, history
