"""One feature, two classes: every row adds a bump of its weight V, and the sum of all bumps is the decision f(x)."""

import numpy as np
from matplotlib import pyplot as plt

import kme_dist as kme
from kme_dist.report.axes import ACCENT, PALETTE


def draw():
    rng = np.random.default_rng(2)
    x = np.sort(rng.uniform(0, 6, size=14))[:, None]
    y = (np.sin(x[:, 0]) + 0.3 * rng.normal(size=14) > 0).astype(float)
    kernel, lam = kme.kernels.Gaussian(length_scale=0.7), 0.02
    V = np.linalg.solve(kernel.gram(x) + len(x) * lam * np.eye(len(x)), y)
    at = np.linspace(-2, 8, 300)[:, None]
    bumps = kernel.gram(at, x) * V
    figure, axes = plt.subplots(figsize=(6.6, 2.8))
    axes.plot(at, bumps, color=PALETTE[6], linewidth=0.8, alpha=0.8)
    axes.plot(at, bumps.sum(axis=1), color=ACCENT, linewidth=2, label="f(x) = Σ V_i k(x_i, x)")
    axes.scatter(
        x, y, color=[PALETTE[0] if label else PALETTE[2] for label in y], zorder=3, s=26, label="rows and labels"
    )
    axes.axhline(0, linewidth=0.6, color=PALETTE[6])
    axes.set_xlabel("x")
    axes.legend(fontsize=8)
    return figure
