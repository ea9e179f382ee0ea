"""Rounds on a cluster: coordination overhead, speedup of a second worker, memory of long loops.

    python -m benchmarks.rounds [overhead] [scaling] [local] [delay] [long] [covtype] [--rows 1000 2000] [--rounds 60]

    overhead   a round beyond the slowest of its batches at one and two workers: plain tasks, lanes, actors, and the mix
               of tasks and lanes that learning uses, without and with delayed gradients; all of them in turn
    scaling    batches per second of two workers against one
    local      seconds to the objective that the mean gradient reaches, for replicas that are averaged after several
               steps, with and without a slow network
    delay      objective and test accuracy with gradients delayed by one round, at several learning rates
    long       memory of driver and scheduler and pace over thousands of rounds (--long-rounds)
    covtype    581,012 rows on two workers: time, memory of a worker; the settings are chosen on held-out training rows,
               then test accuracy after a Nystrom fit, against scikit-learn's Nystroem and RBFSampler with the median
               heuristic and a ridge classifier

Every line prints the load of the machine: on a busy one, coordination has to wait for a core.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections import deque
from itertools import combinations
from pathlib import Path

import numpy as np
import psutil
from sklearn.datasets import load_digits

from benchmarks.machine import load_average, shared_data
from kme_dist.backend import blas_threads
from kme_dist.config import ClusterConfig
from kme_dist.core import optim
from kme_dist.core.kernels import Gaussian
from kme_dist.core.kernels.base import median_length_scale
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.data.rows import Scaling
from kme_dist.ops.cluster import open_executor
from kme_dist.run.executors import SerialExecutor, Started
from kme_dist.run.fit import fit_on_dataset
from kme_dist.run.lanes import Lanes
from kme_dist.run.learn import batch_gradient, kernel_batches, learn_on_dataset
from kme_dist.run.learners import KernelLearner, LearnSettings

FEATURES, CLASSES = 54, 7
WARM_UP, BLOCK = 5, 20  # rounds; those of a block follow one another in one way


class Gradients:
    """The same work by an actor, to compare with plain tasks."""

    def take(self, learner, batches, number, parameters):
        return batch_gradient(learner, batches, number, parameters)


def made_up(folder, rows=100_000):
    rng = np.random.default_rng(0)
    X = rng.random((rows, FEATURES), dtype=np.float32)
    scores = X @ rng.normal(size=(FEATURES, CLASSES))
    y = (scores + rng.gumbel(size=scores.shape)).argmax(axis=1)
    return ingest((X, y), Path(folder) / "made-up.zarr", shuffle=0)


def workers(count):
    return open_executor(ClusterConfig(workers=count, dashboard=False))


def start(data, batch):
    kernel = Gaussian(length_scale=np.full(data.features, 1.0))
    settings = LearnSettings(batch_size=batch)
    batches = kernel_batches(data, settings, split=None)
    return (KernelLearner(kernel, settings, CLASSES), batches), optim.to_log(
        {**kernel.parameters, "regularization": np.array(0.01)}
    )


def timed_rounds(begin, job, parameters, batches, count, delay=0):
    """(round, slowest batch) in seconds, of `count` rounds after some to warm up; `delay` rounds are sent ahead.

    A round takes from the moment it is sent, or the round before it is collected if that is later, until it is
    collected.
    """
    found, in_flight, collected, sent = [], deque(), 0.0, 0
    while len(found) < count + WARM_UP:
        while len(in_flight) <= delay:
            calls = [(*job, sent * batches + i, parameters) for i in range(batches)]
            in_flight.append((time.perf_counter(), begin(calls)))
            sent += 1
        began, started = in_flight.popleft()
        records = started.results()
        began, collected = max(began, collected), time.perf_counter()
        found.append((collected - began, max(r.read_s + r.compute_s for r in records)))
    for _, started in in_flight:
        started.results()
    return found[WARM_UP:]


def overhead(data, sizes, count):
    """All ways in turn, in short blocks, so that they see the same load."""
    print("coordination: a round beyond the slowest of its batches")
    for batch in sizes:
        job, parameters = start(data, batch)
        for number in (1, 2):
            with workers(number) as executor:
                chosen = ways(executor)
                found = {name: [] for name in chosen}
                for _ in range(max(1, count // BLOCK)):
                    for name, (begin, delay) in chosen.items():
                        found[name] += timed_rounds(begin, job, parameters, number, BLOCK, delay)
                for name, rounds in found.items():
                    report(f"{number} workers, n_b={batch}, {name:16}", rounds)
                learning(data, executor, number, batch, count)


def ways(executor):
    """The ways to send a round to the workers, and how many rounds are sent ahead."""
    client, lanes = executor.client, Lanes(executor.client)
    addresses = list(client.scheduler_info(n_workers=-1)["workers"])
    actors = [client.submit(Gradients, actor=True, workers=[a], pure=False).result() for a in addresses]

    def by_lanes(calls):
        sent = lanes.start(batch_gradient, calls, resource=None)
        return Started(lambda: list(sent.results(deadline_s=60).values()))

    def by_actors(calls):
        pending = [actor.take(*call) for actor, call in zip(actors, calls, strict=True)]
        return Started(lambda: [future.result() for future in pending])

    def by_tasks(calls):
        return executor.start(batch_gradient, calls, name="batch-gradient")

    def as_used(calls):
        return executor.start(batch_gradient, calls, name="batch-gradient", quick=True)

    return {
        "tasks": (by_tasks, 0),
        "lanes": (by_lanes, 0),
        "actors": (by_actors, 0),
        "as used": (as_used, 0),
        "as used, delay 1": (as_used, 1),
    }


def learning(data, executor, number, batch, count):
    """Whole rounds of learning, with update, record and callback: delay 0 and 1 in turn."""
    kernel = Gaussian(length_scale=np.full(data.features, 1.0))
    found = {0: [], 1: []}
    for _ in range(max(1, count // BLOCK)):
        for delay, seconds in found.items():
            settings = LearnSettings(steps=BLOCK + WARM_UP, batch_size=batch, delay=delay)
            options = {"batches_per_step": number, "executor": executor, "split": None}
            history = learn_on_dataset(data, kernel, 0.01, settings, **options).history
            seconds += np.diff([record["seconds"] for record in history])[WARM_UP - 1 :].tolist()
    medians = {delay: 1e3 * statistics.median(seconds) for delay, seconds in found.items()}
    print(
        f"  {number} workers, n_b={batch}, learning: {medians[0]:.1f} ms per round, {medians[1]:.1f} with delay 1 "
        f"({100 * (1 - medians[1] / medians[0]):.1f} % less), load {load_average()}",
        flush=True,
    )


def report(name, found):
    rounds = [1e3 * r for r, _ in found]
    beyond = [1e3 * (r - slowest) for r, slowest in found]
    share = statistics.median(b / r for b, r in zip(beyond, rounds, strict=True))
    total = sum(beyond) / sum(rounds)
    print(
        f"  {name}: round {statistics.median(rounds):7.1f} ms, beyond compute {statistics.median(beyond):5.1f} "
        f"(least {min(beyond):4.1f}, quartile {np.percentile(beyond, 25):5.1f}, mean {statistics.mean(beyond):5.1f}) "
        f"ms = {100 * share:4.1f} % (all rounds together {100 * total:.1f} %), load {load_average()}",
        flush=True,
    )


def scaling(data, batch, count):
    """One and two workers alternately, so that both see the same load."""
    job, parameters = start(data, batch)
    rates, least = {1: [], 2: []}, {}
    with workers(1) as one, workers(2) as two:
        for _ in range(3):
            for number, executor in ((1, one), (2, two)):
                found = timed_rounds(ways(executor)["as used"][0], job, parameters, number, count)
                rates[number] += [number / r for r, _ in found]
                least[number] = min([least.get(number, np.inf), *(r for r, _ in found)])
    medians = {number: statistics.median(found) for number, found in rates.items()}
    print(
        f"two workers against one, n_b={batch}: {medians[1]:.2f} and {medians[2]:.2f} batches/s, "
        f"{medians[2] / medians[1]:.2f} times as many (fastest rounds: {2 * least[1] / least[2]:.2f}), "
        f"load {load_average()}",
        flush=True,
    )


class Far:
    """Workers behind a network that adds `latency_s` to every round."""

    def __init__(self, executor, latency_s):
        self._executor, self._latency_s = executor, latency_s

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def map(self, *arguments, **options):
        time.sleep(self._latency_s)
        return self._executor.map(*arguments, **options)


def local(data, batch, steps, lengths=(None, 5, 20), latencies=(0.0, 0.1)):
    """Seconds to the final objective of the mean gradient, to within 1 %; `None` is the mean gradient itself."""
    kernel = Gaussian(length_scale=np.full(data.features, 1.0))
    settings = LearnSettings(steps=steps, batch_size=batch, learning_rate=0.05)
    with workers(2) as executor:
        for latency in latencies:
            target = None
            for length in lengths:
                learned = learn_on_dataset(
                    data, kernel, 1.0, settings, batches_per_step=2, local_steps=length, executor=Far(executor, latency)
                )  # fmt: skip
                wide = max(1, 20 // (length or 1))  # the mean over twenty steps, however many rounds they are
                smooth = np.convolve([r["objective"] for r in learned.history], np.ones(wide) / wide, mode="valid")
                seconds = [r["seconds"] for r in learned.history][wide - 1 :]
                target = smooth[-1] * 1.01 if target is None else target
                reached = next((s for s, q in zip(seconds, smooth, strict=True) if q <= target), None)
                name = "mean gradient" if length is None else f"replicas of {length:2} steps"
                print(
                    f"  n_b={batch}, {1e3 * latency:3.0f} ms added to a round, {name:20}: objective {target:.1f} "
                    f"{'not reached' if reached is None else f'after {reached:5.1f} s'}, {steps} steps in "
                    f"{learned.history[-1]['seconds']:5.1f} s, ended at {smooth[-1]:.1f}, load {load_average()}",
                    flush=True,
                )


def delay(rates=(0.02, 0.05, 0.1, 0.3, 0.5), seeds=5, steps=150, batch=150):
    """The objective of the last twenty steps and the accuracy on a quarter of the rows, without and with delay."""
    rng = np.random.default_rng(0)
    X = rng.random((1600, 12))
    scores = np.stack([np.sin(4 * X[:, 0]) + X[:, 1], 2 * X[:, 1] * X[:, 2], X[:, 0] + X[:, 2]], axis=1)
    sets = {
        "digits": load_digits(return_X_y=True),
        "made up": (X, (scores + 0.15 * rng.gumbel(size=scores.shape)).argmax(1)),
    }
    for name, (X, y) in sets.items():
        for rate in rates:
            found = {late: [delayed(X, y, rate, s, late, steps, batch) for s in range(seeds)] for late in (0, 1)}
            early, end, right = np.transpose([found[0], found[1]], (2, 0, 1))
            print(
                f"  {name}, rate {rate}: objective after {steps // 4} steps {early[0].mean():.1f}, delayed "
                f"{early[1].mean():.1f}; after {steps} {end[0].mean():.2f}, delayed {end[1].mean():.2f} "
                f"({100 * (end[1] / end[0] - 1).mean():+.2f} %); test accuracy {100 * right[0].mean():.2f} %, delayed "
                f"{100 * right[1].mean():.2f} %",
                flush=True,
            )


def delayed(X, y, rate, seed, late, steps, batch):
    """(objective after a quarter of the steps, objective at the end, test accuracy)"""
    order = np.random.default_rng(seed).permutation(len(y))
    X = ((X - X.min(axis=0)) / np.maximum(np.ptp(X, axis=0), 1e-9)).astype(np.float32)[order]
    y, train = y[order], len(y) * 3 // 4
    data = ArrayRows(X[:train], y[:train], range(int(y.max()) + 1))
    settings = LearnSettings(steps=steps, batch_size=batch, learning_rate=rate, seed=seed, delay=late)
    kernel, here = Gaussian(length_scale=np.ones(X.shape[1])), {"executor": SerialExecutor(), "scaling": None}
    learned = learn_on_dataset(data, kernel, 1.0, settings, **here)
    lam = learned.regularization * batch / train  # the same shift nλ
    fitted = fit_on_dataset(data, learned.kernel, lam, solver="cholesky", **here).embedding
    values, quarter = [record["objective"] for record in learned.history], steps // 4
    right = np.mean(fitted.decision(X[train:]).argmax(axis=1) == y[train:])
    return np.mean(values[quarter - 10 : quarter + 10]), np.mean(values[-20:]), right


def long(data, count):
    me, memory, seconds = psutil.Process(), [], []

    def watch(record):
        seconds.append(record["round_seconds"])
        if record["step"] % (count // 20) == 0:
            gc.collect()  # cycles that wait for their collection are not growth
            memory.append(me.memory_info().rss / 2**20)

    settings = LearnSettings(steps=count, batch_size=20, learning_rate=0.01)
    kernel = Gaussian(length_scale=np.full(data.features, 1.0))
    with workers(2) as executor:
        learn_on_dataset(data, kernel, 0.1, settings, batches_per_step=2, executor=executor, callback=watch)
    # The second half: before it, caches of bounded size fill up, among them the records of the last steps.
    later = memory[10:]
    slope = (
        20_000 / count * statistics.median((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(later), 2))
    )
    tenth = count // 10
    print(
        f"{count} rounds of 2 batches: driver and scheduler (one process) {memory[10]:.1f} MiB half-way, "
        f"{memory[-1]:.1f} MiB at the end, "
        f"{slope:.2f} MiB per 1,000 rounds; round {1e3 * statistics.median(seconds[tenth : 2 * tenth]):.1f} ms early, "
        f"{1e3 * statistics.median(seconds[-tenth:]):.1f} ms late, load {load_average()}",
        flush=True,
    )


# Settings that covtype chooses from, by accuracy on held-out training rows.
CANDIDATES = {
    "rcb": {"objective": "rcb"},
    "validation, half of a batch trains": {"objective": "validation", "train_share": 0.5},
    "validation, 0.8 of a batch trains": {"objective": "validation", "train_share": 0.8},
    "validation, 0.8 of a batch trains, no complexity": {
        "objective": "validation", "train_share": 0.8, "complexity_weight": 0.0,
    },
}  # fmt: skip


def covtype(folder, steps, centres, rows):
    source = shared_data()
    if source is None:
        print("covtype: the shared data sets were not found; set KME_DATA to their folder")
        return
    place = Path(folder) / "covtype.zarr"
    ingest(source / "covtype.npz", place, label="y", shuffle=0, split="train=0.765,held=0.035,test=0.2")
    data = open_dataset(place)
    found = {}
    for name, chosen in CANDIDATES.items():
        learned, seconds, peak = learn_covtype(data, steps, chosen)
        share = accuracy(data, "held", learned, centres // 2, rows // 2)
        found[name] = (share, learned)
        print(
            f"covtype, {name}: {steps} steps of 2 x 2000 rows in {seconds:.0f} s, worker memory at most "
            f"{peak / 2**20:.0f} MiB; {100 * share:.2f} % of {data.split_rows('held')} held-out training rows "
            f"({centres // 2} centres, {rows // 2} rows), load {load_average()}",
            flush=True,
        )
    best = max(found, key=lambda name: found[name][0])
    print(f"covtype: chosen: {best!r}; test rows are evaluated once, now", flush=True)
    accuracies(data, found[best][1], centres, rows)


def learn_covtype(data, steps, chosen):
    """Length scales on two workers: (learned, seconds, peak memory of a worker in bytes)."""
    settings = LearnSettings(
        steps=steps, batch_size=2000, learning_rate=0.1, schedule=optim.cosine_decay, **chosen
    )  # fmt: skip
    peaks = {}
    with workers(2) as executor:
        began = time.perf_counter()

        def watch(record):
            if record["step"] % 25 == 0:
                for address, peak in executor.client.run(_peak_bytes).items():
                    peaks[address] = max(peak, peaks.get(address, 0))

        kernel = Gaussian(length_scale=np.ones(data.features))
        learned = learn_on_dataset(data, kernel, 1e-3, settings, batches_per_step=2, executor=executor, callback=watch)
    return learned, time.perf_counter() - began, max(peaks.values(), default=0)


def _peak_bytes():
    # Not getrusage: its maximum includes that of the parent process.
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def scaled(data, split, rows, kind="unit"):
    X, y = data.read(split)
    return Scaling.of(data.split_statistics("train"), kind).apply(X, "float32")[:rows], y[:rows]


def nystrom(learned, X, y, centres):
    return fit_on_dataset(
        ArrayRows(X, y, range(CLASSES)), learned.kernel, learned.regularization, executor=SerialExecutor(),
        scaling=None, solver="nystrom", centres=centres,
    ).embedding  # fmt: skip


def accuracy(data, split, learned, centres, rows):
    X, y = scaled(data, split, None)
    fitted = nystrom(learned, *scaled(data, "train", rows), centres)
    return np.mean(fitted.decision(X).argmax(axis=1) == y)


def accuracies(data, learned, centres, rows):
    """Test accuracy of the learned kernel and of the median heuristic, with the same number of centres or features."""
    X, y = scaled(data, "train", rows)
    X_test, y_test = scaled(data, "test", None)
    print(f"  {len(X)} training rows, {len(X_test)} test rows, {centres} centres or features", flush=True)
    began = time.perf_counter()
    share = np.mean(nystrom(learned, X, y, centres).decision(X_test).argmax(axis=1) == y_test)
    print(
        f"  learned kernel, Nystrom: test accuracy {100 * share:.2f} % ({time.perf_counter() - began:.0f} s)",
        flush=True,
    )
    median_heuristic(data, centres, rows)


def median_heuristic(data, centres, rows):
    """Accuracy of scikit-learn's approximations with a ridge classifier, in the usual scalings."""
    from sklearn.kernel_approximation import Nystroem, RBFSampler
    from sklearn.linear_model import RidgeClassifier

    for scaling in ("unit", "standard"):
        X, y = scaled(data, "train", rows, scaling)
        X_test, y_test = scaled(data, "test", None, scaling)
        gamma = 1 / (2 * median_length_scale(X, 0) ** 2)
        for kind in (Nystroem, RBFSampler):
            began = time.perf_counter()
            made = kind(gamma=gamma, n_components=centres, random_state=0)
            found = RidgeClassifier().fit(made.fit_transform(X), y).predict(made.transform(X_test))
            print(
                f"  median heuristic, {kind.__name__} + RidgeClassifier, {scaling} scaling: test accuracy "
                f"{100 * np.mean(found == y_test):.2f} % ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=["overhead", "scaling", "local", "delay", "long", "covtype"], default=[]
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--scaling-rows", type=int, default=2500)
    parser.add_argument("--long-rounds", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--centres", type=int, default=2048)
    parser.add_argument("--fit-rows", type=int, default=60_000)
    chosen = parser.parse_args(argv)
    parts = chosen.parts or ["overhead", "scaling"]
    with tempfile.TemporaryDirectory() as folder, blas_threads(1):
        data = made_up(folder)
        if "overhead" in parts:
            overhead(data, chosen.rows, chosen.rounds)
        if "scaling" in parts:
            scaling(data, chosen.scaling_rows, max(5, chosen.rounds // 6))
        if "local" in parts:
            local(data, 500, 200)
        if "delay" in parts:
            delay()
        if "long" in parts:
            long(data, chosen.long_rounds)
        if "covtype" in parts:
            covtype(folder, chosen.steps, chosen.centres, chosen.fit_rows)


if __name__ == "__main__":
    main()
