"""Two attributes of iris: learning from a start that overfits and from one that underfits, under the published
objective. Both approach the same objective; the accuracy is that of the rows learned from."""

from matplotlib import pyplot as plt
from sklearn.datasets import load_iris
from sklearn.model_selection import train_test_split

import kme_dist as kme
from kme_dist.report.axes import ACCENT, PALETTE


def draw():
    X, y = load_iris(return_X_y=True)
    X, _, y, _ = train_test_split(X[:, :2], y, test_size=0.2, random_state=0)
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 2.9))
    for name, scale, lam, colour in (
        ("overfitted start", 0.1, 1e-4, PALETTE[0]),
        ("underfitted start", 1.0, 1.0, ACCENT),
    ):
        clf = kme.MCEClassifier(
            kernel=kme.kernels.Gaussian(length_scale=scale), objective="rcb", regularization=lam, steps=400,
            learning_rate=0.01, batch_size=120, refit_regularization=False,
        ).fit(X, y)  # fmt: skip
        steps = [record["step"] for record in clf.history_]
        left.plot(steps, [record["objective"] for record in clf.history_], color=colour, label=name)
        right.plot(steps, [100 * record["accuracy"] for record in clf.history_], color=colour)
    left.set_yscale("log")
    left.set_ylabel("objective q")
    right.set_ylabel("accuracy on training rows (%)")
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid()
    left.legend(fontsize=8)
    return figure
