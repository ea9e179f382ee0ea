"""Many workers: the scheduler under load, and the model of `kme-dist plan --workers` against measured runs.

    python -m benchmarks.scale simulate [--workers 50] [--chunks 2000] [--seconds 0.5] [--processes 2]
    python -m benchmarks.scale check [--rows 1000000] [--centres 2000] [--workers 1 2 4]

    simulate   one real scheduler, workers whose calls sleep, and the executor that predict (`stream`) and fit
               (`map_reduce`) use: calls per second, share of the time that workers are busy (all, and the least busy
               one), processor time per call of scheduler, workers and driver, memory of the scheduler
    check      learn, fit and predict on made-up rows: measured seconds beside those of the model. Workers, scheduler
               and driver share the cores of this machine: where they are all busy, the processor time of the last two
               is added as measured. Learning stays near its start, since its batches take up to twice as long once λ
               is too small for single precision

Every line prints the load of the machine: on a busy one, scheduler and workers have to wait for a core.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
from distributed import Client, LocalCluster

from benchmarks.machine import figure, load_average
from benchmarks.rounds import made_up
from benchmarks.simulation import add, simulated_cluster, sleep
from kme_dist import MCEClassifier, predict
from kme_dist.backend import available_cores
from kme_dist.config import ClusterConfig, parse_config
from kme_dist.core.kernels import Gaussian
from kme_dist.data.dataset import open_dataset
from kme_dist.ops.cluster import open_executor
from kme_dist.pipelines import scaling
from kme_dist.pipelines.plan import batch_seconds
from kme_dist.run.executors import DaskExecutor
from kme_dist.run.fit import fit_on_dataset
from kme_dist.run.learn import learn_on_dataset
from kme_dist.run.learners import LearnSettings
from kme_dist.run.machine import measured_machine
from kme_dist.run.scaling_model import Machine, estimate

STEPS, BATCH = 120, 2_000
CLUSTER_CONSTANTS = ("scheduler_task_s", "driver_task_s", "task_s", "round_s", "message_s", "reduce_bytes_per_s")


class Watch:
    """Processor time of scheduler, simulated workers and driver, and memory of the scheduler."""

    def __init__(self, scheduler, workers):
        self._scheduler = scheduler
        self._groups = {"scheduler": [scheduler], "workers": workers, "driver": [psutil.Process(os.getpid())]}
        self.start()

    def start(self):
        self._before = {name: self._cpu_s(name) for name in self._groups}

    def _cpu_s(self, name):
        return sum(sum(process.cpu_times()[:2]) for process in self._groups[name])

    @property
    def scheduler_mib(self):
        return self._scheduler.memory_info().rss / 2**20

    def per_call(self, calls):
        used = {name: (self._cpu_s(name) - before) / calls * 1e3 for name, before in self._before.items()}
        return ", ".join(f"{name} {milliseconds:.2f} ms" for name, milliseconds in used.items())


def simulate(given):
    with simulated_cluster(given.workers, given.processes) as (client, *processes):
        executor = DaskExecutor(client)
        list(executor.stream(sleep, [(0.01,)] * given.workers, name="warm-up"))
        print(f"{given.workers} workers, {given.chunks} calls of {given.seconds} s, load {load_average()}")
        _streamed(executor, Watch(*processes), given)
        _reduced(executor, Watch(*processes), given)


def _streamed(executor, watch, given):
    watch.start()
    began, marks, when, calls = time.perf_counter(), [], [], Counter()
    results = executor.stream(sleep, [(given.seconds,)] * given.chunks, name="predict-chunk")
    for done, (_, (worker, _)) in enumerate(results, 1):
        when.append(time.perf_counter())
        calls[worker] += 1
        if done % max(1, given.chunks // 5) == 0:
            marks.append(watch.scheduler_mib)
    took = time.perf_counter() - began
    _report("stream", given.chunks, took, watch, given)
    least = min(calls.values()) * given.seconds / took
    first, last = when[given.chunks // 5], when[given.chunks * 4 // 5]  # without start and end, which long runs forget
    middle = given.chunks * 3 // 5 * given.seconds / ((last - first) * given.workers)
    print(
        f"  busy in the middle three fifths {middle:.1%}; the least busy of {len(calls)} workers {least:.1%} of all "
        f"the time; scheduler MiB at each fifth: {' '.join(f'{m:.0f}' for m in marks)}",
        flush=True,
    )


def _reduced(executor, watch, given):
    watch.start()
    calls = [(given.seconds, given.result_bytes)] * min(given.chunks, 4 * given.workers)
    began = time.perf_counter()
    executor.map_reduce(sleep, calls, add, name="sums")
    _report("map_reduce", len(calls), time.perf_counter() - began, watch, given)


def _report(name, calls, took, watch, given):
    busy = calls * given.seconds / (took * given.workers)
    print(
        f"  {name:10} {took:7.1f} s  {calls / took:6.0f} calls/s  busy {busy:6.1%}  processor time per call: "
        f"{watch.per_call(calls)}; load {load_average()}",
        flush=True,
    )


# --- the model against measured runs -----------------------------------------------------------------------


def check(given):
    cluster_constants = measured_machine(cluster=True)
    with tempfile.TemporaryDirectory() as folder:
        data = made_up(folder, given.rows)
        for count in given.workers:
            # As fast as a core is when as many cores are busy: two of them may share caches and arithmetic.
            busy = min(count, available_cores())
            with ProcessPoolExecutor(busy, mp_context=multiprocessing.get_context("spawn")) as pool:
                asked = [pool.submit(_expected, data.path, given, cluster_constants, busy) for _ in range(busy)]
                found = [one.result() for one in asked]
            with _workers(count) as executor:
                measured = _measured(data, given, executor, Path(folder) / str(count))
            for name, (took, used, beside) in measured.items():
                seconds, work = np.mean([own[name] for own in found], axis=0)
                seconds = max(seconds, (work + beside) / available_cores())
                for series, value in (("model", seconds), ("measured", took)):
                    figure("seconds by the model and measured", series, f"{name}, {count}", value)
                print(
                    f"{count} workers on {busy} cores, {name:8} predicted / measured: {seconds:6.2f} / {took:6.2f} s "
                    f"({seconds / took:.2f}); processor time of the workers {work:6.2f} / {used:6.2f} s "
                    f"({work / used:.2f}); load {load_average()}",
                    flush=True,
                )


def _expected(path, given, cluster_constants, workers):
    """Seconds, and processor seconds, of each stage by the model, with the speeds measured in this process."""
    config = parse_config(
        {
            "data": {"source": "none"},
            "model": {"objective": "rcb", "dtype": "float32", "kernel": {"name": "gaussian", "ard": True}},
            "learn": {"steps": STEPS, "batch_size": BATCH, "batches_per_step": 2},
            "fit": {"solver": "nystrom", "centres": given.centres},
        }
    )
    data, here = open_dataset(path), asdict(measured_machine())
    of_cluster = {name: value for name, value in asdict(cluster_constants).items() if name in CLUSTER_CONSTANTS}
    machine, found = Machine(**{**here, **of_cluster}), {}
    for stage in scaling.stages(config, data, data.rows, None, batch_seconds):
        alone, together = estimate(stage, machine, 1), estimate(stage, machine, workers)
        work = alone.terms["reading"] + alone.terms["compute"]
        found[stage.name] = together.seconds, work
    return found


@contextlib.contextmanager
def _workers(count):
    """Worker processes; more than there are cores, if asked for."""
    if count <= available_cores():
        with open_executor(ClusterConfig(workers=count, dashboard=False)) as executor:
            yield executor
        return
    with (
        LocalCluster(n_workers=count, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield DaskExecutor(client, direct=True)


def _measured(data, given, executor, folder):
    """Of learn, fit and predict: seconds, processor seconds of the workers, and of this process, which is driver and
    scheduler. A first round of each warms the workers up."""
    kernel, centres = Gaussian(length_scale=np.full(data.features, 1.0)), given.centres
    model = MCEClassifier(kernel=kernel, objective="rcb", steps=0, solver="nystrom", centres=centres, n_jobs=1)
    X, y = data.read_rows(0, 5_000)
    model.fit(X, y)

    def learned(steps):
        settings = LearnSettings(steps=steps, batch_size=BATCH, learning_rate=1e-4)
        return learn_on_dataset(data, kernel, 1e-3, settings, executor=executor, batches_per_step=2)

    def fitted(count):
        fit_on_dataset(data, kernel, 1e-3, executor=executor, scratch=folder, solver="nystrom", centres=count)

    def predicted(out):
        predict(model, data, folder / out, executor=executor)

    runs = {"learn": (learned, 3, STEPS), "fit": (fitted, 100, centres), "predict": (predicted, "warm", "out")}
    found = {}
    for name, (run, warm, real) in runs.items():
        run(warm)
        used, own, began = _used(executor), time.process_time(), time.perf_counter()
        run(real)
        found[name] = time.perf_counter() - began, _used(executor) - used, time.process_time() - own
    return found


def _used(executor):
    """Processor seconds of all workers, which on a busy machine say more than the clock."""
    return sum(executor.client.run(time.process_time).values())


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    simulated = commands.add_parser("simulate")
    simulated.add_argument("--workers", type=int, default=50)
    simulated.add_argument("--chunks", type=int, default=2_000)
    simulated.add_argument("--seconds", type=float, default=0.5)
    simulated.add_argument("--processes", type=int, default=2)
    simulated.add_argument("--result-bytes", type=int, default=0)
    simulated.set_defaults(run=simulate)
    checked = commands.add_parser("check")
    checked.add_argument("--rows", type=int, default=1_000_000)
    checked.add_argument("--centres", type=int, default=2_000)
    checked.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    checked.set_defaults(run=check)
    given = parser.parse_args(arguments)
    given.run(given)


if __name__ == "__main__":
    main()
