"""Normal scores for columns with heavy tails."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.data.curves import Curves
from kme_dist.data.rows import Scaling


def table(n=500, seed=0):
    """A normal, a uniform, a lognormal, a binary and a mostly empty column."""
    rng = np.random.default_rng(seed)
    empty = np.where(rng.uniform(size=n) < 0.7, 0.0, rng.exponential(size=n))
    rare = (rng.uniform(size=n) < 0.02).astype(float)
    return np.stack([rng.normal(size=n), rng.uniform(size=n), np.exp(2 * rng.normal(size=n)), rare, empty], axis=1)


def test_only_columns_with_heavy_tails_get_a_curve():
    """Rare values of binary columns have a large kurtosis, too, but a curve through two points is a line."""
    X = table()
    curves = Curves.of(X)
    assert curves.columns.tolist() == [2]
    Z = curves.apply(X)
    np.testing.assert_array_equal(Z[:, [0, 1, 3, 4]], X[:, [0, 1, 3, 4]])
    assert Curves.of(X[:, :2]) is None
    assert Curves.of(X[:20]) is None


def test_a_curve_keeps_the_order_and_gives_normal_scores_from_0_to_1():
    X = table(2_000)
    curves = Curves.of(X)
    z = curves.apply(X)[:, 2]
    order = np.argsort(X[:, 2])
    assert np.all(np.diff(z[order]) >= 0)
    assert (z.min(), z.max()) == (0.0, 1.0)
    away = (z - z.mean()) / z.std()
    assert abs(np.mean(away**4) - 3) < 0.5
    assert abs(np.mean(away**3)) < 0.2
    assert X[:, 2].max() > 100 * np.median(X[:, 2])


def test_values_beyond_those_of_the_fit_are_at_the_ends():
    X = table()
    curves = Curves.of(X)
    far = np.tile(X[:1], (2, 1))
    far[:, 2] = [-1e30, 1e30]
    assert curves.apply(far)[:, 2].tolist() == [0.0, 1.0]


def test_one_wrong_cell_does_not_hide_the_others():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(400, 1))
    spoiled = x.copy()
    spoiled[7] = 1e12
    z = Curves.of(spoiled).apply(spoiled)[:, 0]
    others = np.arange(400) != 7
    assert np.corrcoef(z[others], x[others, 0])[0, 1] > 0.99


@pytest.mark.parametrize("factor", [1e-250, 1.0, 1e250])
def test_curves_do_not_depend_on_the_unit(factor):
    X = table()
    one, two = Curves.of(X), Curves.of(X * factor)
    assert one.columns.tolist() == two.columns.tolist()
    np.testing.assert_allclose(one.values, two.values, atol=1e-12)
    np.testing.assert_allclose(one.knots * factor, two.knots, rtol=1e-12)


def test_a_row_of_weight_two_is_the_row_twice():
    X = table(200)
    counts = np.random.default_rng(1).integers(1, 4, len(X))
    one, two = Curves.of(X, counts.astype(float)), Curves.of(np.repeat(X, counts, axis=0))
    assert one.columns.tolist() == two.columns.tolist()
    np.testing.assert_allclose(one.knots, two.knots, rtol=1e-10)
    np.testing.assert_allclose(one.values, two.values, rtol=1e-10, atol=1e-12)


def test_counts_have_a_knot_for_each_frequent_value():
    rng = np.random.default_rng(2)
    x = rng.geometric(0.4, size=(1_000, 1)).astype(float)
    x[:5] = 1_000
    curves = Curves.of(x)
    z = curves.apply(x)[:, 0]
    assert [np.unique(z[x[:, 0] == v]).size for v in (1, 2, 3, 1_000)] == [1, 1, 1, 1]
    assert 0 == z[x[:, 0] == 1][0] < z[x[:, 0] == 2][0] < z[x[:, 0] == 3][0] < 1


def test_a_scaling_with_curves_is_stored_and_restored():
    X = table()
    plain = Scaling.learn(X, "unit")
    curves = Curves.of(plain.apply(X, "float64"))
    scaling = Scaling(plain.shift, plain.factor, curves)
    again = Scaling.restored(scaling.stored())
    np.testing.assert_array_equal(again.apply(X, "float32"), scaling.apply(X, "float32"))
    assert scaling.to_plain() == again.to_plain() != plain.to_plain()
    assert again.curves.digest == curves.digest
    assert scaling.apply(X, "float32").dtype == np.float32
    weights = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    np.testing.assert_allclose(scaling.weighted(weights).apply(X, "float64"), scaling.apply(X, "float64") * weights)


@pytest.mark.parametrize("cell", [1e100, -1e100])
def test_features_with_a_curve_are_in_their_own_units(cell):
    """Minus its least value, -1e100, a feature would have one value only."""
    X = table()
    X[0, 0] = cell
    plain = Scaling.learn(X, "unit")
    curves = Curves.of(X)
    flat = plain.flattened(curves)
    assert 0 in curves.columns
    assert len(np.unique(flat.apply(X, "float32")[:, 0])) > len(X) / 2
    rest = [j for j in range(X.shape[1]) if j not in curves.columns]
    np.testing.assert_array_equal(flat.apply(X, "float64")[:, rest], plain.apply(X, "float64")[:, rest])
    assert plain.flattened(None) is plain
