"""CMERegressor with its defaults against kernel ridge, support vectors and trees: errors, seconds, intervals.

    python -m benchmarks.regression [--splits 5] [--sets abalone,space_ga,cadata] [--models cme,krr,svr,hgb,xgb]
                                    [--out FOLDER] [--resume] [--limit SECONDS] [--search-rows 4000]
    python -m benchmarks.regression --development ...     three folds inside the rows for design choices

Rows: while the defaults were designed, errors of two random splits were looked at. No row that was a test row of one
of those is a test row here: the others, 56 % of a table, are its reserve, from which the test rows of a split (a
quarter of the table) are drawn. All remaining rows are training rows. Design choices since then use only rows outside
the reserve (`--development`).

Every cell (set, split, model) runs in a process of its own on one core. KRR and SVR are searched over 5 x 5 settings
with five folds of the training rows, on standardised inputs and targets; trees have the defaults of their libraries.
With more than `--search-rows` training rows KRR and SVR are searched on that many and fitted on all with what was
found; their seconds are then estimates, marked "~": of KRR 125 folds at 0.8³ of its last fit (the least they can take),
of SVR those of the search times the square of the ratio of rows. Trees have conformal intervals, from a fifth of the
training rows that they are not fitted to: around the mean ("split") and around quantiles ("CQR"; Romano, Patterson and
Candès, 2019).

Writes FOLDER/results.jsonl (a line per cell; `--resume` measures only what is missing) and FOLDER/summary.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR

from benchmarks.defaults import cell, results
from benchmarks.defaults.__main__ import chosen, commit_of
from benchmarks.defaults.rows import hashed_order
from benchmarks.machine import load_average, shared_data

NAMES = ("abalone", "space_ga", "cadata")
COVERAGE = 0.9
FOLDS = 3  # of the development rows
SEEN = (0, 1)  # splits whose test errors were looked at
GAMMAS = np.logspace(-3, 1, 5)
SEARCHED_FOLDS = 5

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # X and y to learn from, X and y to evaluate


# --- rows -------------------------------------------------------------------------------------------------------------


def table(name: str) -> tuple[np.ndarray, np.ndarray]:
    folder = shared_data()
    if folder is None or not (folder / f"{name}.npz").exists():
        raise SystemExit(f"{name}.npz was not found; set KME_DATA to the folder of the shared data sets")
    with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
        return stored["X"].astype(np.float64), stored["y"].astype(np.float64).reshape(-1)


def reserve(n: int) -> np.ndarray:
    """Numbers of the rows from which test rows are drawn: those that were in no test part of the splits looked at."""
    seen = [np.random.default_rng(number).permutation(n)[round(0.75 * n) :] for number in SEEN]
    return np.setdiff1d(np.arange(n), np.concatenate(seen))


def rows_of(name: str, number: int, development: bool = False) -> Rows:
    """Training and test rows of a split, or of a fold of the development rows; both in random order."""
    X, y = table(name)
    n, own = len(y), reserve(len(y))
    if development:
        rest = np.setdiff1d(np.arange(n), own)
        rest = rest[hashed_order(f"{name} regression folds", len(rest))]
        test = rest[number::FOLDS]
        train = rest[~np.isin(rest, test)]
    else:
        test = own[hashed_order(f"{name} regression split {number}", len(own))][: n // 4]
        train = hashed_order(f"{name} regression rows {number}", n)
        train = train[~np.isin(train, test)]
    return X[train], y[train], X[test], y[test]


# --- models -----------------------------------------------------------------------------------------------------------


class Searched:
    """A grid search on at most `rows` rows, then a fit on all of them with the best settings."""

    def __init__(self, estimator: Any, name: str, rows: int, **grid: Any) -> None:
        self.estimator = TransformedTargetRegressor(
            make_pipeline(StandardScaler(), estimator), transformer=StandardScaler()
        )
        self.grid = {f"regressor__{name}__{key}": values for key, values in grid.items()}
        self.rows = rows

    def fit(self, X: np.ndarray, y: np.ndarray) -> Any:
        search = GridSearchCV(
            self.estimator, self.grid, cv=SEARCHED_FOLDS, scoring="neg_mean_squared_error", refit=False
        )
        with cell.Clock() as self.searching:
            search.fit(X[: self.rows], y[: self.rows])
        with cell.Clock() as self.last:
            fitted = clone(self.estimator).set_params(**search.best_params_).fit(X, y)
        self.best = {key.rsplit("__", 1)[-1]: float(value) for key, value in search.best_params_.items()}
        return fitted


def _cme(rows: int) -> Any:
    from kme_dist import CMERegressor

    return CMERegressor()


def _xgboost(rows: int) -> Any:
    from xgboost import XGBRegressor

    return XGBRegressor(n_jobs=1, random_state=0)


MODELS: dict[str, Callable[[int], Any]] = {
    "cme": _cme,
    "hgb": lambda rows: HistGradientBoostingRegressor(random_state=0),
    "xgb": _xgboost,
    "krr": lambda rows: Searched(
        KernelRidge(kernel="rbf"), "kernelridge", rows, alpha=np.logspace(-4, 0, 5), gamma=GAMMAS
    ),
    "svr": lambda rows: Searched(SVR(cache_size=1000), "svr", rows, C=np.logspace(-1, 2, 5), gamma=GAMMAS),
}


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
    """Coverage and mean width."""
    low, high = interval
    return float(np.mean((low <= y) & (y <= high))), float(np.mean(high - low))


# --- cells ------------------------------------------------------------------------------------------------------------


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One model on one split."""
    X, y, X_test, y_test = rows_of(task["set"], task["split"], task["development"])
    rows = min(task["search_rows"], len(y))
    model = MODELS[task["model"]](rows)
    with cell.Clock() as fit:
        fitted = model.fit(X, y)
    with cell.Clock() as predict:
        predicted = fitted.predict(X_test)
    found: dict[str, Any] = {
        "train": len(y), "test": len(y_test), "fit_cpu": fit.cpu, "fit_wall": fit.wall, "predict_cpu": predict.cpu,
        "rmse": float(np.sqrt(np.mean((predicted - y_test) ** 2))), "deviation": float(np.std(y_test)),
    }  # fmt: skip
    if isinstance(model, Searched):
        found |= {"best": model.best, "estimated": rows < len(y)}
        if rows < len(y) and task["model"] == "krr":
            folds = SEARCHED_FOLDS * math.prod(len(values) for values in model.grid.values())
            found["fit_cpu"] = (1 + folds * (1 - 1 / SEARCHED_FOLDS) ** 3) * model.last.cpu
        elif rows < len(y):
            found["fit_cpu"] = model.searching.cpu * (len(y) / rows) ** 2 + model.last.cpu
    if task["model"] == "cme":
        found["intervals"] = {"jackknife+": covered(y_test, fitted.predict_interval(X_test, COVERAGE))}
        found |= {"kernel": fitted.kernel_name_, "solver": fitted.solver_}
    elif task["model"] == "hgb":
        found["intervals"] = {kind: covered(y_test, ends) for kind, ends in conformal(X, y, X_test).items()}
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {**found, "status": "ok"}


def measured(tasks: list[dict[str, Any]], path: Path) -> None:
    for number, task in enumerate(tasks, 1):
        began = time.time()
        record = cell.run(task, module="benchmarks.regression")
        results.append(path, record)
        got = f"RMSE {record['rmse']:.5g}, {record['fit_cpu']:.1f} s" if "rmse" in record else record.get("reason", "")
        took = f"{time.time() - began:.1f} s, load {load_average()}"
        print(f"{number}/{len(tasks)} {task['set']} split {task['split']} {task['model']}: {got} ({took})", flush=True)


# --- summary ----------------------------------------------------------------------------------------------------------


def summary(tasks: list[dict[str, Any]], records: list[dict[str, Any]]) -> str:
    """A paragraph for each set; every model is compared with CMERegressor on the splits that both have."""
    found = {results.key(record): record for record in records if record["status"] == "ok"}
    lines = []
    for name in dict.fromkeys(task["set"] for task in tasks):
        by: dict[str, dict[int, dict[str, Any]]] = {}
        for task in tasks:
            if task["set"] == name and results.key(task) in found:
                by.setdefault(task["model"], {})[task["split"]] = found[results.key(task)]
        lines += _set_lines(name, by) if by else [f"{name}: nothing was measured"]
    return "\n".join(lines) + "\n"


def _set_lines(name: str, by: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    def mean(model: str, figure: str, splits: Any) -> float:
        return float(np.mean([by[model][split][figure] for split in splits]))

    rows = next(iter(next(iter(by.values())).values()))["train"]
    lines = [f"{name}: {rows:,} training rows"]
    for model, cells in by.items():
        rmse = np.array([cell["rmse"] for cell in cells.values()])
        mark = "~" if any(cell.get("estimated") for cell in cells.values()) else ""
        error = rmse.std(ddof=1) / math.sqrt(len(rmse)) if len(rmse) > 1 else math.nan
        seconds = f"{mark}{mean(model, 'fit_cpu', cells):.1f} s"
        lines.append(f"  {model:11} RMSE {rmse.mean():<10.5g} ± {error:<9.2g} {seconds:10} splits {_numbers(cells)}")
    widths = {}
    for model in ("cme", "hgb"):
        for kind in next(iter(by[model].values()))["intervals"] if model in by else ():
            pairs = np.array([cell["intervals"][kind] for cell in by[model].values()])
            coverage, widths[kind] = pairs.mean(axis=0)
            lines.append(f"  {kind:11} coverage {100 * coverage:.1f} %   width {widths[kind]:.5g}")
    common = {m: sorted(by[m].keys() & by["cme"].keys()) for m in by if m != "cme"} if "cme" in by else {}
    ratios = {m: mean("cme", "rmse", own) / mean(m, "rmse", own) for m, own in common.items() if own}
    if ratios:
        best = max(ratios, key=lambda model: ratios[model])
        parts = [f"RMSE {ratios[best]:.3f} of the best other ({best})"]
        if common.get("krr"):
            speed = mean("krr", "fit_cpu", common["krr"]) / mean("cme", "fit_cpu", common["krr"])
            parts.append(f"fitted {speed:.1f} times faster than the KRR grid")
        if "split" in widths:
            narrower = min(widths["split"], widths["CQR"])
            parts.append(f"intervals {widths['jackknife+'] / narrower:.2f} of the narrower conformal ones")
        lines.append(f"  CMERegressor: {'; '.join(parts)}")
    return lines


def _numbers(splits: Any) -> str:
    return ", ".join(map(str, sorted(splits)))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--sets", help=f"of {','.join(NAMES)}")
    parser.add_argument("--models", help=f"of {','.join(MODELS)}")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/regression)")
    parser.add_argument("--resume", action="store_true", help="measure only the cells that FOLDER does not have")
    parser.add_argument("--limit", type=float, default=3_600, help="processor seconds of a cell")
    parser.add_argument("--search-rows", type=int, default=4_000, help="rows of the searches of KRR and SVR")
    parser.add_argument("--development", action="store_true", help="cross-validation inside the development rows")
    given = parser.parse_args(argv)
    sets, models = chosen(given.sets, NAMES, "set"), chosen(given.models, MODELS, "model")
    folder = given.out or Path("runs/regression-development" if given.development else "runs/regression")
    path = folder / "results.jsonl"
    if path.exists() and not given.resume:
        raise SystemExit(f"{path} already exists; add to it with --resume, or use another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    own = {"code": results.code_of(cell.ROOT), "commit": commit_of()}
    tasks: list[dict[str, Any]] = [
        {
            "set": name, "split": number, "model": model, "development": given.development, "limit": given.limit,
            "search_rows": given.search_rows, **(own if model == "cme" else {"code": None, "commit": None}),
        }
        for number in range(FOLDS if given.development else given.splits)
        for name in sets
        for model in models
    ]  # fmt: skip
    todo = results.missing(tasks, results.read(path))
    print(f"{len(todo)} of {len(tasks)} cells to measure; load {load_average()}", flush=True)
    try:
        measured(todo, path)
    finally:  # what was measured is shown, also after ctrl-C
        text = summary(tasks, results.read(path))
        (folder / "summary.txt").write_text(text, encoding="utf-8")
        print("\n" + text)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        asked = json.loads(sys.argv[1])
        cell.limit_seconds(asked["limit"])
        cell.emit(measure(asked))
    else:
        main()
