"""Calibration: honest decisions in closed form, and maps that make probabilities mean what they say."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from kernel_table import labels, vectors

from kme_dist.core import embedding as mce
from kme_dist.core.calibration import (
    KINDS,
    Calibration,
    class_probabilities,
    expectation,
    leave_one_out_decisions,
    with_argmax,
)
from kme_dist.core.kernels import Gaussian
from kme_dist.core.metrics import Tally
from kme_dist.errors import ConfigError

M, LAM = 3, 0.02


def distorted(n=4000, power=0.4, seed=1):
    """Labels drawn from p, and probabilities p^power that are underconfident about them."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(M, 0.5), n)
    codes = np.array([rng.choice(M, p=row) for row in p])
    q = p**power
    return q / q.sum(axis=1, keepdims=True), codes, p


def figures(p, codes):
    return Tally.of(codes, p).metrics(["a", "b", "c"])


def test_temperature_finds_the_power_that_was_applied():
    q, _, p = distorted()
    q_more, codes_more, _ = distorted(seed=2)
    found = Calibration.fit("temperature", q_more, codes_more)
    assert found.temperature == pytest.approx(0.4, rel=0.08)
    np.testing.assert_allclose(found.apply(q), p, atol=0.06)


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_other_rows_are_better_calibrated_afterwards(kind):
    q, codes, _ = distorted()
    other, other_codes, _ = distorted(seed=2)
    found = Calibration.fit(kind, q, codes)
    before, after = figures(other, other_codes), figures(found.apply(other), other_codes)
    assert after["calibration_error"] < 0.2 * before["calibration_error"]
    assert after["log_loss"] < before["log_loss"]
    np.testing.assert_allclose(found.apply(other).sum(axis=1), 1, rtol=1e-12)


def test_temperature_keeps_every_label_and_the_precision():
    q, codes, _ = distorted()
    found = Calibration.fit("temperature", q, codes).apply(q.astype(np.float32))
    assert found.dtype == np.float32
    assert (found.argmax(axis=1) == q.argmax(axis=1)).all()


def test_impossible_labels_cost_much_but_leave_numbers():
    p = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    found = Calibration.fit("temperature", p, np.array([1, 1]))
    assert np.isfinite(found.apply(p)).all()


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_the_floor_holds_after_the_map(kind):
    q, codes, _ = distorted()
    found = Calibration.fit(kind, q, codes, floor=0.02).apply(q)
    assert found.min() > 0.018
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-12)


def test_isotonic_maps_never_decrease():
    q, codes, _ = distorted(300)
    for x, y in Calibration.fit("isotonic", q, codes).knots:
        assert (np.diff(x) >= 0).all()
        assert (np.diff(y) >= 0).all()
        assert 0 < y[0] <= y[-1] < 1


def awkward_decisions(m, dtype, seed=5):
    """Decision values that try a rule: of any sign, with ties at the top and elsewhere, all at or below 0, tiny, huge,
    and neighbours that rounding makes equal."""
    rng = np.random.default_rng(seed)
    f = [
        rng.normal(size=(400, m)),
        rng.integers(-2, 3, size=(400, m)) / 2,  # many ties
        -np.abs(rng.normal(size=(200, m))),  # nothing positive
        np.zeros((3, m)),
        rng.normal(size=(100, m)) * 1e-9,  # all below any floor
        rng.normal(size=(100, m)) * 1e9,
        1 / m + rng.integers(-1, 2, size=(300, m)) * np.finfo(dtype).eps,
        np.eye(m)[rng.integers(0, m, 50)],
    ]
    return np.concatenate(f).astype(dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("m", [2, 3, 10])
@pytest.mark.parametrize("floor", [0.0, 0.004])
@pytest.mark.parametrize("kind", KINDS)
def test_the_label_is_the_most_probable_class_in_every_row(kind, floor, m, dtype):
    """The argmax of f, of the probabilities, and of the probabilities in single precision: the same, ties included."""
    rng = np.random.default_rng(m)
    q = rng.dirichlet(np.full(m, 0.3), 600)
    codes = np.array([rng.choice(m, p=row) for row in q**2 / (q**2).sum(axis=1, keepdims=True)])
    f = awkward_decisions(m, dtype)
    label = f.argmax(axis=1)
    p = class_probabilities(f, floor, Calibration.fit(kind, q, codes, floor))
    assert p.dtype == dtype
    np.testing.assert_array_equal(p.argmax(axis=1), label)
    np.testing.assert_array_equal(with_argmax(p.astype(np.float32), label).argmax(axis=1), label)
    unit = np.finfo(dtype).eps
    np.testing.assert_allclose(p.sum(axis=1), 1, rtol=0, atol=4 * m * unit)
    assert p.min() >= 0
    assert p.max() <= 1 + 4 * unit
    before = mce.clip_normalise(f, floor)
    i, j = np.triu_indices(m, 1)  # what was in order before calibration is never turned around
    gap = np.sign(before[:, i].astype(np.float64) - before[:, j])
    assert (gap * (p[:, i].astype(np.float64) - p[:, j]) >= -2 * unit).all()
    np.testing.assert_allclose(class_probabilities(f, floor), before, rtol=0, atol=2 * unit)


def class_by_class(calibration, p):
    """Isotonic maps for each class without regard to the order in a row, as they were once."""
    q = np.stack([np.interp(p[:, c], x, y) for c, (x, y) in enumerate(calibration.knots)], axis=1)
    return q / q.sum(axis=1, keepdims=True)


def test_isotonic_probabilities_are_the_nearest_ones_that_keep_the_order():
    q, codes, _ = distorted(400)
    other, other_codes, _ = distorted(4000, seed=3)
    found = Calibration.fit("isotonic", q, codes)
    free, kept = class_by_class(found, other), found.apply(other)
    turned = np.flatnonzero(free.argmax(axis=1) != other.argmax(axis=1))
    assert len(turned) > 20, "maps for each class turn labels around"
    rising = np.take_along_axis(kept, np.argsort(other, axis=1), axis=1)
    assert (np.diff(rising, axis=1) >= 0).all()
    same = (np.argsort(free, axis=1) == np.argsort(other, axis=1)).all(axis=1)
    np.testing.assert_allclose(kept[same], free[same], rtol=1e-12)
    rng = np.random.default_rng(0)
    for row in turned[:20]:
        order = np.argsort(other[row])
        trials = np.sort(kept[row] + rng.normal(scale=0.1, size=(200, M)), axis=1)  # rising, in the order of the row
        distances = ((trials - free[row][order]) ** 2).sum(axis=1)
        assert ((kept[row] - free[row]) ** 2).sum() <= distances.min() + 1e-12
    before, after = (figures(p, other_codes)["log_loss"] for p in (free, kept))
    assert after < before + 1e-3, "the order was right: nothing is lost by keeping it"


def test_a_calibration_of_an_older_model_still_loads():
    """Its knots are those of today; what they gave out of order is put in order."""
    record = {
        "kind": "isotonic",
        "temperature": 1.0,
        "floor": 0.0,
        "knots": [[[0.0, 1.0], [0.4, 0.5]], [[0.0, 1.0], [0.1, 0.9]]],
    }
    found = Calibration.from_plain(record)
    p = np.array([[0.4, 0.6], [0.45, 0.55], [0.7, 0.3], [0.51, 0.49]])
    raw = class_by_class(found, p)
    assert (raw.argmax(axis=1) == [1, 1, 0, 1]).all()
    np.testing.assert_allclose(found.apply(p)[:3], raw[:3], rtol=1e-12)
    np.testing.assert_allclose(found.apply(p)[3], [0.5, 0.5], rtol=1e-12)
    assert (class_probabilities(p, 0.0, found).argmax(axis=1) == [1, 1, 0, 0]).all()
    assert found.to_plain() == record


def test_an_expectation_stays_within_the_values_of_its_function(rng):
    for dtype in ("float64", "float32"):
        p = class_probabilities(awkward_decisions(4, dtype), 0.001)
        for g in (np.array([0.1, 0.1, 0.1, 0.1]), np.array([0.0, 1.0, 0.0, 0.0]), rng.normal(size=4)):
            found = expectation(p, g)
            assert (found >= g.min()).all()
            assert (found <= g.max()).all()
            np.testing.assert_allclose(found, p.astype(np.float64) @ g, atol=1e-6)
    assert expectation(p, np.eye(4)).shape == p.shape


@pytest.mark.parametrize("kind", ["none", "temperature", "isotonic"])
def test_a_calibration_survives_as_plain_data(kind):
    q, codes, _ = distorted(300)
    found = Calibration.fit(kind, q, codes)
    again = Calibration.from_plain(found.to_plain())
    np.testing.assert_array_equal(again.apply(q), found.apply(q))


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="platt"):
        Calibration("platt")


def test_leave_one_out_is_what_refits_give(arrays):
    n, kernel = 14, Gaussian()
    X, y = vectors(n), labels(n)
    Y = np.eye(M)[y]
    V = mce.solve_dual(kernel, X, Y, LAM)
    fitted = mce.Embedding(kernel, arrays(X), arrays(V), LAM)
    found = arrays.host(leave_one_out_decisions(fitted, arrays(X), arrays(Y), n))
    K = oracles.gram(kernel, dict(kernel.parameters), X, X)
    for i in range(n):
        rest = np.delete(np.arange(n), i)
        alone = np.linalg.solve(K[np.ix_(rest, rest)] + n * LAM * np.eye(n - 1), Y[rest])
        np.testing.assert_allclose(found[i], K[i, rest] @ alone, rtol=1e-5, atol=1e-6)


def test_leave_one_out_with_few_centres_is_what_refits_give():
    n, p, kernel = 30, 6, Gaussian()
    X, y = vectors(n), labels(n)
    Y, C = np.eye(M)[y], X[:p]
    K, K_cc = kernel.gram(X, C), kernel.gram(C)

    def solve(rows):
        return np.linalg.solve(K[rows].T @ K[rows] + n * LAM * K_cc, K[rows].T @ Y[rows])

    fitted = mce.Embedding(kernel, C, solve(np.arange(n)), LAM)
    found = leave_one_out_decisions(fitted, X, Y, n)
    for i in range(n):
        np.testing.assert_allclose(found[i], K[i] @ solve(np.delete(np.arange(n), i)), rtol=1e-6, atol=1e-7)
