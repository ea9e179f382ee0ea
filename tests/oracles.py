"""The paper in slow, plain code: what the fast code is held against.

Gram matrices come from the formula for one pair of rows, broadcast; objectives from their definitions, with a general
solve and a product by K; gradients from automatic differentiation (autograd). Nothing here is clever, and nothing is
shared with the package but the kernel objects, which are read for their type and parameters only.
"""

from __future__ import annotations

import math
from collections import Counter

import autograd
import autograd.numpy as np
import numpy as onp

from kme_dist import kernels


def _values(kernel, log_parameters):
    """Parameters by name; those of a feature map are no logarithms."""
    return {k: v if "features." in k else np.exp(v) for k, v in log_parameters.items()}


def log_parameters(kernel):
    return {k: onp.array(v) if "features." in k else onp.log(v) for k, v in kernel.parameters.items()}


def _part(values, prefix):
    return {name[len(prefix) :]: value for name, value in values.items() if name.startswith(prefix)}


def _root(s):
    """sqrt with slope 0 at 0, where the kernels' own slopes vanish."""
    positive = s > 0
    return np.where(positive, np.sqrt(np.where(positive, s, 1.0)), 0.0)


def gram(kernel, values, X, X2):
    """k(x_i, x2_j) for every pair."""
    if hasattr(kernel, "oracle"):  # kernels that tests define bring their own formula
        return kernel.oracle(values, X, X2)
    scale2 = values["scale"] ** 2 if "scale" in values else 1.0
    match kernel:
        case kernels.Spectrum():
            return scale2 * _shared_substrings(kernel, X, X2)
        case kernels.Bags():
            means = [[np.mean(gram(kernel.parts[0], _part(values, "0."), A, B)) for B in X2] for A in X]
            return np.array(means)
        case kernels.Sum():
            return sum(gram(part, _part(values, f"{i}."), X, X2) for i, part in enumerate(kernel.parts))
        case kernels.Product():
            return math.prod(gram(part, _part(values, f"{i}."), X, X2) for i, part in enumerate(kernel.parts))
        case kernels.Scaled():
            return scale2 * gram(kernel.parts[0], _part(values, "0."), X, X2)
        case kernels.ConvexCombination():
            shares = values["weights"] / np.sum(values["weights"])
            return sum(shares[i] * gram(part, _part(values, f"{i}."), X, X2) for i, part in enumerate(kernel.parts))
        case kernels.OnFeatures():
            phi = kernel.features.oracle
            inner = _part(values, "features.")
            return gram(kernel.kernel, values, phi(inner, X), phi(inner, X2))
        case kernels.Polynomial():
            products = X[:, None, :] * X2[None, :, :] / values.get("length_scale", 1.0) ** 2
            return scale2 * (np.sum(products, axis=2) + values.get("offset", 0.0)) ** kernel.degree
    difference = X[:, None, :] - X2[None, :, :]
    match kernel:
        case kernels.Cosine():
            return scale2 * np.cos(np.sum(difference * values["frequency"], axis=2))
        case kernels.Laplace():
            return scale2 * np.exp(-np.sum(np.abs(difference) / values["length_scale"], axis=2))
        case kernels.Periodic():
            sines = np.sin(np.pi * difference / values["period"])
            return scale2 * np.exp(-2 * np.sum((sines / values["length_scale"]) ** 2, axis=2))
    s = np.sum((difference / values["length_scale"]) ** 2, axis=2)
    match kernel:
        case kernels.Gaussian():
            return scale2 * np.exp(-s / 2)
        case kernels.RationalQuadratic():
            return scale2 * (1 + s / (2 * values["shape"])) ** (-values["shape"])
        case kernels.Matern(nu=0.5):
            return scale2 * np.exp(-_root(s))
        case kernels.Matern(nu=1.5):
            r = math.sqrt(3) * _root(s)
            return scale2 * (1 + r) * np.exp(-r)
        case kernels.Matern(nu=2.5):
            r = math.sqrt(5) * _root(s)
            return scale2 * (1 + r + r**2 / 3) * np.exp(-r)
    raise AssertionError(f"no oracle for {kernel!r}")


def _shared_substrings(kernel, X, X2):
    """Inner products of substring counts, by counting."""

    def count(text):
        found = Counter(text[i : i + kernel.p] for i in range(len(text) - kernel.p + 1))
        if kernel.normalize and not found:
            found = Counter([text])  # too short to have a substring: resembles its equals only
        return found

    def inner(a, b):
        return float(sum(a[key] * b[key] for key in a))

    def similarity(s, t):
        a, b = count(s), count(t)
        return inner(a, b) / math.sqrt(inner(a, a) * inner(b, b)) if kernel.normalize else inner(a, b)

    return onp.array([[similarity(s, t) for t in X2] for s in X])


def kernel_gradient(kernel, X, X2, K_bar):
    """sum_ij K_bar_ij dK_ij / d log θ by automatic differentiation."""

    def weighted(logs):
        return np.sum(K_bar * gram(kernel, _values(kernel, logs), X, X2))

    return autograd.grad(weighted)(log_parameters(kernel))


# --- objectives ------------------------------------------------------------------------------------


def one_hot(y, m):
    return onp.eye(m)[onp.asarray(y)]


def _loss(Y, P, risk, floor):
    own = np.clip(np.sum(Y * P, axis=1), floor, 1.0)
    total = -np.sum(np.log(own))
    return total if risk == "sum" else total / len(Y)


def _complexity(K, V, alpha):
    return alpha * np.sqrt(np.sum(V * (K @ V)))


def _alpha(K, alpha):
    return np.sqrt(np.max(np.diag(K))) if alpha is None else alpha


def rcb(K, Y, lam, *, risk="sum", tau=4 * math.e, floor=1e-15, alpha=None):
    n = len(Y)
    V = np.linalg.solve(K + n * lam * np.eye(n), Y)
    return _loss(Y, K @ V, risk, floor) + tau * _complexity(K, V, _alpha(K, alpha))


def validation(K, Y, lam, *, train_rows, risk="sum", tau=1.0, floor=1e-15, alpha=None):
    T = train_rows
    K_TT, K_DT = K[:T, :T], K[T:, :T]
    V = np.linalg.solve(K_TT + T * lam * np.eye(T), Y[:T])
    return _loss(Y[T:], K_DT @ V, risk, floor) + tau * _complexity(K_TT, V, _alpha(K_TT, alpha))


def loo(K, Y, lam, *, risk="sum", tau=1.0, floor=1e-15, alpha=None):
    """By n real refits, each without its row and with the shift of all rows."""
    n = len(Y)
    shift = n * lam
    predictions = []
    for i in range(n):
        rest = onp.arange(n) != i
        V_i = np.linalg.solve(K[rest][:, rest] + shift * np.eye(n - 1), Y[rest])
        predictions.append(K[i, rest] @ V_i)
    V = np.linalg.solve(K + shift * np.eye(n), Y)
    return _loss(Y, np.stack(predictions), risk, floor) + tau * _complexity(K, V, _alpha(K, alpha))


OBJECTIVES = {"rcb": rcb, "validation": validation, "loo": loo}


def objective(name, kernel, X, y, lam, n_classes, **settings):
    """Value of the objective and its gradient by the logarithms of all parameters."""
    logs = {**log_parameters(kernel), "regularization": onp.log(lam)}
    Y = one_hot(y, n_classes)

    def q(logs):
        values = _values(kernel, logs)
        lam = values.pop("regularization")
        return OBJECTIVES[name](gram(kernel, values, X, X), Y, lam, **settings)

    value, gradient = autograd.value_and_grad(q)(logs)
    return value, gradient


def feature_objective(Z, y, lam, n_classes, *, risk="sum", tau=4 * math.e, floor=1e-15, alpha=1.0):
    """Value, gradient by Z, and gradient by log λ of the objective on explicit features."""
    Y, n = one_hot(y, n_classes), len(Z)

    def q(Z, log_lam):
        W = np.linalg.solve(Z.T @ Z + n * np.exp(log_lam) * np.eye(Z.shape[1]), Z.T @ Y)
        sup = np.sqrt(np.max(np.sum(Z**2, axis=1))) if alpha is None else alpha
        return _loss(Y, Z @ W, risk, floor) + tau * sup * np.sqrt(np.sum(W**2))

    by_Z, by_log_lam = autograd.grad(q, (0, 1))(Z, onp.log(lam))
    return q(Z, onp.log(lam)), by_Z, by_log_lam


# --- comparing -------------------------------------------------------------------------------------

# Relative errors that count as agreement with these double-precision oracles.
VALUE_TOLERANCE = {"float64": 1e-10, "float32": 5e-5}
GRADIENT_TOLERANCE = {"float64": 1e-8, "float32": 1e-3}


def relative_error(found, expected):
    """Distance between two gradients (dictionaries or arrays), relative to the length of the expected one."""
    if not isinstance(expected, dict):
        found, expected = {"": found}, {"": expected}
    assert set(found) == set(expected)
    for name in expected:
        assert onp.shape(found[name]) == onp.shape(expected[name]), name
    gap = sum(float(onp.sum((onp.asarray(found[k]) - expected[k]) ** 2)) for k in expected)
    size = sum(float(onp.sum(onp.asarray(expected[k]) ** 2)) for k in expected)
    return math.sqrt(gap) / math.sqrt(size)
