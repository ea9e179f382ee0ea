"""The final fit: agreement of the exact solvers, gain of the preconditioner and of chosen centres, and speed.

python -m benchmarks.fit agree               cholesky, tiled and pcg on 5,000 rows
python -m benchmarks.fit iterations          conjugate gradients on 20,000 rows of covtype, plain and preconditioned
python -m benchmarks.fit centres             unexplained part of the kernel, by how centres were chosen
python -m benchmarks.fit covtype             centres on all of covtype, against scikit-learn with the same number

The shared data sets are looked for in KME_DATA, or in ../shared/data beside the repository.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import figure, load_average, shared_data
from kme_dist.backend import blas_threads
from kme_dist.config import ClusterConfig
from kme_dist.core.kernels import Gaussian
from kme_dist.core.kernels.base import median_length_scale
from kme_dist.core.pivots import CHOICES, choose_centres, unexplained
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import RowsRef, Scaling
from kme_dist.ops.cluster import open_executor
from kme_dist.run.fit import Problem, fit_on_dataset
from kme_dist.run.fit.panels import labels, make_panels
from kme_dist.run.fit.pcg import GramSystem, Preconditioner, default_rank
from kme_dist.run.scratch import Scratch


def workers(count=2):
    return open_executor(ClusterConfig(workers=count, dashboard=False))


def covtype(folder, kept):
    """The data set, shuffled, 90 % for the fit; created once if `kept` names a folder."""
    place = Path(kept or folder) / "covtype.zarr"
    if not place.exists():
        ingest(shared_data() / "covtype.npz", place, label="y", shuffle=0, split="train=0.9,test=0.1")
    return open_dataset(place)


def median_kernel(data):
    X = Scaling.of(data.split_statistics("train"), "unit").apply(data.read_rows(0, 20_000)[0], "float32")
    return Gaussian(length_scale=np.full(data.features, median_length_scale(X, 0)))


def agree(folder, rows):
    rng = np.random.default_rng(0)
    X = rng.random((rows, 6))
    y = (2.5 * np.clip(X[:, 0] + 0.3 * np.sin(9 * X[:, 1]) + 0.1 * rng.normal(size=rows), 0, 1)).astype(int)
    data = ingest((X, y), Path(folder) / "agree.zarr", dtype="float64")
    kernel, exact = Gaussian(length_scale=np.full(6, 0.5)), None
    print(f"{rows} rows, float64, regularization 1e-6", flush=True)
    with workers() as executor:
        for solver in ("cholesky", "tiled", "pcg"):
            fit = fit_on_dataset(
                data, kernel, 1e-6, solver=solver, retune=False, dtype="float64", executor=executor,
                scratch=Path(folder) / "scratch", tolerance=1e-8,
            )  # fmt: skip
            V = fit.embedding.weights
            exact = V if exact is None else exact
            apart = np.linalg.norm(V - exact) / np.linalg.norm(exact)
            print(
                f"  {solver}: differs from cholesky by {apart:.1e}, residual {fit.residual:.1e}, "
                f"{fit.iterations} iterations, {fit.seconds:.1f} s, {fit.bytes / 1e6:.0f} MB",
                flush=True,
            )


def iterations(data, folder, rows, lam):
    """Steps of preconditioned against plain conjugate gradients, which are stopped at four times as many."""
    part = ingest(
        tuple(a[:rows] for a in (data.read_rows(0, rows))), Path(folder) / "part.zarr", dtype="float32"
    )  # fmt: skip
    common = {"split": None, "scaling": "unit", "dtype": "float64", "classes": True}
    with workers() as executor:
        scratch = Scratch.at(Path(folder) / "scratch")
        problem = Problem(RowsRef.of(part, **common), median_kernel(data), executor, scratch, 6 << 30)
        panels = make_panels(problem, "float64")
        Y = labels(panels)
        began = time.perf_counter()
        factor = Preconditioner.build(panels, problem, default_rank(rows))
        built = time.perf_counter() - began
        _, steps, residual = GramSystem(panels, problem, factor, lam).solve(Y, 1e-6)
        print(
            f"{rows} rows of covtype, regularization {lam:.0e}: {steps} steps to a residual of {residual:.1e} "
            f"(rank {factor.rank} built in {built:.0f} s, in all {time.perf_counter() - began:.0f} s, "
            f"tiles {'cached' if panels.cached else 'recomputed'}), load {load_average()}",
            flush=True,
        )
        _, plain, left = GramSystem(panels, problem, None, lam).solve(Y, 1e-6, most=4 * steps)
        print(f"  without the preconditioner: after {plain} steps a residual of {left:.1e}", flush=True)
        panels.scratch.clear()


def centres(data, rows, count):
    scale = Scaling.of(data.split_statistics("train"), "unit")
    X, kernel = scale.apply(data.read_rows(0, rows)[0], "float64"), median_kernel(data)
    print(f"{rows} rows of covtype, {count} centres: share of the trace of K left unexplained", flush=True)
    for how in CHOICES:
        began = time.perf_counter()
        chosen = choose_centres(kernel, X, count, how, 0)
        seconds = time.perf_counter() - began
        print(f"  {how}: {unexplained(kernel, X, X[chosen]):.2e} (chosen in {seconds:.1f} s)", flush=True)


def _peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def against_sklearn(data, folder, count, rows, how, skip):
    """The same rows, the same kernel, as many centres; two workers with a thread each against two threads."""
    kernel = median_kernel(data)
    X_test, y_test = data.read("test")
    splits = data.split_rows("train")
    part = data
    if rows and rows < splits:
        part = ingest(data.read_rows(0, rows), Path(folder) / "part.zarr", dtype="float32")
    n = rows or splits
    scale = Scaling.of(data.split_statistics("train"), "unit")
    X_test = scale.apply(X_test, "float32")
    print(f"{n} rows of covtype, {count} centres, median heuristic, load {load_average()}", flush=True)
    print(f"  the products alone are {n * count**2 / 1e12:.1f} Tflop", flush=True)
    taken = {}
    with workers() as executor:
        # First what scikit-learn does: random centres, ridge penalty 1. Then what a user of kme-dist gets.
        for name, choice, retune in (("the same task", "uniform", False), ("centres chosen, lambda tuned", how, True)):
            fit = fit_on_dataset(
                part, kernel, 1 / n if not retune else 1e-6, solver="nystrom", centres=count, centre_choice=choice,
                executor=executor, scaling=scale, scratch=Path(folder) / "scratch", floor=1e-6, retune=retune,
            )  # fmt: skip
            taken[name] = fit.seconds
            peak = max(executor.client.run(_peak_bytes).values())
            accuracy = np.mean(fit.embedding.decision(X_test).argmax(axis=1) == y_test)
            tuned = "" if fit.loss is None else f"leave-one-out log loss {fit.loss:.4f}, "
            print(
                f"  kme-dist, {name} ({choice}, {fit.facts['centres']} centres): {fit.seconds:.0f} s, test accuracy "
                f"{100 * accuracy:.2f} %, {tuned}regularization {fit.regularization:.1e}, residual "
                f"{fit.residual:.1e}, worker memory at most {peak / 2**30:.2f} GiB; load {load_average()}",
                flush=True,
            )
    if skip:
        return
    from sklearn.kernel_approximation import Nystroem
    from sklearn.linear_model import RidgeClassifier

    X, y = part.read("train" if part is data else None)
    X = scale.apply(X, "float32")
    gamma = 0.5 / float(kernel.length_scale[0]) ** 2
    with blas_threads(2):
        began = time.perf_counter()
        approximation = Nystroem(gamma=gamma, n_components=count, random_state=0)
        ridge = RidgeClassifier().fit(approximation.fit_transform(X), y)
        seconds = time.perf_counter() - began
        parts = (X_test[i : i + 8192] for i in range(0, len(X_test), 8192))
        theirs = np.mean(np.concatenate([ridge.predict(approximation.transform(part)) for part in parts]) == y_test)
    for method, own in {**{f"kme-dist, {name}": own for name, own in taken.items()}, "scikit-learn": seconds}.items():
        figure("fit on covtype, seconds", method, f"{n:,} rows", own)
    print(
        f"  scikit-learn: {seconds:.0f} s, test accuracy {100 * theirs:.2f} %, {_peak_bytes() / 2**30:.1f} GiB; "
        + ", ".join(f"{name}: {seconds / ours:.1f} times as fast" for name, ours in taken.items())
        + f"; load {load_average()}",
        flush=True,
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=["agree", "iterations", "centres", "covtype"])
    parser.add_argument("--rows", type=int, help="5,000 for agree, 20,000 for iterations and centres, all for covtype")
    parser.add_argument("--centres", type=int, default=2048)
    parser.add_argument("--centre-choice", default="rpcholesky", choices=CHOICES)
    parser.add_argument("--regularization", type=float, default=1e-7)
    parser.add_argument("--skip-sklearn", action="store_true")
    parser.add_argument("--keep", help="folder to keep the data set in")
    chosen = parser.parse_args(argv)
    if chosen.parts != ["agree"] and shared_data() is None:
        parser.exit(2, "the shared data sets were not found; set KME_DATA to their folder\n")
    with tempfile.TemporaryDirectory() as folder:
        if "agree" in chosen.parts:
            agree(folder, chosen.rows or 5_000)
        if chosen.parts == ["agree"]:
            return
        data = covtype(folder, chosen.keep)
        if "iterations" in chosen.parts:
            iterations(data, folder, chosen.rows or 20_000, chosen.regularization)
        if "centres" in chosen.parts:
            centres(data, chosen.rows or 20_000, min(chosen.centres, 1_000))
        if "covtype" in chosen.parts:
            against_sklearn(data, folder, chosen.centres, chosen.rows, chosen.centre_choice, chosen.skip_sklearn)


if __name__ == "__main__":
    main()
