"""A two-sample test every day: from day 15 on, two columns that were independent become more and more correlated,
while each of them alone looks as before. The shaded region has 99 % of the values without drift."""

import numpy as np
from matplotlib import pyplot as plt

import kme_dist as kme
from kme_dist.report.axes import ACCENT, PALETTE


def draw():
    rng = np.random.default_rng(0)
    training, statistics, limits = rng.normal(size=(500, 4)), [], []
    for day in range(30):
        rows = rng.normal(size=(150, 4))
        mixed = min(0.9, max(0.0, (day - 14) * 0.08))
        rows[:, 1] = mixed * rows[:, 0] + np.sqrt(1 - mixed**2) * rows[:, 1]
        test = kme.mmd_test(training, rows, random_state=day)
        statistics.append(test.statistic)
        limits.append(np.quantile(test.null_values, 0.99))
    figure, axes = plt.subplots(figsize=(6, 3))
    axes.fill_between(
        range(30), limits, min(statistics) - 0.001, color=PALETTE[6], alpha=0.25, label="99 % without drift"
    )
    above = np.array(statistics) > limits
    axes.plot(statistics, color=ACCENT, linewidth=1)
    axes.scatter(np.arange(30)[~above], np.array(statistics)[~above], color=ACCENT, s=20, zorder=3)
    axes.scatter(np.arange(30)[above], np.array(statistics)[above], color=PALETTE[0], s=28, zorder=3, label="rejected")
    axes.axvline(14.5, linestyle=":", color=PALETTE[6])
    axes.set_xlabel("day")
    axes.set_ylabel("MMD²")
    axes.legend(loc="upper left")
    return figure
