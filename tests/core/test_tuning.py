"""One factor of the length scales and the shift, tuned by leave-one-out log loss of calibrated decisions."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_table import labels, strings

from kme_dist.core import tuning
from kme_dist.core.calibration import Calibration, class_probabilities
from kme_dist.core.kernels import Gaussian, Linear, Matern, Polynomial, Spectrum
from kme_dist.core.objective import Workspace
from kme_dist.core.tuning import COARSE, FINE, Tuned, at_median_distance, raise_shift, tune
from kme_dist.errors import KMEError

M = 3


def made(n=150, seed=0, noise=0.3):
    """Three classes by the angle around the origin, with noise, and a feature without meaning."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3))
    angle = np.arctan2(X[:, 1], X[:, 0]) + noise * rng.normal(size=n)
    return X, (np.floor((angle / (2 * np.pi) % 1) * M).astype(int)) % M


def explicit_loss(kernel, X, y, shift, q, weights=None, floor=0.0):
    """By refits without each of the last q rows, calibrated to them."""
    n, Y, K = len(y), np.eye(M)[y], np.asarray(kernel.gram(X), float)
    A = K + np.diag(np.full(n, shift) if weights is None else shift / weights)
    P = np.empty((q, M))
    for row, i in enumerate(range(n - q, n)):
        rest = np.arange(n) != i
        P[row] = K[i, rest] @ np.linalg.solve(A[np.ix_(rest, rest)], Y[rest])
    own = None if weights is None else weights[-q:]
    found = class_probabilities(P, floor, Calibration.fit("softmax", P, y[-q:], floor, own))
    return np.average(-np.log(found[np.arange(q), y[-q:]]), weights=own)


def scaled(kernel, factor):
    return kernel.replace({"length_scale": kernel.parameters["length_scale"] * factor})


@pytest.mark.parametrize("kernel", [Gaussian(length_scale=np.array([1.0, 1.0, 3.0])), Matern(nu=0.5)], ids=repr)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_that_of_refits_at_the_kernel_and_the_shift_found(kernel, weighted):
    X, y = made(60)
    w = np.random.default_rng(1).uniform(0.3, 2.0, 60) if weighted else None
    found = tune(kernel, X, y, M, shift=0.1, evaluated=25, floor=0.01, weights=w, trials=6)
    assert found.loss == pytest.approx(explicit_loss(found.kernel, X, y, found.shift, 25, w, 0.01), rel=1e-6)
    assert found.losses.shape == (25,)
    assert found.loss == pytest.approx(np.average(found.losses, weights=None if w is None else w[-25:]), rel=1e-12)


@pytest.mark.parametrize(("factor", "shift"), [(1.0, 0.1), (10.0, 1e-4), (0.1, 10.0)])
def test_from_any_start_the_loss_is_about_that_of_a_fine_grid(factor, shift):
    X, y = made()
    kernel = Gaussian(length_scale=np.array([1.0, 1.0, 3.0]))
    found = tune(scaled(kernel, factor), X, y, M, shift=shift, steps=COARSE, trials=60)
    grid = [
        tune(scaled(kernel, a), X, y, M, shift=b, trials=1).loss
        for a in np.exp(np.linspace(-2.5, 2.5, 11))
        for b in np.exp(np.linspace(-7, 3, 11))
    ]
    # Less than half the standard error of a mean loss over 150 rows; the last steps, COARSE / 4, are no finer.
    assert found.loss <= min(grid) + 0.02
    assert np.ptp(grid) > 0.3, "the grid has bad places, too"
    ratios = found.kernel.parameters["length_scale"] / kernel.parameters["length_scale"]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-12, err_msg="one factor for all length scales")


@pytest.mark.parametrize("weighted", [False, True])
def test_the_gain_over_another_kernel_and_its_error_are_over_the_same_rows(weighted, rng):
    a, b = rng.normal(size=(2, 40))
    w = rng.uniform(0.2, 3.0, 40) if weighted else None
    one, two = (Tuned(Gaussian(), 0.1, 0.0, losses, 1, w) for losses in (a, b))
    gain, error = one.gain(two)
    assert gain == pytest.approx(np.average(a - b, weights=w), rel=1e-12)
    draws = rng.choice(40, size=(20_000, 40))  # the deviation of the mean over rows drawn again
    own = (a - b)[draws] if w is None else (a - b)[draws] * w[draws]
    means = own.mean(axis=1) if w is None else own.sum(axis=1) / w[draws].sum(axis=1)
    assert error == pytest.approx(means.std(), rel=0.1)


@pytest.mark.parametrize("slack", [0.0, 3.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_largest_shift_that_is_worse_by_less_than_a_standard_error_is_taken(weighted, slack):
    X, y = made(noise=0.05)
    w = np.random.default_rng(1).uniform(0.3, 2.0, len(y)) if weighted else None
    wide = Gaussian(length_scale=np.array([3.0, 3.0, 9.0]))  # whose shift must be small
    start = tune(wide, X, y, M, shift=1e-5, evaluated=80, weights=w, trials=0)
    found = raise_shift(start, X, y, M, slack=slack, evaluated=80, weights=w)
    own = None if w is None else w[-80:]

    def too_bad(shift):
        losses = tune(start.kernel, X, y, M, shift=shift, trials=0, evaluated=80, weights=w).losses
        rise = losses - start.losses
        share = np.full(80, 1 / 80) if own is None else own / own.sum()
        error, whole = (np.sqrt(np.sum((share * (a - share @ a)) ** 2)) for a in (rise, start.losses))
        return share @ rise > max(error, slack * whole)

    tried = [start.shift * np.exp(tuning._RAISE * k) for k in range(found.trials - start.trials + 2)]
    assert found.shift == pytest.approx(tried[-2])
    assert [too_bad(shift) for shift in tried] == [False] * (len(tried) - 1) + [True]
    assert found.kernel == start.kernel
    assert found.loss == pytest.approx(np.average(found.losses, weights=own), rel=1e-12)


def test_a_shift_is_not_raised_beyond_the_variance_of_the_kernel():
    X, y = made(60)
    kernel = Gaussian(scale=2.0)
    for start, most in ((0.1, 4.0), (7.0, 7.0)):
        tuned = tune(kernel, X, y, M, shift=start, trials=0)
        found = raise_shift(tuned, X, y, M, slack=1e9)
        assert most * np.exp(-tuning._RAISE) < found.shift <= most * (1 + 1e-12)


def test_the_same_rows_give_the_same_bits():
    X, y = made()
    one, two = (tune(Gaussian(), X, y, M, shift=0.1, evaluated=50) for _ in range(2))
    assert (one.shift, one.loss, one.trials) == (two.shift, two.loss, two.trials)
    assert one.kernel == two.kernel
    np.testing.assert_array_equal(one.losses, two.losses)


def test_more_trials_are_never_worse_and_no_more_are_made_than_allowed():
    X, y = made()
    start = scaled(Gaussian(), 0.08)
    found = [tune(start, X, y, M, shift=1e-3, evaluated=80, trials=trials) for trials in (1, 4, 8, 16, 40)]
    losses = [tuned.loss for tuned in found]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.05
    # A round of moves that has begun is finished: up to four trials more.
    assert all(tuned.trials <= trials + 4 for tuned, trials in zip(found, (1, 4, 8, 16, 40), strict=True))


def test_the_last_rows_are_the_ones_evaluated():
    """Labels of the last rows that are pure noise give a loss of log m; those of the others do not count for it."""
    X, y = made(240, noise=0.0)
    noisy = y.copy()
    noisy[-80:] = np.random.default_rng(3).integers(0, M, 80)
    kernel = Gaussian(length_scale=1.0)
    last = tune(kernel, X, noisy, M, shift=0.1, evaluated=80, trials=1)
    first = tune(kernel, np.roll(X, 80, axis=0), np.roll(noisy, 80), M, shift=0.1, evaluated=80, trials=1)
    assert last.loss > 0.9 * np.log(M)
    assert first.loss < 0.6 * np.log(M)


def test_rows_of_large_weight_decide():
    """Half of the rows follow a smooth rule with noise, half a fine one: the factor goes with the heavy half."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(400, 1))
    smooth, fine = (X[:, 0] + rng.normal(size=400) > 0).astype(int), (np.floor(X[:, 0] * 8) % 2).astype(int)
    half = np.arange(400) % 2 == 0
    y = np.where(half, smooth, fine)
    factors = []
    for heavy in (half, ~half):
        w = np.where(heavy, 2.0 - 1e-3, 1e-3)
        tuned = tune(Gaussian(length_scale=0.3), X, y, 2, shift=0.1, weights=w, trials=30)
        factors.append(float(np.mean(tuned.kernel.parameters["length_scale"])))
    assert factors[0] > 1.5 * factors[1]


@pytest.mark.parametrize("kernel", [Linear(), Polynomial(degree=2)], ids=repr)
def test_without_length_scales_only_the_shift_is_tuned(kernel):
    X, y = made(80)
    found = tune(kernel, X, y, M, shift=100.0, trials=20)
    assert found.kernel.parameters.keys() == kernel.parameters.keys()
    if "length_scale" not in kernel.parameters:
        assert found.kernel == kernel
    assert found.loss <= tune(kernel, X, y, M, shift=100.0, trials=1).loss


def test_kernels_of_strings_are_tuned():
    texts, y = strings(40), labels(40)
    found = tune(Spectrum(p=2), texts, y, M, shift=1.0, evaluated=20)
    assert found.losses.shape == (20,)
    assert np.isfinite(found.loss)
    assert at_median_distance(Spectrum(p=2), texts, 0) == Spectrum(p=2)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equal_rows_and_tiny_shifts_are_no_obstacle(dtype):
    X, y = np.repeat(vectors_of(20), 3, axis=0).astype(dtype), np.tile(labels(20), 3)
    for Z in (X, np.zeros_like(X), X + np.asarray(1e4, dtype)):
        found = tune(Gaussian(length_scale=np.ones(3)), Z, y, M, shift=1e-7, trials=14)
        assert np.isfinite(found.loss)
        assert found.shift >= 1e-7 * (1 - 1e-12)


def vectors_of(n):
    return np.random.default_rng(2).normal(size=(n, 3))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_few_rows_are_enough(n):
    found = tune(Gaussian(), vectors_of(n), np.arange(n), M, shift=0.1)
    assert np.isfinite(found.loss)


def test_single_precision_finds_what_double_finds():
    X, y = made()
    narrow, wide = (tune(Gaussian(), X.astype(t), y, M, shift=0.1, evaluated=60) for t in ("float32", "float64"))
    assert narrow.loss == pytest.approx(wide.loss, abs=1e-3)  # three digits is what float32 is used for


def test_a_device_gives_what_the_host_gives(arrays):
    X, y = made(60)
    found = tune(Gaussian(), arrays(X), y, M, shift=0.1, evaluated=20, trials=4)
    assert found.loss == pytest.approx(tune(Gaussian(), X, y, M, shift=0.1, evaluated=20, trials=4).loss, rel=1e-8)


def test_rows_that_are_not_finite_are_an_error():
    X, y = made(30)
    X[7, 0] = np.nan
    with pytest.raises(KMEError, match=r"finite|row 7"):
        tune(Gaussian(), X, y, M, shift=0.1)


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_the_start_has_length_scales_in_units_of_the_median_distance(offset):
    X, _ = made()
    kernel = Gaussian(length_scale=np.array([1.0, 2.0, 4.0]))
    found = at_median_distance(kernel, X * 1e3 + offset, seed=0)
    lengths = found.parameters["length_scale"]
    np.testing.assert_allclose(lengths / lengths[0], [1, 2, 4], rtol=1e-12)
    i, j = np.triu_indices(len(X), 1)
    median = np.median(np.linalg.norm(X[i] - X[j], axis=1)) * 1e3
    assert np.exp(np.log(lengths).mean()) == pytest.approx(0.6 * median, rel=0.03)  # of 10,000 pairs drawn
    assert FINE[0] < COARSE[0]


def test_a_kept_gram_matrix_is_used_for_its_kernel_and_precision_only(monkeypatch):
    X = np.random.default_rng(0).normal(size=(30, 3))
    kernel, wider = Gaussian(length_scale=1.0), Gaussian(length_scale=2.0)
    evaluated, gram = [], Gaussian.gram
    monkeypatch.setattr(Gaussian, "gram", lambda self, *a, **k: evaluated.append(self) or gram(self, *a, **k))
    grams = tuning._Grams(X, Workspace())
    for asked, dtype in ((kernel, "float64"), (kernel, "float64"), (wider, "float64"), (wider, "float32")):
        rows = X.astype(dtype)
        K = grams.matrix(asked, rows, asked.diag(rows))
        np.testing.assert_array_equal(K, gram(asked, rows))
        assert K.dtype == dtype
        K[...] = np.nan  # what a factorisation does to it
    assert evaluated == [kernel, wider, wider]
