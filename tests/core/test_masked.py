"""Two views of the features: the objective of algorithm 2 where they are equal, its own slope where they are not."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core.masked import masked_objective
from kme_dist.core.objective import feature_objective
from kme_dist.errors import ConfigError, DataError

CLASSES = 3


@pytest.fixture
def views(rng):
    y = rng.integers(0, CLASSES, 40)
    Z = 0.3 * rng.normal(size=(40, 6)) + np.eye(CLASSES, 6)[y]
    return Z, Z + 0.1 * rng.normal(size=Z.shape), y


@pytest.mark.parametrize("alpha", [1.0, None])
@pytest.mark.parametrize("risk", ["sum", "mean"])
def test_equal_views_are_algorithm_2(views, arrays, dtype, alpha, risk):
    Z, _, y = views
    options = {"regularization": 0.03, "n_classes": CLASSES, "risk": risk, "alpha": alpha, "complexity_weight": 0.5}
    rows = arrays(Z, dtype)
    found = masked_objective(rows, rows, y, clip_above=True, **options)
    expected = feature_objective(rows, y, **options)
    tolerance = {"float64": 1e-10, "float32": 2e-4}[dtype]
    for name in ("value", "risk", "complexity", "bound", "accuracy"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=tolerance), name
    np.testing.assert_allclose(found.gradient["regularization"], expected.gradient["regularization"], rtol=tolerance)
    both = arrays.host(found.feature_gradient[0]) + arrays.host(found.feature_gradient[1])
    gradient = arrays.host(expected.feature_gradient)
    np.testing.assert_allclose(both, gradient, atol=tolerance * np.abs(gradient).max())


@pytest.mark.parametrize("alpha", [1.0, None])
@pytest.mark.parametrize("clip_above", [True, False])
def test_gradients_match_finite_differences(views, rng, alpha, clip_above):
    Z1, Z2, y = views

    def value(Z1, Z2, lam=0.03):
        return masked_objective(
            Z1, Z2, y, regularization=lam, n_classes=CLASSES, alpha=alpha, clip_above=clip_above, complexity_weight=0.7
        )

    out, step = value(Z1, Z2), 1e-6
    for view in (0, 1):
        direction = rng.normal(size=Z1.shape)
        moved = [
            value(*(Z + s * step * direction if i == view else Z for i, Z in enumerate((Z1, Z2)))) for s in (1, -1)
        ]
        slope = (moved[0].value - moved[1].value) / (2 * step)
        np.testing.assert_allclose(np.sum(out.feature_gradient[view] * direction), slope, rtol=1e-6)
    moved = [value(Z1, Z2, 0.03 * np.exp(s * step)).value for s in (1, -1)]
    np.testing.assert_allclose(out.gradient["regularization"], (moved[0] - moved[1]) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize("loss", ["log", "softmax"])
@pytest.mark.parametrize("risk", ["sum", "mean"])
def test_rows_may_be_judged_that_were_not_solved_on(views, arrays, rng, loss, risk):
    Z, _, y = views
    rows = (Z[:25], Z[25:])

    def value(Z1, Z2, lam=0.03):
        options = {"regularization": lam, "n_classes": CLASSES, "risk": risk, "complexity_weight": 0.7, "loss": loss}
        return masked_objective(arrays(Z1), arrays(Z2), y[:25], y[25:], **options)

    out, step = value(*rows), 1e-6
    assert out.accuracy > 0.8
    for view in (0, 1):
        direction = rng.normal(size=rows[view].shape)
        moved = [
            value(*(Z + s * step * direction if i == view else Z for i, Z in enumerate(rows))).value for s in (1, -1)
        ]
        found = np.sum(arrays.host(out.feature_gradient[view]) * direction)
        np.testing.assert_allclose(found, (moved[0] - moved[1]) / (2 * step), rtol=1e-5)
    moved = [value(*rows, 0.03 * np.exp(s * step)).value for s in (1, -1)]
    np.testing.assert_allclose(out.gradient["regularization"], (moved[0] - moved[1]) / (2 * step), rtol=1e-5)


def test_the_softmax_loss_is_the_cross_entropy_of_sharpened_values(views):
    Z, _, y = views
    options = {"regularization": 0.03, "n_classes": CLASSES, "complexity_weight": 0.0}
    P = Z @ np.linalg.solve(Z.T @ Z + 40 * 0.03 * np.eye(6), Z.T @ np.eye(CLASSES)[y])
    softmax = np.exp(10 * P) / np.exp(10 * P).sum(axis=1, keepdims=True)
    found = masked_objective(Z, Z, y, loss="softmax", **options)
    assert found.risk == pytest.approx(-np.log(softmax[np.arange(40), y]).mean())


def test_a_probability_beyond_one_counts_only_where_it_is_let(rng):
    Z, y = np.eye(2), np.array([0, 1])
    options = {"regularization": 1e-3, "n_classes": 2, "complexity_weight": 0.0}
    assert masked_objective(Z, 2 * Z, y, **options).risk < 0
    assert masked_objective(Z, 2 * Z, y, clip_above=True, **options).risk == 0


def test_wrong_input_is_refused(views):
    Z1, Z2, y = views
    with pytest.raises(DataError, match="two views"):
        masked_objective(Z1, Z2[:5], y, regularization=1.0, n_classes=CLASSES)
    with pytest.raises(DataError, match="got 40 rows but 39"):
        masked_objective(Z1, Z2, y[1:], regularization=1.0, n_classes=CLASSES)
    with pytest.raises(DataError, match="two views"):
        masked_objective(Z1, Z2[:5, :4], y, y[:5], regularization=1.0, n_classes=CLASSES)
    with pytest.raises(DataError, match="got 5 rows but 4"):
        masked_objective(Z1, Z2[:5], y, y[:4], regularization=1.0, n_classes=CLASSES)
    with pytest.raises(ConfigError, match="loss='hinge' is unknown"):
        masked_objective(Z1, Z2, y, regularization=1.0, n_classes=CLASSES, loss="hinge")
    with pytest.raises(ConfigError, match="risk"):
        masked_objective(Z1, Z2, y, regularization=1.0, n_classes=CLASSES, risk="median")
    with pytest.raises(ConfigError, match="regularization"):
        masked_objective(Z1, Z2, y, regularization=0.0, n_classes=CLASSES)
