"""The objectives against the paper written out plainly, and what they promise at the edges."""

from __future__ import annotations

import functools
import math
import pickle
import tracemalloc
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_table import ARD, DIFFERENTIABLE, STRING_KERNELS, labels, strings, vectors

from kme_dist import errors
from kme_dist.backend import cholesky
from kme_dist.core.kernels import Gaussian, Kernel, Laplace, Linear, Matern, Polynomial
from kme_dist.core.objective import (
    Workspace,
    feature_objective,
    generalisation_bound,
    loo_objective,
    rcb_objective,
    validation_objective,
)

N, M, LAM = 18, 3, 0.02
KERNELS = {**DIFFERENTIABLE, **STRING_KERNELS}

# name -> (function, its settings, the oracle's settings)
OBJECTIVES = {
    "rcb": (rcb_objective, {}, {}),
    "rcb, mean risk": (rcb_objective, {"risk": "mean", "complexity_weight": 0.7}, {"risk": "mean", "tau": 0.7}),
    "erm": (rcb_objective, {"complexity_weight": 0.0}, {"tau": 0.0}),
    "rcb, alpha given": (rcb_objective, {"alpha": 1.0}, {"alpha": 1.0}),
    "rcb, high floor": (rcb_objective, {"loss_floor": 0.4}, {"floor": 0.4}),
    "validation": (validation_objective, {"train_rows": 11}, {"train_rows": 11}),
    "validation, mean risk": (
        validation_objective,
        {"train_rows": 9, "risk": "mean", "complexity_weight": 4.0},
        {"train_rows": 9, "risk": "mean", "tau": 4.0},
    ),
    "leave one out": (loo_objective, {}, {}),
    "leave one out, no complexity": (
        loo_objective,
        {"complexity_weight": 0.0, "risk": "mean"},
        {"tau": 0.0, "risk": "mean"},
    ),
}
FUNCTIONS = {rcb_objective: "rcb", validation_objective: "validation", loo_objective: "loo"}


@functools.cache
def expected(objective, name, dtype, lam):
    """What the oracle says; the same for every array library."""
    function, _, theirs = OBJECTIVES[objective]
    X = strings(N) if name in STRING_KERNELS else vectors(N).astype(dtype).astype(np.float64)
    return oracles.objective(FUNCTIONS[function], KERNELS[name], X, labels(N), lam, M, **theirs)


def compare(objective, name, X, dtype="float64", lam=LAM):
    function, mine, _ = OBJECTIVES[objective]
    out = function(KERNELS[name], X, labels(N), regularization=lam, n_classes=M, **mine)
    value, gradient = expected(objective, name, dtype, lam)
    assert out.value == pytest.approx(value, rel=oracles.VALUE_TOLERANCE[dtype])
    assert oracles.relative_error(out.gradient, gradient) < oracles.GRADIENT_TOLERANCE[dtype]
    tau = mine.get("complexity_weight", 4 * math.e if function is rcb_objective else 1.0)
    assert out.value == pytest.approx(out.risk + tau * out.complexity, rel=1e-12)
    assert out.dtype == dtype
    assert out.jitter == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_value_and_gradient_match_automatic_differentiation(objective, name):
    compare(objective, name, vectors(N))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", STRING_KERNELS)
def test_objectives_of_strings_match_automatic_differentiation(objective, name):
    compare(objective, name, strings(N))


@pytest.mark.parametrize("objective", ["rcb", "validation", "leave one out"])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_every_array_library_gives_the_same(objective, name, arrays, dtype):
    """Shift large enough that single precision suffices: this is about devices and dtypes."""
    compare(objective, name, arrays(vectors(N), dtype), dtype, lam=0.2)


@pytest.mark.parametrize("objective", ["rcb", "validation"])
@pytest.mark.parametrize("kernel", [Gaussian(length_scale=ARD), Laplace() + Linear(length_scale=ARD)])
def test_gradients_hold_across_tiles(objective, kernel):
    """Batches larger than a tile walk other code: squares on the diagonal, rectangles beside it."""
    X, y = vectors(300), labels(300)
    function, mine, theirs = OBJECTIVES[objective]
    mine = {**mine, **({"train_rows": 270} if "train_rows" in mine else {})}
    theirs = {**theirs, **({"train_rows": 270} if "train_rows" in theirs else {})}
    out = function(kernel, X, y, regularization=LAM, n_classes=M, **mine)
    value, gradient = oracles.objective(FUNCTIONS[function], kernel, X, y, LAM, M, **theirs)
    assert out.value == pytest.approx(value, rel=1e-10)
    assert oracles.relative_error(out.gradient, gradient) < 1e-8


# --- explicit features -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [40, 5])
@pytest.mark.parametrize("alpha", [1.0, None])
@pytest.mark.parametrize("risk", ["sum", "mean"])
def test_feature_objective_matches_automatic_differentiation(n, alpha, risk, arrays, dtype, rng):
    Z = rng.normal(size=(n, 8)).astype(dtype)
    y = labels(n)
    out = feature_objective(arrays(Z), y, regularization=0.05, n_classes=M, risk=risk, alpha=alpha)
    value, by_Z, by_log_lam = oracles.feature_objective(Z.astype(float), y, 0.05, M, risk=risk, alpha=alpha)
    assert out.value == pytest.approx(value, rel=oracles.VALUE_TOLERANCE[dtype])
    found = {"Z": arrays.host(out.feature_gradient), "regularization": out.gradient["regularization"]}
    expected = {"Z": by_Z, "regularization": by_log_lam}
    assert oracles.relative_error(found, expected) < oracles.GRADIENT_TOLERANCE[dtype]


@pytest.mark.parametrize("n", [30, 4])
def test_dual_and_primal_agree_for_a_linear_kernel(n, rng):
    """Algorithm 1 with k(x, x') = x·x' and algorithm 2 with φ(x) = x are one and the same."""
    X, y = rng.normal(size=(n, 6)), labels(n)
    common = {"regularization": 0.1, "n_classes": M}
    dual = rcb_objective(Linear(), X, y, alpha=1.0, **common)
    primal = feature_objective(X, y, alpha=1.0, **common)
    for part in ("value", "risk", "complexity", "bound", "accuracy"):
        assert getattr(dual, part) == pytest.approx(getattr(primal, part), rel=1e-10)
    assert dual.gradient["regularization"] == pytest.approx(primal.gradient["regularization"], rel=1e-9)
    # dq/d log scale of scale² x·x' is the derivative along Z itself
    assert dual.gradient["scale"] == pytest.approx(np.sum(primal.feature_gradient * X), rel=1e-9)


# --- properties ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(factor=st.floats(0.05, 20.0), lam=st.floats(1e-4, 10.0), seed=st.integers(0, 100))
def test_objective_is_invariant_to_joint_scaling(factor, lam, seed):
    """q(c·scale, c²·λ) = q(scale, λ): only λ / scale² can be told from data."""
    X, y = vectors(20, seed), labels(20, seed=seed)
    first = rcb_objective(Gaussian(length_scale=ARD), X, y, regularization=lam, n_classes=M)
    second = rcb_objective(Gaussian(length_scale=ARD, scale=factor), X, y, regularization=lam * factor**2, n_classes=M)
    assert second.value == pytest.approx(first.value, rel=1e-9)
    # so the gradient has no part along that direction
    slope = first.gradient["scale"] + 2 * first.gradient["regularization"]
    assert abs(slope) < 1e-8 * (1 + abs(first.gradient["scale"]))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_order_of_the_rows_does_not_matter(seed):
    X, y = vectors(20), labels(20)
    order = np.random.default_rng(seed).permutation(20)
    first = rcb_objective(Matern(length_scale=ARD), X, y, regularization=LAM, n_classes=M)
    second = rcb_objective(Matern(length_scale=ARD), X[order], y[order], regularization=LAM, n_classes=M)
    assert second.value == pytest.approx(first.value, rel=1e-11)


def test_leave_one_out_equals_refits_in_value():
    X, y = vectors(15), labels(15)
    out = loo_objective(Gaussian(), X, y, regularization=0.03, n_classes=M, complexity_weight=0.0)
    K, Y = Gaussian().gram(X), np.eye(M)[y]
    losses = []
    for i in range(15):
        rest = np.arange(15) != i
        V = np.linalg.solve(K[np.ix_(rest, rest)] + 15 * 0.03 * np.eye(14), Y[rest])
        losses.append(-math.log(min(max((K[i, rest] @ V)[y[i]], 1e-15), 1.0)))
    assert out.risk == pytest.approx(sum(losses), rel=1e-10)


def test_bound_is_the_right_hand_side_of_the_theorem():
    X, y = vectors(30), labels(30)
    out = rcb_objective(Gaussian(), X, y, regularization=0.1, n_classes=M, complexity_weight=0.3)
    expected = out.risk / 30 + 4 * math.e * out.complexity + math.sqrt(8 * math.log(2 / 0.05) / 30)
    assert out.bound == pytest.approx(expected, rel=1e-12)
    assert generalisation_bound(0.0, 0.0, 800, confidence=1 - 2 / math.e) == pytest.approx(0.1)


def test_accuracy_counts_rows_whose_own_class_leads():
    X = np.array([[0.0], [0.1], [5.0], [5.1], [0.05]])
    out = rcb_objective(Gaussian(), X, np.array([0, 0, 1, 1, 1]), regularization=0.05, n_classes=2)
    assert out.accuracy == pytest.approx(0.8)


# --- the edges of the data -------------------------------------------------------------------------

EVERY = [rcb_objective, validation_objective, loo_objective]


def call(function, kernel, X, y, **more):
    if function is validation_objective:
        more.setdefault("train_rows", len(X) // 2)
    return function(kernel, X, y, **{"regularization": LAM, "n_classes": M, **more})


def finite(out):
    return math.isfinite(out.value) and all(np.isfinite(g).all() for g in out.gradient.values())


@pytest.mark.chaos(22)
@pytest.mark.parametrize("function", EVERY)
def test_class_missing_from_a_batch(function):
    X, y = vectors(20), labels(20, m=2)
    wide, narrow = (call(function, Gaussian(), X, y, n_classes=m) for m in (5, 2))
    assert wide.value == pytest.approx(narrow.value, rel=1e-12)
    assert oracles.relative_error(wide.gradient, narrow.gradient) < 1e-12


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("function", [rcb_objective, loo_objective])
def test_batch_of_one_row(function, name, dtype):
    assert finite(call(function, DIFFERENTIABLE[name], vectors(1).astype(dtype), np.array([1])))


@pytest.mark.parametrize("name", ["gaussian ARD", "matern 1/2", "linear", "convex combination"])
def test_batch_of_one_row_on_a_device(name, arrays, dtype):
    X = arrays(vectors(1), dtype)
    assert finite(rcb_objective(DIFFERENTIABLE[name], X, np.array([1]), regularization=LAM, n_classes=M))


def test_batch_of_two_rows_can_be_split():
    assert finite(call(validation_objective, Gaussian(), vectors(2), np.array([0, 1])))


@pytest.mark.chaos(20)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("function", EVERY)
def test_duplicate_rows(function, name, dtype):
    X = np.repeat(vectors(8), 3, axis=0).astype(dtype)
    out = call(function, DIFFERENTIABLE[name], X, labels(24))
    assert finite(out)
    # Entries of the cubic kernel go into the hundreds: beside them the shift is too small for single precision.
    assert out.dtype == ("float64" if name == "cubic ARD" else dtype)


@pytest.mark.parametrize("function", EVERY)
@pytest.mark.parametrize("kernel", [Gaussian(length_scale=ARD), Matern(nu=0.5), Laplace(), Linear(), Polynomial()])
@pytest.mark.parametrize("level", [0.0, 3.0])
def test_constant_features(function, kernel, level, dtype):
    """All rows equal, all zero even: no information, but numbers."""
    assert finite(call(function, kernel, np.full((10, 3), level, dtype=dtype), labels(10)))


@pytest.mark.parametrize("alpha", [1.0, None])
def test_features_that_are_all_zero(alpha, arrays, dtype):
    out = feature_objective(arrays(np.zeros((6, 4)), dtype), labels(6), regularization=LAM, n_classes=M, alpha=alpha)
    assert finite(out)
    assert (arrays.host(out.feature_gradient) == 0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("function", EVERY)
@pytest.mark.parametrize("kernel", [Gaussian(), Laplace(), Linear(), Matern() + Linear()])
def test_missing_values_are_named(bad, function, kernel, arrays, dtype):
    X = vectors(12).astype(dtype)
    X[3, 1] = bad
    more = {"train_rows": 6} if function is validation_objective else {}
    with pytest.raises(errors.DataError, match=f"row 3, column 1 .* is {bad}"):
        function(kernel, arrays(X), labels(12), regularization=LAM, n_classes=M, **more)


def test_missing_value_in_a_single_row_is_named():
    with pytest.raises(errors.DataError, match="row 0, column 2"):
        call(rcb_objective, Gaussian(), np.array([[0.0, 1.0, math.nan]]), np.array([0]))


def test_missing_value_among_features_is_named():
    Z = vectors(5)
    Z[4, 0] = math.nan
    with pytest.raises(errors.DataError, match="row 4, column 0"):
        feature_objective(Z, labels(5), regularization=LAM, n_classes=M)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"regularization": 0.0}, errors.ConfigError, "regularization=0.0: must be a positive number"),
        ({"regularization": math.nan}, errors.ConfigError, "regularization=nan"),
        ({"regularization": "small"}, errors.ConfigError, "regularization='small'"),
        ({"risk": "median"}, errors.ConfigError, "risk='median' is unknown"),
        ({"complexity_weight": -1.0}, errors.ConfigError, "complexity_weight=-1.0"),
        ({"complexity_weight": None}, errors.ConfigError, "complexity_weight=None"),
        ({"loss_floor": 0.0}, errors.ConfigError, "loss_floor=0.0"),
        ({"n_classes": 2}, errors.DataError, r"labels must be in 0..1, got 0..2"),
        ({"n_classes": 0}, errors.ConfigError, "n_classes=0"),
        ({"n_classes": 2.5}, errors.ConfigError, "n_classes=2.5"),
        ({"y": labels(9)}, errors.DataError, "got 10 rows but 9 labels"),
        ({"y": labels(10) - 1}, errors.DataError, "got -1"),
        ({"y": labels(10) / 2}, errors.DataError, "integers"),
        ({"y": np.eye(10, dtype=int)}, errors.DataError, "integers"),
        ({"X": vectors(10)[:0], "y": labels(0)}, errors.DataError, "no rows"),
        ({"X": vectors(10)[0]}, errors.DataError, "expects a matrix"),
    ],
)
@pytest.mark.parametrize("function", [rcb_objective, loo_objective])
def test_wrong_arguments_are_refused_with_a_reason(function, changes, kind, message):
    arguments = {"X": vectors(10), "y": labels(10), "regularization": LAM, "n_classes": M, **changes}
    with pytest.raises(kind, match=message):
        function(Gaussian(), arguments.pop("X"), arguments.pop("y"), **arguments)


@pytest.mark.parametrize("train_rows", [0, 10, -1])
def test_validation_needs_rows_on_both_sides(train_rows):
    with pytest.raises(errors.ConfigError, match=f"train_rows={train_rows}"):
        call(validation_objective, Gaussian(), vectors(10), labels(10), train_rows=train_rows)


def test_numpy_scalars_do_not_widen_single_precision():
    X, y = vectors(20).astype(np.float32), labels(20)
    plain = call(rcb_objective, Gaussian(), X, y, regularization=0.1, complexity_weight=2.0)
    scalars = call(rcb_objective, Gaussian(), X, y, regularization=np.float64(0.1), complexity_weight=np.float64(2.0))
    assert scalars.value == plain.value
    assert all((scalars.gradient[name] == plain.gradient[name]).all() for name in plain.gradient)


# --- memory and precision --------------------------------------------------------------------------


@pytest.mark.parametrize("function", EVERY)
def test_workspace_changes_nothing_but_memory(function, arrays, dtype):
    space = Workspace()
    for n in (30, 30, 21):
        X, y = arrays(vectors(n, seed=n), dtype), labels(n)
        more = {"train_rows": n // 2} if function is validation_objective else {}
        fresh, reused = (
            function(Matern(length_scale=ARD), X, y, regularization=LAM, n_classes=M, workspace=w, **more)
            for w in (None, space)
        )
        assert reused.value == fresh.value
        assert all((reused.gradient[name] == fresh.gradient[name]).all() for name in fresh.gradient)


def test_workspace_keeps_one_block_per_shape():
    space, reference = Workspace(), np.zeros(3)
    block = space.square(5, reference)
    assert space.square(5, reference) is block
    assert space.square(6, reference) is not block
    assert space.square(6, reference.astype(np.float32)).dtype == np.float32


@pytest.mark.parametrize("function", EVERY)
def test_one_factorisation_per_call(function, monkeypatch):
    from kme_dist.core import objective

    calls = []
    monkeypatch.setattr(objective, "cholesky", lambda A: calls.append(A.shape) or cholesky(A))
    call(function, Gaussian(), vectors(20), labels(20))
    assert len(calls) == 1


def test_beside_its_workspace_a_step_takes_no_second_matrix():
    n = 1200
    X, y, space = vectors(n), labels(n), Workspace()
    call(rcb_objective, Gaussian(length_scale=ARD), X, y, workspace=space)
    tracemalloc.start()
    call(rcb_objective, Gaussian(length_scale=ARD), X, y, workspace=space)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * n * n * 8


def test_rows_are_left_alone():
    X, y = vectors(20), labels(20)
    before = X.copy(), y.copy()
    for function in EVERY:
        call(function, Gaussian() + Linear(), X, y)
    assert (before[0] == X).all()
    assert (before[1] == y).all()


def test_one_transfer_and_few_waits_per_step(device):
    """A step waits for the device five times: for where the rows lie and how far they reach, twice to learn whether the
    factorisation worked, and for the result."""
    import strict_cupy

    X, y = device(vectors(20)), labels(20)
    before = strict_cupy.synchronisations
    rcb_objective(Gaussian(), X, y, regularization=LAM, n_classes=M)
    assert strict_cupy.synchronisations - before <= 5


@pytest.mark.parametrize("function", [rcb_objective, loo_objective])
def test_single_precision_is_promoted_when_it_does_not_suffice(function, arrays):
    X = arrays(np.ones((60, 2)), "float32")  # rank one, and a shift far below single precision
    out = function(Gaussian(), X, labels(60), regularization=1e-11, n_classes=M)
    assert out.dtype == "float64"
    assert out.jitter == 0
    exact = function(Gaussian(), arrays(np.ones((60, 2)), "float64"), labels(60), regularization=1e-11, n_classes=M)
    assert out.value == exact.value


@pytest.mark.parametrize("function", [rcb_objective, loo_objective])
def test_a_shift_that_double_precision_cannot_carry_is_raised_and_reported(function, dtype):
    """60 equal rows: |K| = 60, of which double precision tells 1e-12 parts apart with three digits to spare."""
    out = function(Gaussian(), np.ones((60, 2), dtype), labels(60), regularization=1e-18, n_classes=M)
    assert out.dtype == "float64"
    assert 60e-12 < out.jitter < 80e-12


def test_overflow_in_single_precision_is_promoted():
    X = (vectors(12) * 1e25).astype(np.float32)
    out = rcb_objective(Linear(), X, labels(12), regularization=1e40, n_classes=M)
    assert out.dtype == "float64"
    assert finite(out)


@pytest.mark.chaos(20)
def test_jitter_is_the_last_resort():
    X = np.ones((40, 2))
    out = rcb_objective(Gaussian(), X, labels(40), regularization=1e-22, n_classes=M)
    assert out.jitter > 0
    assert finite(out)


@dataclass(frozen=True, eq=False, repr=False)
class Indefinite(Kernel):
    """No kernel at all: its Gram matrix has a negative eigenvalue of the size of n."""

    scale: Any = 1.0
    learned = ("scale",)

    def evaluate(self, X, X2, out=None):
        return (X[:, :1] * 0 - 1) @ (X2[:, :1] * 0 + 1).T

    def diag(self, X):
        return X[:, 0] * 0 + 1

    def pullback(self, X, X2, K, K_bar):
        return {"scale": (K_bar * 0).sum()}


def test_hopeless_matrix_is_a_clear_error(arrays, dtype):
    with pytest.raises(errors.NumericalError) as caught:
        rcb_objective(Indefinite(), arrays(vectors(50), dtype), labels(50), regularization=1e-3, n_classes=M)
    message = str(caught.value)
    for fact in ("50 rows", "1.0e-03", dtype, "float64", "Raise `regularization`", "positive semi-definite"):
        assert fact in message
    assert (caught.value.rows, caught.value.regularization, caught.value.dtype) == (50, 1e-3, "float64")
    assert isinstance(caught.value, ArithmeticError)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.rows, copy.regularization, copy.dtype) == (message, 50, 1e-3, "float64")


def test_kernel_that_forgets_a_gradient_is_told():
    class Forgetful(Gaussian):
        def pullback(self, X, X2, K, K_bar):
            return {"scale": K_bar.sum()}

    with pytest.raises(errors.ConfigError, match=r"returned no gradient for \['length_scale'\]"):
        call(rcb_objective, Forgetful(), vectors(10), labels(10))
