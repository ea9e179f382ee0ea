"""One learning step: the closed-form gradient against automatic differentiation and against the floor.

    python -m benchmarks.gradient [--rows 2000 4000] [--dtype float32]

The same objective (algorithm 1, ARD Gaussian kernel, 64 features, 10 classes) four ways in one run with one thread
each: `kme_dist.rcb_objective`, PyTorch autograd, compiled JAX (on one core), and the floor: one Gram product, one
exponential over the lower triangle, one Cholesky factorisation in place, one product of an n x n matrix with the
data. Ratios are of the fastest of several alternating calls. The gradients are compared too, to make sure that equal
work is timed.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
from scipy.linalg import lapack

import kme_dist as kme
from benchmarks.machine import figure, load_average
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


def jax_step(kernel, X, y):
    """The same objective in idiomatic JAX, compiled."""
    import jax
    import jax.numpy as jnp
    from jax.scipy.linalg import cho_solve

    jax.config.update("jax_enable_x64", X.dtype == np.float64)
    n = len(X)
    rows, labels = jnp.asarray(X), jnp.asarray(y)
    Y = jax.nn.one_hot(labels, CLASSES, dtype=rows.dtype)

    def objective(parameters):
        log_ell, log_scale, log_lam = parameters
        Z = rows / jnp.exp(log_ell)
        squares = (Z * Z).sum(1)
        distances = jnp.maximum(squares[:, None] + squares[None, :] - 2 * Z @ Z.T, 0)
        K = jnp.exp(2 * log_scale) * jnp.exp(-0.5 * distances)
        V = cho_solve((jnp.linalg.cholesky(K + n * jnp.exp(log_lam) * jnp.eye(n, dtype=rows.dtype)), True), Y)
        P = K @ V
        risk = -jnp.log(jnp.clip(P[jnp.arange(n), labels], 1e-15, 1)).sum()
        return risk + 4 * np.e * jnp.exp(log_scale) * jnp.sqrt((V * P).sum())

    start = (jnp.log(jnp.asarray(kernel.length_scale, rows.dtype)), jnp.zeros((), rows.dtype),
             jnp.asarray(np.log(LAM), rows.dtype))  # fmt: skip
    gradient = jax.jit(jax.grad(objective))
    return lambda: jax.block_until_ready(gradient(start))


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
    errors, peers = {}, {"torch autograd": torch_step, "jax": jax_step}
    found = ours().gradient
    got = np.concatenate([found["length_scale"], [found["scale"]], [found["regularization"]]])
    for name, make in peers.items():
        try:
            theirs = make(kernel, X, y)
        except ImportError:
            continue
        expected = np.concatenate([np.atleast_1d(np.asarray(g)) for g in theirs()])
        errors[name] = np.abs(got - expected).max() / np.abs(expected).max()
        parts[name] = (lambda: None, theirs)
    times = fastest(parts, repeats)
    floor = sum(times[name] for name in floor_steps(kernel, X[:8]))
    step = times["kme-dist"]
    print(f"n={n}, d={FEATURES}, m={CLASSES}, {dtype}, one thread, machine load {load_average()}")
    for name, seconds in times.items():
        print(f"  {name:22}{1e3 * seconds:>10.1f} ms")
    print(f"  step / floor {step / floor:.2f}")
    for name, error in errors.items():
        print(
            f"  {name} / step {times[name] / step:.1f};  {name} / floor {times[name] / floor:.1f};  "
            f"gradients agree to {error:.1e} of the largest entry"
        )
    for name, seconds in {"floor": floor, **{name: times[name] for name in ("kme-dist", *errors)}}.items():
        figure("a learning step, milliseconds", name, f"n = {n:,}", 1e3 * seconds)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2000, 4000])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args(argv)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # JAX has no other way to use one thread
    with blas_threads(1):
        for n in arguments.rows:
            compare(n, arguments.dtype, arguments.repeats)


if __name__ == "__main__":
    main()
