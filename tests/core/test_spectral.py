"""The spectral objective: losses and slopes, the proximal step as a minimum, the variants."""

from __future__ import annotations

import numpy as np
import pytest

from kme_dist.core import features as maps
from kme_dist.core.spectral import (
    LOSSES,
    VARIANTS,
    generalisation_bound,
    lipschitz_constant,
    losses,
    nuclear_norm,
    shrink,
    spectral_objective,
)
from kme_dist.errors import ConfigError

CLASSES = 3


@pytest.fixture
def problem(rng):
    X, y = rng.normal(size=(20, 4)), rng.integers(0, CLASSES, 20)
    return maps.spectral(4, 6, seed=1), rng.normal(size=(6, CLASSES)), X, y


def plain_loss(kind, f, t):
    """One row, in slow words."""
    if kind == "squared":
        return sum((a - b) ** 2 for a, b in zip(f, t, strict=True))
    own = int(np.argmax(t))
    if kind == "cross_entropy":
        return np.log(sum(np.exp(f))) - f[own]
    return max(0.0, 1 + max(f[j] for j in range(len(f)) if j != own) - f[own])


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_are_what_they_say_and_so_are_their_slopes(kind, arrays, dtype, rng):
    F, T = rng.normal(size=(15, CLASSES)), np.eye(CLASSES)[rng.integers(0, CLASSES, 15)]
    each, slope = losses(kind, arrays(F, dtype), arrays(T, dtype))
    expected = [plain_loss(kind, f, t) for f, t in zip(F, T, strict=True)]
    np.testing.assert_allclose(arrays.host(each), expected, rtol=1e-5, atol=1e-6)
    direction = rng.normal(size=F.shape)
    ends = [sum(plain_loss(kind, f, t) for f, t in zip(F + s * 1e-6 * direction, T, strict=True)) for s in (1, -1)]
    np.testing.assert_allclose(np.sum(arrays.host(slope) * direction), (ends[0] - ends[1]) / 2e-6, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_match_finite_differences(loss, problem, rng):
    phi, W, X, y = problem
    options = {"loss": loss, "n_classes": CLASSES, "ridge": 0.03, "feature_penalty": 0.2}

    def value(phi, W):
        return spectral_objective(phi, W, X, y, **options).value

    out = spectral_objective(phi, W, X, y, **options)
    for name, start in {"W": W, **phi.parameters}.items():
        direction = rng.normal(size=start.shape)
        moved = [start + s * 1e-6 * direction for s in (1, -1)]
        ends = [value(phi, v) if name == "W" else value(phi.replace(**{name: v}), W) for v in moved]
        found = out.gradient["W" if name == "W" else f"features.{name}"]
        np.testing.assert_allclose(np.sum(found * direction), (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-7)


def test_the_objective_is_loss_plus_both_penalties(problem):
    phi, W, X, y = problem
    Z = phi.forward(X)
    mean = np.mean([plain_loss("hinge", f, t) for f, t in zip(Z @ W, np.eye(CLASSES)[y], strict=True)])
    out = spectral_objective(phi, W, X, y, loss="hinge", n_classes=CLASSES, ridge=0.5, feature_penalty=2.0)
    assert out.value == pytest.approx(mean + 0.5 * np.sum(W**2) + 2.0 * np.sum(Z**2) / 20)
    assert out.complexity == pytest.approx(np.linalg.norm(W, "nuc"))
    R = np.linalg.norm(W, "nuc") * np.sqrt(CLASSES * np.sum(Z**2)) / 20
    assert out.bound == pytest.approx(mean + 4 * np.sqrt(2) * np.sqrt(2) * R + 3 * np.sqrt(np.log(40) / 40))


def test_assigned_frequencies_have_no_gradient(problem):
    phi, W, X, y = problem
    out = spectral_objective(phi, W, X, y, loss="hinge", n_classes=CLASSES, learn_features=False)
    assert set(out.gradient) == {"W"}


def test_regression_takes_numbers(problem, rng):
    phi, W, X, _ = problem
    y = rng.normal(size=20)
    out = spectral_objective(phi, W[:, :1], X, y, loss="squared", n_classes=None)
    assert out.risk == pytest.approx(np.mean((phi.forward(X) @ W[:, 0] - y) ** 2))
    assert np.isnan(out.accuracy)


def test_shrinking_lowers_singular_values_and_solves_its_problem(rng):
    W, threshold = rng.normal(size=(30, 4)), 1.7
    V = shrink(W, threshold)
    before, after = np.linalg.svd(W, compute_uv=False), np.linalg.svd(V, compute_uv=False)
    np.testing.assert_allclose(after, np.maximum(before - threshold, 0), atol=1e-10)

    def cost(V):
        return 0.5 * np.sum((V - W) ** 2) + threshold * np.linalg.norm(V, "nuc")

    assert all(cost(V) < cost(V + 1e-3 * rng.normal(size=W.shape)) for _ in range(50))
    np.testing.assert_array_equal(shrink(W, 0.0), W)
    np.testing.assert_allclose(shrink(W, 1e3), 0)
    np.testing.assert_allclose(shrink(np.zeros((5, 2)), 0.1), 0)
    assert nuclear_norm(W) == pytest.approx(np.linalg.norm(W, "nuc"))


def test_the_variants_are_those_of_the_table():
    shown = {name: (v.stationary, v.learned, v.trace_norm) for name, v in VARIANTS.items()}
    assert shown == {
        "sk": (True, False, False),
        "nsk": (False, False, False),
        "skl": (True, True, False),
        "nskl": (False, True, False),
        "askl": (False, True, True),
    }


def test_the_bound_falls_with_rows_and_grows_with_both_norms():
    base = generalisation_bound(0.1, 2.0, 50.0, 100, 3, 1.0)
    assert generalisation_bound(0.1, 2.0, 500.0, 1000, 3, 1.0) < base
    assert generalisation_bound(0.1, 4.0, 50.0, 100, 3, 1.0) > base
    assert generalisation_bound(0.1, 2.0, 100.0, 100, 3, 1.0) > base
    assert generalisation_bound(0.1, 2.0, 50.0, 100, 3, 2.0) > base


@pytest.mark.parametrize("kind", LOSSES)
def test_no_loss_changes_faster_than_its_lipschitz_constant(kind, rng):
    """Also along the steepest way: from one class to another where the slopes of both count."""
    T = np.eye(CLASSES)[rng.integers(0, CLASSES, 4000)]
    F = rng.normal(scale=6, size=(4000, CLASSES))
    G = F + rng.normal(scale=0.3, size=F.shape)
    (first, at_F), (second, at_G) = (losses(kind, scores, T) for scores in (F, G))
    L = max(lipschitz_constant(kind, at_F), lipschitz_constant(kind, at_G))
    ratio = np.abs(first - second) / np.linalg.norm(F - G, axis=1)
    assert ratio.max() <= L * (1 + 1e-12)
    steepest = losses(kind, F - 1e-3 * at_F, T)[0]
    met = (first - steepest) / np.maximum(np.linalg.norm(1e-3 * at_F, axis=1), 1e-300)
    assert met.max() > 0.99 * lipschitz_constant(kind, at_F), "no smaller constant would do"
    if kind != "squared":
        assert lipschitz_constant(kind, at_F) == np.sqrt(2)


def test_the_complexity_in_the_bound_is_above_the_rademacher_complexity(rng):
    """Monte Carlo over signs: sup over |W|_* <= B of Σ_ik ε_ik (Wᵀφ_i)_k / n is B |Zᵀε|_2 / n."""
    n, outputs, B = 40, 3, 1.7
    Z = rng.normal(size=(n, 6))
    signs = rng.choice([-1.0, 1.0], size=(400, n, outputs))
    met = B * np.mean([np.linalg.norm(Z.T @ e, 2) for e in signs]) / n
    L = 1.3
    bound, without = (generalisation_bound(0.0, b, np.sum(Z**2), n, outputs, L) for b in (B, 0.0))
    R = (bound - without) / (4 * np.sqrt(2) * L)
    np.testing.assert_allclose(R, B / n * np.sqrt(outputs * np.sum(Z**2)))
    assert met < R < 2 * met


def test_an_unknown_loss_is_refused(rng):
    with pytest.raises(ConfigError, match="loss='log'"):
        losses("log", np.ones((2, 2)), np.eye(2))
