"""Choice of kernel and λ for a conditional embedding, by held-out error in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kme_dist.backend import to_host
from kme_dist.core import kernels
from kme_dist.core.conditional import Delta, held_out_scores
from kme_dist.core.kernels import Kernel, Linear, OnFeatures
from kme_dist.core.kernels.base import length_scale_names, median_length_scale, row_count, take
from kme_dist.data.validation import text_among
from kme_dist.errors import DataError
from kme_dist.run.conditional import as_targets
from kme_dist.run.maps import as_features

Score = tuple[Kernel, float, float]  # kernel, λ, held-out error

_WIDTHS = (0.25, 0.5, 1.0, 2.0)  # multiples of the median distance
_SHIFTS = 10.0 ** np.arange(-6.0, 2.1, 0.5)  # n λ / mean k(x, x)
_OWN: dict[str, type[Kernel]] = {"delta": Delta}


def target_kernel(given: Any, Y: Any, seed: int) -> Kernel:
    """The kernel of targets; one given by name gets the median distance as its length scale."""
    if not isinstance(given, str):
        return kernels.from_config(given, own=_OWN)
    if given == "delta":
        return Delta()
    found = kernels.from_config({"name": given})
    return with_median(found, as_targets(Y, found), 1.0, seed)


def input_kernels(given: Any, features: Any, X: Any, seed: int) -> list[Kernel]:
    """Candidate kernels of inputs: those given, that of a feature map, or one name with several widths."""
    if features is not None and not isinstance(features, int | np.integer):
        return [OnFeatures(Linear(), as_features(features, np.shape(X)[1], seed))]
    if not isinstance(given, str):
        return [kernels.from_config(one, own=_OWN) for one in (given if isinstance(given, list | tuple) else [given])]
    found = kernels.from_config({"name": given, "ard": True}, n_features=np.shape(X)[-1])
    if not length_scale_names(found):
        return [found]
    return [with_median(found, X, width, seed) for width in _WIDTHS]


def with_median(kernel: Kernel, rows: Any, factor: float, seed: int) -> Kernel:
    """The kernel with `factor` times the median distance between rows as its length scales."""
    names = length_scale_names(kernel)
    if not names:
        return kernel
    few = take(rows, slice(0, 2000))
    try:
        values = np.asarray(few, dtype=np.float64)
    except (TypeError, ValueError) as error:
        found = text_among(few)
        if found is None and isinstance(error, TypeError):  # what scikit-learn expects of dictionaries among numbers
            raise
        what = f"values of type {type(few[0]).__name__}" if found is None else found.words
        raise DataError(
            f"{type(kernel).__name__} is a kernel of numbers, got {what}; choose 'delta' for labels (as `kernel` or "
            "`target_kernel`), or a kernel of such values, e.g. kme_dist.kernels.Spectrum(p=2) of texts"
        ) from None
    width = factor * median_length_scale(values, seed)
    return kernel.replace({name: np.full(kernel.parameters[name].shape, width) for name in names})


def score_kernels(
    candidates: Sequence[Kernel],
    targets_by: Kernel,
    X: Any,
    Y: Any,
    *,
    rows: int,
    regularization: float | None,
    folds: int | None,
    seed: int,
    centred: bool = False,
) -> list[Score]:
    """Held-out error of every kernel and λ on the given pairs, a sample of `rows` pairs: each λ is scaled to all rows
    such that the shift nλ stays the same. `centred` predicts l(y, ·) minus its mean."""
    n = row_count(X)
    L = np.asarray(targets_by.gram(Y), dtype=np.float64)
    if centred:
        L = L - L.mean(axis=0) - L.mean(axis=1)[:, None] + L.mean()
    parts = None
    if folds is not None:
        order = np.random.default_rng([seed, 1]).permutation(n)
        parts = [np.sort(part) for part in np.array_split(order, min(folds, n))]
    found: list[Score] = []
    for kernel in candidates:
        scale = float(np.mean(to_host(kernel.diag(X)))) or 1.0
        shifts = _SHIFTS * scale if regularization is None else np.array([n * regularization])
        scores = held_out_scores(np.asarray(kernel.gram(X)), L, [float(shift) for shift in shifts], parts)
        lams = shifts / rows if regularization is None else shifts / n
        found += [(kernel, float(lam), float(score)) for lam, score in zip(lams, scores, strict=True)]
    return found
