"""kme-dist: kernel embeddings of conditional distributions, learned from data that do not fit one machine.

Names are imported when first used, so that a command that only prints help does not wait for scikit-learn.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kme_dist import errors, kernels
    from kme_dist.core.objective import (
        Objective,
        feature_objective,
        loo_objective,
        rcb_objective,
        validation_objective,
    )
    from kme_dist.data.dataset import Dataset, open_dataset
    from kme_dist.data.ingest import ingest
    from kme_dist.data.predictions import Predictions, open_predictions
    from kme_dist.data.reading import Table, read_table
    from kme_dist.models import bayes
    from kme_dist.models.askl import ASKLClassifier, ASKLRegressor
    from kme_dist.models.bags import OneClassSupportMeasure, SupportMeasureClassifier
    from kme_dist.models.base import load
    from kme_dist.models.bayes import KernelBayesFilter
    from kme_dist.models.cen import CENClassifier
    from kme_dist.models.cme import ConditionalMeanEmbedding
    from kme_dist.models.density import MixtureMatching
    from kme_dist.models.independence import IndependenceTest, conditional_independence_test, hsic_test
    from kme_dist.models.mce import MCEClassifier
    from kme_dist.models.means import KernelMean, ParzenClassifier
    from kme_dist.models.mmd import MMDTest, mmd_test
    from kme_dist.models.predict import predict
    from kme_dist.models.regressor import CMERegressor
    from kme_dist.report.displays import LearningCurveDisplay, RelevanceDisplay, ReliabilityDisplay

__version__ = "0.1.0"

__all__ = [
    "ASKLClassifier",
    "ASKLRegressor",
    "CENClassifier",
    "CMERegressor",
    "ConditionalMeanEmbedding",
    "Dataset",
    "IndependenceTest",
    "KernelBayesFilter",
    "KernelMean",
    "LearningCurveDisplay",
    "MCEClassifier",
    "MMDTest",
    "MixtureMatching",
    "Objective",
    "OneClassSupportMeasure",
    "ParzenClassifier",
    "Predictions",
    "RelevanceDisplay",
    "ReliabilityDisplay",
    "SupportMeasureClassifier",
    "Table",
    "bayes",
    "conditional_independence_test",
    "errors",
    "feature_objective",
    "hsic_test",
    "ingest",
    "kernels",
    "load",
    "loo_objective",
    "mmd_test",
    "open_dataset",
    "open_predictions",
    "predict",
    "rcb_objective",
    "read_table",
    "validation_objective",
]

_HOMES = {
    "ASKLClassifier": "kme_dist.models.askl",
    "ASKLRegressor": "kme_dist.models.askl",
    "CENClassifier": "kme_dist.models.cen",
    "CMERegressor": "kme_dist.models.regressor",
    "ConditionalMeanEmbedding": "kme_dist.models.cme",
    "Dataset": "kme_dist.data.dataset",
    "IndependenceTest": "kme_dist.models.independence",
    "KernelBayesFilter": "kme_dist.models.bayes",
    "KernelMean": "kme_dist.models.means",
    "LearningCurveDisplay": "kme_dist.report.displays",
    "MCEClassifier": "kme_dist.models.mce",
    "MMDTest": "kme_dist.models.mmd",
    "MixtureMatching": "kme_dist.models.density",
    "Objective": "kme_dist.core.objective",
    "OneClassSupportMeasure": "kme_dist.models.bags",
    "ParzenClassifier": "kme_dist.models.means",
    "Predictions": "kme_dist.data.predictions",
    "RelevanceDisplay": "kme_dist.report.displays",
    "ReliabilityDisplay": "kme_dist.report.displays",
    "SupportMeasureClassifier": "kme_dist.models.bags",
    "Table": "kme_dist.data.reading",
    "conditional_independence_test": "kme_dist.models.independence",
    "feature_objective": "kme_dist.core.objective",
    "hsic_test": "kme_dist.models.independence",
    "ingest": "kme_dist.data.ingest",
    "load": "kme_dist.models.base",
    "loo_objective": "kme_dist.core.objective",
    "mmd_test": "kme_dist.models.mmd",
    "open_dataset": "kme_dist.data.dataset",
    "open_predictions": "kme_dist.data.predictions",
    "predict": "kme_dist.models.predict",
    "rcb_objective": "kme_dist.core.objective",
    "read_table": "kme_dist.data.reading",
    "validation_objective": "kme_dist.core.objective",
}
_MODULES = {"bayes": "kme_dist.models.bayes", "errors": "kme_dist.errors", "kernels": "kme_dist.kernels"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'kme_dist' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
