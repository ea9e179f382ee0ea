"""Rounds over a cluster: what coordination costs, what a second worker brings, whether long loops grow.

    python -m benchmarks.rounds [overhead] [scaling] [long] [covtype] [--rows 1000 2000] [--rounds 60]

    overhead   a round beyond the slowest of its batches, for plain tasks and for actors, at one and two workers
    scaling    batches per second of two workers against one
    long       memory of driver and scheduler and pace over thousands of rounds (--long-rounds)
    covtype    581,012 rows on two workers: time, memory of a worker against the plan, test accuracy after a Nystrom
               fit, beside scikit-learn's Nystroem and RBFSampler with the median heuristic and a ridge classifier

Every line prints the load of the machine: on a busy one, coordination waits for its turn like everybody else.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks.machine import load_average, shared_data
from kme_dist.backend import blas_threads
from kme_dist.cluster import open_executor
from kme_dist.config import ClusterConfig
from kme_dist.core import optim
from kme_dist.core.kernels import Gaussian
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.run import solve
from kme_dist.run.learn import LearnSettings, median_length_scale
from kme_dist.run.rounds import batch_gradient, learn_on_dataset, make_job
from kme_dist.run.scaling import Scaling

FEATURES, CLASSES = 54, 7


class Gradients:
    """The same work by an actor: what plain tasks are compared with."""

    def take(self, job, number, parameters):
        return batch_gradient(job, number, parameters)


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
    job = make_job(data, kernel, LearnSettings(batch_size=batch), split=None, scaling="unit", dtype="float32")
    return job, optim.to_log({**kernel.parameters, "regularization": np.array(0.01)})


def timed_rounds(executor, job, parameters, batches, count, actors=None):
    """(round, slowest batch) in seconds, of `count` rounds after some to warm up."""
    found = []
    for step in range(count + 5):
        calls = [(job, step * batches + i, parameters) for i in range(batches)]
        began = time.perf_counter()
        if actors:
            pending = [actor.take(*call) for actor, call in zip(actors, calls, strict=True)]
            records = [future.result() for future in pending]
        else:
            records = executor.map(batch_gradient, calls, name="rcb-gradient")
        found.append((time.perf_counter() - began, max(r.read_s + r.compute_s for r in records)))
    return found[5:]


def overhead(data, sizes, count):
    print("coordination: round minus its slowest batch")
    for batch in sizes:
        job, parameters = start(data, batch)
        for number in (1, 2):
            with workers(number) as executor:
                report(f"{number} workers, n_b={batch}, tasks ", timed_rounds(executor, job, parameters, number, count))
                client = executor.client
                addresses = list(client.scheduler_info(n_workers=-1)["workers"])
                actors = [client.submit(Gradients, actor=True, workers=[a], pure=False).result() for a in addresses]
                report(
                    f"{number} workers, n_b={batch}, actors",
                    timed_rounds(executor, job, parameters, number, count, actors),
                )


def report(name, found):
    rounds = [1e3 * r for r, _ in found]
    beyond = [1e3 * (r - slowest) for r, slowest in found]
    share = statistics.median(b / r for b, r in zip(beyond, rounds, strict=True))
    print(
        f"  {name}: round {statistics.median(rounds):7.1f} ms, beyond compute {statistics.median(beyond):5.1f} "
        f"(least {min(beyond):4.1f}, quartile {np.percentile(beyond, 25):5.1f}) ms = {100 * share:4.1f} %, "
        f"load {load_average()}",
        flush=True,
    )


def scaling(data, batch, count):
    """One and two workers in turns, so that both meet the same machine."""
    job, parameters = start(data, batch)
    rates, least = {1: [], 2: []}, {}
    with workers(1) as one, workers(2) as two:
        for _ in range(3):
            for number, executor in ((1, one), (2, two)):
                found = timed_rounds(executor, job, parameters, number, count)
                rates[number] += [number / r for r, _ in found]
                least[number] = min([least.get(number, np.inf), *(r for r, _ in found)])
    medians = {number: statistics.median(found) for number, found in rates.items()}
    print(
        f"two workers against one, n_b={batch}: {medians[1]:.2f} and {medians[2]:.2f} batches/s, "
        f"{medians[2] / medians[1]:.2f} times as many (fastest rounds: {2 * least[1] / least[2]:.2f}), "
        f"load {load_average()}",
        flush=True,
    )


def long(data, count):
    me, memory, seconds = psutil.Process(), [], []

    def watch(record):
        seconds.append(record["round_seconds"])
        if record["step"] % (count // 20) == 0:
            memory.append(me.memory_info().rss / 2**20)

    settings = LearnSettings(steps=count, batch_size=20, learning_rate=0.01)
    kernel = Gaussian(length_scale=np.full(data.features, 1.0))
    with workers(2) as executor:
        learn_on_dataset(data, kernel, 0.1, settings, batches_per_step=2, executor=executor, callback=watch)
    # The second half: before it, caches of bounded size fill up, among them the records of the last steps.
    slope = np.polyfit(np.arange(len(memory[10:])) * count / 20_000, memory[10:], 1)[0]
    tenth = count // 10
    print(
        f"{count} rounds of 2 batches: driver and scheduler (one process) {memory[10]:.1f} MiB half-way, "
        f"{memory[-1]:.1f} MiB at the end, "
        f"{slope:.2f} MiB per 1,000 rounds; round {1e3 * statistics.median(seconds[tenth : 2 * tenth]):.1f} ms early, "
        f"{1e3 * statistics.median(seconds[-tenth:]):.1f} ms late, load {load_average()}",
        flush=True,
    )


def covtype(folder, steps, centres, rows, objective):
    source = shared_data()
    if source is None:
        print("covtype: the shared data sets are not here; set KME_DATA to their folder")
        return
    place = Path(folder) / "covtype.zarr"
    data = ingest(source / "covtype.npz", place, label="y", shuffle=0, split="train=0.8,test=0.2")
    kernel = Gaussian(length_scale=np.ones(data.features))
    settings = LearnSettings(
        objective=objective,
        steps=steps,
        batch_size=2000,
        learning_rate=0.1,
        schedule=optim.cosine_decay,
        train_share=0.8,
    )
    peaks = {}
    with workers(2) as executor:
        began = time.perf_counter()

        def watch(record):
            if record["step"] % 25 == 0:
                for address, peak in executor.client.run(_peak_bytes).items():
                    peaks[address] = max(peak, peaks.get(address, 0))

        learned = learn_on_dataset(data, kernel, 1e-3, settings, batches_per_step=2, executor=executor, callback=watch)
        seconds = time.perf_counter() - began
    print(
        f"covtype, {objective}: {steps} steps of 2 x 2000 rows in {seconds:.0f} s, worker memory at most "
        f"{max(peaks.values()) / 2**20:.0f} MiB, load {load_average()}",
        flush=True,
    )
    accuracies(open_dataset(place), learned, centres, rows)


def _peak_bytes():
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def accuracies(data, learned, centres, rows):
    """Test accuracy of the learned kernel and of the median heuristic, with as many centres or features."""
    from sklearn.kernel_approximation import Nystroem, RBFSampler
    from sklearn.linear_model import RidgeClassifier

    scale = Scaling.of(data.split_statistics("train"), "unit")
    X, y = data.read("train")
    X, y = scale.apply(X, "float32")[:rows], y[:rows]
    X_test, y_test = data.read("test")
    X_test, y_test = scale.apply(X_test, "float32")[:50_000], y_test[:50_000]

    def judge(name, predict):
        began = time.perf_counter()
        print(
            f"  {name}: test accuracy {100 * np.mean(predict() == y_test):.2f} % ({time.perf_counter() - began:.0f} s)",
            flush=True,
        )

    def ours():
        fitted = solve.fit(
            learned.kernel, X, y, CLASSES, regularization=learned.regularization, retune=True, solver="nystrom",
            centres=centres,
        )  # fmt: skip
        return fitted.embedding.decision(X_test).argmax(axis=1)

    def theirs(approximation):
        return RidgeClassifier().fit(approximation.fit_transform(X), y).predict(approximation.transform(X_test))

    width = median_length_scale(X, 0)
    gamma = 1 / (2 * width**2)
    print(f"  {len(X)} training rows, {len(X_test)} test rows, {centres} centres or features")
    judge("learned kernel, Nystrom", ours)
    judge(
        "median heuristic, Nystroem + RidgeClassifier",
        lambda: theirs(Nystroem(gamma=gamma, n_components=centres, random_state=0)),
    )
    judge(
        "median heuristic, RBFSampler + RidgeClassifier",
        lambda: theirs(RBFSampler(gamma=gamma, n_components=centres, random_state=0)),
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["overhead", "scaling", "long", "covtype"], default=[])
    parser.add_argument("--rows", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--scaling-rows", type=int, default=2500)
    parser.add_argument("--long-rounds", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--centres", type=int, default=2048)
    parser.add_argument("--objective", default="validation", choices=["rcb", "validation"])
    parser.add_argument("--fit-rows", type=int, default=60_000)
    chosen = parser.parse_args(argv)
    parts = chosen.parts or ["overhead", "scaling"]
    with tempfile.TemporaryDirectory() as folder, blas_threads(1):
        data = made_up(folder)
        if "overhead" in parts:
            overhead(data, chosen.rows, chosen.rounds)
        if "scaling" in parts:
            scaling(data, chosen.scaling_rows, max(5, chosen.rounds // 6))
        if "long" in parts:
            long(data, chosen.long_rounds)
        if "covtype" in parts:
            covtype(folder, chosen.steps, chosen.centres, chosen.fit_rows, chosen.objective)


if __name__ == "__main__":
    main()
