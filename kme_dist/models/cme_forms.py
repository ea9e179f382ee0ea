"""Sparse forms of a fitted conditional embedding, and its stored form as arrays and facts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.core import kernels, sparse
from kme_dist.core.conditional import ConditionalEmbedding, Delta, Explicit, marginal_weights, solve_embedding
from kme_dist.core.intervals import LeftOut
from kme_dist.core.kernels import Kernel, Linear, OnFeatures
from kme_dist.core.kernels.base import select
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.base import Arrays, Facts, Own, get_rows, put_rows
from kme_dist.run.conditional import Inverse, are_numbers
from kme_dist.run.maps import restore_features

# --- sparse forms -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SparseForm:
    """An embedding with few inputs and targets, and its distance to the dense one."""

    embedding: ConditionalEmbedding
    left_out: LeftOut | None  # residuals, if available from the kept rows
    gamma: float
    density: float  # share of nonzero entries of the dense weights
    distance: float  # to the dense embedding in the Hilbert-Schmidt norm
    relative_distance: float
    penalised_distance: float  # relative, before refitting the kept entries


def sparse_forms(
    model: ConditionalEmbedding, penalty: str, gammas: Sequence[float] | int, method: str, refit: bool, steps: int
) -> list[SparseForm]:
    """See `ConditionalMeanEmbedding.sparsify`."""
    W, K, L = dense_weights(model)
    if method == "cholesky":
        counts = np.unique(np.linspace(1, len(K), gammas + 1).astype(int)[1:]) if isinstance(gammas, int) else gammas
        found = [sparse.incomplete_cholesky(W, K, L, int(count)) for count in counts]
    elif method == "fista":
        found = list(sparse.path(W, K, L, penalty=penalty, gammas=gammas, steps=steps))
    else:
        raise ConfigError(f"method={method!r} is unknown; choose 'fista' or 'cholesky'")
    whole = sparse.operator_distance(W * 0, W, K, L) or 1.0
    forms = []
    for step in found:
        kept = sparse.refit(step, W, K, L) if refit and method == "fista" else step
        forms.append(_sparse_form(model, kept, L, whole, step.distance / whole))
    return forms


def dense_weights(model: ConditionalEmbedding) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """W, K of the centres and L of the targets."""
    if model.features is not None:
        raise ConfigError("sparse forms select rows, and solver='features' keeps none; use another solver")
    K = np.asarray(model.kernel.gram(model.centres), dtype=np.float64)
    L = np.asarray(model.target_kernel.gram(model.targets), dtype=np.float64)
    return np.asarray(model.weights.forward(np.eye(len(K)))), K, L


def _sparse_form(
    model: ConditionalEmbedding, step: sparse.SparseStep, L: np.ndarray, whole: float, penalised: float
) -> SparseForm:
    M = np.asarray(step.weights)
    rows, columns = np.flatnonzero(M.any(axis=1)), np.flatnonzero(M.any(axis=0))
    kept, targets = np.ascontiguousarray(M[np.ix_(rows, columns)]), select(model.targets, rows)
    small = ConditionalEmbedding(
        model.kernel, model.target_kernel, select(model.centres, columns), targets, Explicit(kept),
        model.regularization, None, _sparse_base(model, L, rows),
    )  # fmt: skip
    left = None
    if not isinstance(model.weights, Explicit) and are_numbers(targets, model.target_kernel) and len(rows) > 1:
        # Rows and targets coincide here; the weight of a target in the prediction at its own row is its leverage.
        X = select(model.centres, rows)
        Z = np.asarray(small.basis(X), dtype=np.float64).T
        room = np.maximum(1 - np.sum(kept * Z, axis=1), 0.05)
        errors = targets - np.asarray(small.centred_expectation(X, targets))
        left = LeftOut.of(kept.T, Z, errors / room[:, None])
    density, relative = step.nonzero / M.size, step.distance / whole
    return SparseForm(small, left, step.gamma, density, step.distance, relative, penalised)


def _sparse_base(model: ConditionalEmbedding, L: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Weights of the kept targets in the mean over all training rows."""
    if not len(rows):
        return np.zeros(0)
    features = np.asarray(model.mean(L))[rows]
    own = L[np.ix_(rows, rows)]
    if are_numbers(model.targets, model.target_kernel):
        return np.asarray(marginal_weights(own, features, model.targets[rows], model.mean(model.targets)))
    return np.asarray(marginal_weights(own, features))


# --- arrays and facts -----------------------------------------------------------------------------------


def pack(model: ConditionalEmbedding, left: LeftOut | None) -> tuple[Arrays, Facts]:
    """An embedding and its residuals; a factor is not stored, solutions of conjugate gradients are."""
    arrays: Arrays = {}
    facts: Facts = {
        "kernel": model.kernel.to_config(),
        "target_kernel": model.target_kernel.to_config(),
        "regularization": model.regularization,
    }
    if model.features is None:
        put_rows(arrays, facts, "centres", model.centres)
    else:
        features: Any = model.features
        if not hasattr(features, "to_config"):
            raise DataError(f"{features!r} cannot be stored: it has no to_config() and arrays")
        facts["features"] = features.to_config()
        arrays |= {f"features/{name}": value for name, value in features.arrays.items()}
        if isinstance(model.kernel, OnFeatures):
            facts["kernel"] = None  # defined by the map
    targets = model.targets
    if isinstance(targets, np.ndarray) and targets.dtype.kind not in "biuf":
        targets = targets.tolist()
    put_rows(arrays, facts, "targets", targets)
    if model.base is not None:
        arrays["base"] = np.asarray(model.base)
    stored = isinstance(model.weights, Explicit | Inverse)  # a factor gives the same residuals when recomputed
    if left is not None and stored:
        for name in ("columns", "residuals", "sizes"):
            arrays[f"left_out/{name}"] = getattr(left, name)
    if isinstance(model.weights, Explicit):
        arrays["weights"] = np.asarray(model.weights.matrix)
    elif isinstance(model.weights, Inverse):
        facts["tolerance"] = model.weights.tolerance
        arrays |= {f"solved/{key}": value for key, value in model.weights.solutions.items()}
    return arrays, facts


def unpack(
    arrays: Mapping[str, np.ndarray],
    facts: Mapping[str, Any],
    own: Own,
    inverse: Callable[[Kernel, float, Any, Any], Inverse],
) -> tuple[ConditionalEmbedding, LeftOut | None]:
    """The inverse of `pack`. `inverse(kernel, λ, X, Y)` makes the weights of a model that is solved on demand."""
    known: dict[str, type[Kernel]] = {"delta": Delta, **own}
    features = restore_features(facts["features"], arrays, own) if "features" in facts else None
    own_kernel = facts["kernel"] is None
    kernel = OnFeatures(Linear(), features) if own_kernel else kernels.from_config(facts["kernel"], own=known)
    target_kernel = kernels.from_config(facts["target_kernel"], own=known)
    lam, base = float(facts["regularization"]), arrays.get("base")
    X = None if features is not None else get_rows(arrays, facts, "centres")
    Y = get_rows(arrays, facts, "targets")
    Y = np.asarray(Y) if isinstance(target_kernel, Delta) else Y
    left = None
    if "left_out/columns" in arrays:
        columns, residuals, sizes = (arrays[f"left_out/{name}"] for name in ("columns", "residuals", "sizes"))
        left = LeftOut(columns, residuals, sizes)
    if "weights" in arrays:
        weights = Explicit(arrays["weights"])
        return ConditionalEmbedding(kernel, target_kernel, X, Y, weights, lam, features, base), left
    if "tolerance" in facts:
        solver = inverse(kernel, lam, X, Y)
        solver.tolerance = float(facts["tolerance"])
        solver.solutions |= {n.removeprefix("solved/"): v for n, v in arrays.items() if n.startswith("solved/")}
        return ConditionalEmbedding(kernel, target_kernel, X, Y, solver, lam), left
    return solve_embedding(kernel, target_kernel, X, Y, lam), None
