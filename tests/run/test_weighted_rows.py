"""Weights of rows in learning and fitting: weight 2 is the row twice, weight 0 no row, the same bits everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from distributed import Client, LocalCluster

from kme_dist.core import kernels
from kme_dist.core.features import Identity, from_config
from kme_dist.core.spectral import VARIANTS
from kme_dist.core.sums import Centres
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.reading import Table
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.models.askl import SpectralLearner
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.fit import FitStatistics, add_rows, fit_on_dataset, gather, refit, remove_rows
from kme_dist.run.fit.panels import make_panels
from kme_dist.run.fit.pcg import Preconditioner
from kme_dist.run.fit.problem import Problem
from kme_dist.run.full import full_gradient
from kme_dist.run.learn import Batches, learn, learn_on_dataset
from kme_dist.run.learners import KernelLearner, LearnSettings, NetworkLearner, SoftmaxLearner, log_parameters, start_of
from kme_dist.run.scratch import Scratch

N, D, M = 240, 3, 3
KERNEL = kernels.Gaussian(length_scale=np.full(D, 0.8))
SERIAL = SerialExecutor()
NAMES = ["a", "b", "c"]
# Direct solvers agree to rounding times the condition number (1e3 here); conjugate gradients to their tolerance; sums
# of squares lose u (|K|/nλ)².
SOLVERS = {
    "cholesky": ({}, 1e-9),
    "tiled": ({"tile_rows": 100}, 1e-9),
    "pcg": ({"tolerance": 1e-10}, 1e-7),
    "nystrom": ({"centres": 40}, 1e-7),
    "features": ({"features": Identity()}, 1e-9),
}


def table(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, D)) * [1, 10, 0.1] + [0, 3, 1000]
    y = (np.argsort(np.argsort(X[:, 0] + 0.3 * rng.normal(size=N))) * M // N).astype(np.int64)
    return X, y, rng.uniform(1.0, 4.0, N), rng.integers(1, 4, N)


def in_memory(X, y, w=None):
    return ArrayRows(X, y, NAMES, ["u", "v", "w"], weights=None if w is None else np.asarray(w, np.float64))


def fitted(source, solver, **more):
    options = {"scaling": "standard", "dtype": "float64", "retune": False, **SOLVERS[solver][0], **more}
    return fit_on_dataset(source, KERNEL, 1e-3, executor=more.pop("executor", SERIAL), solver=solver, **{
        name: value for name, value in options.items() if name != "executor"
    })  # fmt: skip


def decisions(fit, X):
    return np.asarray(fit.embedding.decision(fit.scaling.apply(X, "float64")))


@pytest.mark.parametrize("solver", SOLVERS)
def test_integer_weights_are_repeated_rows_for_every_solver(solver):
    X, y, _, counts = table()
    new = table(1)[0]
    # With all distinct rows as centres Nystrom is the exact fit of either.
    all_rows = {"centres": N} if solver == "nystrom" else {}
    one = fitted(in_memory(X, y, counts), solver, **all_rows)
    two = fitted(in_memory(np.repeat(X, counts, axis=0), np.repeat(y, counts)), solver, **all_rows)
    np.testing.assert_allclose(one.scaling.factor, two.scaling.factor, rtol=1e-10)
    tolerance = 1e-4 if solver == "nystrom" else SOLVERS[solver][1]
    np.testing.assert_allclose(decisions(one, new), decisions(two, new), atol=tolerance)
    assert one.weight == two.weight == counts.sum()
    assert one.residual < 1e-8


@pytest.mark.parametrize("solver", ["cholesky", "tiled", "pcg"])
def test_regularization_is_retuned_alike_for_integer_weights_and_repeated_rows(solver):
    """Equal rows are left out together: a copy that stayed in would tell the label, and λ would vanish."""
    X, y, _, counts = table()
    one = fitted(in_memory(X, y, counts), solver, retune=True)
    two = fitted(in_memory(np.repeat(X, counts, axis=0), np.repeat(y, counts)), solver, retune=True)
    assert two.regularization == pytest.approx(one.regularization, rel=1e-9)
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert len(one.tried) == len(two.tried) > 3


@pytest.mark.parametrize("retune", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_of_weight_zero_are_no_rows_for_every_solver(solver, retune):
    X, y, w, _ = table()
    w[::5] = 0
    X[5] = 1e6  # not in the range of the features either
    kept = w > 0
    new = table(1)[0]
    one = fitted(in_memory(X, y, w), solver, retune=retune)
    two = fitted(in_memory(X[kept], y[kept], w[kept]), solver, retune=retune)
    assert one.regularization == pytest.approx(two.regularization, rel=1e-9)
    np.testing.assert_allclose(decisions(one, new), decisions(two, new), atol=SOLVERS[solver][1])
    if solver != "features":
        assert len(one.embedding.centres) == len(two.embedding.centres) <= kept.sum()


def refits(fit, solver, X, y, w):
    """Decisions of every row under the fit without it; the shifts of the other rows stay."""
    Z, Y, W = fit.scaling.apply(X, "float64"), np.eye(M)[y], w.sum()
    P = np.empty((N, M))
    if solver in ("nystrom", "features"):
        centres = None if solver == "features" else np.asarray(fit.embedding.centres, np.float64)
        Phi = Z if centres is None else np.asarray(KERNEL.gram(Z, centres))
        metric = np.eye(D) if centres is None else np.asarray(KERNEL.gram(centres))
        for i in range(N):
            rest = np.arange(N) != i
            G = (Phi[rest].T * w[rest]) @ Phi[rest] + W * fit.regularization * metric
            P[i] = Phi[i] @ np.linalg.solve(G, (Phi[rest].T * w[rest]) @ Y[rest])
        return P
    K = np.asarray(KERNEL.gram(Z))
    A = K + np.diag(W * fit.regularization / w)
    for i in range(N):
        rest = np.arange(N) != i
        P[i] = K[i, rest] @ np.linalg.solve(A[np.ix_(rest, rest)], Y[rest])
    return P


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_left_out_of_a_fit_are_decided_by_refits_without_them(solver, weighted):
    """Every row of a small table is left out, in an order of its own; labels and weights come along."""
    X, y, w, _ = table()
    fit = fitted(in_memory(X, y, w if weighted else None), solver)
    found = fit.left_out
    w = w if weighted else np.ones(N)
    wanted = refits(fit, solver, X, y, w)
    assert found.decisions.shape == (N, M)
    order, own = np.lexsort(wanted.T), np.lexsort(found.decisions.T)
    # Sums of squares lose u (|K|/nλ)², conjugate gradients are not used for it.
    np.testing.assert_allclose(found.decisions[own], wanted[order], atol=1e-6)
    np.testing.assert_array_equal(found.codes[own], y[order])
    if weighted:
        np.testing.assert_array_equal(found.weights[own], w[order])
    else:
        assert found.weights is None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("solver", ["cholesky", "tiled", "pcg"])
def test_an_exact_fit_knows_its_risk_and_norm_on_the_rows(solver, weighted):
    X, y, w, _ = table()
    w = w if weighted else None
    fit = fitted(in_memory(X, y, w), solver)
    P, V = decisions(fit, X), np.asarray(fit.embedding.weights, np.float64)
    risk = -np.average(np.log(np.clip(P[np.arange(N), y], 1e-15, 1)), weights=w)
    np.testing.assert_allclose(fit.training, (risk, np.sum(V * P)), rtol=1e-6)


def test_more_rows_than_are_left_out_are_sampled_by_the_seed(monkeypatch):
    monkeypatch.setattr("kme_dist.run.fit.exact.LEFT_OUT_ROWS", 50)
    X, y, w, _ = table()
    one, same, other = (fitted(in_memory(X, y, w), "cholesky", seed=seed) for seed in (1, 1, 2))
    assert one.left_out.decisions.shape == (50, M)
    np.testing.assert_array_equal(one.left_out.decisions, same.left_out.decisions)
    assert set(one.left_out.weights) != set(other.left_out.weights)
    every = refits(one, "cholesky", X, y, w)
    rows = [int(np.flatnonzero(w == weight)[0]) for weight in one.left_out.weights]
    np.testing.assert_allclose(one.left_out.decisions, every[rows], atol=1e-8)
    np.testing.assert_array_equal(one.left_out.codes, y[rows])


def test_the_exact_solvers_agree_and_leave_no_residual():
    X, y, w, _ = table()
    fits = [fitted(in_memory(X, y, w), solver, retune=True) for solver in ("cholesky", "tiled", "pcg")]
    for fit in fits:
        assert fit.regularization == pytest.approx(fits[0].regularization)
        np.testing.assert_allclose(decisions(fit, X), decisions(fits[0], X), atol=1e-7)
        assert fit.residual < 1e-8
    A = KERNEL.gram(fits[0].scaling.apply(X, "float64")) + np.diag(w.sum() * fits[0].regularization / w)
    V = np.linalg.solve(A, np.eye(M)[y])
    np.testing.assert_allclose(fits[0].embedding.weights, V, rtol=1e-6, atol=1e-9)


def test_the_preconditioner_is_that_of_the_weighted_matrix():
    X, y, w, _ = table()
    w[::6] = 0
    rows = RowsRef.of(in_memory(X, y, w), scaling="standard", dtype="float64", classes=True)
    problem = Problem(rows, KERNEL, SERIAL, Scratch.at(None), 1 << 30, tile_rows=90)
    panels = make_panels(problem, "float64")
    found = Preconditioner.build(panels, problem, rank=60)
    F = np.concatenate([np.asarray(panels.scratch.load(f"F-{i}")) for i in range(len(panels.blocks))])
    K = KERNEL.gram(rows.read()[0]) * np.sqrt(np.outer(w, w))
    assert found.unexplained == pytest.approx(np.trace(K - F @ F.T) / np.trace(K), rel=1e-6)
    assert found.unexplained < 0.2
    assert np.linalg.eigvalsh(K - F @ F.T).min() > -1e-9, "what is left of the matrix is still positive"


# --- additive models ---------------------------------------------------------------------------------


def test_chunks_with_weights_are_added_removed_and_stored(tmp_path):
    X, y, w, _ = table()
    first = RowsRef.of(in_memory(X[:100], y[:100], w[:100]), dtype="float64", classes=True)
    second = RowsRef.of(in_memory(X[100:], y[100:], w[100:]), dtype="float64", classes=True)
    both = RowsRef.of(in_memory(X, y, w), dtype="float64", classes=True)
    plain = Scaling(np.zeros(D), np.ones(D))
    tools = {"executor": SERIAL, "scratch": Scratch.at(None)}
    basis = Centres(KERNEL, X[::8])
    statistics = gather(first, basis, **tools)
    add_rows(statistics, second, **tools)
    statistics.save(tmp_path / "s.zarr")
    statistics = FitStatistics.load(tmp_path / "s.zarr")
    assert statistics.rows == N
    assert statistics.weight == pytest.approx(w.sum())
    np.testing.assert_array_equal(np.sort(statistics.sample.weights), np.sort(w))

    def solved(held):
        fit = refit(held, 1e-3, executor=SERIAL, scratch=tmp_path / "x", scaling=plain, retune=True, floor=1e-3)
        return fit.loss, decisions(fit, X)

    for a, b in zip(solved(statistics), solved(gather(both, basis, **tools)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    remove_rows(statistics, second, **tools)
    assert statistics.weight == pytest.approx(w[:100].sum())
    for a, b in zip(solved(statistics), solved(gather(first, basis, **tools)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    # The same rows with other weights are other rows.
    assert add_rows(statistics, RowsRef.of(in_memory(X[:100], y[:100], 2 * w[:100]), dtype="float64", classes=True),
                    **tools) == 100  # fmt: skip


# --- learning ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("risk", ["sum", "mean"])
@pytest.mark.parametrize("prior", [None, 1.0])
def test_learning_with_integer_weights_is_learning_from_repeated_rows(risk, prior):
    X, y, _, counts = table()
    settings = LearnSettings(risk=risk, steps=8, batch_size=10_000, learning_rate=0.05, prior_width=prior)
    sources = in_memory(X, y, counts), in_memory(np.repeat(X, counts, axis=0), np.repeat(y, counts))
    one, two = (
        learn_on_dataset(s, KERNEL, 0.1, settings, executor=SERIAL, scaling="standard", dtype="float64")
        for s in sources
    )
    np.testing.assert_allclose(one.regularization, two.regularization, rtol=1e-6)
    np.testing.assert_allclose(one.kernel.length_scale, two.kernel.length_scale, rtol=1e-6)
    for a, b in zip(one.history, two.history, strict=True):
        for name in ("objective", "risk", "accuracy", "bound"):
            assert a[name] == pytest.approx(b[name], rel=1e-6)


def network():
    return from_config({"name": "dense_network", "hidden": [8, 5]}, n_features=D, seed=3)


SETTINGS = LearnSettings(steps=4, batch_size=60, learning_rate=0.05, seed=2)


def spectral():
    start = from_config({"name": "spectral", "features": 12}, n_features=D, seed=3)
    width = start.forward(np.zeros((1, D))).shape[1]
    return SpectralLearner(start, VARIANTS["askl"], "hinge", M, 1e-3, 1e-3), {
        **start_of(start),
        "W": np.random.default_rng(0).normal(size=(width, M)),
    }


LEARNERS = {
    "kernel": lambda: (KernelLearner(KERNEL, SETTINGS, M), log_parameters(KERNEL, 0.1)),
    "network": lambda: (NetworkLearner(network(), SETTINGS, M), start_of(network(), 0.1)),
    "softmax": lambda: (learner := SoftmaxLearner(network(), SETTINGS, M), learner.start(5)),
    "spectral": spectral,
}


@pytest.mark.parametrize("name", LEARNERS)
def test_every_learner_counts_a_row_of_weight_two_twice(name):
    learner, start = LEARNERS[name]()
    X, y, _, counts = table()
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    one = learner.evaluate(start, X, y, 0, weights=counts.astype(float))
    two = learner.evaluate(start, np.repeat(X, counts, axis=0), np.repeat(y, counts), 0)
    for field in ("value", "risk", "accuracy"):
        assert getattr(one, field) == pytest.approx(getattr(two, field), rel=1e-10)
    for key in two.gradient:
        largest = np.abs(two.gradient[key]).max(initial=0)
        np.testing.assert_allclose(one.gradient[key], two.gradient[key], rtol=1e-8, atol=1e-8 * largest)


def test_halves_of_a_batch_keep_their_weights():
    learner = NetworkLearner(network(), SETTINGS, M, halves=True, loss="softmax")
    X, y, w, _ = table()
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    start = start_of(network(), 0.1)
    plain = learner.evaluate(start, X, y, 0)
    mean = NetworkLearner(network(), LearnSettings(risk="mean", seed=2), M, halves=True, loss="softmax")
    equal = learner.evaluate(start, X, y, 0, weights=np.ones(N))
    assert equal.value == pytest.approx(plain.value, rel=1e-12)
    assert learner.evaluate(start, X, y, 0, weights=w).value != pytest.approx(plain.value, rel=1e-3)
    one, two = (mean.evaluate(start, X, y, 0, weights=c * w) for c in (1, 5))
    assert one.value == pytest.approx(two.value, rel=1e-10)


def test_full_gradients_with_integer_weights_are_those_of_repeated_rows():
    X, y, _, counts = table()
    one, two = (
        full_gradient(s, network(), 0.01, executor=SERIAL, scaling="standard", spans=spans)
        for s, spans in (
            (in_memory(X, y, counts), ((0, 100), (100, 100), (100, N))),
            (in_memory(np.repeat(X, counts, axis=0), np.repeat(y, counts)), None),
        )
    )
    for field in ("value", "risk", "bound", "accuracy"):
        assert getattr(one, field) == pytest.approx(getattr(two, field), rel=1e-9)
    for key in two.gradient:
        np.testing.assert_allclose(one.gradient[key], two.gradient[key], rtol=1e-6, atol=1e-8)


# --- the same bits everywhere ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def executors():
    clusters = [
        LocalCluster(n_workers=count, threads_per_worker=1, processes=False, dashboard_address=":0") for count in (1, 3)
    ]
    clients = [Client(cluster) for cluster in clusters]
    yield [SERIAL, *(DaskExecutor(client) for client in clients)]
    for client, cluster in zip(clients, clusters, strict=True):
        client.close()
        cluster.close()


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Weights that are scaled up (they are below 1), with factors of classes, in memory and stored."""
    X, y, w, _ = table()
    place = tmp_path_factory.mktemp("rows") / "rows.zarr"
    stored = ingest(Table(X, y, ["u", "v", "w"], NAMES, weights=w / 100), place, task="classification", dtype="float64")
    return [source.with_class_factors((1.0, 2.5, 0.5)) for source in (in_memory(X, y, w / 100), stored)]


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_weighted_fit_has_the_same_bits_everywhere(solver, sources, executors, tmp_path):
    found = set()
    for source in sources:
        for executor in executors:
            fit = fitted(source, solver, retune=True, floor=1e-3, executor=executor, scratch=tmp_path)
            found.add((fit.regularization, fit.loss, np.asarray(fit.embedding.weights).tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("name", LEARNERS)
def test_weighted_learning_has_the_same_bits_everywhere(name, sources, executors):
    learner, start = LEARNERS[name]()
    found, plain = set(), None
    for source in sources:
        for executor in executors:
            batches = Batches.of(source, batch_size=60, seed=2, scaling="standard", dtype="float64")
            end = learn(learner, batches, start, SETTINGS, executor=executor, batches_per_step=2).parameters
            found.add(tuple(np.asarray(value).tobytes() for value in end.values()))
    assert len(found) == 1
    X, y, _, _ = table()
    batches = Batches.of(in_memory(X, y), batch_size=60, seed=2, scaling="standard", dtype="float64")
    plain = learn(learner, batches, start, SETTINGS, batches_per_step=2).parameters
    assert tuple(np.asarray(value).tobytes() for value in plain.values()) not in found, "the weights count"
