"""Large data: covtype against trees, centres against scikit-learn and against bare tiles, time against rows.

    python -m benchmarks.large run               `kme-dist run configs/covtype.yaml` (80 % of the rows) and trees
    python -m benchmarks.large memory            MCEClassifier().fit on 100,000 rows of covtype in memory, and trees
    python -m benchmarks.large nystroem          50,000 rows, 1,024 centres, 1 and 2 cores; scikit-learn's Nystroem
    python -m benchmarks.large iterations        20,000 centres on 400,000 rows: a step against its bare tiles, memory
    python -m benchmarks.large linear            ingest, fit and predict of 10^5 to 4x10^6 made-up rows

Test rows are scored once, at the end; nothing is chosen by them. The shared data sets are looked for in KME_DATA, or in
../shared/data beside the repository. Every line has the load of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import load_average, shared_data
from kme_dist import MCEClassifier, predict
from kme_dist.backend import blas_threads
from kme_dist.config import ClusterConfig
from kme_dist.core.falkon import normal_product
from kme_dist.core.kernels import Gaussian, Matern
from kme_dist.core.kernels.base import median_length_scale
from kme_dist.core.sums import Centres
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import Scaling
from kme_dist.ops.cluster import open_executor
from kme_dist.run.fit import fit_on_dataset

CONFIG = Path(__file__).parents[1] / "configs" / "covtype.yaml"


def say(text):
    print(f"{text}; load {load_average()}", flush=True)


def scores(name, P, y, seconds):
    """Accuracy and log loss of probabilities; `y` counts classes from 0."""
    own = np.clip(P[np.arange(len(y)), y], 1e-15, 1.0)
    right, loss = np.mean(P.argmax(axis=1) == y), -np.log(own).mean()
    say(f"  {name}: accuracy {100 * right:.2f} %, log loss {loss:.4f}, {seconds:.0f} s")


def trees(X, y, X_test, y_test):
    from sklearn.ensemble import RandomForestClassifier
    from xgboost import XGBClassifier

    for name, model in (
        ("RandomForest", RandomForestClassifier(n_jobs=2, random_state=0)),
        ("XGBoost, 300 trees", XGBClassifier(n_estimators=300, n_jobs=2, random_state=0)),
    ):
        began = time.perf_counter()
        model.fit(X, y)
        scores(name, model.predict_proba(X_test), y_test, time.perf_counter() - began)


def covtype(folder, share):
    place = Path(folder) / "data" / "covtype.zarr"
    if not place.exists():
        ingest(shared_data() / "covtype.npz", place, label="y", shuffle=0, split=f"train={share},test={1 - share:.6g}")
    return open_dataset(place)


def run(folder):
    """The command of the README, in a folder of its own; a kept folder resumes or scores what is there."""
    data = covtype(folder, 0.8)
    (X, y), (X_test, y_test) = data.read("train"), data.read("test")
    say(f"{len(y)} rows of covtype to learn from, {len(y_test)} to test on")
    began = time.perf_counter()
    command = [sys.executable, "-m", "kme_dist", "run", str(CONFIG), "--out", "runs/covtype"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    found = json.loads((Path(folder) / "runs" / "covtype" / "metrics.json").read_text())
    say(f"  kme-dist run: {json.dumps({key: found[key] for key in ('accuracy', 'log_loss')})}, {seconds:.0f} s")
    trees(X, y, X_test, y_test)


def memory(folder, rows=100_000, test_rows=20_000):
    data = covtype(folder, 0.8)
    (X, y), (X_test, y_test) = data.read_rows(0, rows), data.read("test")
    X_test, y_test = X_test[:test_rows], y_test[:test_rows]
    say(f"{rows} rows of covtype in memory")
    began = time.perf_counter()
    model = MCEClassifier(random_state=0).fit(X, y)
    scores(f"MCEClassifier ({model.solver_})", model.predict_proba(X_test), y_test, time.perf_counter() - began)
    trees(X, y, X_test, y_test)


# --- centres ----------------------------------------------------------------------------------------

ONE_FIT = "from benchmarks.large import one_fit; one_fit({method!r}, {folder!r})"


def problem_of_centres(folder):
    X, y = covtype(folder, 0.8).read_rows(0, 50_000)
    X = (X - X.min(axis=0)) / np.maximum(np.ptp(X, axis=0), 1e-12)
    return X.astype(np.float64), y


def one_fit(method, folder):
    """Seconds of the best of three fits, alternated by the caller's processes; prints them."""
    X, y = problem_of_centres(folder)
    width = float(median_length_scale(X[:2_000], 0))
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        if method == "scikit-learn":
            from sklearn.kernel_approximation import Nystroem
            from sklearn.linear_model import RidgeClassifier

            Z = Nystroem(gamma=0.5 / width**2, n_components=1_024, random_state=0).fit_transform(X)
            RidgeClassifier().fit(Z, y)
        else:
            MCEClassifier(
                kernel=Gaussian(length_scale=np.full(X.shape[1], width)), regularization=1 / len(y), steps=0,
                solver="nystrom", centres=1_024, refit_regularization=False, scaling=None, random_state=0,
            ).fit(X, y)  # fmt: skip
        taken.append(time.perf_counter() - began)
    print(min(taken[1:]))


def nystroem(folder):
    covtype(folder, 0.8)
    say("50,000 rows of covtype, 1,024 centres, Gaussian, λ given")
    for cores in (1, 2):
        environment = os.environ | {f"{name}_NUM_THREADS": str(cores) for name in ("OMP", "OPENBLAS")}
        seconds = {
            method: float(
                subprocess.run(
                    [sys.executable, "-c", ONE_FIT.format(method=method, folder=str(folder))], env=environment,
                    check=True, capture_output=True, text=True, cwd=CONFIG.parents[1],
                ).stdout
            )
            for method in ("kme-dist", "scikit-learn")
        }  # fmt: skip
        ratio = seconds["scikit-learn"] / seconds["kme-dist"]
        say(
            f"  {cores} core{'s' * (cores > 1)}: kme-dist {seconds['kme-dist']:.2f} s, Nystroem + RidgeClassifier "
            f"{seconds['scikit-learn']:.2f} s, {ratio:.1f} times as fast"
        )


def _peak_gib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def iterations(folder, rows, count, steps=3):
    """Seconds of a step of a fit on two workers against those of its kernel tiles and two thin products alone."""
    X, y = covtype(folder, 0.8).read_rows(0, rows)
    part = Path(folder) / "rows.zarr"
    data = open_dataset(part) if part.exists() else ingest((X, y), part, dtype="float32")
    scaling = Scaling.of(data.split_statistics(None), "unit")
    Z = scaling.apply(X, "float32")
    kernel = Matern(length_scale=np.full(Z.shape[1], 0.5 * float(median_length_scale(Z[:2_000], 0))), nu=1.5)
    columns = 2 * data.n_classes  # two values of λ
    few, basis = Z[:8_192], Centres(kernel, Z[-count:].copy())
    S = np.random.default_rng(0).normal(size=(count, columns))
    with blas_threads(1):
        normal_product(basis, few[:512], S)
        began = time.perf_counter()
        normal_product(basis, few, S)
        bare = (time.perf_counter() - began) / len(few) * rows / 2  # two workers
    say(f"{rows} rows of covtype, {count} centres: bare tiles {bare:.1f} s a step on two workers")
    stamps = []

    def report(line):
        stamps.append((time.perf_counter(), line))
        print(f"    {line}", flush=True)
        if f"step {steps}," in line:
            raise KeyboardInterrupt

    with open_executor(ClusterConfig(workers=2, memory="4GiB", dashboard=False)) as executor:
        with contextlib.suppress(KeyboardInterrupt):
            fit_on_dataset(
                data, kernel, 1e-6, solver="falkon", centres=count, executor=executor, scaling=scaling,
                scratch=Path(folder) / "scratch", retune="shared", report=report,
            )  # fmt: skip
        peak = max(executor.client.run(_peak_gib).values())
    at = [stamp for stamp, line in stamps if ": step" in line]
    step = (at[-1] - at[0]) / (len(at) - 1)
    say(f"  a step {step:.1f} s, {step / bare:.2f} times the bare tiles; worker memory at most {peak:.2f} GiB")


# --- time against rows ------------------------------------------------------------------------------


def made_up(rows, width=20, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.random((rows, width), dtype=np.float32)
    return X, ((X[:, 0] + X[:, 1] * X[:, 2] > 0.75).astype(np.int64) + (X[:, 3] > 0.8))


def linear(folder, sizes):
    kernel = Gaussian(length_scale=np.full(20, 1.2))
    model = MCEClassifier(kernel=kernel, objective="rcb", steps=0, solver="nystrom", centres=1_000, n_jobs=1)
    model.fit(*made_up(5_000))
    for rows in sizes:
        place = Path(folder) / f"rows-{rows}.zarr"
        began = time.perf_counter()
        data = ingest(made_up(rows), place, dtype="float32")
        stored = time.perf_counter() - began
        with open_executor(ClusterConfig(workers=2, memory="4GiB", dashboard=False)) as executor:
            fit = fit_on_dataset(
                data, kernel, 1e-6, solver="nystrom", centres=1_000, executor=executor, retune=False,
                scratch=Path(folder) / "scratch",
            )  # fmt: skip
            after_fit = max(executor.client.run(_peak_gib).values())
            began = time.perf_counter()
            predict(model, data, Path(folder) / f"predictions-{rows}", executor=executor)
            applied, peak = time.perf_counter() - began, max(executor.client.run(_peak_gib).values())
        million = rows / 1e6
        say(
            f"  {rows:>9,} rows: seconds per million: ingest {stored / million:.1f}, fit {fit.seconds / million:.1f}, "
            f"predict {applied / million:.1f}; worker memory after fit {after_fit:.2f}, at most {peak:.2f} GiB"
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["run", "memory", "nystroem", "iterations", "linear"])
    parser.add_argument("--folder", help="to keep data sets and runs in")
    parser.add_argument("--rows", type=int, nargs="+", help="400,000 for iterations; 10^5 to 4x10^6 for linear")
    parser.add_argument("--centres", type=int, default=20_000)
    chosen = parser.parse_args(argv)
    if chosen.part != "linear" and shared_data() is None:
        parser.exit(2, "the shared data sets were not found; set KME_DATA to their folder\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen.folder or temporary).absolute()
        if chosen.part == "iterations":
            iterations(folder, *(chosen.rows or [400_000]), chosen.centres)
        elif chosen.part == "linear":
            linear(folder, chosen.rows or [100_000, 200_000, 1_000_000, 4_000_000])
        else:
            {"run": run, "memory": memory, "nystroem": nystroem}[chosen.part](folder)


if __name__ == "__main__":
    main()
