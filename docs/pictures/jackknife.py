"""One query: the predictions f₋ᵢ(x) of models without row i, moved by their residuals, and the interval between the 5 %
and 95 % quantiles."""

import numpy as np
from matplotlib import pyplot as plt

import kme_dist as kme
from kme_dist.report.axes import ACCENT, PALETTE


def draw():
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, size=(60, 1))
    y = np.sin(2 * x[:, 0]) + 0.25 * rng.normal(size=60)
    kernel, lam, query = kme.kernels.Gaussian(length_scale=0.8), 1e-3, np.array([[1.0]])
    inverse = np.linalg.inv(kernel.gram(x) + 60 * lam * np.eye(60))
    residuals = (inverse @ y) / np.diag(inverse)
    weights = inverse @ kernel.gram(x, query)[:, 0]
    without = weights @ y - weights * residuals
    low = np.sort(without - np.abs(residuals))[int(0.1 * 61) - 1]
    high = np.sort(without + np.abs(residuals))[int(np.ceil(0.9 * 61)) - 1]
    at = np.linspace(-3, 3, 200)[:, None]
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.8, 2.9), sharey=True, width_ratios=[2, 1])
    left.plot(at, kernel.gram(at, x) @ inverse @ y, color=ACCENT)
    left.scatter(x, y, s=10, color=PALETTE[6])
    left.plot([1, 1], [low, high], color=PALETTE[0], linewidth=3)
    left.set_xlabel("x")
    left.set_title("the interval at x = 1")
    spread = np.arange(60)
    right.scatter(spread, without + np.abs(residuals), s=10, color=PALETTE[4], label="f₋ᵢ + |eᵢ|")
    right.scatter(spread, without - np.abs(residuals), s=10, color=PALETTE[5], label="f₋ᵢ − |eᵢ|")
    right.axhspan(low, high, color=PALETTE[0], alpha=0.18)
    right.set_xlabel("row left out")
    right.set_title("what it is made of")
    right.legend(fontsize=7)
    return figure
