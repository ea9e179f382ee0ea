"""One step of algorithm 2 with the features given: the closed form against automatic differentiation.

    python -m benchmarks.features [--rows 6000] [--features 1024] [--dtype float32]
    python -m benchmarks.features --frequencies FOLDER       no timing: a picture of frequencies, drawn and learned

The same objective three ways in one run with one thread each: `kme_dist.feature_objective`, the two-mask objective of
the convolutional network, and idiomatic PyTorch autograd of the first. Ratios are of the fastest of several alternating
calls, in processor time (the machine may be shared); gradients are compared too.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_wine

import kme_dist as kme
from benchmarks.machine import figure, load_average
from kme_dist.backend import blas_threads
from kme_dist.core.masked import masked_objective
from kme_dist.report import plots as feature_plots

CLASSES, LAM = 10, 0.1


def problem(n, p, dtype):
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, n)
    centres = rng.normal(size=(CLASSES, p))
    return np.maximum(centres[y] + rng.normal(size=(n, p)), 0).astype(dtype), y


def autograd_step(Z, y):
    import torch

    torch.set_num_threads(1)
    n, p = Z.shape
    rows, labels = torch.from_numpy(Z).requires_grad_(True), torch.from_numpy(y)
    Y = torch.nn.functional.one_hot(labels, CLASSES).to(rows.dtype)
    log_lam = torch.tensor(np.log(LAM), dtype=rows.dtype, requires_grad=True)
    eye = torch.eye(p, dtype=rows.dtype)

    def step():
        L = torch.linalg.cholesky(rows.T @ rows + n * log_lam.exp() * eye)
        W = torch.cholesky_solve(rows.T @ Y, L)
        P = rows @ W
        risk = -torch.log(P[torch.arange(n), labels].clamp(1e-15, 1)).sum()
        return torch.autograd.grad(risk + 4 * np.e * torch.linalg.norm(W), (rows, log_lam))

    return step


def draw_frequencies(folder):
    """The frequencies of a spectral classifier on wine, before and after learning."""
    wine = load_wine()
    options = {"features": 200, "deviation": 0.25}
    start, model = (kme.ASKLClassifier(epochs=n, **options).fit(wine.data, wine.target) for n in (0, 100))
    target = Path(folder) / "frequencies.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    feature_plots.frequencies(model.features_, start.features_, names=wine.feature_names).savefig(target, dpi=120)
    print(f"{target}: training accuracy {model.score(wine.data, wine.target):.3f}")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--frequencies", metavar="FOLDER")
    arguments = parser.parse_args(argv)
    if arguments.frequencies:
        draw_frequencies(arguments.frequencies)
        return
    Z, y = problem(arguments.rows, arguments.features, arguments.dtype)
    options = {"regularization": LAM, "n_classes": CLASSES}
    calls = {
        "closed form": lambda: kme.feature_objective(Z, y, **options),
        "closed form, two masks": lambda: masked_objective(Z, Z, y, risk="sum", **options),
        "torch autograd": autograd_step(Z, y),
    }
    best = dict.fromkeys(calls, float("inf"))
    with blas_threads(1):
        results = {name: call() for name, call in calls.items()}
        for _ in range(arguments.repeats):
            for name, call in calls.items():
                began = time.process_time()
                call()
                best[name] = min(best[name], time.process_time() - began)
    ours, theirs = results["closed form"].feature_gradient, results["torch autograd"][0].numpy()
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    print(
        f"n={arguments.rows}, p={arguments.features}, m={CLASSES}, {arguments.dtype}, one thread, load {load_average()}"
    )
    for name, seconds in best.items():
        print(f"  {name:24}{1e3 * seconds:>10.1f} ms")
        figure("a step of explicit features, milliseconds", name, f"n = {arguments.rows:,}", 1e3 * seconds)
    ratio = best["torch autograd"] / best["closed form"]
    print(f"  torch / closed form {ratio:.1f};  gradients agree to {error:.1e} of the largest entry")


if __name__ == "__main__":
    main()
