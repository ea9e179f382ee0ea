"""What is done to a fitted classifier: calibration that keeps labels, compression that states its loss."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

import kme_dist as kme
from kme_dist.core.kernels import Gaussian
from kme_dist.core.metrics import Tally
from kme_dist.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    return X[:600], np.char.add("d", y[:600].astype(str)), X[600:1200], np.char.add("d", y[600:1200].astype(str))


def fitted(digits, calibration="none", **options):
    kernel = Gaussian(length_scale=np.full(64, 2.5))
    model = kme.MCEClassifier(kernel=kernel, steps=0, regularization=1e-5, calibration=calibration, **options)
    return model.fit(*digits[:2])


@pytest.fixture(scope="module")
def plain(digits):
    return fitted(digits)


def judged(model, digits):
    codes = np.searchsorted(model.classes_, digits[3])
    return Tally.of(codes, model.predict_proba(digits[2])).metrics(model.classes_)


def test_leave_one_out_calibrates_without_touching_labels(plain, digits, tmp_path):
    calibrated = fitted(digits, calibration="temperature")
    before, after = judged(plain, digits), judged(calibrated, digits)
    assert before["calibration_error"] > 0.05, "there is something to mend"
    assert after["calibration_error"] < 0.4 * before["calibration_error"]
    assert after["log_loss"] < before["log_loss"]
    assert (calibrated.predict(digits[2]) == plain.predict(digits[2])).all()
    assert calibrated.entropy(digits[2]).mean() < plain.entropy(digits[2]).mean()
    calibrated.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    np.testing.assert_array_equal(again.predict_proba(digits[2]), calibrated.predict_proba(digits[2]))


SOLVERS = {
    "cholesky": {"solver": "cholesky"},
    "tiled": {"solver": "tiled"},
    "pcg": {"solver": "pcg"},
    "centres": {"solver": "nystrom", "centres": 150},
    "random features": {"features": 300},
}


@pytest.mark.parametrize("solver", SOLVERS)
def test_by_default_probabilities_are_calibrated_whatever_the_solver(digits, solver, tmp_path):
    """By rows of the fit, each left out: nothing is held out, and no label changes."""
    without = fitted(digits, **SOLVERS[solver])
    model = kme.MCEClassifier(kernel=without.kernel, steps=0, regularization=1e-5, **SOLVERS[solver]).fit(*digits[:2])
    assert model.calibration == "auto"
    assert model.calibration_.kind != "none"
    before, after = judged(without, digits), judged(model, digits)
    assert after["log_loss"] < 0.6 * before["log_loss"]
    assert after["calibration_error"] < 0.5 * before["calibration_error"]
    np.testing.assert_array_equal(model.predict(digits[2]), without.predict(digits[2]))
    np.testing.assert_array_equal(
        model.classes_[model.predict_proba(digits[2]).argmax(axis=1)], model.predict(digits[2])
    )
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    np.testing.assert_array_equal(again.predict_proba(digits[2]), model.predict_proba(digits[2]))


def test_the_defaults_learn_digits_and_calibrate_them(digits):
    """Everything by default but fewer steps: log loss lower than without calibration, and the same labels."""
    model = kme.MCEClassifier(steps=10).fit(*digits[:2])
    without = kme.MCEClassifier(steps=10, calibration="none").fit(*digits[:2])
    assert judged(model, digits)["log_loss"] < 0.7 * judged(without, digits)["log_loss"]
    assert judged(model, digits)["accuracy"] == judged(without, digits)["accuracy"] > 0.93
    np.testing.assert_array_equal(model.predict(digits[2]), without.predict(digits[2]))


@pytest.mark.parametrize("method", ["temperature", "isotonic", "softmax", "auto"])
def test_held_out_rows_calibrate_too(digits, method):
    model = fitted(digits)
    before = judged(model, digits)
    half = digits[2][:300], digits[3][:300]
    assert judged(model.calibrate(*half, method=method), digits)["log_loss"] < before["log_loss"]
    assert judged(model.calibrate(*half, method="none"), digits)["log_loss"] == pytest.approx(before["log_loss"])


@pytest.mark.parametrize("method", ["none", "temperature", "isotonic", "softmax", "auto"])
@pytest.mark.parametrize("floor", [None, 0.0])
def test_labels_are_the_most_probable_classes_and_no_calibration_changes_them(digits, method, floor):
    far = np.full((2, 64), 1e3) * [[1], [-1]]  # beyond every centre: all decisions are 0
    X = np.concatenate([digits[2], far])
    model = fitted(digits, probability_floor=floor, calibration=method)
    labels = fitted(digits, probability_floor=floor).predict(X)
    np.testing.assert_array_equal(model.predict(X), labels)
    np.testing.assert_array_equal(model.classes_[model.predict_proba(X).argmax(axis=1)], labels)
    model.calibrate(digits[2][:300], digits[3][:300], method=method)
    np.testing.assert_array_equal(model.predict(X), labels)
    np.testing.assert_array_equal(model.classes_[model.predict_proba(X).argmax(axis=1)], labels)


def test_isotonic_calibration_is_worth_having(plain, digits):
    """Log loss on digits: .30 plain, .05 calibrated."""
    after = judged(fitted(digits, calibration="isotonic"), digits)
    before = judged(plain, digits)
    assert after["log_loss"] < 0.4 * before["log_loss"]
    assert after["accuracy"] == before["accuracy"]


@pytest.mark.parametrize("method", ["none", "temperature", "isotonic", "softmax"])
def test_an_expectation_is_one_of_the_probabilities_unless_asked_for_raw(digits, method):
    model = fitted(digits, calibration=method)
    f, p = model.decision_probabilities(digits[2]), model.predict_proba(digits[2])
    assert f.max() > 1
    assert f.min() < 0
    indicator = np.eye(10)
    found = model.expectation(digits[2], indicator)
    np.testing.assert_allclose(found, p, rtol=1e-12)
    assert found.min() >= 0
    assert found.max() <= 1
    np.testing.assert_allclose(model.expectation(digits[2], np.full(10, 0.1)), 0.1, rtol=0, atol=0)
    np.testing.assert_allclose(model.expectation(digits[2], indicator, raw=True), f, rtol=1e-12)


@pytest.mark.parametrize("solver", ["cholesky", "nystrom"])
def test_a_sample_of_the_rows_is_nearly_as_good(digits, monkeypatch, solver):
    losses, chosen = {}, {"solver": solver, "centres": 80 if solver == "nystrom" else None}
    for rows in (400, 600):
        monkeypatch.setattr("kme_dist.run.fit.equations.LEFT_OUT_ROWS", rows)
        monkeypatch.setattr("kme_dist.run.fit.exact.LEFT_OUT_ROWS", rows)
        model = fitted(digits, calibration="temperature", **chosen)
        losses[rows] = judged(model, digits)["log_loss"]
    plain = judged(fitted(digits, **chosen), digits)["log_loss"]
    assert losses[400] != losses[600]
    assert max(losses.values()) < 0.6 * plain
    assert losses[400] < 1.3 * losses[600]


def test_mistakes_of_calibration_are_named(plain, digits):
    with pytest.raises(ConfigError, match="platt"):
        fitted(digits, calibration="platt")
    with pytest.raises(DataError, match="'d11'"):
        plain.calibrate(digits[2][:2], np.array(["d1", "d11"]))


@pytest.mark.parametrize("method", ["greedy", "herding"])
def test_a_compressed_model_is_smaller_nearly_as_good_and_says_how_much(plain, digits, tmp_path, method):
    small = plain.compress(n_centres=200, method=method, X=digits[2], y=digits[3])
    facts = small.compression_
    assert (facts["centres_before"], facts["centres"], facts["rows"]) == (600, 200, 600)
    assert facts["accuracy_before"] == pytest.approx(plain.score(*digits[2:]))
    assert facts["accuracy"] == pytest.approx(small.score(*digits[2:]))
    assert facts["accuracy"] > facts["accuracy_before"] - 0.02
    assert 0 < facts["rkhs_error"] < 0.7
    assert facts["same_labels"] > 0.97
    assert len(plain.embedding_.weights) == 600, "the original stays"
    small.save(tmp_path / "small.zarr")
    again = kme.load(tmp_path / "small.zarr")
    np.testing.assert_array_equal(again.predict_proba(digits[2]), small.predict_proba(digits[2]))
    assert again.compression_["rkhs_error"] == pytest.approx(facts["rkhs_error"])


def test_a_tolerance_decides_how_many_centres_stay(plain):
    loose, tight = plain.compress(tolerance=0.6), plain.compress(tolerance=0.3)
    assert loose.compression_["rkhs_error"] <= 0.6
    assert tight.compression_["rkhs_error"] <= 0.3
    assert loose.compression_["centres"] < tight.compression_["centres"] < 600
