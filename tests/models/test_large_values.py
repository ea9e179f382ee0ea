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


def table(n=120):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 3))
    return X, X[:, 0] + np.sin(X[:, 1]) + 0.1 * rng.normal(size=n)


@pytest.mark.parametrize("factor", [1e160, 1e200])
@pytest.mark.parametrize("scaling", ["auto", "standard"])
def test_numbers_whose_squares_overflow_are_refused_by_the_name_of_their_column(factor, scaling):
    X, y = table()
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    frame["b"] *= factor
    with pytest.raises(kme.errors.DataError, match=r"column 'b' has values up to .*, whose squares exceed float64"):
        kme.CMERegressor(steps=2, scaling=scaling).fit(frame, y)
    with pytest.raises(kme.errors.DataError, match=r"column 'x1' has values up to"):
        kme.CMERegressor(steps=2, scaling=scaling).fit(frame.to_numpy(), y)


@pytest.mark.parametrize("factor", [1e-140, 1e-160, 1e-200, 1e140])
@pytest.mark.parametrize("build", [kme.CMERegressor, kme.ConditionalMeanEmbedding])
def test_a_table_in_tiny_or_large_units_is_the_table(build, factor):
    """Squares of 1e-200 are 0: the deviation is not, and if it cannot be told, the range is."""
    X, y = table()
    model, other = build().fit(X, y), build().fit(X * factor, y)
    found = [
        m.predict(Z) if hasattr(m, "predict") else m.expectation(Z, lambda t: t)
        for m, Z in ((model, X), (other, X * factor))
    ]
    assert np.corrcoef(*[np.ravel(f) for f in found])[0, 1] > 0.99
    assert (other.scaling_.factor > 0).all()


def test_one_tiny_column_beside_others_counts_as_much():
    X, y = table()
    X[:, 0] *= 1e-200
    assert kme.CMERegressor(steps=10).fit(X[:80], y[:80]).score(X[80:], y[80:]) > 0.9


def test_a_test_of_independence_names_the_variable_whose_squares_overflow():
    X, y = table()
    with pytest.raises(kme.errors.DataError, match=r"X: column 'number 0' has values up to .*squares exceed float64"):
        kme.hsic_test(X * 1e200, y)
    with pytest.raises(kme.errors.DataError, match="Y: column"):
        kme.conditional_independence_test(X[:, 0], y * 1e200, X[:, 1])


def test_a_test_of_independence_does_not_depend_on_units():
    X, y = table()
    wanted = kme.hsic_test(X, y)
    for factor in (1e-200, 1e-100, 1e100):
        found = kme.hsic_test(X * factor, y)
        assert found.p_value == wanted.p_value
        np.testing.assert_allclose(found.statistic, wanted.statistic, rtol=1e-9)
