"""Calibration: maps that make probabilities mean what they say."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.optimize import isotonic_regression

from kme_dist.core import calibration
from kme_dist.core import embedding as mce
from kme_dist.core.calibration import (
    KINDS,
    Calibration,
    class_probabilities,
    expectation,
    softmax_map,
    with_argmax,
)
from kme_dist.core.metrics import Tally
from kme_dist.errors import ConfigError

M = 3


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


@pytest.mark.parametrize("kind", ["temperature", "isotonic", "softmax", "auto"])
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


@pytest.mark.parametrize("kind", ["temperature", "isotonic", "softmax"])
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


@pytest.mark.parametrize("m", [2, 3, 7, 40])
def test_rows_are_put_in_order_all_at_a_time_as_one_by_one(m):
    rng = np.random.default_rng(m)
    q = np.concatenate([rng.dirichlet(np.full(m, 0.5), 200), np.sort(rng.random((5, m)), axis=1), np.full((3, m), 0.1)])
    q[7] = q[7][np.argsort(-q[7])]  # falls all the way
    found = calibration._rising(q)
    assert (np.diff(found, axis=1) >= 0).all()
    np.testing.assert_allclose(found, [isotonic_regression(row).x for row in q], rtol=0, atol=4 * np.finfo(float).eps)
    np.testing.assert_array_equal(calibration._rising(q[5:9]), found[5:9], err_msg="rows do not touch each other")
    assert calibration._rising(q[:0]).shape == (0, m)


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
    assert found.to_plain() == {**record, "sharpness": 0.0}


def test_an_expectation_stays_within_the_values_of_its_function(rng):
    for dtype in ("float64", "float32"):
        p = class_probabilities(awkward_decisions(4, dtype), 0.001)
        for g in (np.array([0.1, 0.1, 0.1, 0.1]), np.array([0.0, 1.0, 0.0, 0.0]), rng.normal(size=4)):
            found = expectation(p, g)
            assert (found >= g.min()).all()
            assert (found <= g.max()).all()
            np.testing.assert_allclose(found, p.astype(np.float64) @ g, atol=1e-6)
    assert expectation(p, np.eye(4)).shape == p.shape


@pytest.mark.parametrize("kind", [*KINDS, "auto"])
def test_a_calibration_survives_as_plain_data(kind):
    q, codes, _ = distorted(300)
    f = q - 0.1
    found = Calibration.fit(kind, f, codes, 0.01)
    again = Calibration.from_plain(json.loads(json.dumps(found.to_plain())))
    assert again.to_plain() == found.to_plain()
    np.testing.assert_array_equal(class_probabilities(f, 0.01, again), class_probabilities(f, 0.01, found))


def test_a_temperature_of_an_older_model_still_loads():
    found = Calibration.from_plain({"kind": "temperature", "temperature": 0.5, "floor": 0.0, "knots": []})
    p = np.array([[0.2, 0.8], [0.5, 0.5]])
    np.testing.assert_allclose(found.apply(p), [[0.04 / 0.68, 0.64 / 0.68], [0.5, 0.5]], rtol=1e-12)


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="platt"):
        Calibration("platt")


# --- softmax: p ∝ p̃^(1/T) exp(β f) ------------------------------------------------------------------


def decisions(power, sharpness, n=6000, seed=4):
    """Decisions with entries outside [0, 1], and labels drawn from p̃^power exp(sharpness f)."""
    rng = np.random.default_rng(seed)
    f = rng.dirichlet(np.full(M, 0.6), n) * 1.3 - 0.1 + 0.05 * rng.normal(size=(n, M))
    p = mce.clip_normalise(f, 0.01)
    q = p**power * np.exp(sharpness * f)
    q /= q.sum(axis=1, keepdims=True)
    codes = (rng.uniform(size=(n, 1)) < np.cumsum(q, axis=1)).argmax(axis=1)
    return f, codes, q


@pytest.mark.parametrize(("power", "sharpness"), [(1.0, 0.0), (0.0, 4.0), (0.6, 2.0), (1.5, 1.0)])
def test_softmax_finds_the_power_and_the_sharpness_that_were_applied(power, sharpness):
    f, codes, q = decisions(power, sharpness)
    found = Calibration.fit("softmax", f, codes, 0.01)
    # Deviations of both estimates over repeated draws of 6,000 rows are below 0.06 and 0.25.
    assert 1 / found.temperature == pytest.approx(power, abs=0.2)
    assert found.sharpness == pytest.approx(sharpness, abs=0.9)
    assert np.abs(class_probabilities(f, 0.01, found) - q).mean() < 0.02


def test_softmax_is_where_the_loss_is_least():
    """The two numbers against a grid of others, with the labels that Laplace's rule adds."""
    f, codes, _ = decisions(0.5, 3.0, n=300)
    p = mce.clip_normalise(f, 0.01)
    targets = np.eye(M)[codes] + 1 / len(f)

    def loss(power, sharpness):
        scores = power * np.log(p) + sharpness * f
        return -(targets * (scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)))).sum() / targets.sum()

    best = loss(*softmax_map(p, f, codes))
    assert best <= min(loss(a, b) for a in np.linspace(0, 2, 21) for b in np.linspace(0, 8, 33)) + 1e-7


def test_classes_that_are_apart_leave_the_sharpness_finite_and_the_probabilities_off_0_and_1():
    for n in (6, 60, 600):
        codes = np.arange(n) % M
        f = np.eye(M)[codes] * 0.8 + 0.05
        found = Calibration.fit("softmax", f, codes)
        assert np.isfinite(found.sharpness)
        p = class_probabilities(f, 0.0, found)
        missing = 1 - p[np.arange(n), codes]
        assert missing.min() > 0
        # By Laplace's rule every row has 1 + m/n labels, of which (m - 1)/n are of other classes.
        np.testing.assert_allclose(missing, (M - 1) / (n + M), rtol=0.02)


def test_decisions_that_say_nothing_get_the_same_probabilities_for_all_classes():
    codes = np.arange(90) % M
    p = class_probabilities(np.full((90, M), 0.2), 0.0, Calibration.fit("softmax", np.full((90, M), 0.2), codes))
    np.testing.assert_allclose(p, 1 / M, rtol=1e-12)


def test_softmax_never_turns_a_decision_around():
    """Even if labels contradict the decisions: neither number is negative."""
    f, _, _ = decisions(1.0, 2.0, n=500)
    contrary = f.argmin(axis=1)
    found = Calibration.fit("softmax", f, contrary, 0.01)
    assert found.sharpness >= 0
    assert found.temperature > 0
    np.testing.assert_array_equal(class_probabilities(f, 0.01, found).argmax(axis=1), f.argmax(axis=1))


def test_the_scale_of_all_weights_does_not_matter_to_softmax(rng):
    f, codes, _ = decisions(0.7, 2.0, n=400)
    w = rng.uniform(0.1, 3.0, 400)
    one, two = (Calibration.fit("softmax", f, codes, 0.01, weights=w * factor) for factor in (1.0, 1e3))
    np.testing.assert_allclose(class_probabilities(f, 0.01, two), class_probabilities(f, 0.01, one), atol=1e-4)
    same = Calibration.fit("softmax", f, codes, 0.01, weights=np.full(400, 7.0))
    plain = Calibration.fit("softmax", f, codes, 0.01)
    np.testing.assert_allclose(class_probabilities(f, 0.01, same), class_probabilities(f, 0.01, plain), atol=1e-4)


def test_softmax_goes_by_the_rows_of_large_weight():
    f, codes, _ = decisions(0.0, 3.0, n=2000, seed=1)
    g, other, _ = decisions(0.0, 12.0, n=2000, seed=2)
    both, labels = np.concatenate([f, g]), np.concatenate([codes, other])
    w = np.repeat([1.0, 1e-6], 2000)
    found = Calibration.fit("softmax", both, labels, 0.01, weights=w)
    alone = Calibration.fit("softmax", f, codes, 0.01)
    np.testing.assert_allclose(class_probabilities(f, 0.01, found), class_probabilities(f, 0.01, alone), atol=2e-3)


# --- "auto" -----------------------------------------------------------------------------------------


def stepped(n, seed):
    """Labels that follow p̃ by steps, which no power and no sharpness describe."""
    rng = np.random.default_rng(seed)
    first = rng.uniform(0, 1, n)
    chance = np.select([first < 0.25, first < 0.5, first < 0.75], [0.02, 0.48, 0.52], 0.98)
    return np.stack([first, 1 - first], axis=1), (rng.uniform(size=n) > chance).astype(int)


def honest(n, seed):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(M, 0.7), n)
    return p, (rng.uniform(size=(n, 1)) < np.cumsum(p, axis=1)).argmax(axis=1)


CASES = {
    "isotonic": lambda n, seed: stepped(n, seed),
    "softmax": lambda n, seed: decisions(0.0, 8.0, n, seed)[:2],
    "temperature or softmax": lambda n, seed: distorted(n, seed=seed)[:2],
    "none": honest,
}


def fresh_loss(kind, draw):
    found = Calibration.fit(kind, *draw(4000, 1), 1e-3)
    f, codes = draw(20_000, 2)
    return -np.log(class_probabilities(f, 1e-3, found)[np.arange(len(codes)), codes]).mean(), found.kind


@pytest.mark.parametrize("case", CASES)
def test_auto_is_as_good_on_fresh_rows_as_the_best_map(case):
    losses = {kind: fresh_loss(kind, CASES[case])[0] for kind in KINDS}
    loss, kind = fresh_loss("auto", CASES[case])
    assert loss <= min(losses.values()) + 1e-3
    if case in ("isotonic", "softmax"):  # clearly better than all others by construction
        assert kind == case
        assert sorted(losses.values())[1] > loss + 5e-3
    if case == "none":
        assert loss <= losses["none"] + 5e-4, "what is right is left as it is"


def test_auto_takes_softmax_for_few_rows():
    """Too few to tell maps apart."""
    f, codes = stepped(100, 0)
    assert Calibration.fit("auto", f, codes).kind == "softmax"


def test_auto_follows_the_weights():
    """Rows that weigh next to nothing neither fit a map nor compare them, whatever their number."""
    f, codes = stepped(3000, 1)
    first = np.random.default_rng(2).uniform(0.3, 0.7, 9000)  # where steps are flat, but these labels are clear
    g = np.stack([first, 1 - first], axis=1)
    both, labels = np.concatenate([f, g]), np.concatenate([codes, g.argmax(axis=1)])
    found = Calibration.fit("auto", both, labels, 1e-3, weights=np.repeat([1.0, 1e-9], [3000, 9000]))
    assert found.kind == "isotonic"
    fitted = Calibration.fit("isotonic", f, codes, 1e-3), Calibration.fit("softmax", f, codes, 1e-3)
    of_light = [-np.log(class_probabilities(g, 1e-3, c)[np.arange(9000), labels[3000:]]).mean() for c in fitted]
    assert of_light[0] > of_light[1] + 0.1, "counted by rows, the other map would win"


def test_auto_is_the_same_every_time():
    f, codes = stepped(600, 3)
    one, two = (Calibration.fit("auto", f, codes, 1e-3).to_plain() for _ in range(2))
    assert one == two
