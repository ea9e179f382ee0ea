"""Handwritten digits: the inverse length scale of every pixel, and the four new images that the model is least certain
of, with the two most probable classes."""

import numpy as np
from matplotlib import pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import kme_dist as kme


def draw():
    X, X_new, y, _ = train_test_split(*load_digits(return_X_y=True), test_size=0.5, random_state=0)
    clf = kme.MCEClassifier(kernel="gaussian", steps=40).fit(X, y)
    figure, panels = plt.subplots(1, 5, figsize=(8.4, 2.1))
    panels[0].imshow((1 / clf.kernel_.length_scale).reshape(8, 8), cmap="viridis")
    panels[0].set_title("1 / length scale")
    for axes, row in zip(panels[1:], np.argsort(-clf.entropy(X_new))[:4], strict=True):
        p = clf.predict_proba(X_new[[row]])[0]
        first, second = np.argsort(-p)[:2]
        axes.imshow(X_new[row].reshape(8, 8), cmap="gray_r")
        axes.set_title(f"{clf.classes_[first]}: {p[first]:.0%}, {clf.classes_[second]}: {p[second]:.0%}", fontsize=8)
    for axes in panels:
        axes.set_xticks([])
        axes.set_yticks([])
    return figure
