"""MCEClassifier(features="spectral"): an embedding on learned features, alone, on workers, stored, chunk by chunk."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from sklearn.datasets import load_digits

import kme_dist as kme
from kme_dist.core.embedding import FeatureEmbedding
from kme_dist.errors import ConfigError
from kme_dist.run import train
from kme_dist.run.fit import Size, choose
from kme_dist.run.spectral import SpectralSettings
from kme_dist.run.train import Recipe

DIGITS = load_digits(return_X_y=True)
CHOICE = sys.modules["kme_dist.run.fit.choose"]  # the package has a function of this name


def table(n, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 4))
    return X, np.array(["no", "yes"])[(X[:, 0] * X[:, 1] > 0).astype(int)]


@pytest.fixture(scope="module")
def fitted():
    X, y = DIGITS
    return kme.MCEClassifier(features="spectral").fit(X[:1200], y[:1200])


def test_probabilities_are_calibrated_on_rows_that_were_not_learned_from(fitted):
    X, y = (part[1200:] for part in DIGITS)
    P = fitted.predict_proba(X)
    assert np.mean(fitted.predict(X) == y) > 0.9
    assert -np.mean(np.log(P[np.arange(len(y)), y])) < 0.5
    assert (fitted.solver_, fitted.objective_) == ("features", "spectral")
    assert isinstance(fitted.embedding_, FeatureEmbedding)
    assert fitted.embedding_.weights.shape == (2 * 10, 10), "the class probabilities of two networks"
    assert fitted.loo_log_loss_["spectral"] > 0
    assert fitted.n_iter_ == SpectralSettings.of(1200).learning(1200 - 48).steps


def test_what_an_embedding_gives_is_there(fitted):
    X, _ = (part[1200:1300] for part in DIGITS)
    P = fitted.predict_proba(X)
    np.testing.assert_allclose(fitted.expectation(X, lambda digit: digit), P @ np.arange(10.0), rtol=1e-6)
    assert fitted.feature_importances_.shape == (64,)
    assert fitted.bound_ > 0
    assert np.all(fitted.entropy(X) >= 0)


def test_it_comes_back_to_the_bit_and_predicts_in_chunks(fitted, tmp_path):
    X, _ = (part[1200:] for part in DIGITS)
    fitted.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert again.predict_proba(X).tobytes() == fitted.predict_proba(X).tobytes()
    kme.predict(again, X, tmp_path / "p.zarr")
    stored = kme.open_predictions(tmp_path / "p.zarr")
    np.testing.assert_allclose(stored.read("probability"), fitted.predict_proba(X), rtol=1e-4, atol=1e-6)


def test_workers_learn_and_fit_the_same_bits():
    X, y = table(700)
    alone, helped = (kme.MCEClassifier(features="spectral", n_jobs=jobs).fit(X, y) for jobs in (None, 2))
    assert helped.predict_proba(X).tobytes() == alone.predict_proba(X).tobytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"solver": "nystrom"}, "remove `solver` and `centres`"),
        ({"centres": 10}, "remove `solver` and `centres`"),
        ({"kernel": "matern"}, "replaces the kernel"),
    ],
)
def test_what_excludes_each_other(settings, message):
    with pytest.raises(ConfigError, match=message):
        kme.MCEClassifier(features="spectral", **settings).fit(*table(50))


class TestAuto:
    def recipe(self, **changes):
        return Recipe(kme.kernels.Gaussian(length_scale=np.ones(4)), **{"profiles": True, **changes})

    def test_features_are_compared_where_rows_are_many_and_a_solve_would_not_be_exact(self):
        assert choose("auto", Size(train._FEATURE_ROWS)).centres is not None
        assert not self.recipe().compares_features(train._FEATURE_ROWS - 1)
        assert self.recipe().compares_features(train._FEATURE_ROWS)
        assert not self.recipe(fit_seconds=1e9).compares_features(train._FEATURE_ROWS), "an exact solve is affordable"
        for given in ({"centres": 100}, {"features": 50}, {"objective": "rcb"}, {"warm": True}, {"profiles": False}):
            assert not self.recipe(**given).compares_features(10**6)

    def test_the_lower_loss_on_the_same_held_out_rows_is_kept(self, monkeypatch, capsys):
        monkeypatch.setattr(Recipe, "compares_features", lambda recipe, rows: True)
        monkeypatch.setattr(CHOICE, "WORK", 1e7)
        monkeypatch.setattr(CHOICE, "CENTRES", 20)
        X, y = table(3_000)
        model = kme.MCEClassifier(verbose=1).fit(X, y)
        losses = model.loo_log_loss_
        assert len(losses) == 2
        assert "spectral" in losses
        assert losses[model.objective_] == min(losses.values())
        shown = capsys.readouterr().err
        assert f"kept {model.objective_}" in shown
        assert "not fitted" in shown
        assert model.objective_ == "spectral"

    def test_a_few_centres_tell_what_eight_times_as_many_reach(self):
        def reached(now, before):
            return train._reached(SimpleNamespace(facts={"loss": now, "loss_of_half_the_centres": before}), 0.4)

        assert reached(0.5, 0.5) == reached(0.6, 0.5) == pytest.approx(0.9 * 0.4), "more centres bring nothing"
        assert reached(0.4, 0.5) == pytest.approx(0.9 * 0.4 * 0.8**3)
        assert reached(0.4, 0.0) == 0.0, "unknown: fit them"

    def test_centres_are_kept_if_features_are_worse(self, monkeypatch, capsys):
        monkeypatch.setattr(Recipe, "compares_features", lambda recipe, rows: True)
        monkeypatch.setattr(CHOICE, "WORK", 1e7)
        real = train.learn_spectral

        def unlearned(dataset, settings, **more):
            return real(dataset, dataclasses.replace(settings, learning_rate=1e-12), **more)

        monkeypatch.setattr(train, "learn_spectral", unlearned)
        X, y = table(1_500)
        model = kme.MCEClassifier(verbose=1).fit(X, y)
        assert model.solver_ == "nystrom"
        assert "log loss of rows that no feature was learned from: spectral" in capsys.readouterr().err
        assert model.loo_log_loss_["spectral"] > model.loo_log_loss_[model.objective_]
        assert len(model.history_) > 100, "the records of both are kept"
