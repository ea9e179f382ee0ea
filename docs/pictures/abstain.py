"""Error rate of the rows that are answered, most certain first, on new rows of the breast cancer set; one line for each
of three splits."""

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split

import kme_dist as kme
from kme_dist.report.axes import ACCENT


def draw():
    figure, axes = plt.subplots(figsize=(5.6, 3))
    for seed in range(3):
        X, X_new, y, y_new = train_test_split(*load_breast_cancer(return_X_y=True), test_size=0.5, random_state=seed)
        clf = kme.MCEClassifier(steps=50).fit(X, y)
        wrong = (clf.predict(X_new) != y_new)[np.argsort(clf.entropy(X_new))]
        share = np.arange(1, len(wrong) + 1) / len(wrong)
        axes.plot(
            100 * share, 100 * np.cumsum(wrong) / np.arange(1, len(wrong) + 1), color=ACCENT, alpha=0.4 + 0.2 * seed
        )
    axes.set_xlabel("rows answered, most certain first (%)")
    axes.set_ylabel("errors among them (%)")
    axes.set_xlim(20, 100)  # the first few rows say little
    axes.set_ylim(0, 6)
    axes.grid()
    return figure
