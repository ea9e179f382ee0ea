"""kme-dist: kernel embeddings of conditional distributions, learned from data that do not fit one machine."""

from kme_dist import errors
from kme_dist.core import kernels
from kme_dist.core.objective import (
    Objective,
    feature_objective,
    loo_objective,
    rcb_objective,
    validation_objective,
)
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.data.ingest import Table, ingest, read_table
from kme_dist.estimators import MCEClassifier, load

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "MCEClassifier",
    "Objective",
    "Table",
    "errors",
    "feature_objective",
    "ingest",
    "kernels",
    "load",
    "loo_objective",
    "open_dataset",
    "rcb_objective",
    "read_table",
    "validation_objective",
]
