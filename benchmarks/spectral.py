"""Steps of learning spectral features against plain PyTorch, and the parts of a step.

    python -m benchmarks.spectral [--rows 20000] [--columns 54] [--batch 256] [--frequencies 384] [--hidden 384,384]

The same network from the same start, cross entropy, Adam with decoupled weight decay, float32, one thread: steps as
`features="spectral"` makes them (batches are read, the loss, its gradient, the update; 64 steps in a call), and a
PyTorch loop with autograd and torch.optim.AdamW on rows in memory. Steps per second of processor time (the machine may
be shared), the best of several alternating repetitions; the losses of the last steps are compared too.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np

from benchmarks.machine import load_average
from kme_dist.backend import blas_threads
from kme_dist.core.optim import adam
from kme_dist.data.arrays import ArrayRows
from kme_dist.run.learn import Batches, local_steps
from kme_dist.run.learners import SoftmaxLearner
from kme_dist.run.spectral import SpectralSettings, _start
from kme_dist.run.trainer import Stepper

CLASSES, STEPS = 7, 64


def problem(rows, columns):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(rows, columns)).astype(np.float32)
    return X, (X[:, 0] * X[:, 1] > 0).astype(np.int64) + 2 * (X[:, 2] > 0)


def own_steps(X, y, settings):
    """A call of 64 steps, as a worker makes it."""
    learning = settings.learning(len(y))
    hidden, start = _start(X.shape[1], CLASSES, settings, 0.4, 0)
    learner, stepper = SoftmaxLearner(hidden, learning, CLASSES), Stepper.of(start, learning)
    rows = Batches.of(ArrayRows(X, y, range(CLASSES)), batch_size=16 * settings.batch_size, seed=0, split=None)
    batches = Batches(rows.rows, rows.plan, per_read=16)
    state = [start, stepper.start(start)]

    def call():
        with blas_threads(1):
            found = local_steps(learner, batches, 0, stepper, [settings.learning_rate] * STEPS, tuple(state))
        state[:] = found.parameters, found.state
        return found.record.objective.value

    return call


def torch_steps(X, y, settings):
    import torch

    torch.set_num_threads(1)
    _, start = _start(X.shape[1], CLASSES, settings, 0.4, 0)
    names = list(start)
    held = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    rows, labels = torch.from_numpy(X), torch.from_numpy(y)
    rate, decay = settings.learning_rate, settings.learning(len(y)).weight_decay
    optimizer = torch.optim.AdamW([held[name] for name in names], lr=rate, weight_decay=decay)

    def call():
        order, total = torch.randperm(len(labels)), 0.0
        for step in range(STEPS):
            some = order[step * settings.batch_size : (step + 1) * settings.batch_size]
            Z = torch.cos(rows[some] @ held["features.0.weight"] + held["features.0.bias"])
            for layer in range(1, 1 + len(settings.hidden)):
                Z = torch.relu(Z @ held[f"features.{layer}.weight"] + held[f"features.{layer}.bias"])
            loss = torch.nn.functional.cross_entropy(Z @ held["softmax.weights"] + held["softmax.bias"], labels[some])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / STEPS

    return call


def products(X, settings):
    """The matrix products of a step alone: what no implementation can do without."""
    sizes = [X.shape[1], settings.frequencies, *settings.hidden, CLASSES]
    rng = np.random.default_rng(0)
    left = [rng.normal(size=(settings.batch_size, size)).astype(np.float32) for size in sizes]
    right = [rng.normal(size=pair).astype(np.float32) for pair in itertools.pairwise(sizes)]

    def call():
        with blas_threads(1):
            for _ in range(STEPS):
                for i, W in enumerate(right):
                    _ = left[i] @ W
                    _ = left[i].T @ left[i + 1]
                    if i:
                        _ = left[i + 1] @ W.T
        return float("nan")

    return call


def updates(X, settings):
    """The updates of a step alone."""
    _, start = _start(X.shape[1], CLASSES, settings, 0.4, 0)
    optimizer, gradient = adam(), {name: np.ones_like(value) for name, value in start.items()}
    state = [optimizer.init(start)]

    def call():
        for _ in range(STEPS):
            _, state[0] = optimizer.update(gradient, state[0], 1e-3)
        return float("nan")

    return call


def measured(calls, repeats):
    """The best steps per second of processor time, in alternating calls; and the last loss."""
    best, losses = dict.fromkeys(calls, 0.0), {}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.process_time()
            losses[name] = call()
            best[name] = max(best[name], STEPS / (time.process_time() - began))
    return best, losses


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--columns", type=int, default=54)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--frequencies", type=int, default=384)
    parser.add_argument("--hidden", default="384,384")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args(argv)
    settings = SpectralSettings(
        frequencies=arguments.frequencies,
        hidden=tuple(map(int, arguments.hidden.split(","))),
        batch_size=arguments.batch,
    )
    X, y = problem(arguments.rows, arguments.columns)
    calls = {
        "kme_dist": own_steps(X, y, settings),
        "PyTorch": torch_steps(X, y, settings),
        "products only": products(X, settings),
        "updates only": updates(X, settings),
    }
    best, losses = measured(calls, arguments.repeats)
    print(f"batches of {arguments.batch} rows, {arguments.columns} columns, load {load_average()}")
    for name, rate in best.items():
        loss = f", loss {losses[name]:.3f}" if losses[name] == losses[name] else ""
        print(f"{name:14s} {rate:7.1f} steps/s  {1e3 / rate:6.2f} ms a step{loss}")
    print(f"steps per second relative to PyTorch: {best['kme_dist'] / best['PyTorch']:.2f}")


if __name__ == "__main__":
    main()
