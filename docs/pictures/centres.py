"""Digits: test error, and the share of the kernel that the centres do not explain, against the number of centres."""

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kme_dist as kme
from kme_dist.core.pivots import rpcholesky, unexplained
from kme_dist.report.axes import ACCENT, PALETTE


def draw():
    X, X_new, y, y_new = train_test_split(*load_digits(return_X_y=True), test_size=0.4, random_state=0)
    exact = kme.MCEClassifier(kernel="gaussian", steps=40, scaling="unit").fit(X, y)
    kernel = exact.kernel_
    scaled = exact.scaling_.apply(X, "float64")
    counts = (10, 20, 40, 80, 160, 320, 640)
    errors, left = [], []
    for count in counts:
        model = kme.MCEClassifier(
            kernel=kernel,
            steps=0,
            regularization=exact.regularization_,
            scaling="unit",
            solver="nystrom",
            centres=count,
        )
        errors.append(100 * (1 - model.fit(X, y).score(X_new, y_new)))
        chosen, _ = rpcholesky(kernel, scaled, count, seed=0)
        left.append(100 * unexplained(kernel, scaled, scaled[np.asarray(chosen)]))
    figure, axes = plt.subplots(figsize=(6, 3))
    axes.loglog(counts, errors, "o-", color=ACCENT, label="test error")
    axes.loglog(counts, left, "s--", color=PALETTE[0], label="kernel not explained")
    axes.axhline(100 * (1 - exact.score(X_new, y_new)), color=ACCENT, linestyle=":", label="test error, all rows")
    axes.set_xlabel("centres")
    axes.set_ylabel("%")
    axes.set_xticks(counts, counts)
    axes.minorticks_off()
    axes.grid()
    axes.legend(fontsize=8)
    return figure
