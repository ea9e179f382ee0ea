"""The fit on many centres by conjugate gradients: the solution of the direct solve, whatever is killed."""

from __future__ import annotations

import pickle
from typing import ClassVar

import numpy as np
import pytest

from kme_dist import errors
from kme_dist.core.kernels import Gaussian, Matern, Spectrum
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.rows import RowsRef
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.fit import falkon, fit_on_dataset
from kme_dist.run.scratch import Scratch

M = 3
KERNEL = Matern(length_scale=np.full(4, 0.8), nu=1.5)


def table(n=1_200, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((n, 4))
    y = np.clip((X[:, 0] + X[:, 1] ** 2 + 0.15 * rng.normal(size=n)) * 1.6, 0, M - 1).astype(int)
    return X, y


def source(X, y, weights=None):
    return ArrayRows(X, y, range(M), weights=weights)


@pytest.fixture
def without_held_out_rows(monkeypatch):
    monkeypatch.setattr(falkon, "_HELD_OUT", (0, 0.0))
    monkeypatch.setattr(falkon, "MOST_STEPS", 300)


def fit(rows, solver="falkon", regularization=1e-4, *, executor=None, **more):
    settings = {"centres": 150, "centre_choice": "uniform", "dtype": "float64", "scaling": None, "retune": False}
    return fit_on_dataset(
        rows, KERNEL, regularization, solver=solver, executor=executor or SerialExecutor(), **{**settings, **more}
    )


# --- the solution ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_the_direct_solution_for_the_same_centres(lam, weighted, without_held_out_rows):
    X, y = table()
    weights = np.random.default_rng(1).integers(0, 3, len(y)).astype(float) if weighted else None
    rows = source(X, y, weights)
    direct = fit(rows, "nystrom", lam)
    found = fit(rows, regularization=lam, tolerance=1e-11)
    np.testing.assert_array_equal(found.embedding.centres, direct.embedding.centres)
    np.testing.assert_allclose(found.embedding.decision(X), direct.embedding.decision(X), atol=1e-7)
    assert found.residual <= 1e-11


@pytest.mark.parametrize("tile_rows", [16, 100, 150, 1_000])
def test_tiles_of_any_size_give_the_same_solution(tile_rows, without_held_out_rows):
    X, y = table()
    found = fit(source(X, y), tile_rows=tile_rows, tolerance=1e-11)
    direct = fit(source(X, y), "nystrom")
    np.testing.assert_allclose(found.embedding.decision(X), direct.embedding.decision(X), atol=1e-8)


@pytest.mark.parametrize("choice", ["rpcholesky", "leverage", "kmeans++"])
def test_centres_chosen_in_any_way_take_few_steps(choice, without_held_out_rows):
    X, y = table()
    found = fit(source(X, y), centre_choice=choice, tolerance=1e-8)
    direct = fit(source(X, y), "nystrom", centre_choice=choice)
    np.testing.assert_allclose(found.embedding.decision(X), direct.embedding.decision(X), atol=1e-5)
    assert found.iterations < 60
    assert found.facts["centre_choice"] == choice


def test_single_precision_gives_three_digits(without_held_out_rows):
    X, y = table()
    direct, found = (fit(source(X, y), solver, dtype=dtype, tolerance=1e-6).embedding.decision(X)
                     for solver, dtype in (("nystrom", "float64"), ("falkon", "float32")))  # fmt: skip
    np.testing.assert_allclose(found, direct, atol=1e-3)


# --- rows held out -----------------------------------------------------------------------------------


def test_the_best_regularisation_on_rows_held_out_is_taken(monkeypatch):
    monkeypatch.setattr(falkon, "_FRACTIONS", (100.0, 1.0, 1e-4))
    X, y = table(4_000)
    found = fit(source(X, y), regularization=1e-4, retune="shared")
    assert found.facts["held_out_rows"] == 200
    losses = list(found.facts["lambdas"].values())
    assert len(losses) == 3
    assert found.loss == min(losses)
    assert found.regularization == pytest.approx([1e-2, 1e-4, 1e-8][int(np.argmin(losses))])
    assert len(found.left_out.codes) == 200


def test_a_regularisation_that_was_not_tuned_is_searched_before_the_steps():
    X, y = table(2_000)
    rows, few = source(X, y), {"centres": 400, "retune": True}
    far, near, direct = (
        fit(rows, solver, lam, **few) for solver, lam in (("falkon", 10.0), ("falkon", 1e-6), ("nystrom", 1e-6))
    )
    assert far.regularization == pytest.approx(near.regularization, rel=3.0)
    assert 1e-8 < far.regularization < 1e-2
    assert far.facts["leave_one_out_rows"] == 2_000
    found, wanted = (one.embedding.decision(X).argmax(axis=1) for one in (far, direct))
    assert np.mean(found == wanted) > 0.97


def test_a_fit_in_memory_has_the_bits_of_one_in_a_folder(tmp_path):
    rows, few = source(*table()), {"tile_rows": 64, "dtype": "float32"}
    here, there = (fit(rows, scratch=scratch, **few) for scratch in (None, tmp_path / "scratch"))
    np.testing.assert_array_equal(here.embedding.weights, there.embedding.weights)


@pytest.mark.parametrize("retune", [False, "shared"])
def test_without_retuning_the_given_regularisation_stays(retune):
    found = fit(source(*table()), regularization=3e-4, retune=retune)
    assert (found.regularization == 3e-4) is (retune is False or found.regularization == 3e-4)
    assert len(found.facts["lambdas"]) == (1 if retune is False else len(falkon._FRACTIONS))


def test_labels_of_rows_held_out_do_not_enter_the_fit(monkeypatch):
    monkeypatch.setattr(falkon, "MOST_STEPS", 1)  # which step is kept depends on them
    X, y = table(2_400)
    rows = RowsRef.of(source(X, y), classes=True)
    held = rows.draw(120, 0)
    other = y.copy()
    other[held.rows] = (other[held.rows] + 1) % M
    one, two = (fit(source(X, labels), tolerance=1e-12) for labels in (y, other))
    np.testing.assert_array_equal(one.embedding.weights, two.embedding.weights)
    assert one.loss != two.loss


def test_steps_end_when_the_loss_of_rows_held_out_no_longer_falls():
    X, y = table(4_000)
    found = fit(source(X, y), regularization=1e-9, retune=True)
    assert found.iterations < falkon.MOST_STEPS
    assert found.residual > 1e-6, "it stopped before the equations were solved"


# --- tasks -------------------------------------------------------------------------------------------


def test_nobody_holds_more_than_a_tile_of_the_factors(monkeypatch, tmp_path):
    saved = []
    save = Scratch.save
    monkeypatch.setattr(Scratch, "save", lambda self, name, a: (saved.append((name, a.size)), save(self, name, a))[1])
    X, y = table()
    fit(source(X, y), tile_rows=40, scratch=tmp_path)
    tiles = [size for name, size in saved if name[0] in "LR" or name.startswith("square")]
    assert tiles
    assert max(tiles) == 40 * 40
    assert not list(tmp_path.rglob("*.npy")), "a finished fit leaves nothing behind"


class Interrupted(SerialExecutor):
    """Ends like a killed process before a given pass over the rows."""

    def __init__(self, passes):
        super().__init__()
        self.passes = passes

    def map_reduce(self, function, calls, combine, *, name, sticky=False):
        if name == "normal-product":
            self.passes -= 1
            if self.passes < 0:
                raise KeyboardInterrupt
        return super().map_reduce(function, calls, combine, name=name, sticky=sticky)


@pytest.mark.parametrize("passes", [0, 1, 4])
def test_a_killed_fit_resumes_with_its_next_step_to_the_same_bits(passes, tmp_path):
    rows, lines = source(*table()), []
    whole = fit(rows, retune="shared")
    with pytest.raises(KeyboardInterrupt):
        fit(rows, retune="shared", executor=Interrupted(passes), scratch=tmp_path)
    counting = Interrupted(1_000)
    resumed = fit(rows, retune="shared", executor=counting, scratch=tmp_path, report=lines.append)
    np.testing.assert_array_equal(resumed.embedding.weights, whole.embedding.weights)
    assert (resumed.regularization, resumed.iterations, resumed.loss) == (
        whole.regularization, whole.iterations, whole.loss,
    )  # fmt: skip
    assert 1_000 - counting.passes == whole.iterations - passes
    assert any("resumes after step" in line for line in lines) is (passes > 0)


def test_another_regularisation_does_not_resume_from_the_steps_of_the_first(tmp_path):
    rows = source(*table())
    with pytest.raises(KeyboardInterrupt):
        fit(rows, executor=Interrupted(2), scratch=tmp_path)
    found = fit(rows, regularization=1e-2, scratch=tmp_path)
    np.testing.assert_array_equal(found.embedding.weights, fit(rows, regularization=1e-2).embedding.weights)


@pytest.mark.parametrize("changed", [{"tile_rows": 100}, {"floor": 0.3}])
def test_tiles_of_another_size_and_losses_of_another_floor_are_not_resumed(changed, tmp_path):
    rows = source(*table())
    with pytest.raises(KeyboardInterrupt):
        fit(rows, executor=Interrupted(2), scratch=tmp_path, tile_rows=40)
    settings, lines = {"tile_rows": 40, **changed}, []
    found = fit(rows, scratch=tmp_path, report=lines.append, **settings)
    assert not any("resumes after step" in line for line in lines)
    np.testing.assert_array_equal(found.embedding.weights, fit(rows, **settings).embedding.weights)
    assert found.loss == fit(rows, **settings).loss


@pytest.mark.parametrize("sampled", [(), ((7, 50), (400, 420))])
def test_calls_do_not_grow_with_the_rows_held_out(sampled, tmp_path):
    class Measured(SerialExecutor):
        sizes: ClassVar[list[int]] = []

        def map_reduce(self, function, calls, combine, *, name, sticky=False):
            own = [[part for part in call if not isinstance(part, RowsRef)] for call in calls]
            self.sizes += [len(pickle.dumps(call)) for call in own]
            return super().map_reduce(function, calls, combine, name=name, sticky=sticky)

    rows = source(*table(4_000))
    found = fit(rows, executor=Measured(), scratch=tmp_path, sampled=sampled)
    assert found.facts["held_out_rows"] == (63 if sampled else 200)
    assert max(Measured.sizes) < 1_600, "8 bytes for each of 200 rows"
    assert max(Measured.sizes) - min(Measured.sizes) < 100
    np.testing.assert_array_equal(found.embedding.weights, fit(rows, sampled=sampled).embedding.weights)


def test_equal_centres_are_no_obstacle(without_held_out_rows):
    X, y = table(300)
    X = np.repeat(X[:30], 10, axis=0)
    found = fit(source(X, y), centres=200, tolerance=1e-7, dtype="float32")
    assert np.isfinite(found.embedding.decision(X)).all()


def test_rows_that_are_not_vectors_are_refused():
    with pytest.raises(errors.ConfigError, match=r"solver='falkon' requires rows of numbers.*'cholesky'"):
        fit_on_dataset(
            ArrayRows(["ab", "ba", "aab"] * 5, np.arange(15) % 2, range(2)), Spectrum(p=2), 1e-3, solver="falkon",
            centres=5, executor=SerialExecutor(), scaling=None, retune=False,
        )  # fmt: skip


@pytest.mark.slow
def test_twenty_thousand_rows_with_half_as_many_centres_are_near_the_exact_fit():
    X, y = table(6_000)
    Xq, yq = table(3_000, seed=9)
    kernel = Gaussian(length_scale=np.full(4, 0.3))
    accuracy = []
    for solver, more in (("cholesky", {}), ("falkon", {"centres": 3_000})):
        found = fit_on_dataset(
            source(X, y), kernel, 1e-5, solver=solver, executor=SerialExecutor(), scaling=None, retune=False, **more
        )
        accuracy.append(np.mean(found.embedding.decision(Xq).argmax(axis=1) == yq))
    assert abs(accuracy[0] - accuracy[1]) < 0.01
