"""Many workers: the scheduler under load, and the model of `kme-dist plan --workers` against measured runs.

    python -m benchmarks.scale simulate [--workers 50] [--chunks 2000] [--seconds 0.5] [--processes 2]
    python -m benchmarks.scale check [--rows 40000] [--workers 1 2]

    simulate   one real scheduler, workers whose tasks sleep, and the executor that predict (`stream`) and fit
               (`map_reduce`) use: tasks per second, share of the time that workers are busy, processor time per task of
               scheduler and driver, memory of the scheduler, beside what the model says
    check      learn, fit and predict on made-up rows: measured seconds beside those of the model

Every line prints the load of the machine: on a busy one, scheduler and workers have to wait for a core.
"""

from __future__ import annotations

import argparse
import os
import time

import psutil

from benchmarks.machine import load_average
from benchmarks.simulation import add, simulated_cluster, sleep
from kme_dist.run.executors import DaskExecutor


class Watched:
    """Processor time and memory of a process since the start of a measurement."""

    def __init__(self, process):
        self.process = process
        self.cpu_before, self.bytes_before = self._cpu(), self.bytes

    def _cpu(self):
        used = self.process.cpu_times()
        return used.user + used.system

    @property
    def bytes(self):
        return self.process.memory_info().rss

    @property
    def cpu_s(self):
        return self._cpu() - self.cpu_before


def simulate(given):
    with simulated_cluster(given.workers, given.processes) as (client, scheduler):
        executor = DaskExecutor(client)
        list(executor.stream(sleep, [(0.01,)] * given.workers, name="warm-up"))
        print(f"{given.workers} workers, {given.chunks} tasks of {given.seconds} s, load {load_average()}")
        _streamed(executor, scheduler, given)
        _reduced(executor, scheduler, given)


def _streamed(executor, scheduler, given):
    server, driver = Watched(scheduler), Watched(psutil.Process(os.getpid()))
    began, marks, when = time.perf_counter(), [], []
    for done, _ in enumerate(executor.stream(sleep, [(given.seconds,)] * given.chunks, name="predict-chunk"), 1):
        when.append(time.perf_counter())
        if done % max(1, given.chunks // 5) == 0:
            marks.append(server.bytes / 2**20)
    _report("stream", given.chunks, time.perf_counter() - began, server, driver, given)
    first, last = when[given.chunks // 5], when[given.chunks * 4 // 5]  # without start and end, which long runs forget
    middle = given.chunks * 3 // 5 * given.seconds / ((last - first) * given.workers)
    print(f"  busy in the middle three fifths {middle:.1%}; scheduler MiB at each fifth:", *(f"{m:.0f}" for m in marks))


def _reduced(executor, scheduler, given):
    server, driver = Watched(scheduler), Watched(psutil.Process(os.getpid()))
    calls = [(given.seconds, given.result_bytes)] * min(given.chunks, 4 * given.workers)
    began = time.perf_counter()
    executor.map_reduce(sleep, calls, add, name="sums")
    _report("map_reduce", len(calls), time.perf_counter() - began, server, driver, given)


def _report(name, tasks, took, server, driver, given):
    busy = tasks * given.seconds / (took * given.workers)
    print(
        f"  {name:10} {took:7.1f} s  {tasks / took:6.0f} tasks/s  busy {busy:6.1%}  CPU per task: scheduler "
        f"{server.cpu_s / tasks * 1e3:.2f} ms, driver {driver.cpu_s / tasks * 1e3:.2f} ms; load {load_average()}",
        flush=True,
    )


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
    given = parser.parse_args(arguments)
    given.run(given)


if __name__ == "__main__":
    main()
