"""The fit of stored data sets: five solvers that agree, whoever does the work and whatever dies on the way."""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import tracemalloc

import numpy as np
import pytest

from kme_dist import errors
from kme_dist.config import ClusterConfig
from kme_dist.core.embedding import clip_normalise
from kme_dist.core.features import from_config
from kme_dist.core.kernels import Gaussian, Matern
from kme_dist.core.nystrom import System
from kme_dist.core.regularization import retune_regularization
from kme_dist.core.risk import with_copies
from kme_dist.core.sums import Centres, OneHot, sum_rows
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import RowsRef
from kme_dist.ops.cluster import open_client
from kme_dist.run.executors import DaskExecutor, SerialExecutor
from kme_dist.run.fit import SOLVERS, Problem, Room, Size, choose, fit_on_dataset, pcg, refit, tiled
from kme_dist.run.fit.centres import MOST_PIVOTS, centres_on_worker, choice_bytes
from kme_dist.run.fit.choose import MANY_WORK, WORK
from kme_dist.run.fit.panels import labels, make_panels, measured_spans
from kme_dist.run.fit.pcg import GramSystem, Preconditioner
from kme_dist.run.fit.problem import CENTRES
from kme_dist.run.scratch import Scratch

choose_module = sys.modules["kme_dist.run.fit.choose"]  # its name in the package is that of its function

M = 3
KERNEL = Gaussian(length_scale=np.full(4, 0.6))


def made_up(n, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((n, 4))
    y = np.clip((X[:, 0] + X[:, 1] ** 2 + 0.15 * rng.normal(size=n)) * 1.6, 0, M - 1).astype(int)
    return X, y


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return ingest(
        made_up(600), tmp_path_factory.mktemp("fit") / "d.zarr", shuffle=0, split="train=0.8,test=0.2",
        chunk_bytes=2048, shard_bytes=8192, dtype="float64",
    )  # fmt: skip


@pytest.fixture
def fit(data, tmp_path):
    def call(solver, kernel=KERNEL, regularization=1e-4, retune=False, executor=None, dtype="float64", **more):
        return fit_on_dataset(
            data, kernel, regularization, solver=solver, retune=retune, dtype=dtype, scratch=tmp_path / "scratch",
            executor=executor or SerialExecutor(), **more,
        )  # fmt: skip

    call.scratch = tmp_path / "scratch"
    return call


@pytest.fixture(scope="module")
def client():
    with open_client(ClusterConfig(workers=2, dashboard=False)) as connected:
        yield connected


def exact(data, lam, kernel=KERNEL):
    X, y = data.read("train")
    low, high = X.min(axis=0), X.max(axis=0)
    Z = (X - low) / (high - low)
    n = len(Z)
    return Z, np.linalg.solve(kernel.gram(Z) + n * lam * np.eye(n), np.eye(M)[y])


def files(folder):
    return [path for path in folder.rglob("*") if path.is_file()] if folder.exists() else []


# --- the exact ones --------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["cholesky", "tiled", "pcg"])
@pytest.mark.parametrize("lam", [1e-3, 1e-6])
def test_exact_solvers_give_the_formula(solver, lam, fit, data):
    found = fit(solver, regularization=lam, tolerance=1e-9, tile_rows=100)
    Z, V = exact(data, lam)
    np.testing.assert_allclose(found.embedding.centres, Z, atol=1e-12)
    assert np.linalg.norm(found.embedding.weights - V) < 1e-6 * np.linalg.norm(V)
    left = KERNEL.gram(Z) @ found.embedding.weights + len(Z) * lam * found.embedding.weights
    Y = np.eye(M)[data.read("train")[1]]
    assert found.residual == pytest.approx(np.linalg.norm(left - Y) / np.linalg.norm(Y), rel=0.1, abs=1e-9)
    assert (found.rows, found.regularization, found.loss) == (len(Z), lam, None)
    assert found.iterations >= 1
    assert found.bytes > 0
    assert not files(fit.scratch), "the scratch folder is empty"


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["tiled", "pcg"])
def test_exact_solvers_agree_on_five_thousand_rows(solver, tmp_path):
    X, y = made_up(5000)
    data = ingest((X, y), tmp_path / "d.zarr", dtype="float64")
    kernel = Gaussian(length_scale=np.full(4, 0.4))
    V, other = (
        fit_on_dataset(
            data, kernel, 1e-6, solver=name, retune=False, dtype="float64", executor=SerialExecutor(),
            scratch=tmp_path / "s", tolerance=1e-8,
        ).embedding.weights
        for name in ("cholesky", solver)
    )  # fmt: skip
    assert np.linalg.norm(V - other) < 1e-6 * np.linalg.norm(V)


@pytest.mark.parametrize("tile_rows", [60, 125, 480, 5000])
def test_tiles_of_any_size_give_the_same_weights(tile_rows, fit, data):
    found = fit("tiled", tile_rows=tile_rows)
    assert found.facts["tile_rows"] == tile_rows
    V = exact(data, 1e-4)[1]
    np.testing.assert_allclose(found.embedding.weights, V, atol=1e-8 * np.abs(V).max())


def test_a_task_holds_a_few_tiles_and_no_more(fit, monkeypatch):
    """Nobody, driver or task, makes an array of more than tile x tile numbers, but for the rows and weights."""
    largest = []
    save = Scratch.save
    monkeypatch.setattr(Scratch, "save", lambda self, name, a: (largest.append(a.size), save(self, name, a))[1])
    fit("tiled", tile_rows=60)
    assert max(largest) == max(60 * 60, 480 * M)


def test_tiles_that_are_there_are_not_made_again(fit, monkeypatch):
    made = []
    original = tiled.factor_diagonal

    def stop_half_way(tiles, j):
        made.append(j)
        if j == 4 and made.count(4) == 1:
            raise KeyboardInterrupt
        original(tiles, j)

    monkeypatch.setattr(tiled, "factor_diagonal", stop_half_way)
    with pytest.raises(KeyboardInterrupt):
        fit("tiled", tile_rows=60)
    kept = {path.name for path in files(fit.scratch)}
    assert {"L-0-0.npy", "L-4-3.npy", "z-3.npy"} <= kept
    stamps = {path.name: path.stat().st_mtime_ns for path in files(fit.scratch)}
    seen = {}
    remember = Scratch.clear
    monkeypatch.setattr(
        Scratch, "clear",
        lambda self: (seen.update({p.name: p.stat().st_mtime_ns for p in files(self.place.path)}), remember(self))[1],
    )  # fmt: skip
    fit("tiled", tile_rows=60)
    assert {name: seen[name] for name in stamps} == stamps


def test_a_disk_or_worker_that_is_too_small_is_refused_beforehand(fit, monkeypatch):
    with pytest.raises(errors.ConfigError, match=r"tiles of 400 rows need .* set `tile_rows` lower"):
        fit("tiled", tile_rows=400, memory=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(errors.ConfigError, match=r"GB of disk for 480 rows, 0.0 GB are free"):
        fit("tiled")


def test_single_precision_is_left_where_lambda_is_too_small_for_it(fit):
    assert fit("tiled", dtype="float32", regularization=1e-3).facts["dtype"] == "float32"
    small = fit("tiled", dtype="float32", regularization=1e-8)
    assert small.facts["dtype"] == "float64"
    assert small.residual < 1e-4, "the weights are stored in single precision"


def test_conjugate_gradients_keep_their_word_or_say_so(fit, monkeypatch):
    for tolerance in (1e-2, 1e-8):
        assert fit("pcg", tolerance=tolerance).residual <= tolerance
    monkeypatch.setattr(pcg, "MAX_STEPS", 3)
    with pytest.raises(errors.NumericalError, match=r"at regularization .*, above the tolerance of"):
        fit("pcg", regularization=1e-6, tolerance=1e-12)


def test_the_preconditioner_saves_two_thirds_of_the_steps(data, tmp_path, monkeypatch):
    monkeypatch.setattr("kme_dist.core.cg._KEPT_BYTES", 0)  # as for rows so many that no earlier direction is kept
    rows = RowsRef.of(data, split="train", scaling="unit", dtype="float64", classes=True)
    problem = Problem(rows, KERNEL, SerialExecutor(), Scratch.at(tmp_path), 10**9)
    panels = make_panels(problem, "float64")
    Y = labels(panels)
    F = Preconditioner.build(panels, problem, rank=100)
    assert F.rank == 100
    plain = GramSystem(panels, problem, None, 1e-6).solve(Y, 1e-6).steps
    steps = GramSystem(panels, problem, F, 1e-6).solve(Y, 1e-6).steps
    assert steps <= plain / 3


@pytest.mark.parametrize("weighted", [False, True], ids=["rows", "weighted rows"])
def test_conjugate_gradients_hold_rows_out_and_decide_them_as_a_fit_without_them(weighted, monkeypatch, rng):
    monkeypatch.setattr(pcg, "LOO_ROWS", 100)
    monkeypatch.setattr(pcg, "_HELD_OUT_TOLERANCE", 1e-9)
    X, y = made_up(400)
    X[390:], y[390:] = X[:10], y[:10]  # copies
    w = rng.uniform(0.5, 2.0, 400) if weighted else np.ones(400)
    everyone = np.ones(400, bool)
    if weighted:
        w[[3, 393, 394, 200]] = 0.0  # both copies of a row, one of two, a row without a copy
        everyone = w > 0
    rows = ArrayRows(X, y, [0, 1, 2], weights=w if weighted else None)
    found = fit_on_dataset(
        rows, KERNEL, 1e-4, solver="pcg", retune=False, dtype="float64", scaling=None, executor=SerialExecutor(),
        tolerance=1e-9,
    )  # fmt: skip
    held = with_copies(X, y, w if weighted else None, pcg.LEFT_OUT_ROWS, 0)
    assert 35 <= held.sum() <= 60
    assert np.array_equal(held[390:393], held[:3]), "all copies or none"
    assert everyone[held].all()
    kept, shift = everyone & ~held, w.sum() * 1e-4
    V = np.linalg.solve(KERNEL.gram(X[kept]) + shift * np.diag(1 / w[kept]), np.eye(M)[y[kept]])
    np.testing.assert_allclose(found.left_out.decisions, KERNEL.gram(X[held], X[kept]) @ V, atol=1e-6)
    np.testing.assert_array_equal(found.left_out.codes, y[held])
    X, y, w = X[everyone], y[everyone], w[everyone]
    everything = np.linalg.solve(KERNEL.gram(X) + shift * np.diag(1 / w), np.eye(M)[y])
    decisions = KERNEL.gram(X) @ everything
    np.testing.assert_allclose(KERNEL.gram(X) @ found.embedding.weights, decisions, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_decisions_at_the_rows_of_the_fit_are_off_by_less_than_the_tolerance(dtype):
    X, y = made_up(3_000)
    rows = ArrayRows(X.astype(dtype), y, [0, 1, 2])
    exact, found = (
        fit_on_dataset(
            rows,
            KERNEL,
            1e-5,
            solver=solver,
            retune=False,
            dtype=dtype,
            scaling=None,
            executor=SerialExecutor(),
            tolerance=2e-3,
        )
        for solver in ("cholesky", "pcg")
    )
    assert found.facts["dtype"] == dtype, "single precision is enough for this tolerance"
    Z = X.astype(dtype).astype(float)
    wanted, F = (KERNEL.gram(Z) @ fit.embedding.weights.astype(float) for fit in (exact, found))
    assert np.linalg.norm(F - wanted) <= 2e-3 * math.sqrt(len(y)), "|K (K + nλI)⁻¹ r| <= |r|"
    assert found.residual <= 2e-3
    assert len(found.left_out.codes) == 300


@pytest.mark.parametrize(("lam", "solver"), [(1e-4, "pcg"), (1e-9, "cholesky")])
def test_auto_factorises_where_conjugate_gradients_would_take_hundreds_of_steps(lam, solver, monkeypatch):
    monkeypatch.setattr(choose_module, "FACTOR_WORK", 1e6)
    X, y = made_up(3_000)
    found = fit_on_dataset(
        ArrayRows(X.astype(np.float32), y, [0, 1, 2]), KERNEL, lam, retune=False, scaling=None,
        executor=SerialExecutor(),
    )  # fmt: skip
    assert found.solver == solver
    assert found.iterations < 50


@pytest.mark.parametrize(
    ("stripes", "retune", "solver"), [(1, "shared", "pcg"), (1, False, "cholesky"), (2, "shared", "cholesky")]
)
def test_lambda_is_raised_to_iterate_where_that_costs_nothing(stripes, retune, solver, monkeypatch):
    """Two wide stripes with a few wrong labels need no tiny λ; four narrow ones without noise do."""
    monkeypatch.setattr(choose_module, "FACTOR_WORK", 1e6)
    rng = np.random.default_rng(0)
    X = rng.random((2_500, 4))
    where = X[:, 0] * 2 * stripes
    apart = abs(where - where.round()) > 0.2
    X, y = X[apart][:1_400].astype(np.float32), np.floor(where[apart][:1_400]).astype(int) % 2
    y = np.where(rng.random(1_400) < (0.02 if stripes == 1 else 0.0), 1 - y, y)
    lam, said = 1e-9, []
    found = fit_on_dataset(
        ArrayRows(X, y, [0, 1]), Gaussian(length_scale=np.array([0.5, 2.0, 2.0, 2.0])), lam, retune=retune,
        scaling=None, executor=SerialExecutor(), report=said.append,
    )  # fmt: skip
    raised = solver == "pcg"
    assert found.solver == solver
    assert (found.regularization > lam) == any("raised" in line for line in said) == raised
    assert found.iterations < 50
    if raised:
        assert found.facts["dtype"] == "float32"
        assert np.mean(found.embedding.decision(X).argmax(axis=1) == y) > 0.97


def test_a_class_without_rows_gets_no_weight(tmp_path):
    X, y = made_up(300)
    data = ingest((X, np.where(y == 1, 2, y)), tmp_path / "d.zarr", dtype="float64", class_names=["0", "1", "2"])
    weights = {
        solver: fit_on_dataset(
            data, KERNEL, 1e-3, solver=solver, retune=False, dtype="float64", executor=SerialExecutor(),
            scratch=tmp_path / "s",
        ).embedding.weights
        for solver in ("cholesky", "tiled", "pcg", "nystrom")
    }  # fmt: skip
    absent = [i for i in range(weights["tiled"].shape[1]) if not np.any(weights["cholesky"][:, i])]
    for found in weights.values():
        assert not np.any(found[:, absent])


# --- λ ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["cholesky", "tiled"])
def test_exact_solvers_choose_lambda_by_leave_one_out(solver, fit, data):
    found = fit(solver, retune=True, floor=1e-3)
    X, y = found.embedding.centres, data.read("train")[1]
    lam, loss, _ = retune_regularization(KERNEL, X, y, M, start=1e-4, floor=1e-3)
    assert found.regularization == pytest.approx(lam)
    assert found.loss == pytest.approx(loss, rel=1e-6)


def test_conjugate_gradients_choose_lambda_by_leave_one_out(fit, data):
    found = fit("pcg", retune=True, floor=1e-3, tile_rows=80)
    Z, y = exact(data, 1e-4)[0], data.read("train")[1]
    n = len(Z)

    def left_out(lam):
        inverse = np.linalg.inv(KERNEL.gram(Z) + n * lam * np.eye(n))
        Y = np.eye(M)[y]
        p = clip_normalise(Y - (inverse @ Y) / np.diag(inverse)[:, None], 1e-3)
        return -np.log(p[np.arange(n), y]).mean()

    assert found.facts["leave_one_out_rows"] == n
    for lam, loss in found.tried:
        assert loss == pytest.approx(left_out(lam), abs=2e-3)
    assert found.loss <= min(loss for _, loss in found.tried) * 1.001


def test_centres_choose_lambda_by_leave_one_out(fit, data):
    found = fit("nystrom", centres=40, retune=True, floor=1e-3)
    assert found.facts["leave_one_out_rows"] == 480
    Z, y = exact(data, 1e-4)[0], data.read("train")[1]
    C, lam = found.embedding.centres, found.regularization
    K_nc, K_cc, Y, losses = KERNEL.gram(Z, C), KERNEL.gram(C), np.eye(M)[y], []
    for i in range(0, 480, 40):
        rest = np.arange(480) != i
        V = np.linalg.solve(K_nc[rest].T @ K_nc[rest] + 480 * lam * K_cc, K_nc[rest].T @ Y[rest])
        losses.append(clip_normalise(K_nc[i : i + 1] @ V, 1e-3)[0, y[i]])
    A = np.linalg.inv(K_nc.T @ K_nc + 480 * lam * K_cc)
    h = np.einsum("ij,jk,ik->i", K_nc, A, K_nc)
    P = Y - (Y - K_nc @ (A @ K_nc.T @ Y)) / (1 - h)[:, None]
    every = clip_normalise(P, 1e-3)[np.arange(480), y]
    np.testing.assert_allclose(every[::40], losses, rtol=1e-5)
    assert found.loss == pytest.approx(-np.log(every).mean(), rel=1e-6)
    assert found.facts["effective_dimension"] == pytest.approx(h.sum(), rel=1e-5)


# --- centres and features --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rpcholesky", "kmeans++", "uniform"])
def test_centres_solve_the_projected_problem(how, fit, data):
    found = fit("nystrom", centres=60, centre_choice=how, kernel=Matern(length_scale=np.ones(4), nu=1.5))
    kernel, C = found.embedding.kernel, found.embedding.centres
    Z, y = exact(data, 1e-4)[0], data.read("train")[1]
    K_nc, K_cc = kernel.gram(Z, C), kernel.gram(C)
    V = np.linalg.solve(K_nc.T @ K_nc + len(Z) * 1e-4 * K_cc, K_nc.T @ np.eye(M)[y])
    np.testing.assert_allclose(found.embedding.decision(Z), K_nc @ V, atol=1e-6)
    assert len(C) == 60
    assert found.residual < 1e-8
    assert len(np.unique(C, axis=0)) == 60, "no row is a centre twice"


@pytest.mark.parametrize("lam", [1e-4, 1e-8])
def test_every_row_a_centre_is_the_exact_fit(lam, fit, data):
    """Sums of squares keep half the digits: at 1e-8 they were off by percents, in double precision too."""
    Z, V = exact(data, lam)
    y, P = data.read("train")[1], KERNEL.gram(Z) @ V
    bound = 20 * 1.1e-16 * np.linalg.norm(KERNEL.gram(Z), 2) / (len(Z) * lam) * np.sqrt(len(Z))
    for centres in (480, 5000, None):
        found = fit("nystrom", regularization=lam, centres=centres)
        assert (found.solver, found.facts["centres"]) == ("nystrom", 480)
        assert np.abs(found.embedding.decision(Z) - P).max() <= bound
    memory = fit_on_dataset(
        ArrayRows(Z, y, range(M)), KERNEL, lam, executor=SerialExecutor(), scaling=None, dtype="float64", retune=False,
        solver="nystrom", centres=480,
    )  # fmt: skip
    assert memory.solver == "nystrom"
    assert np.abs(memory.embedding.decision(Z) - P).max() <= bound


def test_every_row_a_centre_chooses_lambda_as_the_exact_fit_does(fit):
    dual, centres = (fit(solver, retune=True, floor=1e-3) for solver in ("cholesky", "nystrom"))
    assert (centres.regularization, centres.loss) == (dual.regularization, dual.loss)
    again = refit(
        centres.statistics, 1e-4, executor=SerialExecutor(), scratch=fit.scratch, scaling=centres.scaling, floor=1e-3
    )
    assert again.regularization == pytest.approx(dual.regularization)
    assert again.loss == pytest.approx(dual.loss, rel=1e-4), "sums judge a row by the same formula"


def test_sums_lose_twice_the_digits(fit, data):
    """What is left of a fit to fewer centres, and to those an update is made from: u (|K|/nλ)²."""
    X = exact(data, 1e-4)[0]
    statistics = fit("nystrom", centres=480).statistics
    norm = np.linalg.norm(KERNEL.gram(X), 2)
    for lam in (1e-3, 1e-4, 1e-5):
        again = refit(
            statistics, lam, executor=SerialExecutor(), scratch=fit.scratch, scaling=None, retune=False
        )  # fmt: skip
        P = KERNEL.gram(X) @ exact(data, lam)[1]
        apart = np.abs(again.embedding.decision(X) - P).max()
        assert apart <= 10 * 1.1e-16 * (norm / (480 * lam)) ** 2


class Unsplit(Centres):
    leading = None


def test_smooth_kernels_keep_their_detail_in_single_precision(data):
    """Squared in single precision as they are, the rows of a smooth kernel would drown in rounding."""
    smooth = Gaussian(length_scale=np.full(4, 1.5))
    Z, y = exact(data, 1e-4)[0], data.read("train")[1]

    def weights(kind, dtype):
        rows = Z.astype(dtype)
        basis = kind(smooth, rows[:100])
        total = sum_rows(basis, rows, y, OneHot(M))
        V = System(total.G, total.B, basis.metric(), len(Z), total.noise).solve(1e-8)
        return smooth.gram(Z, Z[:100]) @ V

    wanted, split, whole = weights(Centres, "float64"), weights(Centres, "float32"), weights(Unsplit, "float32")
    assert np.linalg.norm(split - wanted) < 0.3 * np.linalg.norm(whole - wanted)


def test_explicit_features_give_ridge_regression(fit, data):
    features = from_config({"name": "random_fourier", "features": 50}, n_features=4, seed=1)
    found = fit("features", features=features)
    Z, y = exact(data, 1e-4)[0], data.read("train")[1]
    Phi = features.forward(Z)
    W = np.linalg.solve(Phi.T @ Phi + len(Z) * 1e-4 * np.eye(Phi.shape[1]), Phi.T @ np.eye(M)[y])
    np.testing.assert_allclose(found.embedding.weights, W, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(found.embedding.decision(Z), Phi @ W, atol=1e-9)
    assert fit("auto", features=features, retune=True).solver == "features"


# --- whoever does the work -------------------------------------------------------------------------


@pytest.mark.parametrize("solver", ["cholesky", "tiled", "pcg", "nystrom"])
def test_workers_give_the_bits_of_a_single_process(solver, fit, client):
    settings = {"retune": solver == "nystrom", "centres": 50, "tile_rows": 120, "dtype": "float32"}
    alone, together = (fit(solver, executor=e, **settings) for e in (SerialExecutor(), DaskExecutor(client)))
    assert alone.regularization == together.regularization
    np.testing.assert_array_equal(alone.embedding.weights, together.embedding.weights)
    np.testing.assert_array_equal(alone.embedding.centres, together.embedding.centres)


class Assassin(DaskExecutor):
    """Kills a worker in the middle of its third round."""

    rounds = 0

    def map(self, function, calls, *, name):
        self.rounds += 1
        if self.rounds == 3:
            pids = self.client.run(os.getpid)
            os.kill(next(iter(pids.values())), signal.SIGKILL)
        return super().map(function, calls, name=name)


@pytest.mark.chaos(3)
@pytest.mark.parametrize("solver", ["tiled", "pcg"])
def test_a_worker_that_dies_changes_nothing(solver, fit, client):
    undisturbed = fit(solver, tile_rows=100)
    killed = fit(solver, tile_rows=100, executor=Assassin(client))
    np.testing.assert_array_equal(killed.embedding.weights, undisturbed.embedding.weights)
    client.wait_for_workers(1, timeout=60)


# --- choosing --------------------------------------------------------------------------------------


def test_auto_goes_by_rows_and_memory_never_by_workers_and_says_why():
    def auto(n, room=10**10, **more):
        return choose("auto", Size(n), more.get("centres"), None, Room(room, room, room))

    assert auto(1000)[0] == "cholesky"
    assert auto(1000, room=6 * 10**6)[0] == "tiled"
    assert auto(10_000).solver == "cholesky"
    assert auto(15_000).solver == auto(15_000, room=10**9).solver == auto(30_000).solver == "pcg"
    assert auto(15_000).tolerance > choose("pcg", Size(15_000)).tolerance, "exact if asked for"
    assert choose("auto", Size(15_000, columns=200)).solver == "cholesky", "steps cost more than a factor"
    assert choose("auto", Size(15_000), iterate=False).solver == "cholesky"
    assert choose("auto", Size(30_000), iterate=False).solver == "falkon"
    assert auto(60_000).solver == "falkon"
    assert auto(60_000, room=2 * 10**8).solver == "nystrom"
    assert auto(60_000, centres=3_000).solver == "nystrom"
    assert auto(60_000, centres=9_000)[:3] == ("falkon", "9000 centres requested", 9_000)
    assert choose("auto", Size(60_000, labelled=False)).solver == "nystrom", "it solves for classes"
    assert auto(1000, centres=50)[:3] == ("nystrom", "50 centres requested", 50)
    assert "60000 rows" in auto(60_000).reason
    assert "fit_seconds" in auto(60_000).reason


def test_the_number_of_centres_follows_from_the_work_that_is_allowed(monkeypatch):
    monkeypatch.setattr(choose_module, "measured_speed", lambda: 1e9)

    def auto(n, seconds=None, room=10**11):
        return choose("auto", Size(n), None, None, Room(room, room, room), seconds)

    for n in (40_000, 100_000, 1_000_000):
        found, allowed = auto(n), MANY_WORK * max(1.0, n / 1e5)
        cost = SOLVERS["falkon"].cost
        assert found.solver == "falkon"
        assert cost(Size(n, basis=found.centres)).flops <= allowed
        assert found.centres == n // 2 or cost(Size(n, basis=found.centres + 500)).flops > allowed
    few = [choose("auto", Size(n, labelled=False)).centres for n in (20_000, 60_000, 200_000, 10**7)]
    assert few == sorted(few, reverse=True)
    assert few[-1] == CENTRES
    assert all(
        SOLVERS["nystrom"].cost(Size(n, basis=p)).flops <= WORK for n, p in ((60_000, few[1]), (200_000, few[2]))
    )
    assert auto(60_000, room=3 * 10**8).centres < auto(60_000, room=10**9).centres < auto(60_000).centres
    assert auto(5_000, seconds=1.0).solver == "nystrom"
    assert auto(5_000, seconds=60.0).solver == "cholesky"
    assert auto(700, room=2**21).centres == 12, "fewer than 100 where memory is too small for these"
    with pytest.raises(errors.ConfigError, match="fit_seconds=0"):
        auto(5_000, seconds=0)


def test_threads_and_workers_do_not_change_the_choice_where_memory_is_enough(monkeypatch):
    monkeypatch.setattr("kme_dist.run.executors.free_bytes", lambda backend: 14 * 10**9)
    big = Size(100_000, 7, width=54)

    def auto(threads):
        return choose("auto", big, room=Room.of(SerialExecutor(threads), Scratch()))

    assert auto(1) == auto(8)
    assert auto(1).centres == choose("auto", big).centres > 10_000
    monkeypatch.setattr("kme_dist.run.executors.free_bytes", lambda backend: 2 * 10**9)
    assert auto(8).centres < choose("auto", big).centres
    assert f"there would be {choose('auto', big).centres}" in auto(8).reason


def test_workers_have_the_memory_that_they_were_started_with(client, tmp_path):
    limits = [worker["memory_limit"] for worker in client.scheduler_info(n_workers=-1)["workers"].values()]
    room = Room.of(DaskExecutor(client), Scratch.at(tmp_path / "not" / "there"))
    assert room.task == room.alone == int(0.6 * min(limits)), "one thread each"
    assert room.scratch == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert Room.of(DaskExecutor(client), Scratch(), memory=10**9) == (10**9, 10**9, 10**9)


@pytest.mark.parametrize("more", [{"dtype": "float64"}, {"tolerance": 1e-5}])
def test_more_digits_do_not_take_rows_from_the_fit(more, fit, monkeypatch):
    """Here every fit may iterate, and none may factorise."""
    monkeypatch.setattr(choose_module, "FACTOR_WORK", 0.0)
    monkeypatch.setattr(choose_module, "_iterates", lambda *given: True)
    settings = {"dtype": "float32", **more}
    assert fit("auto", **settings, regularization=1e-3).solver == "pcg"
    assert fit("auto", **settings, regularization=1e-9).solver != "pcg", "hundreds of steps"


def test_the_speed_of_this_machine_is_measured():
    assert 1e7 < choose_module.measured_speed() < 1e14


def test_a_solver_that_is_asked_for_is_taken_where_it_fits():
    assert choose("nystrom", Size(500), None, None, Room(10**10))[:3] == ("nystrom", "requested", CENTRES)
    with pytest.raises(errors.ConfigError, match=r"needs 166.6 GB on one worker for 100000 centres.* fewer `centres`"):
        choose("nystrom", Size(10**6, dtype="float64"), 100_000, None, Room(10**10))


@pytest.mark.parametrize("solver", SOLVERS)
def test_costs_grow_as_the_table_says(solver):
    """Ten times the rows: exact solvers by at least a hundred times the work, sums over rows by ten."""
    one, ten = (SOLVERS[solver].cost(Size(rows, columns=M)) for rows in (100_000, 1_000_000))
    assert min(one.memory, one.flops) > 0
    growth = ten.flops / one.flops
    assert 5 <= growth <= 11 if solver in ("nystrom", "falkon", "features") else growth >= 80
    assert (ten.memory == one.memory) == (solver in ("tiled", "nystrom", "falkon", "features"))


@pytest.mark.parametrize("solver", ["cholesky", "tiled", "pcg"])
def test_a_fit_holds_no_more_than_its_cost_says(solver, fit):
    found = fit(solver, tile_rows=100)
    cost = SOLVERS[solver].cost(Size(480, columns=M, dtype="float64", tile_rows=100))
    assert found.bytes <= 1.5 * (cost.scratch or cost.memory)


@pytest.mark.parametrize("count", [1_500, MOST_PIVOTS + 500])
def test_choosing_centres_holds_no_more_than_its_cost_says(count):
    width, dtype = 12, "float32"
    X = np.random.default_rng(0).random((3 * count, width), dtype=dtype)
    rows = RowsRef.of(ArrayRows(X, np.zeros(len(X), int), range(1)), dtype=dtype)
    how = "rpcholesky" if count <= MOST_PIVOTS else "leverage"
    tracemalloc.start()
    centres_on_worker(rows, Gaussian(length_scale=np.full(width, 0.1)), count, how, len(X), 0, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.5 < peak / choice_bytes(Size(len(X), 1, count, width, dtype=dtype)) <= 1.0


def test_centres_are_a_function_of_the_seed(data):
    X, y = data.read("train")
    rows = ArrayRows(X, y, range(M))
    first, again, other = (
        fit_on_dataset(
            rows, KERNEL, 1e-3, executor=SerialExecutor(), solver="nystrom", centres=10, retune=False, seed=seed
        ).embedding.centres
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("solver", ["nystrom", "features"])
def test_sums_need_no_scratch_folder(solver, data, client):
    """Their matrices come home with the tasks: the same bits as through a folder."""
    features = from_config({"name": "random_fourier", "features": 50}, n_features=4, seed=1)
    more = {"features": features} if solver == "features" else {"centres": 40}
    alone, together = (
        fit_on_dataset(data, KERNEL, 1e-4, executor=executor, solver=solver, **more)
        for executor in (SerialExecutor(), DaskExecutor(client))
    )
    assert alone.regularization == together.regularization
    np.testing.assert_array_equal(alone.embedding.weights, together.embedding.weights)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"solver": "lu"}, "solver='lu' is unknown; choose 'auto', 'cholesky', 'tiled'"),
        ({"solver": "features"}, "solver='features' requires a feature map"),
        ({"solver": "cholesky", "memory": 1000}, "needs 3.7 MB on one worker for 480 rows.*'tiled'"),
        ({"solver": "nystrom", "centre_choice": "best"}, "centre_choice='best' is unknown; choose one of rpcholesky"),
    ],
)
def test_what_cannot_be_done_is_said(change, line, fit):
    with pytest.raises(errors.ConfigError, match=line):
        fit(**change)


def test_data_without_labels_or_rows_are_refused(tmp_path):
    X, _ = made_up(20)
    plain = ingest(X, tmp_path / "x.zarr")
    common = {"executor": SerialExecutor(), "scratch": tmp_path / "s"}
    with pytest.raises(errors.DataError, match="has no class labels"):
        fit_on_dataset(plain, KERNEL, 1e-3, **common)


def test_the_loss_is_finite_with_two_rows(tmp_path):
    data = ingest((np.eye(2), [0, 1]), tmp_path / "d.zarr")
    found = fit_on_dataset(
        data, Gaussian(length_scale=np.ones(2)), 1e-3, executor=SerialExecutor(), scratch=tmp_path / "s"
    )
    assert math.isfinite(found.loss)
    assert found.solver == "cholesky"


def test_features_that_are_all_zero_are_solved_exactly():
    G, B = np.zeros((3, 3)), np.zeros((3, 2))
    assert System(G, B, None, 10, 0.0).residual(1e-2, np.zeros((3, 2))) == 0.0


def test_the_residual_is_measured_at_all_rows_or_at_stretches_from_first_to_last():
    assert measured_spans(1024) == [(0, 1024)]
    assert measured_spans(15_000) == [(0, 256), (4914, 5170), (9829, 10085), (14744, 15000)]
