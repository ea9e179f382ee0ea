"""Feature maps given by users, storing and restoring them; and scaling followed by a feature map."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kme_dist.backend import to_host
from kme_dist.core import features as maps
from kme_dist.core.kernels.base import row_blocks, row_count
from kme_dist.data.rows import Scaling

_TILE_ROWS = 4_096


def as_features(network: Any, n_features: int, seed: int = 0) -> Any:
    """A feature map from a map, a config, a name or a torch network."""
    if hasattr(network, "linearise"):
        return network
    if isinstance(network, str | Mapping) and not _is_torch(network):
        return maps.from_config(network, n_features=n_features, seed=seed)
    return _torch().as_features(network, seed=seed)


def restore_features(config: Mapping[str, Any], arrays: Mapping[str, np.ndarray], own: Mapping[str, Any]) -> Any:
    """A feature map from its config and the arrays "features/NAME"; `own` holds the user's torch classes by name."""
    stored = {name.removeprefix("features/"): value for name, value in arrays.items() if name.startswith("features/")}
    if _is_torch(config):
        return _torch().from_config(config, stored, own)
    return maps.from_config(config, arrays=stored)


def _is_torch(config: Any) -> bool:
    return isinstance(config, Mapping) and config.get("name") == "torch"


def _torch() -> Any:
    # Imported only for torch networks: torch takes seconds to import.
    return importlib.import_module("kme_dist.run.torch_features")


@dataclass(frozen=True)
class FeatureScaling(Scaling):
    """Scaling followed by a fixed feature map: for a kernel on features."""

    features: Any = None
    after: np.ndarray | None = None  # factors of the features

    def apply(self, X: np.ndarray, dtype: str) -> np.ndarray:
        # In tiles, since hidden layers may be wide.
        tiles = [self._tile(X[rows], dtype) for rows in row_blocks(row_count(X), _TILE_ROWS)]
        return tiles[0] if len(tiles) == 1 else np.concatenate(tiles) if tiles else self._tile(X, dtype)

    def _tile(self, X: np.ndarray, dtype: str) -> np.ndarray:
        Z = to_host(self.features.forward(super().apply(X, dtype)))
        return np.asarray(Z if self.after is None else Z * self.after, dtype)

    def weighted(self, weights: np.ndarray) -> Scaling:
        return replace(self, after=weights if self.after is None else self.after * weights)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        own = {f"features/{name}": value for name, value in self.features.arrays.items()}
        return own if self.after is None else {**own, "scaling/after": self.after}


def with_features(scaling: Scaling, features: Any, seed: int = 0, after: np.ndarray | None = None) -> Scaling:
    """`scaling` followed by a feature map, if there is one."""
    if features is None:
        return scaling
    own = as_features(features, scaling.shift.size, seed)
    return FeatureScaling(scaling.shift, scaling.factor, scaling.curves, own, after)


def features_of(scaling: Scaling) -> tuple[dict[str, np.ndarray], dict[str, Any] | None]:
    """Arrays and config of the feature map in a scaling, for storing; no arrays and None without a map."""
    return (scaling.arrays, scaling.features.to_config()) if isinstance(scaling, FeatureScaling) else ({}, None)
