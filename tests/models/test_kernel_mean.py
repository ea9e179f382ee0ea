"""KernelMean and ParzenClassifier: the estimators, their promises, and what is stored of them."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.utils.estimator_checks import check_estimator

import kme_dist as kme
from kme_dist.core.means import ESTIMATORS
from kme_dist.errors import ConfigError, DataError

KERNEL = kme.kernels.Gaussian(length_scale=1.2)


@pytest.fixture
def X(rng):
    return rng.normal(0.5, 1.0, size=(40, 3))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_evaluation_is_the_weighted_sum_of_kernels(estimator, X):
    mean = kme.KernelMean(estimator, KERNEL).fit(X)
    query = X[:6] + 0.1
    naive = [
        sum(w * np.exp(-0.5 * np.sum((x - q) ** 2) / 1.44) for w, x in zip(mean.weights_, X, strict=True))
        for q in query
    ]
    np.testing.assert_allclose(mean.evaluate(query), naive, rtol=1e-10)
    K = KERNEL.gram(X)
    assert mean.norm() ** 2 == pytest.approx(mean.weights_ @ K @ mean.weights_, rel=1e-10)
    np.testing.assert_allclose(mean.expectation(lambda rows: rows[:, :2]), mean.weights_ @ X[:, :2], rtol=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_target_is_shrunk_towards(estimator, X, rng):
    target = kme.KernelMean("kme", KERNEL).fit(rng.normal(0.4, 1.0, size=(200, 3)))
    plain = kme.KernelMean("kme", KERNEL).fit(X)
    shrunk = kme.KernelMean(estimator, KERNEL, target=target).fit(X)
    if estimator == "kme":
        assert shrunk.distance(plain) == pytest.approx(0.0, abs=1e-7)
    else:
        assert shrunk.distance(target) < plain.distance(target)
        expected = shrunk.weights_ @ KERNEL.gram(X, X[:3]) + shrunk.shrinkage_ * target.evaluate(X[:3])
        np.testing.assert_allclose(shrunk.evaluate(X[:3]), expected, rtol=1e-10)


def test_distance_of_means_is_zero_only_for_equal_samples(X, rng):
    a, b = (kme.KernelMean("kme", KERNEL).fit(rows) for rows in (X, X + 1.0))
    K, L, M = KERNEL.gram(X), KERNEL.gram(X + 1.0), KERNEL.gram(X, X + 1.0)
    assert a.distance(b) ** 2 == pytest.approx(K.mean() + L.mean() - 2 * M.mean(), rel=1e-9)
    assert a.distance(a) == pytest.approx(0.0, abs=1e-7)


def test_random_features_come_with_their_error(X):
    exact = kme.KernelMean("r-kmse", KERNEL).fit(X)
    rough = kme.KernelMean("r-kmse", KERNEL, sums="features", features=5000).fit(X)
    assert exact.rho_error_ == 0
    assert abs(rough.rho_ - exact.rho_) < 4 * rough.rho_error_
    assert rough.shrinkage_ == pytest.approx(exact.shrinkage_, rel=0.2)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_mean_comes_back_from_disk_as_it_was(estimator, X, tmp_path):
    target = kme.KernelMean("kme", KERNEL).fit(X[:5])
    mean = kme.KernelMean(estimator, KERNEL, target=target).fit(X)
    mean.save(tmp_path / "mean.zarr")
    back = kme.load(tmp_path / "mean.zarr")
    np.testing.assert_array_equal(back.evaluate(X), mean.evaluate(X))


def test_the_mean_of_a_data_set_keeps_its_address(X, tmp_path):
    np.save(tmp_path / "rows.npy", X)
    data = kme.ingest(tmp_path / "rows.npy", tmp_path / "rows.zarr", dtype="float64")
    mean = kme.KernelMean("b-kmse", KERNEL).fit(data)
    in_memory = kme.KernelMean("b-kmse", KERNEL).fit(X)
    assert mean.shrinkage_ == pytest.approx(in_memory.shrinkage_, rel=1e-12)
    assert mean.distance(in_memory) == pytest.approx(0.0, abs=1e-7)
    mean.save(tmp_path / "mean.zarr")
    np.testing.assert_allclose(kme.load(tmp_path / "mean.zarr").evaluate(X), in_memory.evaluate(X), rtol=1e-12)


def test_spectral_shrinkage_of_a_data_set_keeps_only_its_centres(X, tmp_path):
    np.save(tmp_path / "rows.npy", X)
    data = kme.ingest(tmp_path / "rows.npy", tmp_path / "rows.zarr", dtype="float64")
    exact = kme.KernelMean("s-kmse", KERNEL, regularization=0.05).fit(X)
    few = kme.KernelMean("s-kmse", KERNEL, regularization=0.05, centres=25).fit(data)
    assert len(few.weights_) == 25
    assert exact.distance(few) <= few.error_bound_
    assert exact.distance(few) < 0.1 * exact.norm()
    assert (exact.error_bound_, exact.unexplained_) == (0.0, 0.0)
    assert 0 < few.unexplained_ < 0.2
    few.save(tmp_path / "mean.zarr")
    again = kme.load(tmp_path / "mean.zarr")
    np.testing.assert_array_equal(again.evaluate(X), few.evaluate(X))
    assert again.error_bound_ == few.error_bound_


def test_many_rows_are_shrunk_by_centres_unless_told_otherwise(X, monkeypatch):
    monkeypatch.setattr("kme_dist.run.means.SPECTRAL_ROWS", 30)
    monkeypatch.setattr("kme_dist.run.means.SPECTRAL_CENTRES", 10)
    assert len(kme.KernelMean("s-kmse", KERNEL).fit(X).weights_) == 10
    with pytest.raises(ConfigError, match="centres=5"):
        kme.KernelMean("r-kmse", KERNEL, centres=5).fit(X)


def test_texts_have_means(tmp_path):
    mean = kme.KernelMean("b-kmse", kme.kernels.Spectrum(p=2)).fit(["abab", "abba", "cdcd"])
    assert mean.evaluate(["abab"])[0] > mean.evaluate(["cdcd"])[0] > mean.evaluate(["zzzz"])[0]
    mean.save(tmp_path / "mean.zarr")
    assert kme.load(tmp_path / "mean.zarr").evaluate(["abab"]) == mean.evaluate(["abab"])


def test_mistakes_of_means_are_named(X):
    with pytest.raises(ConfigError, match="estimator='mean'"):
        kme.KernelMean("mean").fit(X)
    with pytest.raises(ConfigError, match="different kernels"):
        kme.KernelMean("kme", KERNEL).fit(X).distance(kme.KernelMean("kme", kme.kernels.Linear()).fit(X))
    with pytest.raises(ConfigError, match="sums='all'"):
        kme.KernelMean(sums="all").fit(X)
    with pytest.raises(DataError, match="one value for each"):
        kme.KernelMean().fit(X).expectation(lambda rows: 1.0)


# --- Parzen windows ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize("estimator", ["kme", pytest.param("s-kmse", marks=pytest.mark.slow)])
def test_parzen_is_a_scikit_learn_classifier(estimator):
    check_estimator(kme.ParzenClassifier(estimator))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_parzen_prefers_the_nearest_mean_by_majority_of_pairs(estimator):
    X, y = load_iris(return_X_y=True)
    clf = kme.ParzenClassifier(estimator, KERNEL).fit(X[::2], y[::2])
    rows = (X - X[::2].mean(axis=0)) / X[::2].std(axis=0)
    means = [kme.KernelMean(estimator, KERNEL).fit(rows[::2][y[::2] == c]) for c in range(3)]
    distances = [[m.norm() ** 2 - 2 * v for v in m.evaluate(rows[1::2])] for m in means]
    np.testing.assert_array_equal(clf.predict(X[1::2]), np.argmin(distances, axis=0))
    scores = clf.class_scores(X[1::2])
    votes = (scores[:, :, None] > scores[:, None, :]).sum(axis=2)
    np.testing.assert_array_equal(clf.predict(X[1::2]), votes.argmax(axis=1))


def test_probabilities_couple_the_pairwise_ones():
    X, y = load_iris(return_X_y=True)
    clf = kme.ParzenClassifier("r-kmse").fit(X, y)
    P, f = clf.predict_proba(X), clf.class_scores(X)
    np.testing.assert_allclose(P.sum(axis=1), 1.0)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        pairwise = 1 / (1 + np.exp(-clf.slope_ * (f[:, a] - f[:, b])))
        np.testing.assert_allclose(P[:, a] / (P[:, a] + P[:, b]), pairwise, rtol=1e-6, atol=1e-12)
    np.testing.assert_array_equal(P.argmax(axis=1), np.searchsorted(clf.classes_, clf.predict(X)))


def test_the_length_scale_is_chosen_inside_the_training_rows():
    X, y = load_iris(return_X_y=True)
    clf = kme.ParzenClassifier(length_scales=[0.01, 0.6, 50.0]).fit(X, y)
    assert float(clf.kernel_.length_scale) == 0.6
    assert clf.cv_errors_.argmin() == 1
    with pytest.raises(ConfigError, match="given by name"):
        kme.ParzenClassifier(kernel=KERNEL, length_scales=[1.0]).fit(X, y)


def test_parzen_comes_back_from_disk_as_it_was(tmp_path):
    X, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    clf = kme.ParzenClassifier("b-kmse").fit(X, names)
    clf.save(tmp_path / "parzen.zarr")
    back = kme.load(tmp_path / "parzen.zarr")
    np.testing.assert_array_equal(back.predict_proba(X), clf.predict_proba(X))
    np.testing.assert_array_equal(back.predict(X), clf.predict(X))


def test_a_mean_is_compared_with_means_only():
    X = np.random.default_rng(0).normal(size=(20, 2))
    mean = kme.KernelMean().fit(X)
    for ask in (mean.distance, mean.inner):
        with pytest.raises(DataError, match=r"must be a fitted KernelMean, got a ndarray; .*kernel=mean\.kernel_"):
            ask(X)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("value", "dtype"), [(1e160, "float64"), (1e300, "float64"), (1e30, "float32")])
def test_rows_whose_squares_overflow_are_refused_by_the_name_of_their_column(X, estimator, value, dtype):
    mean = kme.KernelMean(estimator, dtype=dtype)
    for wrong in (np.r_[[[0.0, value, 0.0]], X], np.full_like(X, value)):
        with pytest.raises(DataError, match=rf"column 'x\d' has values up to .*, whose squares exceed {dtype}"):
            mean.fit(wrong)
    with pytest.raises(DataError, match=r"row 1 has a value that is .*, whose square overflows"):
        mean.fit(X).evaluate(np.r_[X[:1], [[0.0, value, 0.0]]])


@pytest.mark.parametrize("value", [1e160, 1e300])
def test_models_built_on_kernel_means_refuse_such_rows_as_well(X, value):
    wrong, y = np.r_[[[0.0, value, 0.0]], X], np.arange(len(X) + 1) % 2
    bags = np.split(np.r_[wrong, X[:3]], 11)
    for fit in (
        lambda: kme.MixtureMatching(2).fit(wrong),
        lambda: kme.ParzenClassifier(scaling=None).fit(wrong, y),
        lambda: kme.SupportMeasureClassifier().fit(bags, np.arange(11) % 2),
        lambda: kme.ConditionalMeanEmbedding(scaling=None).fit(wrong, y),
    ):
        with pytest.raises(DataError, match=r"column '.*' has values up to .*, whose squares exceed float64"):
            fit()
    with pytest.raises(DataError, match="row 0 has a value"):
        kme.MixtureMatching(2).fit(X).score_samples(wrong)
    good = np.split(X, 10)
    machine = kme.SupportMeasureClassifier().fit(good, np.arange(10) % 2)
    with pytest.raises(DataError, match="bag 0: row 0 has a value"):
        machine.predict(bags)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_kernel_that_overflows_on_finite_rows_gives_an_error_in_place_of_nan(X):
    mean = kme.KernelMean("kme", kme.kernels.Polynomial(degree=3)).fit(X * 1e120)
    with pytest.raises(DataError, match="the inner product of the means is not finite: Polynomial"):
        mean.norm()
