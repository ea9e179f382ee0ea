"""Decisions, objectives and gradients against arithmetic of 50 digits: the error is what the condition of the solve
allows, wherever the rows lie and however small the regularisation.

The oracle takes rows and parameters as the exact numbers that they are stored as, so that nothing but arithmetic
counts. Its gradients are central differences, whose own error is far below anything that is told apart here.
"""

from __future__ import annotations

import functools
import math

import mpmath
import numpy as np
import oracles
import pytest

from kme_dist.core.embedding import Decision, Embedding, exact_solution, solve_dual
from kme_dist.core.kernels import Gaussian, Laplace, Matern, RationalQuadratic
from kme_dist.core.objective import rcb_objective

mp = mpmath.mp.clone()
mp.dps = 50
N, QUERIES, M = 12, 5, 3
U = 2.0**-53
STEP = mp.mpf(10) ** -20
ARD = (0.7, 1.3, 2.1)
KERNELS = {
    "gaussian ARD": Gaussian(length_scale=ARD, scale=1.2),
    "matern 1/2": Matern(nu=0.5, length_scale=ARD),
    "matern 3/2": Matern(nu=1.5, length_scale=0.8),
    "matern 5/2": Matern(nu=2.5, length_scale=ARD, scale=1.5),
    "rational quadratic": RationalQuadratic(length_scale=ARD, shape=0.7),
    "laplace": Laplace(length_scale=ARD),
}
SHIFTS = (1.0, 1e-3, 1e-6, 1e-10)  # nλ


@functools.cache
def rows(dtype, offset):
    """Training rows and queries of spread 1, the same for every offset but for their own rounding; and labels."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(N, 3))
    y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.3)
    queries = rng.normal(size=(QUERIES, 3))
    return (X + offset).astype(dtype), (queries + offset).astype(dtype), y


# --- the oracle --------------------------------------------------------------------------------------


def similarity(kernel, values, x, x2):
    difference = [(a - b) / ell for a, b, ell in zip(x, x2, values["length_scale"], strict=True)]
    variance = values["scale"][0] ** 2
    if isinstance(kernel, Laplace):
        return variance * mp.exp(-sum(abs(z) for z in difference))
    s = sum(z * z for z in difference)
    match kernel:
        case Gaussian():
            return variance * mp.exp(-s / 2)
        case RationalQuadratic():
            shape = values["shape"][0]
            return variance * (1 + s / (2 * shape)) ** -shape
    a = mp.sqrt(int(2 * kernel.nu) * s)
    polynomial = {0.5: 1, 1.5: 1 + a, 2.5: 1 + a + a * a / 3}[kernel.nu]
    return variance * polynomial * mp.exp(-a)


def solved(A, B):
    """A⁻¹ B for a positive definite A, by Cholesky; lists of rows."""
    n = len(A)
    L = [[mp.zero] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            left = A[i][j] - sum(L[i][k] * L[j][k] for k in range(j))
            L[i][j] = mp.sqrt(left) if i == j else left / L[j][j]
    columns = []
    for column in zip(*B, strict=True):
        z = []
        for i in range(n):
            z.append((column[i] - sum(L[i][k] * z[k] for k in range(i))) / L[i][i])
        v = [mp.zero] * n
        for i in reversed(range(n)):
            v[i] = (z[i] - sum(L[k][i] * v[k] for k in range(i + 1, n))) / L[i][i]
        columns.append(v)
    return [list(row) for row in zip(*columns, strict=True)]


def fit(kernel, values, X, Y, shift):
    """K, V and P = K V."""
    n = len(X)
    K = [[mp.zero] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            K[i][j] = K[j][i] = similarity(kernel, values, X[i], X[j])
    V = solved([[K[i][j] + (shift if i == j else 0) for j in range(n)] for i in range(n)], Y)
    P = [[sum(K[i][k] * V[k][c] for k in range(n)) for c in range(M)] for i in range(n)]
    return K, V, P


def objective(kernel, values, X, y, shift):
    """Σ_i -log clip(P_i,y_i, 1e-15, 1) + 4e α sqrt(trace(Vᵀ K V))"""
    Y = [[mp.mpf(int(label == c)) for c in range(M)] for label in y]
    _, V, P = fit(kernel, values, X, Y, shift)
    own = [min(max(P[i][label], mp.mpf("1e-15")), mp.one) for i, label in enumerate(y)]
    t = sum(V[i][c] * P[i][c] for i in range(len(y)) for c in range(M))
    return -sum(mp.log(p) for p in own) + 4 * mp.mpf(math.e) * values["scale"][0] * mp.sqrt(t)


def exact(array):
    return [[mp.mpf(float(x)) for x in row] for row in array]


@functools.cache
def truth(name, dtype, offset, shift):
    """Weights, decisions at the queries, value and gradient, rounded to double; and (|K| + nλ)/nλ."""
    kernel = KERNELS[name]
    X, queries, y = (part.tolist() if part.dtype.kind == "i" else exact(part) for part in rows(dtype, offset))
    shift = mp.mpf(N * (shift / N))  # what the package makes of λ
    ones = {k: v.size for k, v in kernel.parameters.items()}
    values = {k: [mp.mpf(float(x)) for x in np.ravel(v)] for k, v in kernel.parameters.items()}
    if ones["length_scale"] == 1:
        values["length_scale"] *= 3
    Y = [[mp.mpf(int(label == c)) for c in range(M)] for label in y]
    K, V, _ = fit(kernel, values, X, Y, shift)
    cross = [[similarity(kernel, values, q, x) for x in X] for q in queries]
    f = [[sum(row[k] * V[k][c] for k in range(N)) for c in range(M)] for row in cross]

    def slope(parameter, index):
        found = []
        for sign in (1, -1):
            factor = mp.exp(sign * STEP)
            moved = {k: list(v) for k, v in values.items()}
            if parameter == "regularization":
                found.append(objective(kernel, moved, X, y, shift * factor))
                continue
            for i in index:
                moved[parameter][i] *= factor
            found.append(objective(kernel, moved, X, y, shift))
        return float((found[0] - found[1]) / (2 * STEP))

    gradient = {"regularization": np.array(slope("regularization", ()))}
    for parameter, value in kernel.parameters.items():
        whole = value.ndim == 0
        indices = [range(len(values[parameter]))] if whole else [(i,) for i in range(value.size)]
        found = [slope(parameter, index) for index in indices]
        gradient[parameter] = np.array(found[0] if whole else found)
    norm = float(np.linalg.norm(np.array(K, dtype=float), 2))
    return (
        np.array(V, dtype=float),
        np.array(f, dtype=float),
        float(objective(kernel, values, X, y, shift)),
        gradient,
        (norm + float(shift)) / float(shift),
    )


def relative(found, expected):
    return float(np.linalg.norm(np.asarray(found, dtype=float) - expected) / np.linalg.norm(expected))


# --- what is promised --------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("offset", [0.0, 1e4, 1e8])
@pytest.mark.parametrize("name", KERNELS)
def test_double_precision_is_as_good_as_the_condition_allows(name, offset, shift):
    kernel, (X, queries, y) = KERNELS[name], rows("float64", offset)
    V, f, value, gradient, condition = truth(name, "float64", offset, shift)
    bound = 100 * U * condition
    found = solve_dual(kernel, X, np.eye(M)[y], shift / N)
    assert relative(found, V) <= bound
    assert relative(Decision(Embedding(kernel, X, found, shift / N))(queries), f) <= bound
    out = rcb_objective(kernel, X, y, regularization=shift / N, n_classes=M)
    assert (out.dtype, out.jitter) == ("float64", 0.0)
    assert abs(out.value - value) <= bound * abs(value)
    assert oracles.relative_error(out.gradient, gradient) <= bound


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("name", KERNELS)
def test_single_precision_gives_three_digits_or_is_promoted(name, offset, shift):
    kernel, (X, queries, y) = KERNELS[name], rows("float32", offset)
    V, f, value, gradient, condition = truth(name, "float32", offset, shift)
    fitted = Embedding(kernel, X, exact_solution(kernel, X, y, M, shift / N).weights, shift / N)
    out = rcb_objective(kernel, X, y, regularization=shift / N, n_classes=M)
    assert fitted.weights.dtype == out.dtype
    assert relative(fitted.weights, V) <= 1e-3
    for rows_ in (queries, queries.astype(np.float64)):
        assert relative(fitted.decision(rows_), f) <= 1e-3
    assert abs(out.value - value) <= 1e-3 * abs(value)
    assert oracles.relative_error(out.gradient, gradient) <= 1e-3
    if condition < 100:
        assert out.dtype == "float32"  # it is a wish about speed that is granted where it can be
    if condition > 1e5:
        assert out.dtype == "float64"
