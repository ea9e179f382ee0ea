"""Conditional embeddings, and rows of any kind, as the arrays and attributes of a stored model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kme_dist.core import kernels
from kme_dist.core.conditional import ConditionalEmbedding, Delta, Explicit, solve_embedding
from kme_dist.core.intervals import LeftOut
from kme_dist.core.kernels import Kernel, Linear, OnFeatures
from kme_dist.errors import DataError
from kme_dist.run.conditional import Inverse
from kme_dist.run.maps import restore_features

Arrays = dict[str, np.ndarray]


def put_rows(arrays: Arrays, attributes: dict[str, Any], name: str, rows: Any) -> None:
    """Rows among the arrays of a model; rows that are no numbers (texts) among its attributes."""
    if hasattr(rows, "shape"):
        arrays[name] = np.asarray(rows)
    elif all(isinstance(row, str | int | float | bool) for row in rows):
        attributes[name] = list(rows)
    else:
        raise DataError(f"rows of type {type(rows[0]).__name__} cannot be stored; arrays, texts and numbers can")


def get_rows(arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any], name: str) -> Any:
    return arrays[name] if name in arrays else attributes[name]


def pack(model: ConditionalEmbedding, left: LeftOut | None) -> tuple[Arrays, dict[str, Any]]:
    """An embedding and the residuals that go with it; a factor is not stored, what conjugate gradients solved is."""
    arrays: Arrays = {}
    attributes: dict[str, Any] = {
        "kernel": model.kernel.to_config(),
        "target_kernel": model.target_kernel.to_config(),
        "regularization": model.regularization,
    }
    if model.features is None:
        put_rows(arrays, attributes, "centres", model.centres)
    else:
        features: Any = model.features
        if not hasattr(features, "to_config"):
            raise DataError(f"{features!r} cannot be stored: it has no to_config() and arrays")
        attributes["features"] = features.to_config()
        arrays |= {f"features/{name}": value for name, value in features.arrays.items()}
        if isinstance(model.kernel, OnFeatures):
            attributes["kernel"] = None  # it is the map's own
    targets = model.targets
    if isinstance(targets, np.ndarray) and targets.dtype.kind not in "biuf":
        targets = targets.tolist()
    put_rows(arrays, attributes, "targets", targets)
    if model.base is not None:
        arrays["base"] = np.asarray(model.base)
    stored = isinstance(model.weights, Explicit | Inverse)  # what a factor gives is the same when factorised anew
    if left is not None and stored:
        for name in ("columns", "residuals", "sizes"):
            arrays[f"left_out/{name}"] = getattr(left, name)
    if isinstance(model.weights, Explicit):
        arrays["weights"] = np.asarray(model.weights.matrix)
    elif isinstance(model.weights, Inverse):
        attributes["tolerance"] = model.weights.tolerance
        arrays |= {f"solved/{key}": value for key, value in model.weights.remembered.items()}
    return arrays, attributes


def unpack(
    arrays: Mapping[str, np.ndarray],
    found: Mapping[str, Any],
    own: Mapping[str, type[Kernel]],
    inverse: Callable[[Kernel, float, Any, Any], Inverse],
) -> tuple[ConditionalEmbedding, LeftOut | None]:
    """And back. `inverse(kernel, λ, X, Y)` makes the weights of a model that is solved for when it is asked."""
    known: dict[str, type[Kernel]] = {"delta": Delta, **own}
    features = restore_features(found["features"], arrays, own) if "features" in found else None
    own_kernel = found["kernel"] is None
    kernel = OnFeatures(Linear(), features) if own_kernel else kernels.from_config(found["kernel"], own=known)
    target_kernel = kernels.from_config(found["target_kernel"], own=known)
    lam, base = float(found["regularization"]), arrays.get("base")
    X = None if features is not None else get_rows(arrays, found, "centres")
    Y = get_rows(arrays, found, "targets")
    Y = np.asarray(Y) if isinstance(target_kernel, Delta) else Y
    left = None
    if "left_out/columns" in arrays:
        left = LeftOut(*(arrays[f"left_out/{name}"] for name in ("columns", "residuals", "sizes")))
    if "weights" in arrays:
        weights = Explicit(arrays["weights"])
        return ConditionalEmbedding(kernel, target_kernel, X, Y, weights, lam, features, base), left
    if "tolerance" in found:
        solver = inverse(kernel, lam, X, Y)
        solver.tolerance = float(found["tolerance"])
        solver.remembered |= {n.removeprefix("solved/"): v for n, v in arrays.items() if n.startswith("solved/")}
        return ConditionalEmbedding(kernel, target_kernel, X, Y, solver, lam), left
    return solve_embedding(kernel, target_kernel, X, Y, lam), None
