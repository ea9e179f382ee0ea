"""Tables with heavy tails: the default classifier flattens them where that helps, the same on every path."""

from __future__ import annotations

import numpy as np
import pytest

import kme_dist as kme

QUICK = {"steps": 10, "n_jobs": 1}


def table(n=400, seed=0, power=3.0):
    """Classes that depend on normal numbers, of which the table has the exponentials; one column is normal."""
    rng = np.random.default_rng(seed)
    Z = rng.normal(size=(n, 4))
    y = (Z[:, 0] * Z[:, 1] + 0.3 * Z[:, 2] > 0).astype(int)
    return np.concatenate([np.exp(power * Z[:, :3]), Z[:, 3:]], axis=1), y


def accuracy(model, seed=1):
    X, y = table(600, seed)
    return model.score(X, y)


def test_heavy_tails_are_flattened_by_default():
    X, y = table()
    flat, plain = (kme.MCEClassifier(scaling=kind, **QUICK).fit(X, y) for kind in ("auto", "unit"))
    assert flat.scaling_.curves.columns.tolist() == [0, 1, 2]
    assert plain.scaling_.curves is None
    assert accuracy(flat) > accuracy(plain) + 0.05


def test_tables_without_them_are_scaled_to_unit_range():
    X, y = table(power=0.1)
    one, two = (kme.MCEClassifier(scaling=kind, **QUICK).fit(X, y) for kind in ("auto", "unit"))
    assert one.scaling_.curves is None
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))


@pytest.mark.parametrize("settings", [{"objective": "rcb"}, {"kernel": "linear"}, {"features": {"name": "identity"}}])
def test_published_objectives_and_given_maps_see_rows_of_unit_range(settings):
    X, y = table(120)
    model = kme.MCEClassifier(**settings, **QUICK).fit(X, y)
    assert model.scaling_.curves is None


def test_curves_are_stored_with_the_model(tmp_path):
    X, y = table()
    model = kme.MCEClassifier(**QUICK).fit(X, y)
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert again.scaling_.curves is not None


def test_a_row_of_weight_two_is_the_row_twice():
    X, y = table(150)
    counts = np.random.default_rng(5).integers(1, 3, len(y))
    one = kme.MCEClassifier(dtype="float64", **QUICK).fit(X, y, sample_weight=counts)
    two = kme.MCEClassifier(dtype="float64", **QUICK).fit(np.repeat(X, counts, axis=0), np.repeat(y, counts))
    np.testing.assert_allclose(one.scaling_.curves.values, two.scaling_.curves.values, atol=1e-12)


def test_a_warm_start_keeps_the_curves_its_kernel_was_learned_with():
    X, y = table()
    model = kme.MCEClassifier(warm_start=True, **QUICK).fit(X, y)
    before = model.scaling_.curves.digest
    assert model.fit(X, y).scaling_.curves.digest == before


def test_the_same_bits_alone_and_on_workers():
    X, y = table(200)
    alone, far = (kme.MCEClassifier(steps=5, n_jobs=n_jobs).fit(X, y) for n_jobs in (1, 2))
    assert far.scaling_.curves.columns.tolist() == [0, 1, 2]
    assert far.predict_proba(X).tobytes() == alone.predict_proba(X).tobytes()
