"""Whether calibration by leave-one-out helps on unseen rows.

    python -m benchmarks.calibration [--steps 200] [--seeds 2] [--rows 2000] [names ...]

For each data set (those that ship with scikit-learn, and the shared ones where they are present) a model is fitted to
three quarters of at most `--rows` rows; then its probabilities are evaluated as they are, with a temperature, and with
isotonic maps, both fitted to leave-one-out predictions of the training rows. Printed for the other quarter: log loss,
calibration error and accuracy, mean over the seeds. Nothing is chosen on the test rows.
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn import datasets
from sklearn.model_selection import train_test_split

from benchmarks.machine import shared_data
from kme_dist import MCEClassifier
from kme_dist.core.calibration import KINDS
from kme_dist.core.metrics import Tally

BUILT_IN = ("digits", "iris", "wine", "breast_cancer")
SHARED = ("ecoli", "ionosphere", "parkinsons", "pima", "banknote", "satimage", "segment", "pendigits", "covtype")


def read(name: str, rows: int) -> tuple[np.ndarray, np.ndarray] | None:
    if name in BUILT_IN:
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    else:
        folder = shared_data()
        if folder is None or not (folder / f"{name}.npz").exists():
            return None
        with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
            X, y = stored["X"], stored["y"]
    chosen = np.random.default_rng(0).permutation(len(y))[:rows]
    return X[chosen].astype(np.float64), y[chosen]


def evaluate(X: np.ndarray, y: np.ndarray, seed: int, steps: int) -> dict[str, tuple[float, float, float]]:
    counts = dict(zip(*np.unique(y, return_counts=True), strict=True))
    keep = np.array([counts[label] >= 4 for label in y])
    X, X_test, y, y_test = train_test_split(X[keep], y[keep], random_state=seed, stratify=y[keep])
    model = MCEClassifier(steps=steps, random_state=seed).fit(X, y)
    rows, codes = model.scaling_.apply(X, "float64"), np.searchsorted(model.classes_, y)
    found = {}
    for kind in KINDS:
        model.calibration = kind
        model.calibration_ = model._leave_one_out_calibration(rows, codes)
        p = model.predict_proba(X_test)
        figures = Tally.of(np.searchsorted(model.classes_, y_test), p).metrics(model.classes_)
        found[kind] = (figures["log_loss"], figures["calibration_error"], figures["accuracy"])
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*BUILT_IN, *SHARED])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2000)
    options = parser.parse_args(argv)
    print(f"{'':14}{'':>6}" + "".join(f"{kind + ' loss / ECE / acc':>34}" for kind in KINDS), flush=True)
    better = {"temperature": [0, 0, 0], "isotonic": [0, 0, 0]}
    for name in options.names:
        table = read(name, options.rows)
        if table is None:
            print(f"{name}: not found")
            continue
        runs = [evaluate(*table, seed, options.steps) for seed in range(options.seeds)]
        means = {kind: np.mean([run[kind] for run in runs], axis=0) for kind in KINDS}
        cells = [f"{means[kind][0]:>18.4f} / {means[kind][1]:.3f} / {means[kind][2]:.3f}" for kind in KINDS]
        print(f"{name:14}{len(table[1]):>6}" + "".join(cells), flush=True)
        for kind, counts in better.items():
            counts[0] += 1
            counts[1] += int(means[kind][0] < means["none"][0])
            counts[2] += int(means[kind][1] < means["none"][1])
    for kind, (total, loss, error) in better.items():
        print(f"{kind}: lower log loss on {loss} of {total} data sets, lower calibration error on {error}")


if __name__ == "__main__":
    main()
