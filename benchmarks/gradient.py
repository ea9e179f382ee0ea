"""One learning step: the closed-form gradient against automatic differentiation and against the floor.

    python -m benchmarks.gradient [--rows 2000 4000] [--dtype float32]

The same objective (algorithm 1, ARD Gaussian kernel, 64 features, 10 classes) three ways in one run with one BLAS
thread each: `kme_dist.rcb_objective`, PyTorch autograd, and the floor: one Gram product, one exponential over the lower
triangle, one Cholesky factorisation in place, one product of an n x n matrix with the data. Ratios are of the fastest
of several alternating calls. The gradients are compared too, to make sure that equal work is timed.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from scipy.linalg import lapack

import kme_dist as kme
from benchmarks.machine import load_average
from kme_dist.backend import blas_threads
from kme_dist.core.objective import Workspace

FEATURES, CLASSES, LAM = 64, 10, 0.01


def problem(n, dtype):
    rng = np.random.default_rng(0)
    X = rng.random((n, FEATURES)).astype(dtype)
    scores = X @ rng.normal(size=(FEATURES, CLASSES))
    y = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    kernel = kme.kernels.Gaussian(length_scale=np.full(FEATURES, 2.0))
    return kernel, X, y


def torch_step(kernel, X, y):
    """The same objective in idiomatic PyTorch autograd."""
    import torch

    torch.set_num_threads(1)
    n = len(X)
    rows, labels = torch.from_numpy(X), torch.from_numpy(y)
    Y = torch.nn.functional.one_hot(labels, CLASSES).to(rows.dtype)
    eye = torch.eye(n, dtype=rows.dtype)
    log_ell = torch.tensor(np.log(kernel.length_scale), dtype=rows.dtype, requires_grad=True)
    log_scale = torch.zeros((), dtype=rows.dtype, requires_grad=True)
    log_lam = torch.tensor(np.log(LAM), dtype=rows.dtype, requires_grad=True)

    def step():
        Z = rows / log_ell.exp()
        squares = (Z * Z).sum(1)
        distances = (squares[:, None] + squares[None, :] - 2 * Z @ Z.T).clamp(min=0)
        K = (2 * log_scale).exp() * torch.exp(-0.5 * distances)
        L = torch.linalg.cholesky(K + n * log_lam.exp() * eye)
        V = torch.cholesky_solve(Y, L)
        P = K @ V
        risk = -torch.log(P[torch.arange(n), labels].clamp(1e-15, 1)).sum()
        r = log_scale.exp() * torch.sqrt((V * P).sum())
        return torch.autograd.grad(risk + 4 * np.e * r, (log_ell, log_scale, log_lam))

    return step


def floor_steps(kernel, X):
    """The work that every method has to do, one function for each part."""
    n = len(X)
    Z = X / kernel.length_scale.astype(X.dtype)
    K = np.asfortranarray(kernel.gram(X))
    matrix, work = K.copy(order="F"), K.copy(order="F")
    np.einsum("ii->i", matrix)[...] += n * LAM
    potrf = lapack.spotrf if X.dtype == np.float32 else lapack.dpotrf
    exponents, out = -K, np.empty_like(K)

    def exponential():
        for j in range(0, n, 128):
            np.exp(exponents[j:, j : j + 128], out=out[j:, j : j + 128])

    def factorise():
        potrf(work, lower=1, overwrite_a=1, clean=0)

    return {
        "gram product": (lambda: None, lambda: Z @ Z.T),
        "exp, lower triangle": (lambda: None, exponential),
        "cholesky in place": (lambda: np.copyto(work, matrix), factorise),
        "product M Z": (lambda: None, lambda: K @ Z),
    }


def fastest(parts, repeats):
    """Fewest seconds of each (setup, function), all parts measured alternately."""
    best = dict.fromkeys(parts, float("inf"))
    for _ in range(repeats):
        for name, (setup, function) in parts.items():
            setup()
            began = time.perf_counter()
            function()
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def compare(n, dtype, repeats):
    kernel, X, y = problem(n, dtype)
    workspace = Workspace()
    ours = lambda: kme.rcb_objective(  # noqa: E731
        kernel, X, y, regularization=LAM, n_classes=CLASSES, workspace=workspace
    )
    parts = {"kme-dist": (lambda: None, ours), **floor_steps(kernel, X)}
    try:
        theirs = torch_step(kernel, X, y)
        ell, scale, lam = (g.numpy() for g in theirs())
        found = ours().gradient
        expected = np.concatenate([ell, [scale], [lam]])
        got = np.concatenate([found["length_scale"], [found["scale"]], [found["regularization"]]])
        error = np.abs(got - expected).max() / np.abs(expected).max()
        parts["torch autograd"] = (lambda: None, theirs)
    except ImportError:
        error = float("nan")
    ours()
    times = fastest(parts, repeats)
    floor = sum(times[name] for name in floor_steps(kernel, X[:8]))
    step, autograd = times["kme-dist"], times.get("torch autograd", float("nan"))
    print(f"n={n}, d={FEATURES}, m={CLASSES}, {dtype}, one BLAS thread, machine load {load_average()}")
    for name, seconds in times.items():
        print(f"  {name:22}{1e3 * seconds:>10.1f} ms")
    print(
        f"  step / floor {step / floor:.2f};  torch / step {autograd / step:.1f};  "
        f"torch / floor {autograd / floor:.1f};  gradients agree to {error:.1e} of the largest entry"
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2000, 4000])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args(argv)
    with blas_threads(1):
        for n in arguments.rows:
            compare(n, arguments.dtype, arguments.repeats)


if __name__ == "__main__":
    main()
