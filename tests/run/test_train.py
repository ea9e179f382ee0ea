"""From a data set to a fitted embedding: the same choices as in memory, whoever does the work."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster
from sklearn.datasets import load_iris, make_blobs
from threadpoolctl import threadpool_info, threadpool_limits

import kme_dist
from kme_dist import kernels
from kme_dist.core import embedding
from kme_dist.core.tuning import Tuned
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import RowsRef
from kme_dist.errors import DataError
from kme_dist.run import learners
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.fit import add_rows, fit_on_dataset
from kme_dist.run.scratch import Scratch
from kme_dist.run.train import _AUTO_STEPS, Recipe, fit_candidates, learn_candidates


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def iris(tmp_path_factory):
    X, y = load_iris(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(X))
    path = tmp_path_factory.mktemp("train") / "iris.zarr"
    return ingest((X[order], y[order]), path, task="classification", split="train=0:120,test=120:150", dtype="float64")


def recipe(**changes):
    return Recipe(kernels.from_config("gaussian", n_features=4), steps=20, **changes)


def train(data, chosen, executor, scratch):
    candidates = learn_candidates(data, chosen, executor=executor)
    return fit_candidates(data, chosen, candidates, executor=executor, scratch=scratch)


@pytest.mark.parametrize("objective", ["auto", "calibrated", "rcb", "validation", "loo", "erm", "median", "cv"])
def test_every_objective_ends_in_a_model_that_knows_iris(iris, tmp_path, objective):
    trained = train(iris, recipe(objective=objective), SerialExecutor(), tmp_path / "scratch")
    X, y = iris.read("test")
    decided = trained.fit.embedding.decision(trained.fit.scaling.apply(X, "float64")).argmax(axis=1)
    assert (decided == y).mean() >= 0.9
    if objective == "auto":
        assert set(trained.losses) == {"learned", "common"}
        assert trained.best == trained.candidates[0]
        assert trained.fit.regularization == trained.best.regularization, "tuned on a sample, fitted as it is"
    elif objective != "cv":
        assert set(trained.losses) == {objective}


def test_workers_and_one_process_find_the_same_bits(iris, client, tmp_path):
    alone = train(iris, recipe(), SerialExecutor(), tmp_path / "a")
    together = train(iris, recipe(), DaskExecutor(client), tmp_path / "b")
    assert together.best.name == alone.best.name
    assert together.losses == alone.losses
    np.testing.assert_array_equal(together.fit.embedding.weights, alone.fit.embedding.weights)


def test_the_regularisation_stays_as_learned_where_that_is_asked_for(iris, tmp_path):
    for objective in ("auto", "rcb"):
        chosen = recipe(objective=objective, refit_regularization=False)
        trained = train(iris, chosen, SerialExecutor(), tmp_path / "scratch")
        assert trained.fit.regularization == trained.best.regularization
        assert trained.losses == {}, "nothing is tuned or compared"
        assert isinstance(trained.fit.embedding.kernel, kernels.Gaussian)


def test_without_steps_the_kernel_is_used_as_given(iris, tmp_path):
    given = Recipe(kernels.from_config("gaussian", n_features=4), steps=0, regularization=0.01)
    trained = train(iris, given, SerialExecutor(), tmp_path / "scratch")
    assert trained.fit.regularization == 0.01
    np.testing.assert_array_equal(
        trained.fit.embedding.kernel.parameters["length_scale"], given.kernel.parameters["length_scale"]
    )


# --- "auto": several kernels tuned on a sample, the best one fitted -----------------------------------


def made(kind, n, seed=0):
    """Rows in memory: pure noise; a smooth rule with noise; stripes of very different widths."""
    rng = np.random.default_rng(seed)
    if kind == "noise":
        X, y = rng.normal(size=(n, 3)), rng.integers(0, 3, n)
    elif kind == "smooth":
        X = rng.normal(size=(n, 4))
        score = 2 * X[:, 0] * X[:, 1] + X[:, 2] ** 2 - 1
        y = (rng.uniform(size=n) < 1 / (1 + np.exp(-3 * score))).astype(int)
    else:
        X = 10 ** rng.uniform(-3, 0, size=(n, 1)) * rng.choice([-1, 1], size=(n, 1))
        y = (np.floor(4 * np.log10(np.abs(X[:, 0]))) % 2).astype(int)
    return X, y


def candidates_of(X, y, **changes):
    data = ArrayRows(X, y, np.unique(y))
    start = kernels.from_config("gaussian", n_features=X.shape[1])
    return learn_candidates(data, Recipe(start, **{"steps": 10, **changes}), executor=SerialExecutor())


PROFILES = ["learned matern-3/2", "learned gaussian", "learned matern-1/2", "common matern-3/2"]


def test_candidates_share_the_learned_length_scales_up_to_one_factor():
    found = {c.name: c for c in candidates_of(*made("smooth", 300), profiles=True)}
    assert sorted(found) == sorted(PROFILES)
    lengths = {name: np.log(np.asarray(c.kernel.length_scale)) for name, c in found.items()}
    for name in PROFILES[1:3]:
        change = lengths[name] - lengths[PROFILES[0]]
        np.testing.assert_allclose(change, change[0], atol=1e-9)
    assert np.ptp(lengths["learned gaussian"]) > 0.1, "one length scale for each feature"
    assert {name: getattr(c.kernel, "nu", None) for name, c in found.items()} == dict(
        zip(PROFILES, [1.5, None, 0.5, 1.5], strict=True)
    )
    assert all(np.isfinite(c.loss) for c in found.values())


@pytest.mark.parametrize(
    ("gains", "chosen"),
    [
        ([0.0, 0.0, 0.0], 0),
        ([0.5, 0.5, 0.5], 0),  # all better, none by more than the standard error
        ([-3.0, 2.0, 0.5], 2),
        ([2.0, 3.0, 0.9], 2),
        ([2.0, 1.5, 4.0], 3),
    ],
)
def test_the_first_candidate_stays_unless_another_is_better_by_more_than_the_standard_error(monkeypatch, gains, chosen):
    """`gains` over the first candidate, in standard errors."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=100)
    noise = (noise - noise.mean()) / noise.std()  # the error of the mean of a difference is then 1/10
    seen = []  # kernels in the order of the candidates; some of them come back to be tuned further

    def tuned(rows, kernel, shift, *rest):
        if kernel not in seen:
            seen.append(kernel)
        gain = [0.0, *gains][seen.index(kernel)]
        losses = np.full(100, 1.0) if gain == 0 else 1.0 - gain / 10 - noise
        return Tuned(kernel, shift, float(losses.mean()), losses, 1)

    monkeypatch.setattr("kme_dist.run.train.tune_on_sample", tuned)
    monkeypatch.setattr("kme_dist.run.train.settle_on_sample", lambda rows, best, *rest: best)
    found = candidates_of(*made("noise", 60), profiles=True)
    assert found[0].name == PROFILES[chosen]
    assert [c.name for c in found[1:]] == [name for name in PROFILES if name != PROFILES[chosen]]
    assert [len(c.history) for c in found] == [10, 0, 0, 0]


def test_weights_count_where_candidates_are_compared():
    """Stripes and noise in the same rows: those that weigh next to nothing do not decide."""
    X, y = made("stripes", 300)
    heavy = np.arange(300) % 2 == 0
    y = np.where(heavy, y, np.random.default_rng(1).integers(0, 2, 300))
    model = kme_dist.MCEClassifier(steps=5).fit(X, y, sample_weight=np.where(heavy, 1.0, 1e-6))
    plain = kme_dist.MCEClassifier(steps=5).fit(X[heavy], y[heavy])
    assert min(model.loo_log_loss_.values()) < 0.5 * np.log(2)
    assert min(model.loo_log_loss_.values()) == pytest.approx(min(plain.loo_log_loss_.values()), abs=0.1)


@pytest.mark.parametrize("seed", [0, 1])
def test_rough_rules_get_a_rough_kernel_and_smooth_ones_none_that_is_roughest(seed):
    rough = kme_dist.MCEClassifier(steps=10).fit(*made("stripes", 400, seed))
    assert isinstance(rough.kernel_, kernels.Matern)
    assert rough.loo_log_loss_["learned gaussian"] > 1.5 * rough.loo_log_loss_[rough.objective_]
    smooth = kme_dist.MCEClassifier(steps=10).fit(*made("smooth", 500, seed))
    assert smooth.objective_ != "learned matern-1/2"
    assert smooth.loo_log_loss_["learned gaussian"] < smooth.loo_log_loss_["learned matern-1/2"]


GIVEN_KERNELS = [
    kernels.Gaussian(length_scale=np.ones(4)),
    kernels.Matern(nu=2.5, length_scale=np.ones(4)),
    kernels.Gaussian() + kernels.Linear(),
    kernels.Polynomial(degree=2),
    "laplace",
    "linear",
]


@pytest.mark.parametrize("kernel", GIVEN_KERNELS, ids=str)
def test_a_kernel_that_is_given_keeps_its_form(iris, kernel):
    X, y = iris.read("train")
    model = kme_dist.MCEClassifier(kernel=kernel, steps=5).fit(X, y)
    assert type(model.kernel_) is type(kernels.from_config(kernel, n_features=4))
    assert getattr(model.kernel_, "nu", None) == getattr(kernel, "nu", None)
    assert set(model.loo_log_loss_) == {"learned", "common"}
    assert model.score(X, y) > (0.6 if kernel == "linear" else 0.85)  # planes through the origin confuse two species


def test_a_warm_start_has_no_common_candidate_and_starts_at_the_shift_it_had(iris):
    X, y = iris.read("train")
    learned = kme_dist.MCEClassifier(steps=5).fit(X, y)
    shift = learned.regularization_ * len(np.unique(X, axis=0))
    warm = kme_dist.MCEClassifier(steps=5, warm_start=True, batch_size=40)
    vars(warm).update({name: value for name, value in vars(learned).items() if name.endswith("_")})
    warm.fit(X, y)
    assert set(warm.loo_log_loss_) == set(PROFILES[:3])
    assert warm.history_[0]["regularization"] * 40 == pytest.approx(shift, rel=1e-9)


def test_without_retuning_a_batch_and_all_rows_have_the_same_shift(iris):
    X, y = iris.read("train")
    chosen = {"kernel": "gaussian", "refit_regularization": False, "batch_size": 40}
    model = kme_dist.MCEClassifier(steps=4, learning_rate=1e-6, warm_start=True, **chosen).fit(X, y)
    shift, different = model.history_[-1]["regularization"] * 40, len(np.unique(X, axis=0))
    assert model.regularization_ * different == pytest.approx(shift, rel=1e-4)
    assert model.fit(X, y).regularization_ * different == pytest.approx(shift, rel=1e-4), "and does not drift"


def test_sums_of_a_small_table_are_those_of_its_stored_rows(iris):
    """Chunks can be added to them and removed: they are known by their digests."""
    X, y = iris.read("train")
    assert len(np.unique(X, axis=0)) < len(y), "a row is there twice"
    own = {"kernel": kernels.Gaussian(length_scale=np.ones(4)), "objective": "rcb", "steps": 0}
    given = Recipe(**own, solver="nystrom", centres=20)
    found = learn_candidates(iris, given, executor=SerialExecutor())
    trained = fit_candidates(iris, given, found, executor=SerialExecutor())
    statistics = trained.fit.statistics
    assert (statistics.rows, statistics.weight) == (len(y), len(y))
    present = RowsRef.of(iris, split="train", scaling=trained.fit.scaling, dtype="float32", classes=True)
    assert add_rows(statistics, present, executor=SerialExecutor(), scratch=Scratch.at(None)) == 0
    exact = fit_candidates(iris, Recipe(**own), found, executor=SerialExecutor())
    assert exact.fit.rows == len(y)


def test_auto_makes_a_limited_number_of_steps_at_a_falling_rate():
    settings = recipe(objective="auto").settings("calibrated", 4000)
    assert (settings.steps, settings.batch_size, settings.patience) == (20, 1000, None)
    many = Recipe(recipe().kernel, steps=1000)
    assert many.settings("calibrated", 4000).steps == _AUTO_STEPS < 1000
    rate = settings.schedule(0.1, 20)
    assert rate(0) == 0.1
    assert all(rate(t + 1) < rate(t) for t in range(20))
    assert [many.settings("calibrated", n).batch_size for n in (10, 2000, 10**6)] == [256, 500, 1000]
    for local in (7, 50, 500):  # whole rounds of replicas
        steps = Recipe(recipe().kernel, steps=1000 - 1000 % local, local_steps=local).settings("calibrated", 400).steps
        assert steps % local == 0
        assert max(local, _AUTO_STEPS - local) <= steps <= max(local, _AUTO_STEPS)


def test_only_the_best_candidate_is_fitted(iris, tmp_path, monkeypatch):
    fits = []
    real = fit_on_dataset

    def counted(data, kernel, lam, **options):
        fits.append((kernel, lam))
        return real(data, kernel, lam, **options)

    monkeypatch.setattr("kme_dist.run.train.fit_on_dataset", counted)
    trained = train(iris, recipe(profiles=True), SerialExecutor(), tmp_path / "scratch")
    assert fits == [(trained.best.kernel, trained.best.regularization)]
    assert len(trained.losses) == 4


ODD = {
    "one row per class": (np.array([[0.0, 1.0], [3.0, 1.0], [5.0, 2.0]]), np.array([0, 1, 2])),
    "two rows": (np.array([[0.0, 1.0], [3.0, 1.0]]), np.array([0, 1])),
    "constant features": (np.full((30, 2), 7.0), np.arange(30) % 2),
    "one feature constant": (np.stack([np.arange(30.0), np.full(30, 1e8)], axis=1), (np.arange(30) > 14).astype(int)),
    "equal rows, other labels": (np.repeat(np.eye(3), 10, axis=0), np.arange(30) % 3),
    "one row of a class": (np.arange(20.0)[:, None], (np.arange(20) == 7).astype(int)),
    "far away": (np.arange(40.0)[:, None] + 1e8, (np.arange(40) > 19).astype(int)),
    "many features": (np.random.default_rng(0).normal(size=(12, 200)), np.arange(12) % 2),
}


@pytest.mark.parametrize("scaling", ["unit", "standard", None])
@pytest.mark.parametrize("name", ODD)
def test_odd_rows_are_learned_without_a_crash(name, scaling):
    X, y = ODD[name]
    model = kme_dist.MCEClassifier(steps=3, scaling=scaling).fit(X, y)
    p = model.predict_proba(X)
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(model.predict(X), model.classes_[p.argmax(axis=1)])
    if name in ("far away", "one feature constant"):
        assert model.score(X, y) > 0.9


# --- the same everywhere -----------------------------------------------------------------------------


def same_model(one, other, Xq):
    """To the last bit: what was learned, how it was judged, and what it says."""
    assert one.kernel_ == other.kernel_
    for name in ("regularization_", "bound_", "loo_log_loss_", "objective_", "solver_", "probability_floor_"):
        assert getattr(one, name) == getattr(other, name), name
    assert one.calibration_.to_plain() == other.calibration_.to_plain()
    np.testing.assert_array_equal(one.embedding_.weights, other.embedding_.weights)
    many = np.tile(Xq, (-(-700 // len(Xq)), 1))  # enough rows for every path that a matrix product may take
    np.testing.assert_array_equal(one.predict_proba(many), other.predict_proba(many))
    for a, b in zip(one.history_, other.history_, strict=True):
        for name in ("step", "phase", "objective", "risk", "complexity", "accuracy", "regularization", "gradient_norm"):
            assert a[name] == b[name], name


SETTINGS = [
    {},
    {"kernel": "gaussian"},
    {"kernel": kernels.Matern(nu=2.5) + kernels.Linear(), "calibration": "softmax"},
    {"refit_regularization": False},
    {"class_weight": {0: 3.0}, "batch_size": 40},
    {"objective": "calibrated", "batch_size": 50},
    {"objective": "rcb", "batch_size": 30, "scaling": "standard"},
    {"objective": "validation", "batch_size": 50, "refit_regularization": False},
    {"objective": "loo", "steps": 3},
    {"objective": "cv"},
    {"objective": "median", "calibration": "temperature"},
    {"steps": 0, "regularization": 1e-3},
    {"solver": "nystrom", "centres": 30},
    {"solver": "tiled"},
    {"solver": "pcg"},
    {"features": 40},
    {"features": "polynomial", "solver": "features", "objective": "rcb"},
    {"kernel": "linear", "objective": "rcb"},
    {"scaling": None, "dtype": "float64", "calibration": "isotonic"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_estimator_learns_over_a_client_what_it_learns_alone(iris, client, settings):
    X, y = iris.read("train")
    Xq, yq = iris.read("test")
    chosen = {"steps": 6, **settings}
    alone = kme_dist.MCEClassifier(**chosen).fit(X, y)
    same_model(kme_dist.MCEClassifier(**chosen, client=client).fit(X, y), alone, Xq)
    same_model(kme_dist.MCEClassifier(**chosen, client=client).fit(iris), alone, Xq)
    same_model(kme_dist.MCEClassifier(**chosen).fit(iris), alone, Xq)
    assert alone.score(Xq, yq) > 0.5, "better than chance, which is a third"


@pytest.mark.parametrize("workers", [1, 8])
def test_the_number_of_workers_does_not_show(workers):
    X, y = make_blobs(240, 4, centers=4, cluster_std=3.0, random_state=1)
    chosen = {"steps": 10, "batch_size": 60}
    options = {"threads_per_worker": 1, "dashboard_address": ":0", "processes": workers == 1}
    with LocalCluster(n_workers=workers, **options) as cluster, Client(cluster) as client:
        over = kme_dist.MCEClassifier(**chosen, client=client).fit(X, y)
    same_model(over, kme_dist.MCEClassifier(**chosen).fit(X, y), X)


def test_the_layout_of_a_table_in_memory_does_not_show():
    X, y = make_blobs(90, 3, centers=3, cluster_std=2.0, random_state=3)
    by_rows = kme_dist.MCEClassifier(steps=5, scaling="standard").fit(X, y)
    by_columns = kme_dist.MCEClassifier(steps=5, scaling="standard").fit(np.asfortranarray(X), y)
    same_model(by_columns, by_rows, np.asfortranarray(X))
    np.testing.assert_array_equal(by_rows.predict_proba(X), by_rows.predict_proba(np.asfortranarray(X)))


def test_rows_far_from_the_origin_are_learned_in_the_same_precision_everywhere(client):
    X, y = make_blobs(120, 3, centers=3, cluster_std=2.0, random_state=2)
    far = (X + 20_000).astype(np.float64)
    chosen = {"scaling": None, "steps": 5, "objective": "rcb"}
    alone = kme_dist.MCEClassifier(**chosen).fit(far, y)
    same_model(kme_dist.MCEClassifier(**chosen, client=client).fit(far, y), alone, far)
    assert alone.score(far, y) == kme_dist.MCEClassifier(**chosen).fit(X, y).score(X, y)


def test_rows_in_memory_are_stored_for_the_workers_first(client):
    X, y = make_blobs(90, 3, centers=3, random_state=0)
    labels = np.array(["red", "green", "blue"])[y]
    over = kme_dist.MCEClassifier(steps=5, client=client).fit(X, labels)
    assert over.score(X, labels) > 0.95
    assert over.classes_.tolist() == ["blue", "green", "red"]
    assert over.n_features_in_ == 3


def test_a_model_made_over_a_client_is_stored_and_loaded_like_any_other(iris, client, tmp_path):
    over = kme_dist.MCEClassifier(steps=2, client=client).fit(iris)
    over.save(tmp_path / "model.zarr")
    Xq, _ = iris.read("test")
    np.testing.assert_array_equal(kme_dist.load(tmp_path / "model.zarr").predict_proba(Xq), over.predict_proba(Xq))


def test_dask_arrays_are_rows_like_any_other():
    import dask.array as da

    X, y = make_blobs(60, 2, centers=2, random_state=0)
    model = kme_dist.MCEClassifier(steps=2).fit(da.from_array(X, chunks=20), da.from_array(y, chunks=20))
    np.testing.assert_array_equal(model.predict(X), kme_dist.MCEClassifier(steps=2).fit(X, y).predict(X))


def test_data_without_classes_are_refused_before_any_work(tmp_path, client):
    data = ingest(np.eye(4), tmp_path / "plain.zarr")
    with pytest.raises(DataError, match="no class labels"):
        kme_dist.MCEClassifier(client=client).fit(data)


def test_a_fit_holds_blas_to_one_thread_whatever_the_size_of_the_table(monkeypatch):
    """Two threads for the factorisation of a batch gain nothing, and stall where the other core is busy."""
    seen = set()

    def spied(original):
        def call(*arguments, **options):
            seen.update(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
            return original(*arguments, **options)

        return call

    monkeypatch.setattr(learners, "rcb_objective", spied(learners.rcb_objective))
    monkeypatch.setattr(embedding, "solve_dual", spied(embedding.solve_dual))
    X, y = make_blobs(5_000, 2, centers=2, random_state=0)
    with threadpool_limits(2, user_api="blas"):
        kme_dist.MCEClassifier(objective="rcb", steps=2, batch_size=50, refit_regularization=False).fit(X, y)
    assert seen == {1}


def test_a_linear_kernel_is_solved_for_its_features_and_is_the_same_model(iris):
    X, y = iris.read("train")
    chosen = {"kernel": "linear", "steps": 0, "regularization": 1e-3, "dtype": "float64"}
    primal = kme_dist.MCEClassifier(**chosen).fit(X, y)
    dual = kme_dist.MCEClassifier(**chosen, solver="cholesky").fit(X, y)
    assert (primal.solver_, primal.embedding_.weights.shape) == ("features", (4, 3))
    np.testing.assert_allclose(primal.decision_probabilities(X), dual.decision_probabilities(X), atol=1e-10)


def test_explicit_features_are_stored_and_loaded_with_the_model(iris, tmp_path):
    X, y = iris.read("train")
    for number, settings in enumerate(({"features": 60}, {"features": "polynomial", "kernel": "linear"})):
        model = kme_dist.MCEClassifier(steps=5, objective="rcb", calibration="temperature", **settings).fit(X, y)
        assert model.solver_ == "features"
        model.save(tmp_path / f"{number}.zarr")
        again = kme_dist.load(tmp_path / f"{number}.zarr")
        np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
        assert again.score(X, y) > 0.9


LEARNERS = {
    "network": lambda **more: kme_dist.CENClassifier(hidden=(8, 4), steps=8, batch_size=40, **more),
    "network, exact gradient": lambda **more: kme_dist.CENClassifier(hidden=(6,), steps=4, **more),
    "network, two batches a step": lambda **more: kme_dist.CENClassifier(
        hidden=(6,), steps=4, batch_size=30, batches_per_step=2, refit_regularization=True, **more
    ),
    "kernel on a network": lambda **more: kme_dist.CENClassifier(hidden=(5,), head="gaussian", steps=4, **more),
    "spectral": lambda **more: kme_dist.ASKLClassifier(features=30, epochs=2, loss="cross_entropy", **more),
}


@pytest.mark.parametrize("learner", LEARNERS.values(), ids=LEARNERS)
def test_learned_features_have_the_same_bits_alone_over_a_client_and_from_disk(iris, client, learner):
    X, y = iris.read("train")
    Xq, _ = iris.read("test")
    alone = learner().fit(X, y)
    for other in (learner(client=client).fit(X, y), learner(client=client).fit(iris), learner().fit(iris)):
        np.testing.assert_array_equal(other.weights_, alone.weights_)
        np.testing.assert_array_equal(other.decision_function(Xq), alone.decision_function(Xq))
        assert other.bound_ == alone.bound_


def test_spectral_regression_has_the_same_bits_alone_over_a_client_and_from_disk(client, tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(150, 3))
    y = 1e3 + np.sin(X[:, 0]) + 0.1 * rng.normal(size=150)
    data = ingest((X, y), tmp_path / "numbers.zarr", task="regression", dtype="float64")
    alone = kme_dist.ASKLRegressor(features=30, epochs=2).fit(X, y)
    for other in (
        kme_dist.ASKLRegressor(features=30, epochs=2, client=client).fit(X, y),
        kme_dist.ASKLRegressor(features=30, epochs=2, client=client).fit(data),
        kme_dist.ASKLRegressor(features=30, epochs=2).fit(data),
    ):
        np.testing.assert_array_equal(other.predict(X), alone.predict(X))


@pytest.mark.parametrize("settings", [{"centres": 60}, {"centres": 119}, {"centres": 60, "steps": 0}], ids=str)
def test_centres_in_single_precision_are_as_good_as_in_double(settings):
    """Without noise the best λ is tiny, and the sums over rows must bear it."""
    rng = np.random.default_rng(0)
    X, Xq = rng.uniform(-1, 1, size=(120, 2)), rng.uniform(-1, 1, size=(500, 2))
    y, yq = (np.sin(3 * Z[:, 0]) + Z[:, 1] > 0 for Z in (X, Xq))
    chosen = {"objective": "rcb", "steps": 20, "regularization": 1e-6, "solver": "nystrom", **settings}
    narrow, wide = (kme_dist.MCEClassifier(dtype=dtype, **chosen).fit(X, y) for dtype in ("float32", "float64"))
    assert narrow.score(Xq, yq) >= wide.score(Xq, yq) - 0.004
    np.testing.assert_allclose(narrow.predict_proba(Xq), wide.predict_proba(Xq), atol=0.02)


def test_conjugate_gradients_choose_the_regularisation_that_the_other_exact_solvers_choose(iris):
    X, y = iris.read("train")
    by = {
        solver: kme_dist.MCEClassifier(objective="median", solver=solver, dtype="float64").fit(X, y)
        for solver in ("cholesky", "tiled", "pcg")
    }
    assert len({model.regularization_ for model in by.values()}) == 1
    assert len({model.loo_log_loss_["median"] for model in by.values()}) == 1


def test_a_linear_kernel_counts_the_rows_of_its_own_split(tmp_path):
    X, y = make_blobs(100, 85, centers=3, cluster_std=8.0, random_state=0)
    data = ingest(
        (X, y), tmp_path / "wide.zarr", task="classification", split="train=0:80,test=80:100", dtype="float64"
    )
    chosen = {"kernel": "linear", "objective": "rcb", "steps": 3}
    same_model(kme_dist.MCEClassifier(**chosen).fit(data), kme_dist.MCEClassifier(**chosen).fit(X[:80], y[:80]), X)
