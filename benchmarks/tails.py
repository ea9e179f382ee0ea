"""Features with heavy tails: `MCEClassifier()` with and without normal scores, beside trees, which see the order only.

    python -m benchmarks.tails [--rows 800] [--seeds 2]

The table is scikit-learn's `make_classification` with three classes; its standardised features z become exp(power z),
at power 0 they are z. Trees get the same table at every power, up to rounding.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import make_classification
from sklearn.ensemble import HistGradientBoostingClassifier
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
    given = parser.parse_args(argv)
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


if __name__ == "__main__":
    main()
