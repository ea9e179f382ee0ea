"""Made-up records of cells, as a run of the benchmark writes them."""

from __future__ import annotations

import pytest


@pytest.fixture
def record():
    def make(name="iris", model="mce", split=0, **changed):
        return {
            "set": name,
            "model": model,
            "split": split,
            "development": False,
            "limit": 900.0,
            "code": "abc" if model == "mce" else None,
            "status": "ok",
            "train": 100,
            "test": 40,
            "accuracy": 0.9,
            "log_loss": 0.3,
            "brier": 0.2,
            "calibration": 0.05,
            "fit_cpu": 1.0,
            "predict_cpu": 0.1,
            "calibrate_cpu": 0.0,
            "reliability": [[0, 0, 0]] * 19 + [[40, 38.5, 37]],
            "load": "1.0",
            **changed,
        }

    return make
