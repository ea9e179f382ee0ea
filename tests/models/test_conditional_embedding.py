"""ConditionalMeanEmbedding: any target, every solver, sparse forms, and what is stored."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.datasets import load_iris

import kme_dist as kme
from kme_dist.core.conditional import Delta
from kme_dist.core.features import random_fourier
from kme_dist.errors import ConfigError, DataError
from kme_dist.models.cme import SparseEmbedding
from kme_dist.run.conditional import Inverse

KERNEL = kme.kernels.Gaussian(length_scale=[0.8, 1.2])


@pytest.fixture
def pairs(rng):
    X = rng.uniform(-2, 2, size=(120, 2))
    return X, np.sin(X[:, 0]) * X[:, 1] + 0.1 * rng.normal(size=120)


@pytest.fixture(scope="module")
def iris():
    X, y = load_iris(return_X_y=True)
    return X, np.array(["setosa", "versicolor", "virginica"])[y]


SOLVERS = ["cholesky", "tiled", "pcg", "nystrom", "features"]
EXACT = ["cholesky", "tiled", "pcg"]


@pytest.fixture
def small_tiles(monkeypatch):
    """Several tiles and panels even of a few rows."""
    monkeypatch.setattr("kme_dist.run.fit.tiled._SMALLEST", 32)
    monkeypatch.setattr("kme_dist.run.fit.panels._SMALLEST", 32)


@pytest.mark.parametrize("solver", SOLVERS)
def test_with_labels_as_targets_it_is_the_multiclass_embedding(solver, iris, small_tiles):
    X, y = iris
    X, first = np.unique(X, axis=0, return_index=True)  # equal rows would make a centre superfluous
    y, lam = y[first], 0.01
    kernel = kme.kernels.Laplace(length_scale=np.full(4, 0.4))
    phi = random_fourier(4, 40, seed=3)
    settings = {"nystrom": {"centres": len(X)}, "features": {"features": phi}}.get(solver, {})
    mce = kme.MCEClassifier(kernel=kernel, steps=0, regularization=lam, dtype="float64", scaling="unit")
    mce.set_params(refit_regularization=False).fit(X, y)
    expected = mce.decision_probabilities(X)
    if solver == "features":
        Z, Y = phi.forward(mce.scaling_.apply(X, "float64")), y[:, None] == mce.classes_[None, :]
        expected = Z @ np.linalg.solve(Z.T @ Z + len(X) * lam * np.eye(80), Z.T @ Y)
    cme = kme.ConditionalMeanEmbedding(
        kernel, "delta", lam, scaling="unit", centre_choice="uniform", solver=solver, **settings
    ).fit(X, y)
    assert cme.solver_ == solver
    tolerance = 1e-6 if solver == "pcg" else 1e-8
    np.testing.assert_allclose(cme.evaluate(X, mce.classes_), expected, atol=tolerance)
    g = {"setosa": 1.0, "versicolor": -2.0, "virginica": 0.5}
    found = cme.expectation(X, lambda labels: np.array([g[label] for label in labels]))
    np.testing.assert_allclose(found, expected @ [g[label] for label in mce.classes_], atol=4 * tolerance)


@pytest.mark.parametrize("solver", EXACT)
def test_exact_solvers_answer_every_question_by_the_formula(solver, pairs, small_tiles):
    X, y = pairs
    target = kme.kernels.Gaussian(0.7)
    model = kme.ConditionalMeanEmbedding(KERNEL, target, 0.002, scaling=None, solver=solver).fit(X, y)
    W = np.linalg.inv(KERNEL.gram(X) + len(X) * 0.002 * np.eye(len(X)))
    L, k = target.gram(y[:, None]), KERNEL.gram(X, X[:9])
    tight = {"rtol": 1e-5, "atol": 1e-6} if solver == "pcg" else {"rtol": 1e-8, "atol": 1e-9}
    np.testing.assert_allclose(model.coefficients(X[:9]), (W @ k).T, **tight)
    H = np.stack([y, 3 * y, y**2, 0 * y], axis=1)  # of rank two
    np.testing.assert_allclose(model.expectation(X[:9], H, centred=False), k.T @ W @ H, **tight)
    np.testing.assert_allclose(model.expectation(X[:9], H), H.mean(axis=0) + k.T @ W @ (H - H.mean(axis=0)), **tight)
    np.testing.assert_allclose(model.evaluate(X[:9], y[:4]), k.T @ W @ L[:, :4], **tight)
    a = W @ k
    errors = np.diag(L)[:9] - 2 * np.sum(L[:, :9] * a, axis=0) + np.sum(a * (L @ a), axis=0)
    np.testing.assert_allclose(model.errors(X[:9], y[:9]), errors, **tight)
    D = kme.ConditionalMeanEmbedding(KERNEL, target, 0.002, scaling=None, solver=solver, target_centres=25).fit(X, y)
    assert len(D.embedding_.targets) <= 25
    np.testing.assert_allclose(D.evaluate(X[:9], y[:4]), model.evaluate(X[:9], y[:4]), atol=0.01)


@pytest.mark.parametrize("solver", ["tiled", "pcg"])
def test_what_was_asked_once_is_not_solved_again_not_even_after_loading(solver, pairs, tmp_path, monkeypatch):
    X, y = pairs
    model = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.01, solver=solver).fit(X, y)
    expected = model.predict(X)
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    with monkeypatch.context() as patch:
        patch.setattr(Inverse, "solve", lambda *_: pytest.fail("solved again"))
        np.testing.assert_array_equal(model.predict(X), expected)
        np.testing.assert_array_equal(again.predict(X), expected)
    np.testing.assert_allclose(again.expectation(X, np.cos), model.expectation(X, np.cos), atol=1e-7)


@pytest.mark.parametrize("solver", ["tiled", "pcg"])
def test_what_a_solver_stores_goes_with_the_model(solver, pairs):
    model = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.01, solver=solver).fit(*pairs)
    folder = model.embedding_.weights._stored[1].place.path
    assert any(folder.iterdir())
    del model
    gc.collect()
    assert not folder.exists()


def test_texts_need_a_solver_that_holds_them():
    model = kme.ConditionalMeanEmbedding(kme.kernels.Spectrum(p=2), "delta", 0.01, solver="tiled")
    with pytest.raises(ConfigError, match="requires numeric inputs"):
        model.fit(["abab", "xyxy"], ["left", "right"])


def test_random_features_come_near_the_exact_embedding(pairs, tmp_path):
    X, y = pairs
    kernel = kme.kernels.Gaussian(length_scale=[0.8, 1.2], scale=1.5)
    exact = kme.ConditionalMeanEmbedding(kernel, kme.kernels.Gaussian(0.7), 0.01).fit(X, y)
    for settings in ({}, {"target_centres": 40}):
        near = kme.ConditionalMeanEmbedding(kernel, kme.kernels.Gaussian(0.7), 0.01, features=400, **settings).fit(X, y)
        assert near.solver_ == "features"
        np.testing.assert_allclose(near.predict(X), exact.predict(X), atol=0.1)
        np.testing.assert_allclose(near.errors(X, y), exact.errors(X, y), atol=0.1)
        near.save(tmp_path / "near.zarr")
        np.testing.assert_allclose(kme.load(tmp_path / "near.zarr").predict(X), near.predict(X), rtol=1e-12)
    with pytest.raises(ConfigError, match="keeps none"):
        near.sparsify()
    with pytest.raises(ConfigError, match="no random features"):
        kme.ConditionalMeanEmbedding(kme.kernels.Linear(), regularization=0.1, solver="features").fit(X, y)


def left_out_error(K, L, shift, i):
    rest = np.arange(len(K)) != i
    a = np.linalg.solve(K[np.ix_(rest, rest)] + shift * np.eye(len(K) - 1), K[rest, i])
    return L[i, i] - 2 * L[rest, i] @ a + a @ L[np.ix_(rest, rest)] @ a


@pytest.mark.parametrize("solver", ["pcg", "nystrom", "features"])
def test_lambda_is_chosen_by_leaving_rows_out_of_the_fit_to_all(solver, pairs, small_tiles):
    X, y = pairs[0][:60], pairs[1][:60]
    target, settings = kme.kernels.Gaussian(0.7), {"target_centres": 60}
    settings |= {"nystrom": {"centres": 60}, "features": {"features": random_fourier(2, 40, seed=1)}}.get(solver, {})
    model = kme.ConditionalMeanEmbedding(KERNEL, target, scaling=None, solver=solver, **settings).fit(X, y)
    K, L = model.kernel_.gram(X), target.gram(y[:, None])
    assert model.retuned_[model.regularization_] == pytest.approx(min(model.retuned_.values()), rel=2e-4)
    judged = [lam for lam in model.retuned_ if len(X) * lam > 1e-3]  # below, target centres and loose solves show
    assert len(judged) >= 3
    for lam in judged:
        naive = np.mean([left_out_error(K, L, len(X) * lam, i) for i in range(len(X))])
        assert model.retuned_[lam] == pytest.approx(naive, rel=1e-3)


def test_expectations_are_ridge_regression_on_the_centred_values_of_h(pairs):
    X, y = pairs
    model = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.002, scaling=None).fit(X, y)
    K, k = KERNEL.gram(X), KERNEL.gram(X[:7], X)
    A = K + len(X) * 0.002 * np.eye(len(X))
    for h in (lambda y: y, lambda y: y**2, lambda y: np.stack([np.cos(y), y > 0], axis=1)):
        H = np.asarray(h(y), dtype=float)
        expected = H.mean(axis=0) + k @ np.linalg.solve(A, H - H.mean(axis=0))
        np.testing.assert_allclose(model.expectation(X[:7], h), expected, rtol=1e-8)
        np.testing.assert_allclose(model.expectation(X[:7], h, centred=False), k @ np.linalg.solve(A, H), rtol=1e-8)
    np.testing.assert_allclose(model.predict(X[:7]), model.expectation(X[:7], y), rtol=1e-12)


def test_kernel_and_regularization_are_chosen_by_held_out_error(pairs):
    X, y = pairs
    model = kme.ConditionalMeanEmbedding(folds=5).fit(X[:80], y[:80])
    best = min(model.scores_, key=lambda found: found[2])
    assert (model.kernel_, model.regularization_) == best[:2]
    poor = kme.ConditionalMeanEmbedding(kme.kernels.Gaussian(length_scale=20.0), regularization=1.0).fit(X[:80], y[:80])
    poor.target_kernel_ = model.target_kernel_
    assert model.score(X[80:], y[80:]) > poor.score(X[80:], y[80:])
    chosen = kme.ConditionalMeanEmbedding([kme.kernels.Gaussian(length_scale=20.0), KERNEL]).fit(X, y)
    assert chosen.kernel_ == KERNEL


def test_learning_the_kernel_finds_the_feature_that_matters(rng):
    X = rng.uniform(-2, 2, size=(150, 3))
    y = np.sin(2 * X[:, 0]) + 0.05 * rng.normal(size=150)
    start = kme.kernels.Gaussian(length_scale=np.ones(3))
    learned = kme.ConditionalMeanEmbedding(start, learn_steps=60).fit(X, y)
    given = kme.ConditionalMeanEmbedding(start, target_kernel=learned.target_kernel_).fit(X, y)
    ell = learned.kernel_.length_scale
    assert ell[0] < 0.5 * ell[1]
    assert ell[0] < 0.5 * ell[2]
    X_new = rng.uniform(-2, 2, size=(100, 3))
    y_new = np.sin(2 * X_new[:, 0]) + 0.05 * rng.normal(size=100)
    assert learned.score(X_new, y_new) > given.score(X_new, y_new)
    assert learned.history_[-1]["objective"] < learned.history_[0]["objective"]


def test_centres_come_near_the_exact_embedding(pairs):
    X, y = pairs
    exact = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.01).fit(X, y)
    for settings in (
        {"centres": 60},
        {"centres": 60, "target_centres": 40},
        {"centres": 60, "centre_choice": "uniform"},
    ):
        near = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.01, **settings).fit(X, y)
        assert near.solver_ == "nystrom"
        np.testing.assert_allclose(near.predict(X), exact.predict(X), atol=0.1)
        assert near.score(X, y) > exact.score(X, y) - 0.02


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_data_set_over_workers_gives_what_its_rows_give(solver, pairs, tmp_path, small_tiles):
    X, y = pairs
    np.savez(tmp_path / "rows.npz", X=np.column_stack([X, y]), y=y)
    data = kme.ingest(tmp_path / "rows.npz", tmp_path / "rows.zarr", label="y", task="regression", dtype="float64")
    target = kme.kernels.Gaussian(0.7)
    settings = {"regularization": 0.01, "solver": solver, "target_centres": 40, "centre_choice": "uniform"}
    settings |= {"nystrom": {"centres": 120}, "features": {"features": 60}}.get(solver, {})
    expected = kme.ConditionalMeanEmbedding(KERNEL, target, **settings).fit(X, y)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        model = kme.ConditionalMeanEmbedding(KERNEL, target, client=client, **settings)
        found = model.fit(data, [data.feature_names[2]]).evaluate(X[:9], y[:9])
    np.testing.assert_allclose(found, expected.evaluate(X[:9], y[:9]), atol=1e-5)
    assert [path.name for path in tmp_path.iterdir() if "embedding" in path.name] == []


def test_a_data_set_on_disk_is_fitted_in_one_pass(pairs, tmp_path):
    X, y = pairs
    np.savez(tmp_path / "rows.npz", X=X, y=y)
    data = kme.ingest(tmp_path / "rows.npz", tmp_path / "rows.zarr", label="y", task="regression", dtype="float64")
    settings = {"regularization": 0.01, "centres": 50, "target_centres": 40, "centre_choice": "uniform"}
    stored = kme.ConditionalMeanEmbedding(KERNEL, kme.kernels.Gaussian(0.7), **settings).fit(data)
    memory = kme.ConditionalMeanEmbedding(KERNEL, kme.kernels.Gaussian(0.7), **settings).fit(X, y)
    np.testing.assert_allclose(stored.predict(X), memory.predict(X), atol=0.05)
    by_column = kme.ConditionalMeanEmbedding("gaussian", kme.kernels.Gaussian(0.7), **settings).fit(
        data, [data.feature_names[1]]
    )
    assert by_column.predict(X[:, :1]).shape == (120,)
    for column in (data.feature_names[1], 1, np.int64(1), np.array([1])):
        again = kme.ConditionalMeanEmbedding("gaussian", kme.kernels.Gaussian(0.7), **settings).fit(data, column)
        np.testing.assert_array_equal(again.predict(X[:, :1]), by_column.predict(X[:, :1]))
    for wrong, message in (
        (["zz"], "no column 'zz'"),
        ("price", "no column 'price'"),
        (3, "no column 3.*columns are counted from 0 to 1"),
        (y, "named by texts or numbers, got ndarray values"),
        ([], "named by texts or numbers, got no columns"),
    ):
        with pytest.raises(ConfigError, match=message):
            kme.ConditionalMeanEmbedding().fit(data, wrong)
    with pytest.raises(DataError, match=r"all 2 columns .* are targets"):
        kme.ConditionalMeanEmbedding().fit(data, [0, 1])


def test_texts_can_be_targets_and_inputs(tmp_path):
    words, endings = ["abab", "baba", "xyxy", "yxyx"] * 3, ["oo", "oo", "ii", "ii"] * 3
    model = kme.ConditionalMeanEmbedding(kme.kernels.Spectrum(p=2), kme.kernels.Spectrum(p=2), 0.01).fit(words, endings)
    assert model.evaluate(["abab"], ["oo"])[0, 0] > model.evaluate(["abab"], ["ii"])[0, 0] + 0.5
    assert set(model.sample(["abab"], 3, method="herding")[0]) == {"oo"}
    with pytest.raises(DataError, match="not numeric"):
        model.predict(["abab"])
    model.save(tmp_path / "texts.zarr")
    again = kme.load(tmp_path / "texts.zarr")
    np.testing.assert_allclose(again.evaluate(["abab"], ["oo"]), model.evaluate(["abab"], ["oo"]), rtol=1e-12)


def test_quantiles_cover_what_they_promise(rng):
    x = rng.uniform(-2, 2, size=(400, 1))
    y = x[:, 0] + rng.normal(size=400) * 0.5
    model = kme.ConditionalMeanEmbedding().fit(x[:300], y[:300])
    q = model.quantiles(x[300:], [0.1, 0.5, 0.9])
    inside = np.mean((y[300:] > q[:, 0]) & (y[300:] < q[:, 2]))
    assert 0.65 < inside < 0.95
    assert np.abs(q[:, 1] - x[300:, 0]).mean() < 0.2


def test_a_herded_sample_has_the_conditional_mean(pairs):
    X, y = pairs
    model = kme.ConditionalMeanEmbedding().fit(X, y)
    drawn = model.sample(X[:5], 40, method="herding")
    means = np.array([np.mean(sample) for sample in drawn])
    np.testing.assert_allclose(means, model.predict(X[:5]), atol=0.25)


@pytest.mark.parametrize("penalty", ["element", "row", "column", "pair"])
def test_sparse_forms_predict_with_what_they_kept(penalty, pairs):
    X, y = pairs[0][:40], pairs[1][:40]
    model = kme.ConditionalMeanEmbedding(kme.kernels.Gaussian(0.5), regularization=0.02, scaling=None).fit(X, y)
    found = model.sparsify(penalty, gammas=4, steps=400)
    assert all(isinstance(form, SparseEmbedding) for form in found)
    assert found[0].density_ < found[-1].density_
    assert found[-1].relative_distance_ < found[0].relative_distance_ < 1
    last = found[-2]
    full = np.zeros((40, 40))
    rows = [int(np.flatnonzero((y[:, None] == t).all(axis=1))[0]) for t in last.embedding_.targets]
    columns = [int(np.flatnonzero((c == X).all(axis=1))[0]) for c in last.embedding_.centres]
    full[np.ix_(rows, columns)] = last.embedding_.weights.matrix
    expected = y.mean() + kme.kernels.Gaussian(0.5).gram(X[:5], X) @ full.T @ (
        y - y.mean()
    )  # of all rows, not those kept
    np.testing.assert_allclose(last.predict(X[:5]), expected, atol=1e-10)
    if penalty == "row":
        assert found[0].targets_kept_ < 40
    if penalty == "column":
        assert found[0].inputs_kept_ < 40
    if penalty == "pair":
        assert rows == columns
        assert len(rows) < 40
    assert "SparseEmbedding" in repr(last)


def test_incomplete_cholesky_is_the_alternative(pairs):
    X, y = pairs[0][:40], pairs[1][:40]
    model = kme.ConditionalMeanEmbedding(kme.kernels.Gaussian(0.5), regularization=0.02, scaling=None).fit(X, y)
    found = model.sparsify(method="cholesky", gammas=[5, 20, 40])
    assert [form.inputs_kept_ for form in found[:2]] == [5, 20]
    assert found[0].distance_ > found[1].distance_ > found[2].distance_
    with pytest.raises(ConfigError, match="method='lars'"):
        model.sparsify(method="lars")


@pytest.mark.parametrize("settings", [{}, {"centres": 30}, {"centres": 30, "target_centres": 20}])
def test_an_embedding_comes_back_from_disk_as_it_was(settings, pairs, tmp_path):
    X, y = pairs
    model = kme.ConditionalMeanEmbedding(KERNEL, regularization=0.01, **settings).fit(X, y)
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    sparse = model.sparsify(gammas=[0.5], steps=50)[0] if not settings else None
    if sparse is not None:
        sparse.save(tmp_path / "sparse.zarr")
        np.testing.assert_array_equal(kme.load(tmp_path / "sparse.zarr").predict(X), sparse.predict(X))


def test_labels_come_back_too(iris, tmp_path):
    X, y = iris
    model = kme.ConditionalMeanEmbedding(target_kernel="delta", regularization=0.01).fit(X, y)
    model.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr")
    assert isinstance(again.target_kernel_, Delta)
    np.testing.assert_allclose(again.evaluate(X, ["setosa"]), model.evaluate(X, ["setosa"]), rtol=1e-12)


def test_mistakes_are_named(pairs):
    X, y = pairs
    with pytest.raises(DataError, match="must be equal"):
        kme.ConditionalMeanEmbedding().fit(X, y[:-1])
    with pytest.raises(DataError, match="targets are missing"):
        kme.ConditionalMeanEmbedding().fit(X)
    with pytest.raises(ConfigError, match="solver='lu'"):
        kme.ConditionalMeanEmbedding(solver="lu").fit(X, y)
    with pytest.raises(ConfigError, match=r"solver='falkon' is for .*choose 'nystrom' with `centres`"):
        kme.ConditionalMeanEmbedding(solver="falkon", centres=20).fit(X, y)
    for labels in (["low"] * 120, np.full(120, "low"), np.full(120, "low", object)):
        with pytest.raises(DataError, match="the text 'low' in row 0; choose 'delta' for labels"):
            kme.ConditionalMeanEmbedding().fit(X, labels)
    with pytest.raises(ConfigError, match="from 0 to 1"):
        kme.ConditionalMeanEmbedding(KERNEL, regularization=0.1).fit(X, y).quantiles(X, [2.0])
    with pytest.raises(DataError, match="NaN"):
        kme.ConditionalMeanEmbedding().fit(X, np.full(120, np.nan))


def test_random_samples_follow_the_weights_and_the_seed(rng):
    X = rng.uniform(-3, 3, size=(300, 1))
    model = kme.ConditionalMeanEmbedding(kernel=kme.kernels.Gaussian(0.3), regularization=1e-4).fit(X, np.sign(X[:, 0]))
    drawn = np.stack(model.sample([[-2.0], [2.0]], 500, random_state=1))[..., 0]
    assert (drawn[0] == -1).mean() > 0.7
    assert (drawn[1] == 1).mean() > 0.7
    a = np.maximum(model.coefficients([[2.0]])[0], 0)
    assert np.mean(drawn[1] == 1) == pytest.approx(a[X[:, 0] > 0].sum() / a.sum(), abs=0.06)
    np.testing.assert_array_equal(drawn, np.stack(model.sample([[-2.0], [2.0]], 500, random_state=1))[..., 0])
    assert (drawn != np.stack(model.sample([[-2.0], [2.0]], 500, random_state=2))[..., 0]).any()


def test_twenty_samples_take_no_time(rng):
    X = rng.normal(size=(2_000, 3))
    model = kme.ConditionalMeanEmbedding(kernel=kme.kernels.Gaussian(1.0), regularization=1e-3).fit(X, X[:, 0])
    began = time.process_time()
    model.sample(X[:20], 100)
    assert time.process_time() - began < 1.0


def test_targets_that_doubles_cannot_hold_are_refused():
    X, long = np.random.default_rng(0).normal(size=(40, 2)), 2**60 + np.arange(40)
    for targets in (long, long.tolist(), [[int(y), 1] for y in long]):
        with pytest.raises(DataError, match=r"targets: found the integer .*, and beyond 2\*\*53"):
            kme.ConditionalMeanEmbedding().fit(X, targets)
    with pytest.raises(DataError, match=r"targets: column .* has values up to 1e\+300, whose squares exceed float64"):
        kme.ConditionalMeanEmbedding().fit(X, np.r_[1e300, X[1:, 0]])
    labels = kme.ConditionalMeanEmbedding(target_kernel="delta").fit(X, long % 3 + 2**60)
    assert set(labels.embedding_.targets.tolist()) == {2**60, 2**60 + 1, 2**60 + 2}  # labels keep their values
