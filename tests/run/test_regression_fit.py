"""Numeric targets on many centres: the equations of the direct solve, rows held out, whatever is killed."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.kernels import Matern
from kme_dist.core.pivots import choose_centres
from kme_dist.data.arrays import ArrayRows
from kme_dist.errors import ConfigError
from kme_dist.run.executors import SerialExecutor
from kme_dist.run.fit import Size, choose, falkon
from kme_dist.run.fit.choose import MOST_PIVOTS
from kme_dist.run.regression import fit_regression, numeric_rows, target_of
from kme_dist.run.train import Candidate, Recipe

KERNEL = Matern(length_scale=np.full(3, 0.8), nu=1.5)
LAM, CENTRES = 1e-4, 80


def source(n=600, weights=None, outputs=2):
    rng = np.random.default_rng(0)
    X = rng.random((n, 3))
    Y = np.stack([np.sin(5 * X[:, 0]) + 0.1 * rng.normal(size=n), 1e3 * X[:, 1]], axis=1)[:, :outputs]
    return ArrayRows(X, Y, None, weights=weights)


def fit(rows, *, executor=None, scratch=None, **settings):
    given = {"solver": "falkon", "centres": CENTRES, "dtype": "float64", "refit_regularization": False}
    recipe = Recipe(
        kernel=KERNEL, regularization=LAM, scaling="unit", **{**given, "fit": {"tolerance": 1e-11}} | settings
    )
    return fit_regression(
        rows, recipe, Candidate("given", KERNEL, LAM), executor=executor or SerialExecutor(), scratch=scratch
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_the_direct_solution_on_the_rows_that_were_not_held_out(weighted, monkeypatch):
    monkeypatch.setattr(falkon._Work, "losses", lambda self, F: [0.0])  # no step is worse than the one before
    monkeypatch.setattr(falkon, "_PATIENCE", 1_000)
    monkeypatch.setattr(falkon, "MOST_STEPS", 300)
    w = np.random.default_rng(1).integers(1, 4, 600).astype(float) if weighted else None
    found = fit(source(weights=w))
    rows = numeric_rows(source(weights=w), Recipe(kernel=KERNEL, scaling="unit", dtype="float64"))
    X, y = rows.read()
    held = np.isin(np.arange(600), rows.draw(100, 0).rows)
    Y, w = target_of(rows, SerialExecutor()).standardised(y), np.ones(600) if w is None else w
    C = found.embedding.centres
    Z, own = KERNEL.gram(X, C), np.where(held, 0.0, w)
    A = Z.T @ (own[:, None] * Z) / own.sum() + LAM * KERNEL.gram(C)
    f = Z @ np.linalg.solve(A, Z.T @ (own[:, None] * Y) / own.sum())
    np.testing.assert_allclose(found.embedding.decision(X), f, atol=1e-5)
    e = found.left_out.residuals
    assert e.shape == (100, 2)
    np.testing.assert_allclose(np.sort(e, axis=0), np.sort((Y - f)[held], axis=0), atol=1e-5)
    np.testing.assert_allclose(np.unique(found.left_out.held_out, axis=0), np.unique(X[held], axis=0))


def test_of_two_values_of_lambda_the_better_one_on_rows_held_out_is_taken():
    found = fit(source(), refit_regularization=True, steps=1)
    losses = found.facts["lambdas"]
    assert len(losses) == 2
    assert found.regularization == pytest.approx([LAM, 0.1 * LAM][int(np.argmin(list(losses.values())))])


class Interrupted(SerialExecutor):
    """Ends like a killed process before its third pass over the rows."""

    passes = 3

    def map_reduce(self, function, calls, combine, *, name, sticky=False):
        self.passes -= name == "normal-product"
        if not self.passes:
            raise KeyboardInterrupt
        return super().map_reduce(function, calls, combine, name=name, sticky=sticky)


def test_centres_are_chosen_as_the_settings_say():
    rows = source()
    X = numeric_rows(rows, Recipe(kernel=KERNEL, scaling="unit", dtype="float64")).read()[0]
    for how in ("rpcholesky", "uniform", "kmeans++", "leverage"):
        found = fit(rows, solver="nystrom", fit={"centre_choice": how})
        np.testing.assert_array_equal(found.embedding.centres, X[choose_centres(KERNEL, X, CENTRES, how, 0)])
        assert found.facts["centre_choice"] == how


class Counts(SerialExecutor):
    """How many tasks of each name there were at once, at most."""

    def __init__(self):
        super().__init__()
        self.most = {}

    def map(self, function, calls, *, name):
        self.most[name] = max(self.most.get(name, 0), len(calls))
        return super().map(function, calls, name=name)


@pytest.mark.parametrize(("solver", "name", "tasks"), [("tiled", "factor-tile", 5), ("pcg", "pivoted-cholesky", 6)])
def test_tiles_have_the_rows_and_the_memory_that_the_settings_say(solver, name, tasks):
    executor, whole = Counts(), fit(source(), solver=solver)
    found = fit(source(), solver=solver, executor=executor, fit={"tile_rows": 100, "tolerance": None})
    np.testing.assert_allclose(found.embedding.weights, whole.embedding.weights, rtol=1e-3, atol=1e-3)
    assert executor.most[name] == tasks  # of 600 rows; below the diagonal tile there are fewer
    if solver == "tiled":
        with pytest.raises(ConfigError, match="set `tile_rows` lower"):
            fit(source(), solver=solver, memory=100_000)


def test_a_killed_fit_resumes_to_the_same_bits(tmp_path):
    whole = fit(source())
    with pytest.raises(KeyboardInterrupt):
        fit(source(), executor=Interrupted(), scratch=tmp_path)
    assert list(tmp_path.rglob("progress.npy"))
    again = fit(source(), scratch=tmp_path)
    assert not list(tmp_path.rglob("*.npy"))
    np.testing.assert_array_equal(again.embedding.weights, whole.embedding.weights)
    np.testing.assert_array_equal(again.left_out.residuals, whole.left_out.residuals)


def test_with_every_row_a_centre_and_with_few_rows_the_fit_is_exact():
    assert fit(source(60), centres=100).left_out.held_out is None
    assert fit(source(8), centres=4).left_out.held_out is None


def test_auto_takes_many_centres_where_a_factorisation_costs_too_much():
    assert choose("auto", Size(10_000, width=8), iterate=False).solver == "cholesky"
    many = choose("auto", Size(40_000, width=8), iterate=False)
    assert many.solver == "falkon"
    assert many.centres > MOST_PIVOTS
