"""Expected cost of three actions along one feature: the best action changes before the most probable class does."""

import numpy as np
from matplotlib import pyplot as plt

import kme_dist as kme
from kme_dist.report.axes import PALETTE


def draw():
    rng = np.random.default_rng(0)
    x = rng.uniform(0, 10, size=(300, 1))
    ill = (rng.uniform(size=300) < 1 / (1 + np.exp(-(x[:, 0] - 6)))).astype(int)
    clf = kme.MCEClassifier(steps=50).fit(x, ill)
    at = np.linspace(0, 10, 200)[:, None]
    figure, (above, below) = plt.subplots(2, 1, figsize=(6, 3.8), sharex=True, height_ratios=[1, 2])
    above.plot(at, clf.predict_proba(at)[:, 1], color=PALETTE[6])
    above.axhline(0.5, linewidth=0.8, linestyle=":", color=PALETTE[6])
    above.set_ylabel("P(ill)")
    costs = {"send home": [0, 20], "second test": [2, 6], "treat": [9, 1]}
    lines = {name: clf.expectation(at, values) for name, values in costs.items()}
    for colour, (name, line) in zip(PALETTE, lines.items(), strict=False):
        below.plot(at, line, label=name, color=colour)
    below.plot(at, np.min(list(lines.values()), axis=0), linewidth=5, alpha=0.25, color=PALETTE[6])
    below.set_xlabel("measurement")
    below.set_ylabel("expected cost")
    below.legend()
    return figure
