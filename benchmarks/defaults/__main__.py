"""Quality of the defaults: `MCEClassifier()` on raw data against scikit-learn's `SVC()` on standardised data.

    python -m benchmarks.defaults [--splits 3] [--rows 3000] [--sets iris,wine,...]

Accuracy, and log loss of the predicted probabilities against a calibrated SVC, on the shared classification sets
(folder KME_DATA or ../shared/data) and on those that ship with scikit-learn. Random splits, three quarters for
training; larger sets are sampled down to `--rows` training rows, because SVC does not scale. Default gradient boosting
is shown for comparison.
"""

from __future__ import annotations

import argparse
import time
import warnings

import numpy as np
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import kme_dist as kme
from benchmarks.machine import load_average, shared_data

SHIPPED = {"iris": load_iris, "wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
SHARED = (
    "ecoli",
    "ionosphere",
    "parkinsons",
    "pima",
    "banknote",
    "segment",
    "satimage",
    "pendigits",
    "poker",
    "covtype",
    "mnist",
)


def table(name):
    if name in SHIPPED:
        return SHIPPED[name](return_X_y=True)
    with np.load(shared_data() / f"{name}.npz", allow_pickle=False) as stored:
        return stored["X"].astype(np.float64), stored["y"]


def split(name, seed, rows):
    X, y = table(name)
    if len(y) > rows + 3000:
        keep = np.random.default_rng(seed).choice(len(y), rows + 2000, replace=False)
        X, y = X[keep], y[keep]
    test = 0.25 if 0.75 * len(y) <= rows else len(y) - rows
    counts = np.unique(y, return_counts=True)[1]
    return train_test_split(X, y, test_size=test, random_state=seed, stratify=y if counts.min() > 1 else None)


def loss(model, X, y):
    """Log loss over the rows whose label occurs in training (no model can predict the others)."""
    known = np.isin(y, model.classes_)
    return log_loss(y[known], model.predict_proba(X[known]), labels=model.classes_)


def measure(name, seed, rows):
    X, Xq, y, yq = split(name, seed, rows)
    began = time.perf_counter()
    mce = kme.MCEClassifier().fit(X, y)
    seconds = time.perf_counter() - began
    svc = make_pipeline(StandardScaler(), SVC()).fit(X, y)
    labels, counts = np.unique(y, return_counts=True)
    often = np.isin(y, labels[counts > 1])  # calibration by folds is not possible with a class of one row
    folds = int(min(5, counts[counts > 1].min()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calibrated = CalibratedClassifierCV(make_pipeline(StandardScaler(), SVC()), cv=folds)
        svc_loss = loss(calibrated.fit(X[often], y[often]), Xq, yq)
        boosted = HistGradientBoostingClassifier(random_state=0).fit(X, y)
    return {
        "rows": len(y),
        "mce": mce.score(Xq, yq),
        "svc": svc.score(Xq, yq),
        "boosting": boosted.score(Xq, yq),
        "mce loss": loss(mce, Xq, yq),
        "svc loss": svc_loss,
        "boosting loss": loss(boosted, Xq, yq),
        "seconds": seconds,
    }


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--rows", type=int, default=3000, help="most training rows")
    parser.add_argument("--sets", default=None)
    arguments = parser.parse_args(argv)
    names = [*SHIPPED, *(SHARED if shared_data() else ())]
    if arguments.sets:
        names = arguments.sets.split(",")
    columns = ["rows", "mce", "svc", "boosting", "mce loss", "svc loss", "boosting loss", "seconds"]
    print(f"mean of {arguments.splits} splits, at most {arguments.rows} training rows; machine load {load_average()}")
    print(f"{'':14}" + "".join(f"{c:>14}" for c in columns) + f"{'ahead of svc':>14}")
    means = []
    for name in names:
        runs = [measure(name, seed, arguments.rows) for seed in range(arguments.splits)]
        mean = {c: float(np.mean([run[c] for run in runs])) for c in columns}
        means.append(mean)
        shown = "".join(f"{mean[c]:>14.0f}" if c in ("rows", "seconds") else f"{mean[c]:>14.3f}" for c in columns)
        print(f"{name:14}{shown}{100 * (mean['mce'] - mean['svc']):>+14.1f}", flush=True)
    lead = [100 * (m["mce"] - m["svc"]) for m in means]
    print(
        f"accuracy: {np.mean(lead):+.2f} points against SVC on average, {min(lead):+.1f} at worst; "
        f"mean log loss {np.mean([m['mce loss'] for m in means]):.3f} against "
        f"{np.mean([m['svc loss'] for m in means]):.3f} for calibrated SVC"
    )


if __name__ == "__main__":
    main()
