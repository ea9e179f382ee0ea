"""A regression whose noise grows away from 0: the mean, the 90 % interval (jackknife+), and targets outside of it."""

import numpy as np
from matplotlib import pyplot as plt

import kme_dist as kme
from kme_dist.report.axes import ACCENT, PALETTE


def draw():
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, size=(500, 1))
    y = np.sin(2 * x[:, 0]) + (0.05 + 0.15 * np.abs(x[:, 0])) * rng.normal(size=500)
    reg = kme.CMERegressor().fit(x[:300], y[:300])
    at = np.linspace(-3, 3, 200)[:, None]
    low, high = reg.predict_interval(at, coverage=0.9)
    new_low, new_high = reg.predict_interval(x[300:], coverage=0.9)
    inside = (new_low <= y[300:]) & (y[300:] <= new_high)
    figure, axes = plt.subplots(figsize=(6.4, 3.1))
    axes.fill_between(at[:, 0], low, high, color=ACCENT, alpha=0.25, label="90 % interval")
    axes.plot(at, reg.predict(at), color=ACCENT, label="mean")
    axes.scatter(
        x[300:][inside], y[300:][inside], s=9, color=PALETTE[6], label=f"new targets, {inside.mean():.0%} inside"
    )
    axes.scatter(x[300:][~inside], y[300:][~inside], s=16, color=PALETTE[0])
    axes.set_xlabel("x")
    axes.set_ylabel("y")
    axes.legend(fontsize=8)
    return figure
