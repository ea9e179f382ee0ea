"""Two half moons of 200 rows: the probability of the upper class, and the entropy, which is high where the classes
meet."""

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import make_moons

import kme_dist as kme
from kme_dist.report.axes import PALETTE


def draw():
    X, y = make_moons(200, noise=0.22, random_state=3)
    clf = kme.MCEClassifier(kernel="gaussian").fit(X, y)
    span = np.linspace(-1.6, 2.6, 120), np.linspace(-1.1, 1.6, 90)
    grid = np.stack(np.meshgrid(*span), axis=-1).reshape(-1, 2)
    shape, extent = (90, 120), (-1.6, 2.6, -1.1, 1.6)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.2), sharey=True)
    probability = clf.predict_proba(grid)[:, 1].reshape(shape)
    image = left.imshow(
        probability, origin="lower", extent=extent, cmap="RdBu_r", vmin=0, vmax=1, aspect="auto", alpha=0.85
    )
    figure.colorbar(image, ax=left, label="probability of class 1")
    left.contour(*span, probability, levels=[0.5], colors="black", linewidths=1)
    image = right.imshow(
        clf.entropy(grid).reshape(shape),
        origin="lower",
        extent=extent,
        cmap="viridis",
        vmin=0,
        aspect="auto",
        alpha=0.85,
    )
    figure.colorbar(image, ax=right, label="entropy (nats)")
    for axes in (left, right):
        for label, colour in ((0, PALETTE[2]), (1, PALETTE[0])):
            axes.scatter(*X[y == label].T, s=12, color=colour, edgecolor="white", linewidth=0.4)
        axes.set_xlabel("first feature")
    left.set_ylabel("second feature")
    left.set_title("what it predicts")
    right.set_title("how uncertain it is")
    return figure
