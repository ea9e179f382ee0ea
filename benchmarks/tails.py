"""Features with heavy tails: default models with and without normal scores, beside trees, which see the order only.

    python -m benchmarks.tails [--rows 800] [--seeds 2]       MCEClassifier
    python -m benchmarks.tails --regression                   CMERegressor, on scikit-learn's `make_friedman1`

The table is scikit-learn's `make_classification` with three classes; its standardised features z become exp(power z),
at power 0 they are z. Trees get the same table at every power, up to rounding.
"""

from __future__ import annotations

import argparse

import numpy as np
from scipy.special import ndtri
from sklearn.datasets import make_classification, make_friedman1
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import log_loss

import kme_dist as kme

POWERS = (0, 1, 2, 3)


def table(rows, seed, power):
    X, y = make_classification(2 * rows, 10, n_informative=6, n_redundant=2, n_classes=3, random_state=seed)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    return (np.exp(power * X) if power else X), y


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=800, help="to learn from; as many test rows")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--regression", action="store_true")
    given = parser.parse_args(argv)
    if given.regression:
        return regression(given.rows, given.seeds)
    models = {
        "scaling='unit'": lambda: kme.MCEClassifier(scaling="unit"),
        "scaling='auto'": lambda: kme.MCEClassifier(),
        "HistGB": lambda: HistGradientBoostingClassifier(random_state=0),
    }
    print("accuracy and log loss of test rows")
    for power in POWERS:
        cells = []
        for name, build in models.items():
            found = []
            for seed in range(given.seeds):
                X, y = table(given.rows, seed, power)
                P = build().fit(X[: given.rows], y[: given.rows]).predict_proba(X[given.rows :])
                hidden = y[given.rows :]
                found.append((100 * np.mean(P.argmax(axis=1) == hidden), log_loss(hidden, P)))
            accuracy, loss = np.mean(found, axis=0)
            cells.append(f"{name} {accuracy:.1f} % {loss:.3f}")
        print(f"exp({power} z): " + "   ".join(cells), flush=True)


def regression(rows, seeds):
    """Friedman's first function of ten uniform features u, of which models see exp(power z) with z = Φ⁻¹(u); and with
    one wrong cell."""
    models = {
        "scaling='standard'": lambda: kme.CMERegressor(scaling="standard"),
        "scaling='auto'": lambda: kme.CMERegressor(),
        "HistGB": lambda: HistGradientBoostingRegressor(random_state=0),
    }
    print("R² of test rows")
    for name in (*POWERS, "one cell of 1e9"):
        cells = {model: [] for model in models}
        for seed in range(seeds):
            U, y = make_friedman1(2 * rows, noise=1.0, random_state=seed)
            Z = ndtri(U)
            X = np.exp(name * Z) if isinstance(name, int) and name else Z
            if isinstance(name, str):
                X[0, 0] = 1e9
            for model, build in models.items():
                cells[model].append(build().fit(X[:rows], y[:rows]).score(X[rows:], y[rows:]))
        shown = "   ".join(f"{model} {np.mean(found):.3f}" for model, found in cells.items())
        print(f"{f'exp({name} z)' if isinstance(name, int) else name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
