"""Calibration: honest decisions in closed form, and maps that make probabilities mean what they say."""

from __future__ import annotations

import numpy as np
import oracles
import pytest
from kernel_table import labels, vectors

from kme_dist.core import embedding as mce
from kme_dist.core.calibration import Calibration, leave_one_out_decisions
from kme_dist.core.kernels import Gaussian
from kme_dist.core.metrics import Tally
from kme_dist.errors import ConfigError

M, LAM = 3, 0.02


def distorted(n=4000, power=0.4, seed=1):
    """Labels drawn from p, and probabilities p^power that are too modest about them."""
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
