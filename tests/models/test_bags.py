"""Support measure machines: Gram matrices of bags against slow sums, and machines that tell bags apart."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

import kme_dist as kme
from kme_dist.core.means import ESTIMATORS, gram_weights
from kme_dist.errors import ConfigError, DataError

KERNEL = kme.kernels.Gaussian(length_scale=1.0)


@pytest.fixture
def clouds(rng):
    bags = [rng.normal(0.0, 1.0 + (i % 2), size=(rng.integers(8, 20), 2)) for i in range(30)]
    return bags, np.array(["narrow", "wide"])[np.arange(30) % 2]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("level", ["linear", "gaussian"])
def test_the_kernel_of_bags_is_that_of_their_means(estimator, level, clouds):
    bags, y = clouds
    clf = kme.SupportMeasureClassifier(KERNEL, estimator, level, width=0.3).fit(bags[:8], y[:8])
    new = bags[8:11]
    weights = [np.asarray(gram_weights(estimator, KERNEL.gram(bag)).weights) for bag in bags[:11]]

    def inner(i, j):
        return weights[i] @ KERNEL.gram(bags[i], bags[j]) @ weights[j]

    G = np.array([[inner(i, j) for j in range(8)] for i in (8, 9, 10)])
    if level == "gaussian":
        squared = np.array([[inner(i, i) + inner(j, j) - 2 * inner(i, j) for j in range(8)] for i in (8, 9, 10)])
        G = np.exp(-squared / (2 * 0.3**2))
    np.testing.assert_allclose(clf.gram(new), G, rtol=1e-9)


@pytest.mark.parametrize("level", ["linear", "gaussian"])
def test_bags_of_different_spread_are_told_apart(level, clouds):
    bags, y = clouds
    clf = kme.SupportMeasureClassifier(level=level, estimator="r-kmse").fit(bags[:20], y[:20])
    assert clf.score(bags[20:], y[20:]) >= 0.9
    assert clf.decision_function(bags[20:]).shape == (10,)


def test_strange_bags_are_found(rng):
    usual = [rng.normal(size=(25, 2)) for _ in range(30)]
    strange = [rng.normal(3.0, 1.0, size=(25, 2)) for _ in range(5)]
    found = kme.OneClassSupportMeasure(nu=0.1).fit(usual)
    assert (found.predict(strange) == -1).all()
    assert np.mean(found.predict(usual) == 1) > 0.75
    assert found.decision_function(strange).max() < np.median(found.decision_function(usual))


@pytest.mark.parametrize("kind", ["classes", "one class"])
def test_machines_come_back_from_disk_as_they_were(kind, clouds, tmp_path):
    bags, y = clouds
    if kind == "classes":
        model = kme.SupportMeasureClassifier(estimator="b-kmse").fit(bags[:20], y[:20])
    else:
        model = kme.OneClassSupportMeasure(level="linear").fit(bags[:20])
    model.save(tmp_path / "bags.zarr")
    again = kme.load(tmp_path / "bags.zarr")
    np.testing.assert_allclose(again.decision_function(bags[20:]), model.decision_function(bags[20:]), rtol=1e-9)
    np.testing.assert_array_equal(again.predict(bags[20:]), model.predict(bags[20:]))


def test_bags_of_texts(tmp_path):
    bags = [["abab", "abba"], ["baba", "abab", "aabb"], ["xyxy"], ["yxyx", "xxyy"]]
    clf = kme.SupportMeasureClassifier(kme.kernels.Spectrum(p=2), level="linear").fit(bags, [0, 0, 1, 1])
    assert clf.predict([["abab"], ["yyxx", "xyxy"]]).tolist() == [0, 1]


def test_mistakes_are_named(clouds):
    bags, y = clouds
    with pytest.raises(DataError, match=r"bag 1: .*no rows"):
        kme.SupportMeasureClassifier().fit([bags[0], bags[0][:0]], [0, 1])
    with pytest.raises(DataError, match="number of features"):
        kme.SupportMeasureClassifier().fit([bags[0], bags[0][:, :1]], [0, 1])
    with pytest.raises(DataError, match="must be equal"):
        kme.SupportMeasureClassifier().fit(bags, y[:-1])
    with pytest.raises(ConfigError, match="level='cubic'"):
        kme.SupportMeasureClassifier(level="cubic").fit(bags, y)
    with pytest.raises(NotFittedError):
        kme.SupportMeasureClassifier().predict(bags)
