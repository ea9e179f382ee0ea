"""Sparse rows: the same results as dense ones, and the table is never converted to a dense one."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster
from scipy import sparse

import kme_dist as kme
from kme_dist import kernels
from kme_dist.core.risk import merge_equal_rows
from kme_dist.data import sparse as sparse_rows
from kme_dist.data.sparse import SparseRows, as_sparse_rows
from kme_dist.errors import DataError

N, D = 180, 300
RNG = np.random.default_rng(0)
X = sparse.random_array((N, D), density=0.05, rng=RNG, format="csr")
X.data *= np.where(RNG.random(X.nnz) < 0.3, -2.0, 2.0)
Y = np.where(X @ RNG.normal(size=D) > 0, "a", "b")
SCALED = X.toarray() / np.maximum(abs(X.toarray()).max(axis=0), 1e-300)
KERNELS = {
    "gaussian": kernels.Gaussian(length_scale=RNG.random(D) + 0.5, scale=1.3),
    "linear": kernels.Linear(length_scale=RNG.random(D) + 0.5),
    "polynomial": kernels.Polynomial(degree=3, length_scale=2.0),
    "matern": kernels.Matern(nu=2.5),
    "sum": kernels.Gaussian() + kernels.Linear(),
}
SETTINGS = {
    "gaussian": {"kernel": "gaussian", "objective": "rcb", "steps": 3},
    "linear": {"kernel": "linear", "objective": "loo", "steps": 3},
    "polynomial": {"kernel": "polynomial", "objective": "rcb", "steps": 2},
    "median": {"objective": "median"},
    "auto": {"steps": 5},
    "random features": {"features": 32, "objective": "rcb", "steps": 2},
    "nystrom": {"kernel": "gaussian", "solver": "nystrom", "centres": 40, "objective": "rcb", "steps": 2},
    "tiled": {"kernel": "gaussian", "solver": "tiled", "objective": "rcb", "steps": 2},
    "pcg": {"kernel": "gaussian", "solver": "pcg", "objective": "rcb", "steps": 2},
}


@pytest.fixture(scope="module")
def client():
    workers = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**workers) as cluster, Client(cluster) as found:
        yield found


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_and_their_gradients_are_those_of_dense_rows(name):
    kernel, few = KERNELS[name], as_sparse_rows(X[:60])
    left, right = X[:60].toarray(), X[60:100].toarray()
    K_bar = RNG.normal(size=(60, 40))
    np.testing.assert_allclose(kernel.gram(few), kernel.gram(left), rtol=1e-12, atol=1e-12)
    for one, other in ((few, X[60:100]), (left, X[60:100]), (few, right)):  # one side may be dense
        np.testing.assert_allclose(kernel.gram(one, other), kernel.gram(left, right), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(kernel.diag(few), kernel.diag(left), rtol=1e-12)
    wanted = kernel.vjp(left, right, K_bar)
    for parameter, found in kernel.vjp(few, X[60:100], K_bar).items():
        np.testing.assert_allclose(found, wanted[parameter], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_fit_to_sparse_rows_is_that_of_dense_ones_and_makes_none(name, tmp_path, monkeypatch):
    """Scaling divides by the largest absolute value of each feature, without a shift."""
    settings = {"random_state": 0, "dtype": "float64", **SETTINGS[name]}
    dense = kme.MCEClassifier(**settings, scaling=None).fit(SCALED, Y)
    wanted = dense.predict_proba(SCALED)

    def no_table(self, *_, **__):
        assert self.shape[1] != D or self.shape[0] <= 40, f"{self.shape} became dense"  # pivots and centres may
        return plain(self)

    plain = sparse.csr_array.toarray
    monkeypatch.setattr(SparseRows, "toarray", no_table)
    model = kme.MCEClassifier(**settings).fit(X, Y)
    found = model.predict_proba(X)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    model.save(tmp_path / "m.zarr")
    loaded = kme.load(tmp_path / "m.zarr")
    np.testing.assert_array_equal(loaded.predict_proba(sparse.coo_array(X)), found)
    monkeypatch.undo()
    np.testing.assert_allclose(loaded.predict_proba(X.toarray()), found, atol=1e-9)


def test_sparse_formats_and_weights_are_those_of_rows():
    settings = {"kernel": "gaussian", "objective": "rcb", "steps": 2}
    wanted = kme.MCEClassifier(**settings).fit(X, Y).predict_proba(X)
    for given in (sparse.csr_matrix(X), sparse.csc_array(X), sparse.coo_array(X)):
        np.testing.assert_array_equal(kme.MCEClassifier(**settings).fit(given, Y).predict_proba(given), wanted)
    twice = kme.MCEClassifier(objective="rcb", steps=0).fit(sparse.vstack([X, X[:50]]), np.append(Y, Y[:50]))
    weighted = kme.MCEClassifier(objective="rcb", steps=0).fit(X, Y, sample_weight=1.0 + (np.arange(N) < 50))
    np.testing.assert_allclose(twice.decision_probabilities(X), weighted.decision_probabilities(X), atol=1e-4)


def test_equal_rows_are_found_without_making_them_dense():
    rows = as_sparse_rows(sparse.vstack([X[:5], X[1:3], X[4:5]]))
    merged = merge_equal_rows(rows, np.zeros(8, np.int64), None)
    assert merged.X.shape == (5, D)
    assert merged.weights.tolist() == [1, 2, 2, 1, 2]


def test_standard_scaling_of_sparse_rows_keeps_zeros():
    model = kme.MCEClassifier(objective="rcb", steps=0, scaling="standard").fit(X, Y)
    assert not model.scaling_.shift.any()
    dense = X.toarray()
    used = dense.any(axis=0)
    np.testing.assert_allclose(model.scaling_.factor[used], 1 / np.sqrt((dense**2).mean(axis=0))[used])


def test_relevance_is_measured_on_a_sample():
    model = kme.MCEClassifier(objective="median").fit(X[:, :20], Y)
    assert model.feature_importances_.shape == (20,)


def test_a_computation_that_needs_dense_rows_says_so_beyond_the_limit(monkeypatch):
    monkeypatch.setattr(sparse_rows, "DENSE_BYTES", 1000)
    with pytest.raises(DataError, match=r"180 sparse rows of 300 features would take .* as dense rows"):
        np.asarray(as_sparse_rows(X))


@pytest.mark.parametrize("solver", ["cholesky", "pcg", "nystrom"])
def test_workers_give_the_same_bits(client, solver):
    settings = {"kernel": "gaussian", "objective": "rcb", "steps": 2, "solver": solver}
    settings |= {"centres": 40} if solver == "nystrom" else {}
    alone = kme.MCEClassifier(**settings).fit(X, Y).predict_proba(X)
    np.testing.assert_array_equal(kme.MCEClassifier(**settings, client=client).fit(X, Y).predict_proba(X), alone)


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": "gaussian", "steps": 3},
        {"steps": 2},
        {"kernel": "linear", "steps": 2},
        {"kernel": "matern", "solver": "nystrom", "centres": 30, "steps": 2},
    ],
    ids=["gaussian", "auto", "linear", "nystrom"],
)
def test_a_regressor_of_sparse_rows_is_that_of_dense_ones_and_makes_none(settings, tmp_path, monkeypatch):
    y = X @ np.linspace(-1, 1, D)
    dense = kme.CMERegressor(scaling=None, **settings).fit(X.toarray(), y)
    wanted = [dense.predict(X.toarray()), *dense.predict_interval(X.toarray())]

    def refuse(self, dtype=None, copy=None):
        raise AssertionError("dense rows")

    monkeypatch.setattr(SparseRows, "__array__", refuse)
    model = kme.CMERegressor(scaling=None, **settings).fit(X, y)
    found = [model.predict(X), *model.predict_interval(X)]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.std(y))
    model.save(tmp_path / "m.zarr")
    np.testing.assert_array_equal(kme.load(tmp_path / "m.zarr").predict(X), found[0])


@pytest.mark.parametrize("kind", [kme.CMERegressor, kme.MCEClassifier])
def test_many_centres_of_sparse_rows_give_the_same_bits_on_workers(kind, client, tmp_path):
    rows = sparse.random_array((2_400, 40), density=0.2, rng=np.random.default_rng(0), format="csr")
    targets = rows.sum(axis=1) if kind is kme.CMERegressor else np.where(rows.sum(axis=1) > 4, "a", "b")
    settings = {"solver": "falkon", "centres": 60, "steps": 1}
    alone, remote = kind(**settings).fit(rows, targets), kind(**settings, client=client).fit(rows, targets)
    assert remote.solver_ == "falkon"
    remote.save(tmp_path / "model.zarr")
    for other in (remote, kme.load(tmp_path / "model.zarr")):
        if kind is kme.CMERegressor:
            np.testing.assert_array_equal(other.predict_interval(rows), alone.predict_interval(rows))
        else:
            np.testing.assert_array_equal(other.predict_proba(rows), alone.predict_proba(rows))


@pytest.mark.parametrize("scaling", ["unit", "standard"])
def test_a_regressor_scales_sparse_rows_without_a_shift(scaling):
    y = X @ np.linspace(-1, 1, D)
    model = kme.CMERegressor(scaling=scaling, steps=2).fit(X, y)
    assert not model.scaling_.shift.any()
    assert model.score(X, y) > 0.3


@pytest.mark.parametrize("name", ["scores.zarr", "scores.parquet", None])
def test_batch_inference_takes_sparse_rows(name, tmp_path, client):
    model = kme.MCEClassifier(kernel="gaussian", objective="rcb", steps=2).fit(X, Y)
    if name is None:
        table = kme.predict(model, X.tocoo())
        found = np.stack([table["probability_a"].to_numpy(), table["probability_b"].to_numpy()], axis=1)
    else:
        assert kme.predict(model, X, tmp_path / name, executor=client).rows == N
        found = kme.open_predictions(tmp_path / name).read("probability")
    np.testing.assert_allclose(found, model.predict_proba(X), atol=1e-6)
    bad = X.copy()
    bad.data[bad.indptr[7]] = np.nan
    with pytest.warns(UserWarning, match="no prediction for 1 row; the first is row 7: feature"):
        without = kme.predict(model, bad)["probability_a"].to_numpy(zero_copy_only=False)
    assert np.flatnonzero(np.isnan(without)).tolist() == [7]
    np.testing.assert_allclose(np.delete(without, 7), np.delete(found[:, 0], 7), atol=1e-6)
    with pytest.raises(DataError, match="5 features, the model was fitted with 300"):
        kme.predict(model, X[:, :5])
    network = kme.CENClassifier(hidden=(3,), steps=1).fit(X.toarray(), Y)
    with pytest.raises(DataError, match=r"CENClassifier does not take sparse rows; pass dense ones: X.toarray\(\)"):
        kme.predict(network, X)


@pytest.mark.parametrize("kind", [kme.ParzenClassifier, kme.CENClassifier, kme.ASKLClassifier, kme.ASKLRegressor])
def test_other_estimators_refuse_sparse_rows_by_scikit_learns_rule(kind):
    with pytest.raises(TypeError, match=r"Sparse data was passed for X, but dense data is required"):
        kind().fit(X, np.arange(N) % 2)
