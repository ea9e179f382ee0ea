"""Values far from 0 stay apart: 400 consecutive seconds, of which single precision would make four values."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import kme_dist as kme

SECONDS = 1_700_000_000 + np.arange(400)
LABELS = np.where(np.arange(400) // 50 % 2 == 0, "even", "odd")
TARGETS = np.sin(np.arange(400) / 30)
KERNEL = kme.kernels.Gaussian(length_scale=20.0)
WAYS = {
    "mce": lambda: kme.MCEClassifier(objective="rcb", steps=2),
    "mce, auto": lambda: kme.MCEClassifier(steps=2),
    "mce, not scaled": lambda: kme.MCEClassifier(kernel=KERNEL, scaling=None, steps=0, regularization=1e-4),
    "cen": lambda: kme.CENClassifier(hidden=(4,), steps=3),
    "askl": lambda: kme.ASKLClassifier(features=8, epochs=1, loss="cross_entropy"),
    "parzen": lambda: kme.ParzenClassifier(folds=2),
    "cme": lambda: kme.CMERegressor(steps=2),
    "cme, not scaled": lambda: kme.CMERegressor(kernel=KERNEL, scaling=None, steps=0, regularization=1e-4),
    "askl regressor": lambda: kme.ASKLRegressor(features=8, epochs=1),
    "embedding": lambda: kme.ConditionalMeanEmbedding(kernel=KERNEL, regularization=1e-4),
}


def fitted(way, X):
    model = WAYS[way]()
    return model.fit(X, LABELS if hasattr(model, "predict_proba") else TARGETS)


def answers(model, X):
    return np.asarray(model.predict_proba(X) if hasattr(model, "predict_proba") else model.predict(X))


@pytest.mark.parametrize("way", WAYS)
def test_rows_far_from_zero_are_those_near_it(way):
    """Kernels of differences, and whatever is scaled, do not see an offset. It costs the digits of double precision
    that it takes: 1.7e9 leaves 2e-7 of a second."""
    far, near = SECONDS[:, None], (SECONDS - SECONDS[0])[:, None].astype(float)
    wanted, found = answers(fitted(way, near), near), answers(fitted(way, far), far)
    assert len(np.unique(found, axis=0)) > 20
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("way", ["mce, not scaled", "cme, not scaled"])
def test_tables_data_sets_and_batch_inference_keep_them_apart(way, tmp_path):
    far, frame = SECONDS[:, None], pd.DataFrame({"time": SECONDS, "shop": "north"})
    model = fitted(way, far)
    wanted = answers(model, far)
    np.testing.assert_allclose(answers(fitted(way, frame), frame), wanted, rtol=1e-5, atol=1e-5)
    numeric = not hasattr(model, "predict_proba")
    y = TARGETS if numeric else LABELS
    data = kme.ingest(frame.assign(y=y), tmp_path / "d.zarr", label="y", exclude=["shop"])
    assert data.dtype == np.float64
    stored = WAYS[way]().fit(data)
    np.testing.assert_allclose(answers(stored, far), wanted, rtol=1e-5, atol=1e-5)
    kme.predict(stored, data, tmp_path / "scores.zarr")
    scores = kme.open_predictions(tmp_path / "scores.zarr").read("mean" if numeric else "probability")
    np.testing.assert_allclose(scores, wanted, rtol=1e-5, atol=1e-5)
