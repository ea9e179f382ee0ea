"""Table 1 of Hsu, Nock and Ramos: accuracy of the Gaussian MCE on UCI data, mean and deviation over ten folds.

The published protocol: features scaled to [0, 1] by the range of the whole set, one permutation of the rows from
NumPy's seed 0, ten contiguous folds; length scales, scale and λ start at 1 and are learned as logarithms with Adam at
rate 0.1, in single precision, summed losses, last iterate, λ kept. The full gradient takes 1000 steps on all rows, the
stochastic one 10 000 steps on batches of a tenth.

Stochastic figures depend on the order of the batches, to two rows of wine. With the published order (one legacy random
state through permutation, folds and epochs; a batch that runs over the end of an epoch wraps around in its permutation)
they come out as printed; with the estimator's own batches they come close.
"""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.model_selection import KFold

from kme_dist import MCEClassifier, backend, kernels
from kme_dist.core.embedding import Embedding, exact_solution
from kme_dist.data.plan import BatchRef
from kme_dist.run.learn import learn_in_memory as learn
from kme_dist.run.learners import LearnSettings

pytestmark = [pytest.mark.paper, pytest.mark.shared_data, pytest.mark.timeout(4 * 3600)]


def unit_range(X):
    width = np.ptp(X, axis=0)
    return (X - X.min(axis=0)) / np.where(width > 0, width, 1)  # a constant feature becomes 0


def ten_folds(X, y, *, stochastic=False):
    order = np.random.RandomState(0).permutation(len(X))
    X, y = unit_range(X)[order], y[order]
    scores = []
    with backend.blas_threads(1):
        for train, test in KFold(10).split(X):
            clf = MCEClassifier(
                objective="rcb",
                refit_regularization=False,
                scaling=None,
                steps=10_000 if stochastic else 1000,
                batch_size=len(train) // 10 if stochastic else len(train),
            )
            scores.append(100 * clf.fit(X[train], y[train]).score(X[test], y[test]))
    return np.mean(scores), np.std(scores)


class PublishedBatches:
    """The rows of step t as the published experiments drew them."""

    def __init__(self, rows, size, state):
        self.rows, self.rows_per_batch, self.state = rows, size, state
        self.epoch, self.order = 0, state.permutation(rows)

    def batch(self, step):
        size = self.rows_per_batch
        if step * size // self.rows > self.epoch:
            self.epoch += 1
            self.order = self.state.permutation(self.rows)
        return BatchRef(step, (), self.order[np.arange(step * size, (step + 1) * size) % self.rows])


def ten_folds_in_published_order(X, y):
    state = np.random.RandomState(0)
    order = state.permutation(len(X))
    X, codes = unit_range(X)[order].astype(np.float32), np.unique(y, return_inverse=True)[1][order]
    classes = codes.max() + 1
    start = kernels.Gaussian(length_scale=np.ones(X.shape[1]))
    scores = []
    with backend.blas_threads(1):
        for train, test in KFold(10).split(X):
            size = len(train) // 10
            settings = LearnSettings(objective="rcb", steps=10_000, batch_size=size)
            batches = PublishedBatches(len(train), size, state)
            learned = learn(start, 1.0, X[train], codes[train], classes, settings, plan=batches)
            lam = learned.regularization
            weights = exact_solution(learned.kernel, X[train], codes[train], classes, lam).weights
            fitted = Embedding(learned.kernel, X[train], weights, lam)
            scores.append(100 * np.mean(fitted.decision(X[test]).argmax(axis=1) == codes[test]))
    return np.mean(scores), np.std(scores)


@pytest.mark.parametrize(("name", "mean", "deviation"), [("wine", 97.2, 3.7), ("ecoli", 87.5, 4.4)])
def test_full_gradient_gives_the_published_figure(name, mean, deviation, shared_data):
    found = ten_folds(*shared_data(name), stochastic=False)
    assert found == (pytest.approx(mean, abs=0.051), pytest.approx(deviation, abs=0.051))


@pytest.mark.parametrize(("name", "mean", "deviation"), [("wine", 93.3, 6.0), ("ecoli", 84.5, 5.0)])
def test_stochastic_gradient_gives_the_published_figure(name, mean, deviation, shared_data):
    found = ten_folds_in_published_order(*shared_data(name))
    assert found == (pytest.approx(mean, abs=0.051), pytest.approx(deviation, abs=0.051))


@pytest.mark.parametrize(("name", "mean"), [("banknote", 98.8), ("segment", 96.1)])
def test_stochastic_gradient_comes_within_half_a_point(name, mean, shared_data):
    found, _ = ten_folds_in_published_order(*shared_data(name))
    assert found == pytest.approx(mean, abs=0.5)


@pytest.mark.parametrize(("name", "mean", "deviation"), [("wine", 93.3, 6.0), ("ecoli", 84.5, 5.0)])
def test_the_estimators_own_batches_stay_within_half_a_deviation(name, mean, deviation, shared_data):
    found, _ = ten_folds(*shared_data(name), stochastic=True)
    assert abs(found - mean) < deviation / 2


# --- other ways to choose the parameters -----------------------------------------------------------------
# Their rows come from ten contiguous folds in the order of the files, which are sorted by class: a fold may have a
# single one, hence deviations of up to 48 points. In MED every feature has the median distance between its values as
# length scale, and λ stays at 1.


def folds_of_the_file(X, y, predict):
    scores = [100 * np.mean(predict(X[train], y[train], X[test]) == y[test]) for train, test in KFold(10).split(X)]
    return np.mean(scores), np.std(scores)


def median_distances(X):
    above = np.triu_indices(len(X), 1)
    return np.array([np.median(np.abs(column[:, None] - column)[above]) for column in X.T])


def by_medians(X, y, queries):
    kernel = kernels.Gaussian(length_scale=median_distances(X))
    given = {"steps": 0, "scaling": None, "refit_regularization": False, "calibration": "none"}
    return MCEClassifier(kernel, "rcb", regularization=1.0, dtype="float64", **given).fit(X, y).predict(queries)


@pytest.mark.parametrize(("name", "mean", "deviation"), [("wine", 93.3, 7.8), ("banknote", 92.0, 4.3)])
def test_median_distances_give_the_published_figure(name, mean, deviation, shared_data):
    X, y = shared_data(name)
    found = folds_of_the_file(unit_range(X), y, by_medians)
    assert found == (pytest.approx(mean, abs=0.051), pytest.approx(deviation, abs=0.051))


def test_a_median_of_zero_gives_the_first_class_and_the_published_figure(shared_data):
    """Two features of ecoli have one value in nearly all rows. Divided by zero, no decision is a number."""
    X, y = shared_data("ecoli")
    X, codes = unit_range(X), np.unique(y, return_inverse=True)[1]
    assert all((median_distances(X[train]) == 0).any() for train, _ in KFold(10).split(X))
    found = folds_of_the_file(X, codes, lambda X, y, queries: 0)
    assert found == (pytest.approx(42.1, abs=0.051), pytest.approx(47.7, abs=0.051))


# The grid of CV is not printed; why ERM differs by a few rows was not found. On the same folds near, not to the digit
# (ERM 92.8 ± 6.6, 76.6 ± 18.5; CV 95.0 ± 5.8, 78.1 ± 20.7).
OTHERS = [
    ("wine", "erm", 93.9, 5.2),
    ("wine", "cv", 93.3, 7.4),
    ("ecoli", "erm", 72.1, 20.5),
    ("ecoli", "cv", 73.8, 23.8),
]


@pytest.mark.parametrize(("name", "objective", "mean", "deviation"), OTHERS)
def test_other_objectives_stay_within_a_third_of_the_published_deviation(name, objective, mean, deviation, shared_data):
    X, y = shared_data(name)

    def learned(X, y, queries):
        settings = {"refit_regularization": False, "scaling": None, "steps": 1000, "batch_size": len(X)}
        return MCEClassifier(objective=objective, **settings).fit(X, y).predict(queries)

    with backend.blas_threads(1):
        found, spread = folds_of_the_file(unit_range(X), y, learned)
    print(f"{name} {objective}: {found:.1f} ± {spread:.1f}, published {mean} ± {deviation}")
    assert abs(found - mean) < deviation / 3
    assert abs(spread - deviation) < deviation / 3
