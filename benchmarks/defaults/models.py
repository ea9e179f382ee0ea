"""The classifiers of the table, each with its customary preparation and otherwise its own defaults, on one core.

An entry builds an estimator for the labels. Support vector machines have no probabilities: a second estimator,
calibrated on five folds, gives theirs, and its seconds count for the figures of probabilities only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import RBF
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

FOLDS = 5


@dataclass(frozen=True)
class Entry:
    """build : (X, y) -> estimator        calibrated : probabilities need a second fit"""

    title: str
    build: Callable[[np.ndarray, np.ndarray], Any]
    preparation: str
    calibrated: bool = False
    most_rows: int | None = None
    stops_early: bool = False
    library: str = "sklearn"


def _mce(X, y):
    import kme_dist as kme

    return kme.MCEClassifier()


def _svc(X, y):
    return make_pipeline(StandardScaler(), SVC())


def _svc_grid(X, y):
    # 1 / d is gamma="scale" on standardised features.
    grid = {"svc__C": np.logspace(-1, 3, 5), "svc__gamma": np.logspace(-3, 1, 5) / X.shape[1]}
    return GridSearchCV(_svc(X, y), grid, cv=5)


def _boosting(X, y):
    return HistGradientBoostingClassifier(random_state=0)


def _xgboost(X, y):
    from xgboost import XGBClassifier

    return XGBClassifier(n_jobs=1)


def _lightgbm(X, y):
    from lightgbm import LGBMClassifier

    return LGBMClassifier(n_jobs=1, verbose=-1)


def _knn(X, y):
    return make_pipeline(StandardScaler(), KNeighborsClassifier())


def _logistic(X, y):
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=10_000))


def _gp(X, y):
    return make_pipeline(StandardScaler(), GaussianProcessClassifier(1.0 * RBF(1.0), random_state=0))


MODELS = {
    "mce": Entry("MCE", _mce, "MCEClassifier() on raw data", library="kme_dist"),
    "svc": Entry("SVC", _svc, "SVC() on standardised data", calibrated=True),
    "svc-grid": Entry(
        "SVC grid",
        _svc_grid,
        "SVC on standardised data, 5 x 5 grid (C from 0.1 to 1,000, gamma from 0.001 / d to 10 / d), 5 folds",
        calibrated=True,
    ),
    "gp": Entry(
        "GP",
        _gp,
        "GaussianProcessClassifier, scaled RBF kernel, standardised data, up to 2,000 training rows",
        most_rows=2000,
    ),
    "boosting": Entry("HistGB", _boosting, "HistGradientBoostingClassifier() on raw data", stops_early=True),
    "xgboost": Entry("XGBoost", _xgboost, "XGBClassifier() on raw data", library="xgboost"),
    "lightgbm": Entry("LightGBM", _lightgbm, "LGBMClassifier() on raw data", library="lightgbm"),
    "knn": Entry("kNN", _knn, "KNeighborsClassifier() on standardised data"),
    "logistic": Entry(
        "Logistic", _logistic, "LogisticRegression() on standardised data, iterations raised to converge"
    ),
    "before": Entry("MCE before", _mce, "MCEClassifier() of an earlier commit on raw data", library="kme_dist"),
}
KERNEL_METHODS = ("mce", "svc", "svc-grid", "gp")
# An earlier state of ourselves is shown, but does not compete: it would take ranks from the others.
RANKED = tuple(name for name in MODELS if name != "before")


def why_empty(entry: Entry, rows: int) -> str | None:
    """The reason why a model has no figures on this many training rows, if there is one."""
    if entry.most_rows is not None and rows > entry.most_rows:
        return f"> {entry.most_rows:,} rows"
    if importlib.util.find_spec(entry.library) is None:
        return "not installed"
    return None


def fit_rows(entry: Entry, y: np.ndarray) -> np.ndarray:
    """Which training rows a model is fitted on: all that it accepts.

    Above 10,000 rows HistGradientBoostingClassifier() stops early by a stratified part of the rows, which a class of
    one row cannot have.
    """
    labels, counts = np.unique(y, return_counts=True)
    return np.isin(y, labels[counts > 1]) if entry.stops_early and len(y) > 10_000 else np.ones(len(y), bool)


def versions(entry: Entry) -> dict[str, str]:
    """Versions of the libraries that a model runs on."""
    names = {"sklearn": "scikit-learn", "kme_dist": "numpy"}
    used = {"numpy", names.get(entry.library, entry.library)}
    return {name: importlib.metadata.version(name) for name in sorted(used) if _is_installed(name)}


def _is_installed(name):
    return importlib.util.find_spec({"scikit-learn": "sklearn"}.get(name, name)) is not None


class Calibrated:
    """A support vector machine with probabilities: a sigmoid on its decisions in five folds.

    There are fewer folds if the smallest class has fewer rows. A class of one row cannot be in two folds: it gets its
    frequency in training as probability, so that it is not impossible, and the sigmoids share the rest.
    """

    def __init__(self, fitted: Any, X: np.ndarray, y: np.ndarray) -> None:
        best = fitted.best_estimator_ if isinstance(fitted, GridSearchCV) else fitted
        self.classes_, counts = np.unique(y, return_counts=True)
        self.rare = counts == 1
        self.frequency = counts / len(y)
        often = np.isin(y, self.classes_[~self.rare])
        folds = int(min(FOLDS, counts[~self.rare].min()))
        self.inner = CalibratedClassifierCV(clone(best), ensemble=False, cv=folds).fit(X[often], y[often])

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        P = np.tile(np.where(self.rare, self.frequency, 0.0), (len(X), 1))
        P[:, ~self.rare] = (1 - P.sum(axis=1, keepdims=True)) * self.inner.predict_proba(X)
        return P


def use_source(folder: Path) -> None:
    """Import kme_dist from this folder from now on."""
    assert "kme_dist" not in sys.modules
    sys.path.insert(0, str(folder))
    import kme_dist

    found = Path(kme_dist.__file__).resolve()
    if not found.is_relative_to(folder.resolve()):
        raise SystemExit(f"kme_dist was imported from {found}, not from {folder}")
