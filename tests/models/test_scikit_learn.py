"""What scikit-learn's users reach for: searches over kernels, seeds, early stopping, warm starts, workers."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from distributed import Client, LocalCluster
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import RFE
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler

import kme_dist as kme
from kme_dist import CENClassifier, MCEClassifier, kernels
from kme_dist.data.arrays import ArrayRows
from kme_dist.errors import ConfigError, DataError
from kme_dist.run.workers import job_count


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


# --- kernels in searches ----------------------------------------------------------------------------


def test_settings_of_a_kernel_can_be_searched(iris):
    start = kernels.Matern(nu=1.5)
    grid = {"kernel__nu": [0.5, 2.5], "kernel__length_scale": [0.3, 100.0]}
    search = GridSearchCV(MCEClassifier(kernel=start, steps=0, regularization=1e-3), grid, cv=3).fit(*iris)
    best = search.best_estimator_.kernel_
    assert {"kernel__nu": best.nu, "kernel__length_scale": best.length_scale} == search.best_params_
    assert len(set(search.cv_results_["mean_test_score"])) > 1  # each setting was a different model
    assert start == kernels.Matern(nu=1.5)


def test_settings_of_sums_are_searched_through_a_pipeline(iris):
    clf = MCEClassifier(kernel=kernels.Gaussian() + 0.1 * kernels.Linear(), steps=0, regularization=1e-3)
    pipeline = Pipeline([("scale", StandardScaler()), ("mce", clf)])
    search = GridSearchCV(pipeline, {"mce__kernel__k1__length_scale": [0.5, 5.0]}, cv=2).fit(*iris)
    found = search.best_estimator_["mce"].kernel_.parts[0]
    assert found.length_scale == search.best_params_["mce__kernel__k1__length_scale"]
    assert clf.kernel.parts[0].length_scale == 1


def test_every_setting_that_is_a_kernel_has_settings():
    head = CENClassifier(head=kernels.Gaussian()).set_params(head__length_scale=0.5)
    assert head.head == kernels.Gaussian(length_scale=0.5)
    cme = kme.ConditionalMeanEmbedding(target_kernel=kernels.Matern()).set_params(target_kernel__nu=2.5)
    assert cme.target_kernel == kernels.Matern(nu=2.5)
    both = MCEClassifier().set_params(kernel=kernels.Matern(), kernel__nu=0.5, steps=3)
    assert (both.kernel, both.steps) == (kernels.Matern(nu=0.5), 3)


def test_a_clone_has_the_kernel_and_does_not_share_changes():
    clf = MCEClassifier(kernel=kernels.Gaussian(length_scale=[1.0, 2.0]) * kernels.Matern())
    other = clone(clf)
    assert other.kernel == clf.kernel
    other.set_params(kernel__k2__nu=0.5)
    assert clf.kernel.parts[1].nu == 1.5


def test_settings_that_a_kernel_has_not_are_named():
    with pytest.raises(ConfigError, match="has no setting 'nu'"):
        MCEClassifier(kernel=kernels.Gaussian()).set_params(kernel__nu=0.5)
    with pytest.raises(ConfigError, match="kernel='auto' is a name without settings; pass a kernel first"):
        MCEClassifier().set_params(kernel__length_scale=0.5)
    with pytest.raises(ValueError, match="Invalid parameter 'kern'"):
        MCEClassifier().set_params(kern__nu=0.5)


# --- early stopping -----------------------------------------------------------------------------------


def test_published_objectives_run_all_steps_and_others_stop_at_a_plateau_unless_told(iris):
    X, y = iris
    steps = {
        (objective, stop): MCEClassifier(objective=objective, steps=300, early_stopping=stop, n_iter_no_change=5)
        .fit(X, y).n_iter_
        for objective in ("rcb", "validation") for stop in ("auto", True, False)
    }  # fmt: skip
    assert steps["rcb", "auto"] == steps["rcb", False] == steps["validation", False] == 300
    assert steps["validation", "auto"] == steps["validation", True] < 300
    assert steps["rcb", True] < 300


def test_more_patience_more_steps(iris):
    few, many = (MCEClassifier(objective="validation", steps=400, n_iter_no_change=n).fit(*iris) for n in (2, 60))
    assert few.n_iter_ < many.n_iter_
    assert few.n_iter_ == len(few.history_)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"early_stopping": "yes"}, "early_stopping='yes': must be True, False or 'auto'"),
        ({"n_iter_no_change": 0}, "n_iter_no_change=0: must be an integer >= 1, or None"),
        ({"warm_start": 1}, "warm_start=1: must be True or False"),
    ],
)
def test_wrong_settings_are_named(settings, message, iris):
    with pytest.raises(ConfigError, match=message):
        MCEClassifier(**settings).fit(*iris)


# --- warm start --------------------------------------------------------------------------------------


def test_a_warm_start_continues_from_what_was_learned(iris, tmp_path):
    X, y = iris
    clf = MCEClassifier(objective="validation", steps=400, warm_start=True).fit(X[::2], y[::2])
    first, kernel, lam = clf.n_iter_, clf.kernel_, clf.regularization_
    assert clf.recipe(ArrayRows(X, y, np.arange(3))).kernel == kernel
    clf.save(tmp_path / "model.zarr")
    again = kme.load(tmp_path / "model.zarr").fit(X, y)  # more rows
    clf.fit(X, y)
    assert clf.n_iter_ < first
    assert clf.history_[0]["regularization"] == pytest.approx(lam)
    assert again.kernel_ == clf.kernel_
    assert clf.score(X, y) > 0.9


@pytest.mark.parametrize("kernel", ["auto", "gaussian", "laplace"])
def test_no_steps_after_a_warm_start_keep_the_learned_kernel(iris, kernel):
    X, y = iris
    clf = MCEClassifier(kernel=kernel, steps=10, warm_start=True).fit(X[::2], y[::2])
    if kernel == "auto":  # whichever profile was kept
        clf.kernel_ = kernels.Matern(length_scale=np.array([1.0, 2.0, 3.0, 4.0]), nu=0.5)
    kernel, lam = clf.kernel_, clf.regularization_
    clf.set_params(steps=0).fit(X, y)
    assert (clf.kernel_, clf.regularization_) == (kernel, lam)


def test_under_auto_a_warm_start_needs_no_search(iris):
    X, y = iris
    clf = MCEClassifier(kernel="gaussian", steps=30, warm_start=True).fit(X, y)
    kernel = clf.kernel_
    clf.set_params(steps=1).fit(X, y)
    assert set(clf.loo_log_loss_) == {"learned"}
    change = np.log(clf.kernel_.length_scale / kernel.length_scale)
    # One step of adam is its rate, in the log of each parameter; what is tuned afterwards is one factor of all.
    assert np.ptp(change) <= 2 * 0.1 + 1e-6


@pytest.mark.parametrize("nu", [0.5, 1.5])
def test_a_warm_start_of_kernel_auto_continues_from_the_length_scales_of_any_profile(iris, nu):
    X, y = iris
    clf = MCEClassifier(steps=5, warm_start=True).fit(X, y)
    factor = 2 if nu == 0.5 else 1  # what a Matérn 1/2 kernel starts its tuning with
    clf.kernel_ = kernels.Matern(length_scale=factor * np.array([1.0, 2.0, 3.0, 4.0]), scale=1.5, nu=nu)
    recipe = clf.recipe(ArrayRows(X, y, np.arange(3)))
    assert recipe.warm
    assert recipe.kernel == kernels.Gaussian(length_scale=[1.0, 2.0, 3.0, 4.0], scale=1.5)


def test_a_cold_start_forgets_and_a_kernel_of_another_form_starts_anew(iris):
    X, y = iris
    cold = MCEClassifier(steps=5).fit(X, y)
    once = cold.kernel_
    assert cold.fit(X, y).kernel_ == once
    warm = MCEClassifier(steps=5, objective="rcb", warm_start=True).fit(X, y)
    warm.set_params(kernel="laplace").fit(X, y)
    assert warm.kernel_ == MCEClassifier(kernel="laplace", steps=5, objective="rcb").fit(X, y).kernel_


def test_a_warm_start_requires_the_same_columns(iris):
    X, y = iris
    clf = MCEClassifier(steps=2, warm_start=True).fit(X, y)
    with pytest.raises(ValueError, match="warm_start=True: X has 3 features, but MCEClassifier learned from 4"):
        clf.fit(X[:, :3], y)
    assert clf.predict(X).shape == (150,)  # the model before is whole


# --- relevance ---------------------------------------------------------------------------------------


def trees(n=200, seed=0):
    """A relevant category of three, a relevant number, two numbers of noise; as a frame of numbers."""
    rng = np.random.default_rng(seed)
    kind, numbers = rng.integers(0, 3, n), rng.normal(size=(n, 3))
    y = (np.array([1.5, 0.0, -1.5])[kind] + numbers[:, 0] + 0.2 * rng.normal(size=n) > 0).astype(int)
    names = ["kind=a", "kind=b", "kind=c", "size", "noise 1", "noise 2"]
    return pd.DataFrame(np.column_stack([np.eye(3)[kind], numbers]), columns=names), y


SETTINGS = {
    "exact": MCEClassifier(steps=30),
    "centres": MCEClassifier(steps=30, solver="nystrom", centres=60),
    "random features": MCEClassifier(steps=30, features=200),
    "network": CENClassifier(hidden=(16,), steps=60),
    "network with a kernel": CENClassifier(hidden=(16,), head="gaussian", steps=60),
}


def test_losses_of_noise_are_none_though_its_shares_have_the_sum_one():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(300, 5)), rng.integers(0, 2, 300)
    clf = MCEClassifier(steps=10).fit(X, y)
    assert np.abs(clf.feature_importances(shares=False)).max() < 0.1
    signal = MCEClassifier(steps=10).fit(X, X[:, 0] > 0)
    assert signal.feature_importances(shares=False)[0] > 0.4


@pytest.mark.parametrize("name", SETTINGS)
def test_relevance_is_measured_and_comes_back_after_saving(name, tmp_path):
    X, y = trees()
    clf = clone(SETTINGS[name]).fit(X, y)
    found = clf.feature_importances_
    assert found.shape == (6,)
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(1)
    kind, size, *noise = clf.feature_importances(
        {"kind": ["kind=a", "kind=b", "kind=c"], "size": [3], "n": [4], "m": [5]}
    )
    assert max(noise) < 0.05 < min(kind, size)
    losses = clf.feature_importances(shares=False)
    np.testing.assert_allclose(np.clip(losses, 0, None) / np.clip(losses, 0, None).sum(), found, atol=1e-7)
    clf.save(tmp_path / "model.zarr")
    np.testing.assert_array_equal(kme.load(tmp_path / "model.zarr").feature_importances_, found)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(clf)).feature_importances_, found)


def test_relevance_is_that_of_rows_that_were_never_seen():
    """The left-out rows of the fit stand for new rows: shares agree with permutation importance on the latter."""
    (X, y), (Xq, yq) = trees(300), trees(3000, seed=1)
    clf = MCEClassifier(steps=60).fit(X.to_numpy(), y)
    Q = Xq.to_numpy()

    def brier(rows):
        return np.mean(np.sum((np.eye(2)[yq] - clf.predict_proba(rows)) ** 2, axis=1))

    groups, expected = [[0, 1, 2], [3], [4], [5]], []
    for group in groups:
        exchanged = Q.copy()
        exchanged[:, group] = Q[np.random.default_rng(2).permutation(len(Q))][:, group]
        expected.append(max(0.0, brier(exchanged) - brier(Q)))
    np.testing.assert_allclose(clf.feature_importances(groups), np.array(expected) / sum(expected), atol=0.07)


def test_a_data_set_knows_the_columns_that_its_features_come_from(tmp_path):
    X, y = trees(120)
    kinds = np.array(["a", "b", "c"])[X.iloc[:, :3].to_numpy().argmax(axis=1)]
    frame = pd.DataFrame({"size": X["size"], "kind": kinds, "noise": X["noise 1"], "label": y.astype(str)})
    frame.to_csv(tmp_path / "trees.csv", index=False)
    data = kme.ingest(tmp_path / "trees.csv", tmp_path / "trees.zarr", label="label")
    clf = MCEClassifier(steps=10).fit(data)
    assert clf.feature_groups_ == {"size": [0], "kind": [1, 2, 3], "noise": [4]}
    assert clf.feature_importances("columns").shape == (3,)
    assert clf.feature_importances_.shape == (5,)
    clf.save(tmp_path / "model.zarr")
    assert kme.load(tmp_path / "model.zarr").feature_groups_ == clf.feature_groups_


def test_features_can_be_eliminated_by_relevance():
    X, y = trees(120)
    kept = RFE(MCEClassifier(steps=5), n_features_to_select=3, step=3).fit(X.to_numpy(), y).support_
    assert kept[3]
    assert not kept[4:].any()


def test_groups_that_do_not_exist_are_named(iris):
    clf = MCEClassifier(steps=1).fit(*iris)
    for groups in ([["size"]], [[7]], [[-1]]):
        with pytest.raises(
            DataError, match="is not a feature; pass names of encoded_feature_names_ or positions from 0 to 3"
        ):
            clf.feature_importances(groups)
    with pytest.raises(ConfigError, match="groups='all' is unknown"):
        clf.feature_importances("all")
    with pytest.raises(NotFittedError):
        MCEClassifier().feature_importances()


def test_a_second_fit_measures_again_and_models_without_rows_have_no_relevance(iris):
    X, y = iris
    clf = MCEClassifier(steps=1).fit(X, y)
    first = clf.feature_importances_
    assert (clf.fit(X[:, ::-1], y).feature_importances_ != first).any()
    clf.sample_ = None  # as in models of earlier versions
    clf._importances = None
    assert not hasattr(clf, "feature_importances_")
    with pytest.raises(AttributeError, match="fit it again"):
        clf.feature_importances()


# --- workers -----------------------------------------------------------------------------------------


JOBS = {
    "MCEClassifier": (MCEClassifier(steps=3, solver="tiled"), "predict_proba"),
    "CENClassifier": (CENClassifier(hidden=(4,), steps=3, batch_size=50, batches_per_step=2), "predict_proba"),
    "ASKLClassifier": (kme.ASKLClassifier(features=20, epochs=1, batches_per_step=2), "decision_function"),
    "ASKLRegressor": (kme.ASKLRegressor(features=20, epochs=1, batches_per_step=2), "predict"),
    "KernelMean": (kme.KernelMean(), "evaluate"),
    "MixtureMatching": (kme.MixtureMatching(2, starts=1), "score_samples"),
    "ConditionalMeanEmbedding": (kme.ConditionalMeanEmbedding(solver="nystrom", centres=20), "predict"),
}


@pytest.fixture(scope="module")
def threads():
    """Workers in threads of this process: quick to start."""
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("name", JOBS)
def test_jobs_give_the_same_bits_and_leave_nothing_behind(name, iris, threads, monkeypatch):
    X, y = iris
    asked = []

    @contextlib.contextmanager
    def workers(count):
        asked.append(count)
        yield threads

    monkeypatch.setattr("kme_dist.models.base.local_workers", workers)
    model, question = JOBS[name]
    y = y.astype(float) if name in ("ASKLRegressor", "ConditionalMeanEmbedding") else y
    alone, shared = clone(model).fit(X, y), clone(model).set_params(n_jobs=2).fit(X, y)
    assert asked == [2]
    np.testing.assert_array_equal(getattr(alone, question)(X), getattr(shared, question)(X))
    assert shared._client is None
    pickle.dumps(shared)


def test_processes_are_opened_for_a_fit_in_a_script_and_closed_after_it(tmp_path):
    """A plain script, without the guard that processes of multiprocessing require, with a kernel of its own module."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nfrom kme_dist.kernels import Gaussian\n"
        "@dataclass(frozen=True, eq=False, repr=False)\nclass Mine(Gaussian):\n    pass\n"
    )
    (tmp_path / "script.py").write_text(
        "import numpy as np, mine\nfrom sklearn.datasets import load_iris\nfrom kme_dist import MCEClassifier\n"
        "X, y = load_iris(return_X_y=True)\n"
        "one, two = (MCEClassifier(kernel=mine.Mine(), steps=2, n_jobs=n).fit(X, y) for n in (None, 2))\n"
        "print((one.predict_proba(X) == two.predict_proba(X)).all())\n"
    )
    ran = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.stdout.strip() == "True", ran.stderr


def test_jobs_are_counted_as_in_joblib():
    cores = job_count(-1)
    assert cores >= 1
    assert (job_count(None), job_count(1), job_count(3)) == (1, 1, 3)
    assert job_count(-2) == max(1, cores - 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_jobs": 0}, "n_jobs=0: must be an integer other than 0"),
        ({"n_jobs": 1.5}, r"n_jobs=1\.5: must be an integer other than 0"),
        ({"n_jobs": 2, "client": object()}, "n_jobs=2 and a client exclude each other"),
    ],
)
def test_jobs_that_cannot_be_are_named(settings, message, iris):
    with pytest.raises(ConfigError, match=message):
        MCEClassifier(**settings).fit(*iris)


# --- in company -------------------------------------------------------------------------------------


def test_the_tools_of_scikit_learn_take_every_classifier(iris):
    X, y = iris
    for clf in (
        MCEClassifier(steps=5),
        CENClassifier(hidden=(8,), steps=20),
        kme.ASKLClassifier(features=50, epochs=5),
    ):
        assert cross_val_score(clf, X, y, cv=2, n_jobs=2).mean() > 0.6
        calibrated = CalibratedClassifierCV(clf, cv=2).fit(X, y)
        assert calibrated.predict_proba(X).shape == (150, 3)
        fitted = pickle.loads(pickle.dumps(clone(clf).set_params(random_state=np.random.RandomState(0)).fit(X, y)))
        assert fitted.score(X, y) > 0.6
