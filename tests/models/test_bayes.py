"""Kernel Bayes: rules on weights against matrices and against the closed form of Gaussians; a filter on a circle."""

from __future__ import annotations

import numpy as np
import pytest

import kme_dist as kme
from kme_dist.core.bayes import TargetFeatures, posterior_weights
from kme_dist.core.means import Mean
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.bayes import JointMean, KernelBayesFilter, bayes_rule, chain_rule, sum_rule


@pytest.fixture(scope="module")
def gaussian():
    """x ~ N(0, 4), y = x + N(0, 1); a prior N(1, 1), so that y ~ N(1, 2) and x | y ~ N((1 + y)/2, 1/2)."""
    rng = np.random.default_rng(0)
    x = rng.normal(0, 2, size=(500, 1))
    y = x[:, 0] + rng.normal(size=500)
    model = kme.ConditionalMeanEmbedding(solver="cholesky").fit(x, y)
    return model, rng.normal(1, 1, size=(400, 1)), x, y


def test_the_sum_rule_averages_the_conditional_embeddings(gaussian):
    model, prior, _, y = gaussian
    found = sum_rule(model, prior, normalise=False)
    at = np.linspace(-3, 5, 7)[:, None]
    np.testing.assert_allclose(found.evaluate(at), model.evaluate(prior, at).mean(axis=0), rtol=1e-8)
    law = sum_rule(model, prior)
    assert law.weights.sum() == pytest.approx(1.0)
    assert law.expectation(lambda y: y[:, 0]) == pytest.approx(1.0, abs=0.15)
    assert law.expectation(lambda y: y[:, 0] ** 2) == pytest.approx(3.0, abs=0.5)
    assert law.expectation(lambda y: y[:, 0]) != pytest.approx(y.mean(), abs=0.3)


def test_priors_are_rows_means_or_fitted_kernel_means(gaussian):
    model, prior, _, _ = gaussian
    expected = sum_rule(model, prior).weights
    fitted = kme.KernelMean("kme", kme.kernels.Gaussian()).fit(prior)
    np.testing.assert_allclose(sum_rule(model, fitted).weights, expected, rtol=1e-9)
    np.testing.assert_allclose(sum_rule(model, fitted.mean_).weights, expected, rtol=1e-9)
    doubled = Mean(kme.kernels.Gaussian(), prior, np.where(prior[:, 0] > 1, 2.0, 0.0))
    assert sum_rule(model, doubled).expectation(lambda y: y[:, 0]) > 1.4


def test_the_chain_rule_has_the_marginals_of_prior_and_sum_rule(gaussian):
    model, prior, _, _ = gaussian
    joint = chain_rule(model, prior)
    assert isinstance(joint, JointMean)
    np.testing.assert_array_equal(joint.second.weights, sum_rule(model, prior).weights)
    assert joint.first.expectation(lambda x: x[:, 0]) == pytest.approx(1.0, abs=0.15)
    covariance = joint.expectation(lambda x, y: (x[:, 0] - 1) * (y[:, 0] - 1))
    assert covariance == pytest.approx(1.0, abs=0.35)  # that of x, since y = x + noise
    X, Y = np.array([[0.5], [2.0]]), np.array([[0.0], [2.5]])
    gram = model.kernel_.gram(model.embedding_.centres, (X - model.scaling_.shift) * model.scaling_.factor)
    expected = joint.weights @ (gram * model.target_kernel_.gram(model.embedding_.targets, Y))
    np.testing.assert_allclose(joint.evaluate(X, Y), expected, rtol=1e-7)


def test_posterior_weights_are_those_of_the_published_formula(rng):
    n, kernel = 12, kme.kernels.Gaussian(0.8)
    Y, w, y = rng.normal(size=(n, 1)), rng.normal(size=n), rng.normal(size=(2, 1))
    L, Lam = kernel.gram(Y), np.diag(w)
    R = Lam @ L @ np.linalg.inv(Lam @ L @ Lam @ L + 1e-3 * np.eye(n)) @ Lam
    features = TargetFeatures.on(kernel, Y)
    found = posterior_weights(w, features.rows(Y), features.rows(y), 1e-3)
    np.testing.assert_allclose(found, R @ kernel.gram(Y, y), atol=1e-4)  # M is nearly singular


def test_bayes_rule_gives_the_posterior_of_gaussians(gaussian):
    model, prior, _, _ = gaussian
    observed = np.array([-1.0, 0.0, 1.0, 2.0, 3.0])
    found = [bayes_rule(model, prior, y) for y in observed]
    means = np.array([law.expectation(lambda x: x[:, 0]) for law in found])
    np.testing.assert_allclose(means, (1 + observed) / 2, atol=0.3)
    spread = [law.expectation(lambda x, m=m: (x[:, 0] - m) ** 2) for law, m in zip(found, means, strict=True)]
    assert np.mean(spread) == pytest.approx(0.5, abs=0.2)
    memoryless = kme.ConditionalMeanEmbedding().fit(gaussian[3][:, None], gaussian[2][:, 0]).predict(observed[:, None])
    truth = (1 + observed) / 2
    assert np.mean((means - truth) ** 2) < 0.25 * np.mean((memoryless - truth) ** 2)  # which knows no prior
    few = bayes_rule(model, prior, 2.0, centres=40)
    assert few.expectation(lambda x: x[:, 0]) == pytest.approx(means[3], abs=0.05)


def test_mistakes_are_named(gaussian):
    model, prior, x, y = gaussian
    with pytest.raises(DataError, match="far from all inputs"):
        sum_rule(model, np.full((3, 1), 1e3))
    with pytest.raises(DataError, match="no posterior"):
        bayes_rule(model, prior, 1e3)
    with pytest.raises(ConfigError, match="regularization=0"):
        bayes_rule(model, prior, 1.0, regularization=0)
    few = kme.ConditionalMeanEmbedding(solver="nystrom", centres=20, target_centres=15).fit(x, y)
    assert sum_rule(few, prior).expectation(lambda y: y[:, 0]) == pytest.approx(1.0, abs=0.3)
    with pytest.raises(ConfigError, match="keeps centres"):
        chain_rule(few, prior)
    assert kme.bayes.sum_rule is sum_rule


# --- the filter ---------------------------------------------------------------------------------------------


def rotation(rng, steps, noise=0.4):
    """A noisy rotation on the circle, seen through noise."""
    angle = np.cumsum(0.4 + 0.2 * rng.normal(size=steps))
    states = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return states, states + noise * rng.normal(size=states.shape)


@pytest.fixture(scope="module")
def circle():
    rng = np.random.default_rng(1)
    return rotation(rng, 250), rotation(rng, 150)


@pytest.fixture(scope="module")
def fitted(circle):
    return KernelBayesFilter(centres=60).fit(*circle[0])


def test_the_filter_beats_observations_and_what_has_no_memory(circle, fitted):
    (states, seen), (truth, new) = circle
    error = np.mean((fitted.filter(new) - truth) ** 2)
    memoryless = kme.ConditionalMeanEmbedding().fit(seen, states).predict(new)
    last = np.mean((truth[1:] - truth[:-1]) ** 2)
    assert error < 0.5 * np.mean((new - truth) ** 2)
    assert error < 0.8 * np.mean((memoryless - truth) ** 2)
    assert error < last
    assert min(score[3] for score in fitted.scores_) < max(score[3] for score in fitted.scores_)


def test_beliefs_are_weights_of_the_training_states(circle, fitted):
    means, weights = fitted.filter(circle[1][1][:20], return_weights=True)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-9)
    np.testing.assert_allclose(weights @ circle[0][0], means)
    np.testing.assert_allclose(fitted.filter(circle[1][1][:7]), means[:7], rtol=1e-9)  # later ones change nothing


def test_a_step_is_sum_rule_then_bayes_rule(circle):
    """The first two steps, from the rules on models of transitions and of observations."""
    states, seen = circle[0][0][:80], circle[0][1][:80]
    k, l = kme.kernels.Gaussian(0.7), kme.kernels.Gaussian(0.9)
    lam, delta = 1e-3, 1e-3
    one = KernelBayesFilter(k, l, lam, delta, scaling=None, centres=80).fit(states, seen)
    onward = kme.ConditionalMeanEmbedding(k, k, lam, solver="cholesky", scaling=None).fit(states[:-1], states[1:])
    likelihood = kme.ConditionalMeanEmbedding(k, l, lam, solver="cholesky", scaling=None).fit(states, seen)
    w = np.full(80, 1 / 80)
    features = TargetFeatures.on(l, seen)
    v = posterior_weights(w, features.rows(seen), features.rows(seen[:1]), delta)[:, 0]
    belief = Mean(k, states, v / v.sum())
    np.testing.assert_allclose(one.filter(seen[:1])[0], belief.expectation(lambda s: s), atol=1e-6)
    belief = bayes_rule(likelihood, sum_rule(onward, belief), seen[1], regularization=delta, centres=80)
    np.testing.assert_allclose(one.filter(seen[:2])[1], belief.expectation(lambda s: s), atol=1e-5)


def test_an_impossible_observation_is_ignored(circle, fitted):
    new = circle[1][1][:10].copy()
    new[5] = 1e4
    means = fitted.filter(new)
    assert np.isfinite(means).all()
    assert np.linalg.norm(means[5] - circle[1][0][5]) < 1.0  # the prediction


def test_a_stored_filter_predicts_the_same(circle, fitted, tmp_path):
    fitted.save(tmp_path / "filter.zarr")
    again = kme.load(tmp_path / "filter.zarr")
    np.testing.assert_array_equal(again.predict(circle[1][1]), fitted.predict(circle[1][1]))


def test_sequences_are_checked():
    one = KernelBayesFilter()
    with pytest.raises(DataError, match="9 states but 8 observations"):
        one.fit(np.zeros((9, 1)), np.zeros((8, 1)))
    with pytest.raises(DataError, match="at least 8 steps"):
        one.fit(np.zeros((5, 1)), np.zeros((5, 1)))
    with pytest.raises(ConfigError, match="centres=0"):
        KernelBayesFilter(centres=0).fit(np.zeros((9, 1)), np.zeros((9, 1)))


def test_models_and_observations_of_another_kind_are_told_what_to_pass():
    x = np.random.default_rng(0).normal(size=(30, 1))
    regressor = kme.CMERegressor(steps=0).fit(x, x[:, 0])
    for call in (
        lambda: sum_rule(regressor, x),
        lambda: chain_rule(regressor, x),
        lambda: bayes_rule(regressor, x, np.zeros(1)),
    ):
        with pytest.raises(ConfigError, match="must be a fitted ConditionalMeanEmbedding, got a CMERegressor; fit one"):
            call()
    model = kme.ConditionalMeanEmbedding(solver="cholesky").fit(x, x[:, 0])
    with pytest.raises(DataError, match=r"^the observation: NaN or infinity; pass finite numbers"):
        bayes_rule(model, x, np.array([np.nan]))
    with pytest.raises(DataError, match=r"^targets: row 3 has NaN or infinity"):
        kme.ConditionalMeanEmbedding().fit(x, np.where(np.arange(30) == 3, np.nan, x[:, 0]))
