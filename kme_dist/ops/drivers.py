"""A driver host: the process that runs the drivers of submitted jobs, apart from the workers that compute.

    Drivers(cluster, command, slots=4).serve(stop)      # `kme-dist drivers --scheduler ADDRESS`

Twice a second it asks the queue on the scheduler (kme_dist.ops.queue) for jobs and starts a process for each, as many
at a time as it has slots. It is not a Dask worker, which would be given tasks to compute. Any number of hosts may serve
a scheduler.

A driver that dies is started again, here or on another host. A host that loses its scheduler keeps its drivers for a
while, since they try again by themselves, and stops them when the scheduler does not return, so that another host may
resume the jobs; a scheduler that was restarted gets its queue back from the hosts. A driver whose host is killed stops
at its next step. Leases decide who drives (kme_dist.ops.driver), so none of this can give two results.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

from kme_dist.config import ClusterConfig
from kme_dist.data.leases import latest_epoch
from kme_dist.errors import ConfigError, KMEError, RetryError, counted
from kme_dist.ops.cluster import check_scheduler, open_unchecked
from kme_dist.ops.jobs import ENDED, Job, job_at, job_root
from kme_dist.ops.queue import DEATHS, Answer, Entry, Turn, exchange, job_key

SLOTS = 4
POLL_S = 0.5
ANSWER_S = 10.0  # how long the scheduler may take to answer
LOST_S = 45.0  # without a scheduler, until the drivers are stopped: until then they try again by themselves
STOP_S = 30.0  # time for a driver to save its state
CONNECT_S = 5.0

Command = Callable[[Job], list[str]]  # the command line that drives a job


@dataclass
class _Child:
    """A driver: a process for one job."""

    job: Job
    entry: Entry
    process: subprocess.Popen[bytes]
    kill_at: float | None = None  # once it was asked to stop
    revoked: bool = False

    def revoke(self) -> None:
        """The job was cancelled, or another host drives it: nothing of this process can be stored any more."""
        self.revoked = True
        self.process.kill()

    def ask_to_stop(self) -> None:
        if self.kill_at is None and self.process.poll() is None:
            self.kill_at = time.monotonic() + STOP_S
            self.process.terminate()

    def kill_if_due(self) -> None:
        if self.kill_at is not None and time.monotonic() >= self.kill_at:
            self.process.kill()


@dataclass
class Drivers:
    """The drivers of one host."""

    cluster: ClusterConfig
    command: Command
    slots: int = SLOTS
    max_per_user: int | None = None
    root: str = ""  # whose jobs are shown on the dashboard, also before any is submitted; see also `_job`
    say: Callable[[str], None] = lambda line: None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _children: dict[str, _Child] = field(default_factory=dict, repr=False)
    _known: tuple[Entry, ...] = field(default=(), repr=False)  # the queue, when it was last seen
    _seen: tuple[str, int] = field(default=("", 0), repr=False)
    _ended: list[str] = field(default_factory=list, repr=False)
    _died: list[str] = field(default_factory=list, repr=False)

    def serve(self, stop: Event) -> None:
        """Run jobs until `stop` is set; then their drivers save their state, and the jobs wait for another host."""
        lost_since: float | None = None
        try:
            while not stop.is_set():
                try:
                    with open_unchecked(self.cluster, timeout_s=CONNECT_S) as client:
                        check_scheduler(client)
                        self.say(f"{counted(self.slots, 'slot')} for drivers of jobs at {client.scheduler.address}")
                        lost_since = None
                        self._serve(client, stop)
                except RetryError as error:
                    lost_since = lost_since or self._lost(str(error))
                self._collect()
                if lost_since is not None and time.monotonic() - lost_since > LOST_S:
                    self._stop_all()
                stop.wait(POLL_S)
        finally:
            self._end()

    def _lost(self, why: str) -> float:
        self.say(f"{why}; waiting for it")
        return time.monotonic()

    def _serve(self, client: Any, stop: Event) -> None:
        """Until `stop` is set, or the scheduler is lost (RetryError)."""
        while not stop.is_set():
            self._collect()
            answer = self._exchange(client)
            if answer.seen[0] != self._seen[0]:
                restored = self._still_to_do() if self._seen[0] else ()
                before, self._seen = self._seen, (answer.seen[0], -1)
                try:
                    answer = self._exchange(client, restored=restored)
                except RetryError:
                    self._seen = before  # else its jobs would seem to be those of others, and their drivers be stopped
                    raise
            if answer.check:
                self._exchange(client, checked={entry.key: self._problem(entry) for entry in answer.check})
            stop.wait(POLL_S)

    def _exchange(self, client: Any, **more: Any) -> Answer:
        ended, died = tuple(self._ended), tuple(self._died)
        told = Turn(
            host=self.id,
            client=client.id,
            label=f"process {os.getpid()} on {socket.gethostname()}",
            root=self.root,
            free=max(0, self.slots - len(self._children)),
            max_per_user=self.max_per_user,
            seen=self._seen,
            running=tuple(self._children),
            ended=ended,
            died=died,
            **more,
        )
        try:
            answer: Answer = client.run_on_scheduler(exchange, told, callback_timeout=ANSWER_S)
        except Exception as error:  # whatever a client raises whose scheduler is gone
            raise RetryError(f"the scheduler at {self.cluster.address} was lost ({type(error).__name__})") from error
        del self._ended[: len(ended)], self._died[: len(died)]
        if answer.entries is not None and answer.seen[0] == self._seen[0]:
            self._known, self._seen = answer.entries, answer.seen
        for key in answer.stop:
            if key in self._children:
                self._children[key].revoke()
        for entry in answer.start:
            try:
                self._start(entry)
            except (KMEError, OSError) as error:  # its root is gone, or the system has no process to spare
                self.say(f"{entry.id}: its driver could not be started: {error}")
                self._died.append(entry.key)
        return answer

    def _still_to_do(self) -> tuple[Entry, ...]:
        """The queue of an earlier scheduler, without what has ended since."""
        found = []
        for entry in self._known:
            try:
                ended = self._job(entry).status()["state"] in ENDED
            except (KMEError, OSError):
                continue
            mine = entry.key in self._children
            if not ended or mine:
                found.append(replace(entry, host=self.id if mine else None))
        return tuple(found)

    def _job(self, entry: Entry) -> Job:
        """The job on this host. An operator who sets KME_ROOT here says where all jobs are, whatever the path was where
        they were submitted: under the root of this host, which is `--root`, else KME_ROOT."""
        own = os.environ.get("KME_ROOT") and (self.root or os.environ["KME_ROOT"])
        job = job_at(job_root(own or entry.root), entry.id)
        job.request()
        if job_key(job) != entry.key:
            raise ConfigError(f"{job.folder} is that of another job with the same id")
        return job

    def _problem(self, entry: Entry) -> str | None:
        """Why a driver could not run the job on this host; None when it could."""
        try:
            self._job(entry)
        except (KMEError, OSError) as error:
            return f"{error}; mount the same disk on all hosts, and set KME_ROOT where its path differs"
        return None

    def _start(self, entry: Entry) -> None:
        job = self._job(entry)
        process = subprocess.Popen(self.command(job), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._children[entry.key] = _Child(job, entry, process)
        self.say(f"{job.id}: started (process {process.pid})")

    def _collect(self) -> None:
        """Note which drivers have ended."""
        for key, child in list(self._children.items()):
            child.kill_if_due()
            code = child.process.poll()
            if code is None:
                continue
            del self._children[key]
            if child.revoked:
                self.say(f"{child.job.id}: its driver was stopped")
                continue
            try:
                state = child.job.status()["state"]
                if code == 0 or state in ENDED:
                    self._ended.append(key)
                    self.say(f"{child.job.id}: {state}")
                    continue
                self._note_death(child, code)
            except (KMEError, OSError) as error:  # its folder was deleted, or cannot be reached
                self.say(f"{child.job.id}: {error}")
            self._died.append(key)

    def _note_death(self, child: _Child, code: int) -> None:
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        next_ = "a supervisor resubmits it" if child.entry.deaths >= DEATHS else "it waits for another"
        self.say(f"{child.job.id}: its driver ended {how}; {next_}")
        epoch, lease = latest_epoch(child.job.place)
        if (lease or {}).get("process") == child.process.pid:  # else another driver has the job
            last = {"left_queue": True} if child.entry.deaths >= DEATHS else {}
            child.job.event("waiting", epoch=epoch, **last)
            child.job.log(f"its driver ended {how}; {next_}", level="warning", epoch=epoch)

    def _stop_all(self) -> None:
        for child in self._children.values():
            child.ask_to_stop()

    def _end(self) -> None:
        self._stop_all()
        while self._children:
            self._collect()
            time.sleep(0.05)
