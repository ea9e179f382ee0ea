"""Four bags of two kinds with the same mean, and the kernel means of 60 bags on their two leading directions."""

import numpy as np
from matplotlib import pyplot as plt

import kme_dist as kme
from kme_dist.report.axes import PALETTE


def draw():
    rng = np.random.default_rng(0)
    wide = np.arange(60) % 2 == 1
    bags = [rng.normal(0, 1.7 if w else 1.0, size=(30, 2)) for w in wide]
    K = kme.kernels.Bags(kme.kernels.Gaussian(length_scale=1.0)).gram(bags)
    centred = K - K.mean(axis=0) - K.mean(axis=1)[:, None] + K.mean()
    values, vectors = np.linalg.eigh(centred)
    points = vectors[:, -2:] * np.sqrt(values[-2:])
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.6, 3.1))
    for i, mark in zip(range(4), "osD^", strict=True):
        left.scatter(*bags[i].T, s=12, marker=mark, color=PALETTE[0] if wide[i] else PALETTE[2], alpha=0.7)
    left.set_title("members of four bags")
    for kind, colour, name in ((True, PALETTE[0], "wide"), (False, PALETTE[2], "narrow")):
        right.scatter(*points[wide == kind].T[::-1], s=22, color=colour, label=name)
    right.set_title("60 bags, each a point")
    right.set_xticks([])
    right.set_yticks([])
    right.legend()
    return figure
