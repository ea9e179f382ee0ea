"""CMERegressor with its defaults against kernel ridge, support vectors and trees: errors, seconds, intervals.

    OMP_NUM_THREADS=1 python -m benchmarks.regression [--splits 5] [--models cme,krr,svr,hgb,xgb] [names ...]

For each data set and split (three quarters of the rows for training, drawn by the number of the split) every model is
fitted on one core. KRR and SVR are searched over 5 x 5 settings with five folds of the training rows, on standardised
inputs and targets; trees have the defaults of their libraries. Printed: the RMSE of the test rows, processor seconds of
the fit, and for CMERegressor (jackknife+) and HistGradientBoosting the coverage and mean width of 90 % intervals. Those
of the trees are conformal, on a fifth of the training rows that they are not fitted to: around the mean ("split") and
around quantiles ("CQR"; Romano, Patterson and Candès, 2019). A last line divides by the best of the others.

`--krr-rows` limits the rows of the two searches: a grid of kernel matrices of cadata takes an hour. Their seconds are
then multiplied by the cube (SVR: the square) of the ratio, and marked by "~".
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR

from benchmarks.machine import shared_data
from kme_dist import CMERegressor
from kme_dist.errors import DataError

NAMES = ("abalone", "space_ga", "cadata")
GAMMAS = np.logspace(-3, 1, 5)
COVERAGE = 0.9


def searched(estimator: Any, name: str, **grid: Any) -> Any:
    inside = TransformedTargetRegressor(make_pipeline(StandardScaler(), estimator), transformer=StandardScaler())
    own = {f"regressor__{name}__{key}": values for key, values in grid.items()}
    return GridSearchCV(inside, own, cv=5, scoring="neg_mean_squared_error")


def xgboost() -> Any:
    from xgboost import XGBRegressor

    return XGBRegressor(n_jobs=1, random_state=0)


MODELS: dict[str, Callable[[], Any]] = {
    "cme": CMERegressor,
    "krr": lambda: searched(KernelRidge(kernel="rbf"), "kernelridge", alpha=np.logspace(-4, 0, 5), gamma=GAMMAS),
    "svr": lambda: searched(SVR(cache_size=1000), "svr", C=np.logspace(-1, 2, 5), gamma=GAMMAS),
    "hgb": lambda: HistGradientBoostingRegressor(random_state=0),
    "xgb": xgboost,
}
GROWTH = {"krr": 3, "svr": 2}  # of the seconds with the rows


def split(name: str, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    folder = shared_data()
    if folder is None or not (folder / f"{name}.npz").exists():
        raise DataError(f"{name}.npz was not found; the data sets of this benchmark are in the shared folder")
    with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
        X, y = stored["X"].astype(np.float64), stored["y"].astype(np.float64).reshape(-1)
    order = np.random.default_rng(number).permutation(len(y))
    train, test = np.split(order, [round(0.75 * len(y))])
    return X[train], y[train], X[test], y[test]


def rank(scores: np.ndarray) -> float:
    """The ⌈c (n + 1)⌉-th smallest, as conformal intervals take it."""
    return float(np.sort(scores)[min(len(scores), math.ceil(COVERAGE * (len(scores) + 1))) - 1])


def conformal(X: np.ndarray, y: np.ndarray, X_test: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Intervals of HistGradientBoosting around means and around quantiles."""
    cut = 4 * len(y) // 5  # rows are in random order
    fit, held = slice(None, cut), slice(cut, None)

    def made(**settings: Any) -> Any:
        return HistGradientBoostingRegressor(random_state=0, **settings).fit(X[fit], y[fit])

    mean = made()
    reach, centre = rank(np.abs(y[held] - mean.predict(X[held]))), mean.predict(X_test)
    low, high = (made(loss="quantile", quantile=q) for q in ((1 - COVERAGE) / 2, (1 + COVERAGE) / 2))
    more = rank(np.maximum(low.predict(X[held]) - y[held], y[held] - high.predict(X[held])))
    return {
        "split": (centre - reach, centre + reach),
        "CQR": (low.predict(X_test) - more, high.predict(X_test) + more),
    }


def covered(y: np.ndarray, interval: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    low, high = interval
    return float(np.mean((low <= y) & (y <= high))), float(np.mean(high - low))


def measure(name: str, number: int, models: list[str], most: int) -> dict[str, tuple[float, ...]]:
    """By model (rmse, seconds), and by kind of interval (coverage, width)."""
    X, y, X_test, y_test = split(name, number)
    found: dict[str, tuple[float, ...]] = {}
    for model in models:
        rows = min(most, len(y)) if model in GROWTH else len(y)
        began = time.process_time()
        fitted = MODELS[model]().fit(X[:rows], y[:rows])
        seconds = (time.process_time() - began) * (len(y) / rows) ** GROWTH.get(model, 0)
        found[model] = (float(np.sqrt(np.mean((fitted.predict(X_test) - y_test) ** 2))), seconds)
        if model == "cme":
            found["jackknife+"] = covered(y_test, fitted.predict_interval(X_test, COVERAGE))
    if "hgb" in models:
        found |= {kind: covered(y_test, ends) for kind, ends in conformal(X, y, X_test).items()}
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--krr-rows", type=int, default=4_000)
    options = parser.parse_args(argv)
    models = [name for name in MODELS if name in options.models.split(",")]
    for name in options.names:
        rows = round(0.75 * len(np.concatenate(split(name, 0)[1::2])))
        parts = [measure(name, number, models, options.krr_rows) for number in range(options.splits)]
        means = {key: np.mean([part[key] for part in parts], axis=0) for key in parts[0]}
        print(f"\n{name}: {rows:,} training rows, mean of {options.splits} splits", flush=True)
        for model in models:
            estimated = "~" if model in GROWTH and rows > options.krr_rows else ""
            note = f" (searched on {options.krr_rows:,} rows)" if estimated else ""
            print(f"  {model:11} RMSE {means[model][0]:<11.5g} {estimated}{means[model][1]:.1f} s{note}")
        for kind in (kind for kind in ("jackknife+", "split", "CQR") if kind in means):
            print(f"  {kind:11} coverage {100 * means[kind][0]:.1f} %   width {means[kind][1]:.5g}")
        others = [means[model][0] for model in models if model != "cme"]
        if "cme" in models and others:
            line = f"  CMERegressor: RMSE {means['cme'][0] / min(others):.3f} of the best other"
            line += (
                f", {means['krr'][1] / means['cme'][1]:.1f} times faster than the KRR grid" if "krr" in means else ""
            )
            if "CQR" in means:
                narrower = min(means["split"][1], means["CQR"][1])
                line += f", intervals {means['jackknife+'][1] / narrower:.2f} of the narrower conformal ones"
            print(line, flush=True)


if __name__ == "__main__":
    main()
