"""Large data: covtype against trees, centres against scikit-learn and against bare tiles, time against rows.

    python -m benchmarks.large run               `kme-dist run configs/covtype.yaml` (80 % of the rows) and trees
    python -m benchmarks.large memory            MCEClassifier().fit on 100,000 rows of covtype in memory, and trees
    python -m benchmarks.large nystroem          50,000 rows, 1,024 centres, 1 and 2 cores; scikit-learn's Nystroem
    python -m benchmarks.large iterations        20,000 centres on 400,000 rows: a step against its bare tiles, memory,
                                                 interrupted and resumed
    python -m benchmarks.large direct            2,000 centres on 100,000 rows: the same as by a direct solve
    python -m benchmarks.large linear            ingest, fit and predict of 10^5 to 4x10^6 made-up rows

Test rows are scored once, at the end; nothing is chosen by them. The shared data sets are looked for in KME_DATA, or in
../shared/data beside the repository. Every line has the load of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.machine import figure, load_average, shared_data
from kme_dist import MCEClassifier, predict
from kme_dist.backend import blas_threads
from kme_dist.config import ClusterConfig
from kme_dist.core.falkon import TILE_ROWS
from kme_dist.core.kernels import Gaussian
from kme_dist.core.kernels.base import median_length_scale
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import Scaling
from kme_dist.ops.cluster import open_executor
from kme_dist.pipelines.scaling import fit_bytes
from kme_dist.run.fit import Size, falkon, fit_on_dataset

CONFIG = Path(__file__).parents[1] / "configs" / "covtype.yaml"


def say(text):
    print(f"{text}; load {load_average()}", flush=True)


def scores(name, P, y, seconds, rows):
    """Accuracy and log loss of probabilities; `y` counts classes from 0."""
    own = np.clip(P[np.arange(len(y)), y], 1e-15, 1.0)
    right, loss = np.mean(P.argmax(axis=1) == y), -np.log(own).mean()
    say(f"  {name}: accuracy {100 * right:.2f} %, log loss {loss:.4f}, {seconds:.0f} s")
    figure("log loss on covtype", name.split(" (")[0], f"{rows:,} rows", loss)


def trees(X, y, X_test, y_test):
    from sklearn.ensemble import RandomForestClassifier
    from xgboost import XGBClassifier

    for name, model in (
        ("RandomForest", RandomForestClassifier(n_jobs=2, random_state=0)),
        ("XGBoost, 300 trees", XGBClassifier(n_estimators=300, n_jobs=2, random_state=0)),
    ):
        began = time.perf_counter()
        model.fit(X, y)
        scores(name, model.predict_proba(X_test), y_test, time.perf_counter() - began, len(y))


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
    command = [sys.executable, "-m", "kme_dist", "run", str(CONFIG)]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    found = json.loads((Path(folder) / "runs" / "covtype" / "metrics.json").read_text())
    say(f"  kme-dist run: {json.dumps({key: found[key] for key in ('accuracy', 'log_loss')})}, {seconds:.0f} s")
    figure("log loss on covtype", "MCEClassifier", f"{len(y):,} rows", found["log_loss"])
    trees(X, y, X_test, y_test)


def memory(folder, rows=100_000, test_rows=20_000):
    data = covtype(folder, 0.8)
    (X, y), (X_test, y_test) = data.read_rows(0, rows), data.read("test")
    X_test, y_test = X_test[:test_rows], y_test[:test_rows]
    say(f"{rows} rows of covtype in memory")
    began = time.perf_counter()
    model = MCEClassifier(random_state=0).fit(X, y)
    scores(f"MCEClassifier ({model.solver_})", model.predict_proba(X_test), y_test, time.perf_counter() - began, rows)
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
        for method, own in seconds.items():
            figure("fit with 1,024 centres, seconds", method, f"{cores} core{'s' * (cores > 1)}", own)
        ratio = seconds["scikit-learn"] / seconds["kme-dist"]
        say(
            f"  {cores} core{'s' * (cores > 1)}: kme-dist {seconds['kme-dist']:.2f} s, Nystroem + RidgeClassifier "
            f"{seconds['scikit-learn']:.2f} s, {ratio:.1f} times as fast"
        )


def _peak_gib():
    """Of this process; `ru_maxrss` would also count the parent's memory at the moment it started this one."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20


def _used(executor):
    """Processor seconds of all workers, which on a busy machine say more than the clock."""
    return sum(executor.client.run(time.process_time).values())


def bare_tiles(rows, count, width, columns):
    """Seconds and processor seconds for `rows` rows of product, exponential and two thin products, in plain NumPy."""
    rng = np.random.default_rng(0)
    X, C = (rng.random((n, width), dtype=np.float32) for n in (TILE_ROWS, count))
    S, tile = rng.random((count, columns), dtype=np.float32), np.empty((TILE_ROWS, count), np.float32)
    total = np.zeros((count, columns))
    with blas_threads(1):
        for tiles in (2, 24):  # the first ones warm up
            began, used = time.perf_counter(), time.process_time()
            for _ in range(tiles):
                np.exp(np.matmul(X, C.T, out=tile), out=tile)
                total += tile.T @ (tile @ S)
            found = time.perf_counter() - began, time.process_time() - used
    return np.array(found) * rows / (tiles * TILE_ROWS)


def bare_on_workers(rows, *shape, workers=2):
    """The same for all rows, with every worker busy: seconds, and processor seconds of all of them."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [one.result() for one in [pool.submit(bare_tiles, rows / workers, *shape) for _ in range(workers)]]
    return np.max(found, axis=0)[0], np.sum(found, axis=0)[1]


def iterations(folder, rows, count, before=2, after=2):
    """Steps of a fit on two workers against their bare tiles; interrupted after some, then resumed for others."""
    X, y = covtype(folder, 0.8).read_rows(0, rows)
    part = Path(folder) / f"rows-{rows}.zarr"
    data = open_dataset(part) if part.exists() else ingest((X, y), part, dtype="float32")
    scaling = Scaling.of(data.split_statistics(None), "unit")
    width = 0.5 * float(median_length_scale(scaling.apply(X[:2_000], "float32"), 0))
    kernel, shape = Gaussian(length_scale=np.full(data.features, width)), (count, data.features, 2 * data.n_classes)
    bare, marks = [bare_on_workers(rows, *shape)], []
    say(f"{rows} rows of covtype, {count} centres: bare tiles of a step {bare[0][0]:.1f} s on two workers")
    with open_executor(ClusterConfig(workers=2, memory="4GiB", dashboard=False)) as executor:
        for wanted in (before, after):
            marks.append([])
            numbers = itertools.count(1)

            def report(line, numbers=numbers, wanted=wanted):
                print(f"    {line}; load {load_average()}", flush=True)
                if "fit: step" in line or "resumes" in line:
                    marks[-1].append((time.perf_counter(), _used(executor)))
                if "fit: step" in line and next(numbers) == wanted:
                    raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt):
                fit_on_dataset(
                    data, kernel, 1e-6, solver="falkon", centres=count, executor=executor, scaling=scaling,
                    scratch=Path(folder) / "scratch", retune="shared", report=report,
                )  # fmt: skip
        peak = max(executor.client.run(_peak_gib).values())
    bare.append(bare_on_workers(rows, *shape))
    planned = fit_bytes("falkon", Size(rows, data.n_classes, count, width=data.features))
    steps = np.concatenate([np.diff(found, axis=0) for found in marks])
    ratios = np.median(steps, axis=0) / np.mean(bare, axis=0)
    say(
        f"  a step {np.median(steps, axis=0)[0]:.1f} s, {ratios[0]:.2f} times the bare tiles, in processor time "
        f"{ratios[1]:.2f} times; worker memory at most {peak:.2f} GiB, planned {planned / 2**30:.2f}"
    )


def direct(folder, rows, count):
    """Conjugate gradients against the direct solve for the same centres: decisions for rows that are not in the fit."""
    data = covtype(folder, 0.8)
    (X, y), (X_test, _) = data.read_rows(0, rows), data.read_rows(data.rows - 20_000, data.rows)
    part = ingest((X, y), Path(folder) / f"direct-{rows}.zarr", dtype="float32")
    scaling = Scaling.of(part.split_statistics(None), "unit")
    Z = scaling.apply(X_test, "float64")
    kernel = Gaussian(length_scale=np.full(Z.shape[1], 0.5 * float(median_length_scale(Z[:2_000], 0))))
    falkon._HELD_OUT, falkon.MOST_STEPS = (0, 0.0), 300  # to the tolerance, not to the lowest loss of some rows
    found = {}
    with open_executor(ClusterConfig(workers=2, memory="4GiB", dashboard=False)) as executor:
        for dtype in ("float32", "float64"):
            for solver in ("falkon", "nystrom"):
                fit = fit_on_dataset(
                    part, kernel, 1e-4, solver=solver, centres=count, executor=executor, scaling=scaling, retune=False,
                    tolerance=1e-2 if dtype == "float32" else 1e-7, centre_choice="uniform", dtype=dtype,
                    scratch=Path(folder) / "scratch",
                )  # fmt: skip
                found[solver] = fit.embedding.decision(Z)
                say(f"  {dtype}, {solver}: {fit.seconds:.1f} s, {fit.iterations} steps, residual {fit.residual:.1e}")
            off = np.abs(found["falkon"] - found["nystrom"]).max()
            same = np.mean(found["falkon"].argmax(axis=1) == found["nystrom"].argmax(axis=1))
            say(f"{rows} rows, {count} centres, {dtype}: decisions differ by at most {off:.1e}, {same:.2%} same labels")


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
            began_used = _used(executor)
            fit = fit_on_dataset(
                data, kernel, 1e-6, solver="nystrom", centres=1_000, executor=executor, retune=False,
                scratch=Path(folder) / "scratch",
            )  # fmt: skip
            fit_used, after_fit = _used(executor) - began_used, max(executor.client.run(_peak_gib).values())
            began = time.perf_counter()
            predict(model, data, Path(folder) / f"predictions-{rows}", executor=executor)
            applied, peak = time.perf_counter() - began, max(executor.client.run(_peak_gib).values())
            used = _used(executor) - began_used - fit_used
        million = rows / 1e6
        for series, seconds in (("ingest", stored), ("fit", fit.seconds), ("predict", applied)):
            figure("seconds against rows", series, rows, seconds)
        figure("memory of a worker against rows, GiB", "fit and predict", rows, peak)
        say(
            f"  {rows:>9,} rows: seconds per million: ingest {stored / million:.1f}, fit {fit.seconds / million:.1f} "
            f"(processor time of the workers {fit_used / million:.1f}), predict {applied / million:.1f} "
            f"({used / million:.1f}); worker memory after fit {after_fit:.2f}, at most {peak:.2f} GiB"
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["run", "memory", "nystroem", "iterations", "direct", "linear"])
    parser.add_argument("--folder", help="to keep data sets and runs in")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="400,000 for iterations; 100,000 for direct; 10^5 to 4x10^6 for linear"
    )
    parser.add_argument("--centres", type=int, help="20,000 for iterations; 2,000 for direct")
    chosen = parser.parse_args(argv)
    if chosen.part != "linear" and shared_data() is None:
        parser.exit(2, "the shared data sets were not found; set KME_DATA to their folder\n")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(chosen.folder or temporary).absolute()
        if chosen.part == "iterations":
            iterations(folder, *(chosen.rows or [400_000]), chosen.centres or 20_000)
        elif chosen.part == "direct":
            direct(folder, *(chosen.rows or [100_000]), chosen.centres or 2_000)
        elif chosen.part == "linear":
            linear(folder, chosen.rows or [100_000, 200_000, 1_000_000, 4_000_000])
        else:
            {"run": run, "memory": memory, "nystroem": nystroem}[chosen.part](folder)


if __name__ == "__main__":
    main()
