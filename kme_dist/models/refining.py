"""What can be done to a fitted classifier: calibrate its probabilities, shrink it.

clf = MCEClassifier(calibration="temperature").fit(X, y)        # by leave-one-out, nothing held out
clf.calibrate(X_held_out, y_held_out, method="isotonic")
small = clf.compress(n_centres=200)
small.compression_                                              # what that cost
"""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np

from kme_dist.backend import like, to_host
from kme_dist.core import embedding as mce
from kme_dist.core.calibration import Calibration, class_probabilities, leave_one_out_decisions
from kme_dist.core.compression import compress
from kme_dist.core.kernels import Linear
from kme_dist.core.kernels.base import select
from kme_dist.core.objective import one_hot
from kme_dist.errors import ConfigError, DataError

_ROWS = 20_000  # leave-one-out on more rows than this uses a sample


class Refinable:
    """Mixed into classifiers that have `embedding_`, `classes_`, `probability_floor_` and `decision_probabilities`."""

    embedding_: Any
    classes_: np.ndarray
    probability_floor_: float
    calibration: str
    calibration_: Calibration
    compression_: dict[str, Any]

    def decision_probabilities(self, X: Any) -> np.ndarray:
        raise TypeError(f"{type(self).__name__} must define decision_probabilities")

    def probabilities(self, P: np.ndarray) -> np.ndarray:
        """Class probabilities from decision probabilities: clip-normalised, then calibrated where asked for. The class
        with the largest decision probability, which is the label, has the largest probability too."""
        return class_probabilities(P, self.probability_floor_, self.calibration_)

    def calibrate(self, X: Any, y: Any, method: str = "temperature") -> Self:
        """Fit the calibration to held-out rows: "temperature", "isotonic", or "none" to undo it."""
        codes = np.searchsorted(self.classes_, y)
        known = codes < len(self.classes_)
        known[known] = self.classes_[codes[known]] == np.asarray(y)[known]
        if not known.all():
            raise DataError(f"calibrate: the label {np.asarray(y)[~known][0]!r} is none of the model's classes")
        p = mce.clip_normalise(self.decision_probabilities(X), self.probability_floor_)
        self.calibration_ = Calibration.fit(method, np.asarray(p), codes, self.probability_floor_)
        return self

    def _leave_one_out_calibration(
        self, rows: Any, codes: np.ndarray, seed: int, total: int | None = None
    ) -> Calibration:
        if self.calibration == "none":
            return Calibration()
        total = total or len(codes)  # of which `rows` may be a sample
        if len(codes) > _ROWS:
            chosen = np.sort(np.random.default_rng([seed, 3]).choice(len(codes), _ROWS, replace=False))
            rows, codes = select(rows, chosen), codes[chosen]
        Y = one_hot(codes, len(self.classes_), self.embedding_.weights)
        P = to_host(leave_one_out_decisions(self._with_centres(), rows, Y, total))
        p = np.asarray(mce.clip_normalise(P, self.probability_floor_))
        return Calibration.fit(self.calibration, p, codes, self.probability_floor_)

    def _with_centres(self) -> mce.Embedding:
        """The embedding; one of explicit features is a linear kernel with the unit vectors as centres."""
        found = self.embedding_
        if isinstance(found, mce.Embedding):
            return found
        unit = like(np.eye(found.weights.shape[0]), found.weights)
        return mce.Embedding(Linear(), unit, found.weights, found.regularization)

    def compress(
        self,
        n_centres: int | None = None,
        tolerance: float | None = None,
        *,
        method: str = "greedy",
        X: Any = None,
        y: Any = None,
    ) -> Self:
        """A copy with fewer centres: so many, or as few as keep the function within a relative error.

        `compression_` of the copy states the loss: the relative error in the kernel's norm, how many labels stay and
        the largest change of a decision on the rows of X (the centres themselves where X is not given), and with y the
        accuracy before and after. `method` is "greedy" or "herding".
        """
        if not isinstance(self.embedding_, mce.Embedding):
            raise ConfigError("compress chooses among centres, and solver='features' has none; ask for fewer features")
        found = compress(self.embedding_, centres=n_centres, tolerance=tolerance, method=method)
        small = copy.copy(self)
        small.embedding_ = found.embedding
        if X is None:
            before, after = (to_host(e.decision(self.embedding_.centres)) for e in (self.embedding_, found.embedding))
        else:
            before, after = self.decision_probabilities(X), small.decision_probabilities(X)
        facts: dict[str, Any] = {
            "method": method,
            "centres_before": len(self.embedding_.weights),
            "centres": len(found.kept),
            "rkhs_error": found.error,
            "rows": len(before),
            "same_labels": float(np.mean(before.argmax(axis=1) == after.argmax(axis=1))),
            "largest_change": float(np.abs(before - after).max()),
        }
        if y is not None and X is not None:
            facts["accuracy_before"], facts["accuracy"] = (
                float(np.mean(self.classes_[f.argmax(axis=1)] == np.asarray(y))) for f in (before, after)
            )
        small.compression_ = facts
        return small
