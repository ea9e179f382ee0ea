"""The same 30 rows with a step under four kernels, with the same regularisation: smooth, rough, and with a linear part
that extrapolates."""

import numpy as np
from matplotlib import pyplot as plt

import kme_dist as kme
from kme_dist.report.axes import ACCENT, PALETTE


def draw():
    rng = np.random.default_rng(1)
    x = np.sort(rng.uniform(0, 6, size=30))[:, None]
    y = np.sin(x[:, 0]) + (x[:, 0] > 3) + 0.1 * rng.normal(size=30)
    at = np.linspace(-1, 8, 300)[:, None]
    kernels = {
        "Gaussian": kme.kernels.Gaussian(length_scale=1.0),
        "Matérn 1/2": kme.kernels.Matern(nu=0.5, length_scale=2.0),
        "Matérn 3/2": kme.kernels.Matern(nu=1.5, length_scale=1.5),
        "Gaussian + linear": kme.kernels.Gaussian(length_scale=1.0) + 0.3 * kme.kernels.Linear(),
    }
    figure, panels = plt.subplots(1, 4, figsize=(9, 2.4), sharey=True)
    for axes, (name, kernel) in zip(panels, kernels.items(), strict=True):
        model = kme.ConditionalMeanEmbedding(kernel, regularization=1e-3).fit(x, y)
        axes.plot(at, model.predict(at), color=ACCENT)
        axes.scatter(x, y, s=10, color=PALETTE[0], zorder=3)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("x")
    return figure
