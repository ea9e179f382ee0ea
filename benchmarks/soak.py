"""A cluster that is shot at: recovery times, memory slopes and bits, while jobs learn and predict in turns.

    python -m benchmarks.soak --minutes 60 [--seed 0] [--every 12] [--folder FOLDER]

A scheduler, workers with nannies and a driver host (`kme-dist drivers`) run as separate processes with the settings of
`deploy/dask.yaml`, each restarted five seconds after it ends, as the systemd units of `deploy/` do. Jobs are submitted
one after the other: a short round of batches (over lanes), long rounds (as tasks), predictions. At the times of a
Poisson process somebody is killed with SIGKILL:

    worker      the process of a worker; its nanny starts another
    driver      the driver of the job; its host starts another
    host        the driver host, which takes its drivers along; in the first part of the time only, like
    scheduler   the scheduler, which takes its workers along

The first part, three fifths of the time, kills all of them. In the second part one job learns without end and only one
worker is killed, again and again: the memory of scheduler, driver, driver host and the other workers is measured there,
over one life of each. That job is cancelled when the time is over; its first steps are compared.

Recovery is the longest pause in the progress of the job from the kill to the next kill; a kill before the job has
recovered from another one counts together with it, as the more severe of the two. Before anything is killed, each job
runs once undisturbed: every later result must have the same bits.

Exit code 0: all bars hold. At most five seconds of recovery in the median and 20 at worst after kills of workers and
drivers, 60 s at worst after a kill of the scheduler; all jobs succeeded, with the same bits; no memory slope that is
both significant and more than 5 % of the process in an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import yaml

import kme_dist as kme
from benchmarks.machine import load_average
from kme_dist.core.kernels import Gaussian
from kme_dist.data.ingest import ingest
from kme_dist.data.leases import latest_epoch
from kme_dist.data.store import load_arrays
from kme_dist.errors import DataError, KMEError, RetryError
from kme_dist.ops.jobs import ENDED, job_at

KME_DIST = [sys.executable, "-m", "kme_dist"]
SETTINGS = Path(__file__).parents[1] / "deploy" / "dask.yaml"
FEATURES, CLASSES, CENTRES, CHUNK_ROWS = 16, 3, 4000, 2048
WORKERS = 3
RESTART_S = 5.0  # RestartSec of the systemd units
TICK_S, SAMPLE_S = 0.1, 2.0
FIRST_PART = 0.6
KINDS = {"worker": 0.6, "driver": 0.25, "host": 0.07, "scheduler": 0.08}  # in the first part, by severity
CALM_S = 2.0  # progress within this time of the next kill: recovered
MEDIAN_S, WORST_S, SCHEDULER_S, FEWEST = 5.0, 20.0, 60.0, 100
WARM_UP_S = 120.0  # of a process, not part of its memory slope


# --- processes --------------------------------------------------------------------------------------


class Service:
    """A process that is restarted when it ends, like a systemd unit with Restart=always."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.name, self._command, self._environment = name, command, environment
        self._log = (folder / f"{name.replace(' ', '-')}.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0
        self.starts = 0

    def tend(self) -> None:
        """Start it if it is due; called often."""
        if self._process is not None and self._process.poll() is not None:
            self._process, self._start_at = None, time.monotonic() + RESTART_S
        if self._process is None and time.monotonic() >= self._start_at:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=self._log, stderr=self._log, start_new_session=True
            )
            self.starts += 1

    @property
    def process(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def worker(self) -> int | None:
        """The process that the nanny of a `dask worker` looks after."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process).children() if self.process is not None else ():
                if "spawn_main" in " ".join(child.cmdline()):
                    return child.pid
        return None

    def end(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()


class Cluster:
    """Scheduler, workers and driver host, under one root folder."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self.environment = {**os.environ, "DASK_CONFIG": str(SETTINGS), "KME_ROOT": str(folder)}
        self.environment |= {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        dask, nobody = [sys.executable, "-m", "dask"], ["--dashboard-address", "127.0.0.1:0"]
        port = self.address.rpartition(":")[2]
        preload = ["--preload", "kme_dist.dashboard"]

        def service(name: str, *command: str) -> Service:
            return Service(name, list(command), self.environment, folder)

        self.scheduler = service(
            "scheduler", *dask, "scheduler", "--host", "127.0.0.1", "--port", port, *nobody, *preload
        )
        self.workers = []
        for number in range(1, WORKERS + 1):
            options = ["--nworkers", "1", "--nthreads", "1", "--memory-limit", "2GiB", "--host", "127.0.0.1"]
            options += ["--local-directory", str(folder / "scratch"), *nobody, *preload]
            self.workers.append(service(f"worker {number}", *dask, "worker", self.address, *options))
        self.host = service("driver host", *KME_DIST, "drivers", "--scheduler", self.address)
        self.services = [self.scheduler, *self.workers, self.host]

    def tend(self) -> None:
        for service in self.services:
            service.tend()

    def end(self) -> None:
        for service in self.services:
            service.end()

    def processes(self) -> dict[str, int]:
        """All processes by what they are."""
        found = {"scheduler": self.scheduler.process, "driver host": self.host.process}
        for worker in self.workers:
            found |= {worker.name: worker.worker, f"nanny of {worker.name}": worker.process}
        return {name: process for name, process in found.items() if process is not None}


# --- work -------------------------------------------------------------------------------------------


def prepare(folder: Path, chunks: int) -> None:
    """Data sets and a model that the jobs use."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(chunks * CHUNK_ROWS, FEATURES)).astype(np.float32)
    scores = X @ rng.normal(size=(FEATURES, CLASSES)) + rng.gumbel(size=(len(X), CLASSES))
    y = scores.argmax(axis=1)
    sizes = {"chunk_bytes": CHUNK_ROWS * FEATURES * 4, "shard_bytes": 16 * CHUNK_ROWS * FEATURES * 4}
    ingest(X, folder / "rows.zarr", **sizes)
    ingest((X[:40_000], y[:40_000]), folder / "table.zarr", shuffle=0)
    model = kme.MCEClassifier(kernel=Gaussian(length_scale=np.full(FEATURES, 4.0)), steps=0, regularization=1e-3)
    model.fit(X[:CENTRES], y[:CENTRES]).save(folder / "model.zarr")


ENDLESS, STEPS = "endless", 400
WORK = {
    "short rounds": ("learn", {"steps": STEPS, "batch_size": 500, "batches_per_step": 2}),
    "predict": ("predict", {}),
    "long rounds": ("learn", {"steps": 80, "batch_size": 2000, "batches_per_step": 2, "checkpoint_steps": 10}),
}


class Work:
    """One job, from its submission to its result."""

    def __init__(self, cluster: Cluster, folder: Path, kind: str, number: int) -> None:
        pipeline, learn = WORK[kind] if kind != ENDLESS else ("learn", {**WORK["short rounds"][1], "steps": 10**7})
        self.kind, self._cluster = kind, cluster
        self.id = f"{kind.replace(' ', '-')}-{number}"
        self._output = folder / "output" / self.id
        tree = {"data": {"source": "table.zarr"}, "output": {"folder": f"output/{self.id}"}}
        if pipeline == "predict":
            out = f"output/{self.id}.zarr"
            tree["predict"] = {"data": "rows.zarr", "model": "model.zarr", "out": out, "outputs": ["probability"]}
            self._progress = folder / out / "_receipts"
        else:
            tree |= {"learn": learn, "model": {"objective": "rcb"}}
            self._progress = self._output / "metrics.jsonl"
        self.pipeline, self.job = pipeline, job_at(folder, self.id)
        self._config = folder / f"{self.id}.yaml"
        self._config.write_text(yaml.safe_dump(tree))

    def submit(self) -> None:
        """As a person would, until a scheduler accepts it."""
        command = [*KME_DIST, "submit", str(self._config), "--pipeline", self.pipeline, "--id", self.id]
        while True:
            done = subprocess.run(
                [*command, "--scheduler", self._cluster.address], env=self._cluster.environment, capture_output=True
            )
            if done.returncode == 0:
                return
            if done.returncode != RetryError.exit_code:
                raise RuntimeError(done.stderr.decode())
            time.sleep(1.0)

    def cancel(self) -> None:
        command = [*KME_DIST, "jobs", "cancel", self.id, "--scheduler", self._cluster.address]
        subprocess.run(command, env=self._cluster.environment, capture_output=True, check=False)

    @property
    def state(self) -> str:
        try:
            return str(self.job.status()["state"])
        except DataError:  # before it is submitted
            return "waiting"

    def progress(self) -> object:
        """Changes with every step or chunk that is done; None before the first."""
        # Receipts of chunks are in one folder for each epoch of the predictions.
        found = self._progress.glob("*/") if self.pipeline == "predict" else [self._progress]
        return sorted(filter(None, map(_version, found))) or None

    def driver(self) -> int | None:
        """The process of the driver."""
        record = latest_epoch(self.job.place)[1] or {}
        process = record.get("process")
        return process if isinstance(process, int) and psutil.pid_exists(process) else None

    def digest(self) -> str:
        """Of the result, every bit of it."""
        found = hashlib.sha256()
        if self.pipeline == "predict":
            predictions = kme.open_predictions(self._progress.parent)
            predictions.verify()
            for name in sorted(predictions.names):
                found.update(name.encode() + np.ascontiguousarray(predictions.read(name)).tobytes())
        else:
            arrays, attributes = load_arrays(self._output / "learned.zarr")
            found.update(json.dumps(attributes, sort_keys=True, default=str).encode())
            for name in sorted(arrays):
                found.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
        return found.hexdigest()[:16]

    def curve(self) -> list[float]:
        """The objective of the first steps."""
        lines = [json.loads(line) for line in self._progress.read_text().splitlines()[:STEPS]]
        return [line["objective"] for line in lines]

    def remove(self) -> None:
        for path in (self._output, self._progress.parent):
            shutil.rmtree(path, ignore_errors=True)


def _version(path: Path) -> tuple[int, ...]:
    """Of a file or of the names in a folder; empty if it does not exist."""
    with contextlib.suppress(OSError):
        there = path.stat()
        return there.st_ino, there.st_size, there.st_mtime_ns
    return ()


# --- what is measured -------------------------------------------------------------------------------


@dataclass
class Episode:
    """Kills without recovery in between, and the progress after them."""

    kills: list[tuple[float, str]]
    work: str
    marks: list[float] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return max((kind for _, kind in self.kills), key=list(KINDS).index)

    @property
    def recovery_s(self) -> float:
        """The longest pause after the last of the most severe kills."""
        since = max(when for when, kind in self.kills if kind == self.kind)
        return max(np.diff([since, *(mark for mark in self.marks if mark > since)]), default=0.0)

    def recovered(self, now: float) -> bool:
        return bool(self.marks) and now - self.marks[-1] < CALM_S


class Memory:
    """Resident memory of processes over time."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)

    def sample(self, processes: dict[str, int]) -> None:
        for name, process in processes.items():
            with contextlib.suppress(psutil.Error):
                self._samples[name, process].append(
                    (time.monotonic(), psutil.Process(process).memory_info().rss / 2**20)
                )

    def slopes(self) -> dict[str, tuple[float, float, float, float]]:
        """For each name the longest life: minutes, MiB in the mean, slope in MiB per hour and its standard error."""
        found: dict[str, tuple[float, float, float, float]] = {}
        for (name, _), samples in self._samples.items():
            times, sizes = np.array(samples).T
            late = times > times[0] + WARM_UP_S
            minutes = float(times[-1] - times[0]) / 60
            if late.sum() >= 30 and minutes > found.get(name, (0.0,))[0]:
                found[name] = (minutes, float(sizes[late].mean()), *slope(times[late] / 3600, sizes[late]))
        return found


def slope(times: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Least squares, with a standard error that allows for correlation over a tenth of the time (Newey and West)."""
    x = times - times.mean()
    rate = float(x @ values / (x @ x))
    scores = x * (values - values.mean() - rate * x)
    lags = max(1, len(x) // 10)
    spread = scores @ scores
    spread += 2 * sum((1 - lag / (lags + 1)) * (scores[lag:] @ scores[:-lag]) for lag in range(1, lags + 1))
    return rate, float(np.sqrt(max(spread, 0.0)) / (x @ x))


class Soak:
    """The whole of it."""

    def __init__(self, folder: Path, seed: int, every_s: float) -> None:
        self.folder, self.random, self.every_s = folder, random.Random(seed), every_s
        self.cluster, self.memory = Cluster(folder), Memory()
        self.episodes: list[Episode] = []
        self.open: Episode | None = None
        self.expected: dict[str, str] = {}
        self.curve: list[float] = []  # of short rounds, undisturbed
        self.results: list[tuple[str, str]] = []  # job, and what became of it
        self._sample_at, self._threads = 0.0, ThreadPoolExecutor(1)
        self._end = self._next_kill = 0.0  # set when the kills begin

    def run(self, minutes: float) -> None:
        for kind in WORK:  # undisturbed
            began = time.monotonic()
            self._do(kind, 0)
            _say(f"{kind}, undisturbed: {time.monotonic() - began:.0f} s, load {load_average()}")
        began, kinds = time.monotonic(), list(WORK)
        self._end = began + 60 * minutes
        self._next_kill = began + self.random.expovariate(1 / self.every_s)
        number = 0
        while time.monotonic() < began + FIRST_PART * 60 * minutes:
            number += 1
            self._do(kinds[number % len(kinds)], number)
        if minutes:
            self._do(ENDLESS, 1, gentle=True)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.cluster.end()

    # --- one job ---

    def _do(self, kind: str, number: int, *, gentle: bool = False) -> None:
        work = Work(self.cluster, self.folder, kind, number)
        sent: Future[None] = self._threads.submit(work.submit)
        last, started, cancelled = None, False, False
        while True:
            self._tick(work)
            if sent.done():
                sent.result()
            status = work.state
            now, seen = time.monotonic(), work.progress()
            if seen != last or status in ENDED:
                last, started = seen, started or seen is not None
                self._mark(now)
            if status in ENDED and not self._may_be_resumed(work, status):
                break
            if gentle and now >= self._end and not cancelled:
                cancelled = bool(self._threads.submit(work.cancel))
            if started and self._next_kill <= now < self._end:
                self._next_kill = now + self.random.expovariate(1 / self.every_s)
                self._kill(work, now, gentle=gentle)
        self._finish_episode()
        self._compare(work, status)

    def _tick(self, work: Work) -> None:
        time.sleep(TICK_S)
        self.cluster.tend()
        if time.monotonic() >= self._sample_at:
            self._sample_at = time.monotonic() + SAMPLE_S
            driver = work.driver()
            self.memory.sample(self.cluster.processes() | ({} if driver is None else {"driver": driver}))

    def _may_be_resumed(self, work: Work, state: str) -> bool:
        """Whether the host will resubmit a job that failed."""
        last = work.job.events()[-1]
        return state == "failed" and last.get("exit_code") == RetryError.exit_code and not last.get("given_up")

    def _compare(self, work: Work, state: str) -> None:
        outcome = state
        if work.kind == ENDLESS and state == "cancelled":
            steps = work.curve()
            outcome = "same bits" if steps == self.curve[: len(steps)] else "OTHER BITS"
        elif state == "succeeded":
            try:
                digest = work.digest()
                same = self.expected.setdefault(work.kind, digest) == digest
                outcome = "same bits" if same else "OTHER BITS"
            except KMEError as error:
                outcome = f"damaged: {error}"
            if work.kind == "short rounds" and not self.curve:
                self.curve = work.curve()
        else:
            _say(f"{work.id}: {work.job.status().get('error')}")
        self.results.append((work.id, outcome))
        work.remove()

    # --- kills ---

    def _kill(self, work: Work, now: float, *, gentle: bool) -> None:
        kind = "worker" if gentle else self.random.choices(list(KINDS), list(KINDS.values()))[0]
        driver = work.driver()
        workers = self.cluster.workers[-1:] if gentle else self.cluster.workers
        others = [process for process in (service.worker for service in workers) if process is not None]
        victim = {
            "worker": self.random.choice(others or [None]),
            "driver": driver,
            "host": self.cluster.host.process,
            "scheduler": self.cluster.scheduler.process,
        }[kind]
        if victim is None:  # it is being restarted
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            if self.open is not None and not self.open.recovered(now):
                self.open.kills.append((now, kind))
            else:
                self._finish_episode()
                self.open = Episode([(now, kind)], work.kind)

    def _mark(self, now: float) -> None:
        if self.open is not None:
            self.open.marks.append(now)

    def _finish_episode(self) -> None:
        if self.open is not None:
            self.episodes.append(self.open)
            slow = self.open.recovery_s > (SCHEDULER_S if self.open.kind == "scheduler" else WORST_S)
            note = "  TOO SLOW" if slow else ""
            kills = " + ".join(kind for _, kind in self.open.kills)
            _say(f"{kills:22} {self.open.work:14} {self.open.recovery_s:6.1f} s, load {load_average()}{note}")
        self.open = None

    # --- report ---

    def report(self, minutes: float) -> bool:
        """Print what was found; whether all bars hold."""
        problems = []
        by_kind = {kind: [e.recovery_s for e in self.episodes if e.kind == kind] for kind in KINDS}
        usual = [time for kind in ("worker", "driver", "host") for time in by_kind[kind]]
        print(f"\n{'killed':12}{'kills':>6}{'recoveries':>12}{'median':>10}{'90 %':>10}{'worst':>10}   seconds")
        killed = [kind for episode in self.episodes for _, kind in episode.kills]
        for kind, times in [*by_kind.items(), ("no scheduler", usual)]:
            count = killed.count(kind) if kind in KINDS else len(killed) - killed.count("scheduler")
            if times:
                high = float(np.quantile(times, 0.9))
                print(
                    f"{kind:12}{count:6}{len(times):12}{statistics.median(times):10.1f}{high:10.1f}{max(times):10.1f}"
                )
        if usual and statistics.median(usual) > MEDIAN_S:
            problems.append(f"median recovery {statistics.median(usual):.1f} s, at most {MEDIAN_S:.0f} promised")
        if usual and max(usual) > WORST_S:
            problems.append(f"worst recovery {max(usual):.1f} s, at most {WORST_S:.0f} promised")
        if (longest := max(by_kind["scheduler"], default=0.0)) > SCHEDULER_S:
            problems.append(f"{longest:.1f} s after a kill of the scheduler, at most {SCHEDULER_S:.0f} promised")
        if len(killed) < FEWEST:
            print(f"{len(killed)} kills; the promise is about {FEWEST} or more")
            problems += [f"{len(killed)} kills in {minutes:.0f} minutes"] if minutes >= 60 else []
        problems += self._memory_problems()
        outcomes = [outcome for _, outcome in self.results]
        same = outcomes.count("same bits")
        print(f"\n{same} of {len(outcomes)} results have the bits of the undisturbed run")
        problems += [f"{job}: {outcome}" for job, outcome in self.results if outcome != "same bits"]
        starts = ", ".join(f"{service.name} {service.starts}" for service in self.cluster.services)
        print(f"starts of services: {starts}; load {load_average()} on {os.cpu_count()} cores")
        for problem in problems:
            print(f"FAILED: {problem}")
        print("all bars hold" if not problems else "")
        return not problems

    def _memory_problems(self) -> list[str]:
        problems = []
        print(f"\n{'process, longest life':24}{'minutes':>9}{'MiB':>8}{'MiB/hour':>10}{'+-':>8}")
        for name, (minutes, size, rate, error) in sorted(self.memory.slopes().items()):
            growing = rate > 2 * error and rate > 0.05 * size
            print(f"{name:24}{minutes:9.1f}{size:8.0f}{rate:10.1f}{error:8.1f}{'  GROWS' if growing else ''}")
            if growing:
                problems.append(f"memory of {name} grows by {rate:.0f} +- {error:.0f} MiB per hour")
        return problems


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="of kills, after the undisturbed runs")
    parser.add_argument("--seed", type=int, default=0, help="of the times and kinds of the kills")
    parser.add_argument("--every", type=float, default=12.0, help="seconds between kills, in the mean")
    parser.add_argument("--chunks", type=int, default=600, help="of a prediction job")
    parser.add_argument("--folder", type=Path, help="for data, jobs and logs; kept if given")
    wanted = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    with contextlib.ExitStack() as stack:
        folder = wanted.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kme-soak-")))
        folder.mkdir(parents=True, exist_ok=True)
        _say(f"load {load_average()} on {os.cpu_count()} cores; folder {folder}")
        prepare(folder, wanted.chunks)
        soak = Soak(folder, wanted.seed, wanted.every)
        stack.callback(soak.close)
        soak.run(wanted.minutes)
        return 0 if soak.report(wanted.minutes) else 1


if __name__ == "__main__":
    sys.exit(main())
