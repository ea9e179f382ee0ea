"""What all estimators share: settings checked by rules, models stored in one form, questions with one answer."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

import kme_dist as kme
from kme_dist.core import embedding as mce
from kme_dist.core.calibration import class_probabilities
from kme_dist.data.store import load_arrays
from kme_dist.errors import ConfigError, DataError
from kme_dist.kernels import Gaussian
from kme_dist.models import base
from kme_dist.models.settings import integer, one_of, positive

GOLDEN = Path(__file__).parent / "golden"
ANSWERS = json.loads((GOLDEN / "format-1.json").read_text())
RNG = np.random.default_rng(0)
X = RNG.normal(size=(30, 2)) + np.arange(30)[:, None] % 3
Y = np.array(["low", "mid", "high"])[np.arange(30) % 3]
BAGS = [X[3 * i : 3 * i + 3] for i in range(10)]
FITS = {
    "ASKLClassifier": lambda **s: kme.ASKLClassifier(features=5, epochs=1, loss="cross_entropy", **s).fit(X, Y),
    "ASKLRegressor": lambda **s: kme.ASKLRegressor(features=5, epochs=1, **s).fit(X, X[:, 0]),
    "CENClassifier": lambda **s: kme.CENClassifier(hidden=(3,), steps=2, **s).fit(X, Y),
    "CMERegressor": lambda **s: kme.CMERegressor(**s).fit(X, X[:, 0]),
    "ConditionalMeanEmbedding": lambda **s: kme.ConditionalMeanEmbedding(**s).fit(X, X[:, 0]),
    "KernelBayesFilter": lambda **s: kme.KernelBayesFilter(**s).fit(X, X),
    "KernelMean": lambda **s: kme.KernelMean("r-kmse", **s).fit(X),
    "MCEClassifier": lambda **s: kme.MCEClassifier(steps=1, objective="rcb", **s).fit(X, Y),
    "MixtureMatching": lambda **s: kme.MixtureMatching(2, **s).fit(X),
    "OneClassSupportMeasure": lambda **s: kme.OneClassSupportMeasure(**s).fit(BAGS),
    "ParzenClassifier": lambda **s: kme.ParzenClassifier(**s).fit(X, Y),
    "SupportMeasureClassifier": lambda **s: kme.SupportMeasureClassifier(**s).fit(BAGS, ["a", "b"] * 5),
}


# --- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FITS)
def test_every_estimator_checks_its_seed_before_it_computes(name):
    for seed in (-1, "seed", 1.5):
        with pytest.raises(ConfigError, match=f"random_state={seed!r}: must be an integer >= 0"):
            FITS[name](random_state=seed)


@pytest.mark.parametrize("name", FITS)
def test_a_generator_gives_the_seed_of_a_fit_and_what_is_saved_repeats_it(name, tmp_path):
    """As in scikit-learn: equal generators give equal models, a second fit draws again, a clone draws for itself."""
    for kind in (np.random.RandomState, np.random.default_rng):
        first, second = FITS[name](random_state=kind(7)), FITS[name](random_state=kind(7))
        assert first.seed_ == second.seed_
    assert FITS[name](random_state=first.random_state).seed_ != first.seed_
    assert not hasattr(clone(first), "seed_")
    first.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert again.random_state == first.seed_
    assert isinstance(FITS[name](random_state=None).seed_, int)


@pytest.mark.parametrize("name", [name for name in FITS if "random_state" in getattr(kme, name)().get_params()])
def test_a_loaded_model_tells_the_seed_of_its_fit(name, tmp_path):
    model = FITS[name](random_state=7)
    model.save(tmp_path / "model.zarr")
    assert model.seed_ == kme.load(tmp_path / "model.zarr").seed_ == 7


def test_all_random_choices_of_a_fit_follow_from_one_seed():
    drawn = kme.CENClassifier(hidden=(3,), steps=2, batch_size=10, random_state=None).fit(X, Y)
    given = kme.CENClassifier(hidden=(3,), steps=2, batch_size=10, random_state=drawn.seed_).fit(X, Y)
    np.testing.assert_array_equal(drawn.predict_proba(X), given.predict_proba(X))


def test_every_rule_is_of_a_setting_and_every_default_keeps_it():
    for name in FITS:
        model = getattr(kme, name)()
        assert set(model._RULES) - set(model.get_params()) <= {"loss"}, name
        model._check_settings()


@pytest.mark.parametrize(
    ("rule", "value", "message"),
    [
        (integer(0), -1, "s=-1: must be an integer >= 0"),
        (integer(1, optional=True), 1.5, r"s=1\.5: must be an integer >= 1, or None"),
        (positive(), float("inf"), "s=inf: must be a positive number"),
        (positive(), "much", "s='much': must be a positive number"),
        (positive(), float("nan"), "s=nan: must be a positive number"),
        (one_of("a", "b", "c"), "d", "s='d' is unknown; choose 'a', 'b' or 'c'"),
        (one_of("a", "b"), np.zeros(2), "is unknown; choose 'a' or 'b'"),
    ],
)
def test_a_rule_says_what_was_seen_and_what_is_needed(rule, value, message):
    with pytest.raises(ConfigError, match=message):
        rule.check("s", value)


def test_none_is_a_value_where_it_is_optional():
    integer(1, optional=True).check("s", None)
    with pytest.raises(ConfigError, match="s=None"):
        integer(1).check("s", None)


# --- storing ----------------------------------------------------------------------------------------


def test_load_knows_every_estimator():
    assert set(base._MODULES) == set(FITS)


@pytest.mark.parametrize("name", FITS)
def test_all_models_are_stored_with_class_version_settings_and_columns(name, tmp_path):
    model = FITS[name](random_state=3)
    model.save(tmp_path / "model.zarr")
    _, found = load_arrays(tmp_path / "model.zarr")
    assert (found["model"], found["model_format"], found["fitted_to_dataset"]) == (name, base.FORMAT, False)
    assert found["n_features_in"] == 2
    again = kme.load(tmp_path / "model.zarr")
    assert type(again) is type(model)
    learned = {"kernel", "target_kernel", "observation_kernel", "regularization", "transition_regularization"}
    learned |= {"solver", "width"}  # come back as they were learned
    kept = {setting: value for setting, value in model.get_params().items() if setting not in learned}
    assert {setting: again.get_params()[setting] for setting in kept} == kept


@pytest.mark.parametrize("name", FITS)
def test_a_loaded_model_can_be_fitted_again(name, tmp_path):
    settings = {"length_scales": [0.5, 1.0]} if name == "ParzenClassifier" else {}
    model = FITS[name](**settings)
    model.save(tmp_path / "model.zarr")
    rows, y = (BAGS, ["a", "b"] * 5) if "SupportMeasure" in name else (X, Y)
    if name in ("ASKLRegressor", "CMERegressor", "ConditionalMeanEmbedding"):
        y = X[:, 0]
    if name == "KernelBayesFilter":
        y = X
    again = clone(kme.load(tmp_path / "model.zarr")).fit(rows, y)
    question = {"KernelMean": "evaluate", "MixtureMatching": "score_samples"}.get(name, "predict")
    np.testing.assert_array_equal(getattr(again, question)(rows), getattr(model, question)(rows))


class Renamed(kme.CENClassifier):
    pass


def test_a_subclass_is_stored_as_the_class_that_load_knows(tmp_path):
    model = Renamed(hidden=(3,), steps=2).fit(X, Y)
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert type(again) is kme.CENClassifier
    assert again.predict_proba(X).tobytes() == model.predict_proba(X).tobytes()


def test_settings_that_json_cannot_hold_are_left_out_not_refused(tmp_path):
    target = kme.KernelMean("kme", Gaussian(1.0)).fit(X[:5])
    model = kme.KernelMean("b-kmse", Gaussian(1.0), target=target).fit(X)
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert again.target is None
    assert again.evaluate(X).tobytes() == model.evaluate(X).tobytes()


@pytest.mark.parametrize("name", ANSWERS["models"])
def test_models_of_earlier_versions_answer_as_they_did(name, tmp_path):
    """Stored by the version of November 2026, before estimators had one base."""
    with zipfile.ZipFile(GOLDEN / "format-1.zip") as stored:
        stored.extractall(tmp_path, [file for file in stored.namelist() if file.startswith(f"{name}.zarr/")])
    model, asked = kme.load(tmp_path / f"{name}.zarr"), ANSWERS["models"][name]
    rows = np.array(ANSWERS["rows"])
    frame = pd.DataFrame(rows, columns=["width", "height"])
    question = {"rows": rows, "frame": frame, "bags": [rows[:3], rows[3:]]}[asked["form"]]
    assert type(model).__name__ == asked["class"]
    assert model.n_features_in_ == 2
    assert hasattr(model, "feature_names_in_") == (asked["form"] == "frame")
    np.testing.assert_allclose(getattr(model, asked["ask"])(question), asked["answer"], rtol=1e-9, atol=1e-12)


# --- questions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MCEClassifier", "CENClassifier", "ASKLClassifier", "ParzenClassifier"])
def test_classifiers_answer_alike(name):
    model = FITS[name]()
    p, worth = model.predict_proba(X), {"low": 1.0, "mid": 0.0, "high": -1.0}
    np.testing.assert_array_equal(model.predict(X), model.classes_[p.argmax(axis=1)])
    np.testing.assert_array_equal(model.predict_log_proba(X), np.log(p))
    np.testing.assert_allclose(model.entropy(X), -np.sum(p * np.log(p), axis=1), rtol=1e-9)
    expected = p @ [worth[label] for label in model.classes_]
    for g in (worth, worth.get, [worth[label] for label in model.classes_]):
        np.testing.assert_allclose(model.expectation(X, g), expected, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(model.expectation(X, np.eye(3)), p, rtol=1e-12)
    with pytest.raises(DataError, match="no value for label 'high'"):
        model.expectation(X, {"low": 1.0, "mid": 0.0})
    with pytest.raises(DataError, match="one value for each of 3 classes"):
        model.expectation(X, [1.0, 2.0])


def test_there_is_no_expectation_without_probabilities():
    model = kme.ASKLClassifier(features=5, epochs=1, loss="hinge").fit(X, Y)
    questions = ("predict_proba", "predict_log_proba", "entropy", "expectation")
    assert not any(hasattr(model, question) for question in questions)


def test_the_logarithm_of_no_probability_is_minus_infinity_without_a_warning(recwarn):
    model = kme.MCEClassifier(steps=0, regularization=1e-6, probability_floor=0, calibration="none").fit(X, Y)
    p, logs = model.predict_proba(X), model.predict_log_proba(X)
    assert (p == 0).any()
    np.testing.assert_array_equal(np.isneginf(logs), p == 0)
    assert not len(recwarn)


def test_networks_have_the_entropy_of_the_embedding_too():
    model = FITS["CENClassifier"]()
    f = model.decision_probabilities(X)
    np.testing.assert_allclose(
        model.entropy(X, kind="rkhs"), -np.sum(f * np.log(np.where(f > 0, f, 1)), axis=1), atol=1e-12
    )
    with pytest.raises(ConfigError, match="kind='shannon'"):
        model.entropy(X, kind="shannon")


def test_single_precision_has_to_carry_the_probabilities_and_not_the_decisions_alone():
    centres, weights = X.astype(np.float32), RNG.normal(size=(30, 3)).astype(np.float32)
    embedding = mce.Embedding(Gaussian(1.0), centres, weights, 0.1)
    assert mce.sufficient_precision(embedding, probabilities=lambda f: class_probabilities(f, 0.01)) == "float32"
    assert mce.sufficient_precision(embedding, probabilities=lambda f: np.sin(1e7 * f)) == "float64"
