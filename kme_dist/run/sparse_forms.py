"""Sparse forms of a fitted conditional embedding, with what their questions need: means and residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kme_dist.core import sparse
from kme_dist.core.conditional import ConditionalEmbedding, Explicit, marginal_weights
from kme_dist.core.intervals import LeftOut
from kme_dist.core.kernels.base import select
from kme_dist.errors import ConfigError
from kme_dist.run.conditional import are_numbers


class Sparsifiable:
    """What an estimator around a fitted `ConditionalEmbedding` can be thinned out by."""

    _fitted: Any  # () -> ConditionalEmbedding
    _sparse_form: Any  # () -> an estimator for a sparse form of this one

    def sparsify(
        self,
        penalty: str = "element",
        gammas: Sequence[float] | int = 20,
        method: str = "fista",
        refit: bool = True,
        steps: int = 200,
    ) -> list[Any]:
        """Embeddings with fewer and fewer zeros: one for each γ (method "fista") or number of pivots ("cholesky").

        penalty : "element" | "row" (targets) | "column" (inputs)
        gammas : how many, or which; for method "cholesky" how many numbers of pivots, or which
        refit : solve anew on what the penalty kept (it also shrinks what it keeps)
        steps : of FISTA, which finishes what a splitting of the problem has begun
        """
        W, K, L = self.dense_weights()
        if method == "cholesky":
            n = len(K)
            counts = np.unique(np.linspace(1, n, gammas + 1).astype(int)[1:]) if isinstance(gammas, int) else gammas
            found = [sparse.incomplete_cholesky(W, K, L, int(count)) for count in counts]
        elif method == "fista":
            found = list(sparse.path(W, K, L, penalty=penalty, gammas=gammas, steps=steps))
        else:
            raise ConfigError(f"method={method!r} is unknown; choose 'fista' or 'cholesky'")
        whole = sparse.operator_distance(W * 0, W, K, L) or 1.0
        forms = []
        for step in found:
            kept = sparse.refit(step, W, K, L) if refit and method == "fista" else step
            forms.append(self._sparse(kept, whole, L))
            forms[-1].penalised_distance_ = step.distance / whole
        return forms

    def dense_weights(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """W, K of the centres and L of the targets."""
        model = self._fitted()
        if model.features is not None:
            raise ConfigError("sparse forms choose among rows, and solver='features' keeps none; use another solver")
        K = np.asarray(model.kernel.gram(model.centres), dtype=np.float64)
        L = np.asarray(model.target_kernel.gram(model.targets), dtype=np.float64)
        return np.asarray(model.weights.forward(np.eye(len(K)))), K, L

    def _sparse(self, step: sparse.SparseStep, whole: float, L: np.ndarray) -> Any:
        M = np.asarray(step.weights)
        rows, columns = np.flatnonzero(M.any(axis=1)), np.flatnonzero(M.any(axis=0))
        model = self._fitted()
        kept, targets = np.ascontiguousarray(M[np.ix_(rows, columns)]), select(model.targets, rows)
        small = ConditionalEmbedding(
            model.kernel, model.target_kernel, select(model.centres, columns), targets, Explicit(kept),
            model.regularization, None, self._sparse_base(L, rows),
        )  # fmt: skip
        found = self._sparse_form()
        found.embedding_ = small
        found.kernel_, found.target_kernel_ = small.kernel, small.target_kernel
        found._left = None
        if not isinstance(model.weights, Explicit) and are_numbers(targets, model.target_kernel) and len(rows) > 1:
            # Rows and targets are the same here; what a target adds to the prediction at its own row is its leverage.
            X = select(model.centres, rows)
            Z = np.asarray(small.basis(X), dtype=np.float64).T
            room = np.maximum(1 - np.sum(kept * Z, axis=1), 0.05)
            apart = targets - np.asarray(small.centred_expectation(X, targets))
            found._left = LeftOut.of(kept.T, Z, apart / room[:, None])
        found.regularization_ = small.regularization
        found.gamma_, found.density_ = step.gamma, step.nonzero / M.size
        found.distance_, found.relative_distance_ = step.distance, step.distance / whole
        return found

    def _sparse_base(self, L: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Weights of the targets that were kept in the mean over all training rows."""
        model = self._fitted()
        if not len(rows):
            return np.zeros(0)
        features = np.asarray(model.mean(L))[rows]
        own = L[np.ix_(rows, rows)]
        if are_numbers(model.targets, model.target_kernel):
            return np.asarray(marginal_weights(own, features, model.targets[rows], model.mean(model.targets)))
        return np.asarray(marginal_weights(own, features))
