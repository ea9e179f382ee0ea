"""Leave-one-out log loss from the training rows alone, and the log loss of new rows, against the regularisation."""

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import kme_dist as kme
from kme_dist.core.embedding import clip_normalise
from kme_dist.report.axes import ACCENT, PALETTE


def draw():
    X, X_new, y, y_new = train_test_split(*load_breast_cancer(return_X_y=True), test_size=0.6, random_state=0)
    low, span = X.min(axis=0), np.ptp(X, axis=0)
    X, X_new = (X - low) / span, (X_new - low) / span
    kernel, Y, n = kme.kernels.Gaussian(length_scale=0.8), np.eye(2)[y], len(X)
    K, K_new, lams, inner, outer = kernel.gram(X), kernel.gram(X_new, X), np.geomspace(1e-7, 1, 40), [], []
    for lam in lams:
        inverse = np.linalg.inv(K + n * lam * np.eye(n))
        V = inverse @ Y
        left_out = Y - V / np.diag(inverse)[:, None]
        inner.append(-np.mean(np.log(clip_normalise(left_out, 1 / (n + 2))[np.arange(n), y])))
        outer.append(-np.mean(np.log(clip_normalise(K_new @ V, 1 / (n + 2))[np.arange(len(y_new)), y_new])))
    figure, axes = plt.subplots(figsize=(6, 2.9))
    axes.semilogx(lams, inner, color=ACCENT, label="leave-one-out, training rows")
    axes.semilogx(lams, outer, color=PALETTE[0], linestyle="--", label="new rows")
    for values, colour in ((inner, ACCENT), (outer, PALETTE[0])):
        axes.scatter(lams[np.argmin(values)], min(values), color=colour, zorder=3)
    axes.set_xlabel("λ")
    axes.set_ylabel("log loss")
    axes.grid()
    axes.legend(fontsize=8)
    return figure
