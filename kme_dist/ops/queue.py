"""The queue of submitted jobs, in the memory of the scheduler: which jobs wait, and which host drives which.

    client.run_on_scheduler(enqueue, entry)         # `kme-dist submit`, see kme_dist.ops.submit
    client.run_on_scheduler(exchange, turn)         # a driver host, twice a second, see kme_dist.ops.drivers

A job is started by priority, then by age, on any host with a free slot that can read the job's folder, unless as many
jobs of its owner run as are allowed. When a host goes away its jobs wait again. The folders of the jobs are the truth
and the leases in them decide who drives: a queue that is lost with its scheduler is restored by the hosts and by the
supervisor, and a job that is queued twice gives one result.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin

from kme_dist.ops.jobs import Job

NAME = "kme-jobs"  # of the queue among the extensions of a scheduler
DEATHS = 3  # of drivers of one job; at the next one it leaves the queue: a supervisor or a person resumes it
_FORGOTTEN_S = 30.0  # a host that has not called for so long gets no jobs, even if it is connected


def job_key(job: Job) -> str:
    """Identifies a job on a scheduler: the jobs of two roots may have the same id."""
    return f"{job.id}-{hashlib.sha256((job.folder / 'job.json').read_bytes()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Entry:
    """A job in the queue."""

    key: str
    root: str
    id: str
    owner: str = ""
    priority: int = 0
    submitted: str = ""
    host: str | None = None  # id of the host that runs its driver; None while it waits
    deaths: int = 0
    again: bool = False  # submitted again before the end of its driver was known

    @classmethod
    def of(cls, job: Job) -> Entry:
        request = job.request()
        return cls(
            job_key(job),
            str(job.root),
            job.id,
            str(request.get("owner") or ""),
            int(request.get("priority") or 0),
            str(request["submitted"]),
        )

    @property
    def rank(self) -> tuple[int, str, str]:
        return -self.priority, self.submitted, self.id


def waiting(entries: Iterable[Entry]) -> list[Entry]:
    """Those that wait, the next one first."""
    return sorted((entry for entry in entries if entry.host is None), key=lambda entry: entry.rank)


@dataclass(frozen=True)
class Turn:
    """What a host tells the queue: its free slots, and what became of its jobs."""

    host: str
    client: str  # id of its client: the host has left when that has gone
    label: str  # for people: process and machine
    root: str = ""  # whose jobs it supervises
    free: int = 0
    max_per_user: int | None = None
    seen: tuple[str, int] = ("", 0)  # the queue and its version when the host last saw it
    checked: dict[str, str | None] = field(default_factory=dict)  # by key: why it cannot run that job; None if it can
    running: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    died: tuple[str, ...] = ()  # without an end
    restored: tuple[Entry, ...] = ()  # what the queue of an earlier scheduler had


@dataclass(frozen=True)
class Answer:
    """What the queue tells a host."""

    start: tuple[Entry, ...]
    check: tuple[Entry, ...]  # jobs that this host has not looked at
    stop: tuple[str, ...]  # jobs that are no longer its own: cancelled, or another host has them
    seen: tuple[str, int]
    entries: tuple[Entry, ...] | None  # the whole queue, if it has changed


@dataclass(frozen=True)
class Hosts:
    """The hosts of a scheduler, with a view to one job."""

    count: int
    able: bool  # at least one of them can run it
    problems: tuple[str, ...]  # why the others cannot


@dataclass
class _Host:
    label: str
    client: str = ""
    seen: float = 0.0
    checked: dict[str, str | None] = field(default_factory=dict)


class JobQueue:
    """The queue of one scheduler. Plain data: every method runs in the scheduler's one thread."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.asked: dict[str, Entry] = {}  # about to be submitted: which hosts could run them?
        self.hosts: dict[str, _Host] = {}
        self.roots: dict[str, None] = {}  # of hosts and of all jobs that were ever queued
        self.seen = (uuid.uuid4().hex, 0)  # which queue this is, and its version

    def add(self, entries: Iterable[Entry]) -> None:
        """Queue jobs; those that are in the queue stay as they are."""
        for entry in entries:
            self.asked.pop(entry.key, None)
            known = self.entries.get(entry.key)
            if known is None:
                self._put(entry)
            elif known.host is not None and entry.host is None:
                self._put(replace(known, again=True))

    def forget(self, key: str) -> None:
        self.asked.pop(key, None)
        if self.entries.pop(key, None) is not None:
            self._changed()

    def waiting(self) -> list[Entry]:
        """The jobs that wait, the next one first."""
        return waiting(self.entries.values())

    def turn(self, told: Turn) -> Answer:
        host = self.hosts.setdefault(told.host, _Host(told.label))
        host.client, host.seen = told.client, time.monotonic()
        if told.root:
            self.roots[told.root] = None
        same = told.seen[0] == self.seen[0]  # else it has not restored its jobs yet
        host.checked |= told.checked
        self.add(entry for entry in told.restored if entry.key not in self.entries)  # not `again`: nobody asked for it
        for key in told.running:
            if (entry := self.entries.get(key)) is not None and entry.host is None:
                self._put(replace(entry, host=told.host))  # its connection was lost for a moment
        for key in told.ended:
            if (entry := self.entries.get(key)) is not None and entry.again:
                self._put(replace(entry, host=None, deaths=0, again=False))
            else:
                self.forget(key)
        for key in told.died:
            self._died(key, told.host)
        for entry in [entry for entry in self.entries.values() if entry.host == told.host]:
            if same and entry.key not in told.running:
                self._put(replace(entry, host=None))  # an answer that did not reach the host
        host.checked = {key: why for key, why in host.checked.items() if key in self.entries or key in self.asked}
        mine = {key for key, entry in self.entries.items() if entry.host == told.host}
        return Answer(
            start=self._started(told, host) if same else (),
            check=tuple(entry for entry in [*self.asked.values(), *self.waiting()] if entry.key not in host.checked),
            stop=tuple(key for key in told.running if key not in mine) if same else (),
            entries=tuple(self.entries.values()) if self.seen != told.seen else None,
            seen=self.seen,
        )

    def _started(self, told: Turn, host: _Host) -> tuple[Entry, ...]:
        running: dict[str, int] = {}
        for entry in self.entries.values():
            running[entry.owner] = running.get(entry.owner, 0) + (entry.host is not None)
        found: list[Entry] = []
        for entry in self.waiting():
            if len(found) >= told.free:
                break
            allowed = told.max_per_user is None or running[entry.owner] < told.max_per_user
            if allowed and host.checked.get(entry.key, "not checked") is None:
                running[entry.owner] += 1
                found.append(replace(entry, host=told.host))
                self._put(found[-1])
        return tuple(found)

    def _died(self, key: str, host: str) -> None:
        entry = self.entries.get(key)
        if entry is None or entry.host != host:
            return
        if entry.deaths >= DEATHS:
            self.forget(key)
        else:
            self._put(replace(entry, host=None, deaths=entry.deaths + 1, again=False))

    def client_left(self, client: str) -> None:
        """The jobs of a host that is gone wait for another."""
        for host in [name for name, host in self.hosts.items() if host.client == client]:
            del self.hosts[host]
            for entry in [entry for entry in self.entries.values() if entry.host == host]:
                self._put(replace(entry, host=None))

    def _put(self, entry: Entry) -> None:
        self.entries[entry.key] = entry
        self.roots[entry.root] = None
        self._changed()

    def _changed(self) -> None:
        self.seen = (self.seen[0], self.seen[1] + 1)

    def describe(self, keys: Iterable[str]) -> list[dict[str, Any]]:
        """Where jobs stand: state None (unknown here), waiting or running; place in the queue, or host."""
        places = {entry.key: place for place, entry in enumerate(self.waiting(), 1)}
        found: list[dict[str, Any]] = []
        for key in keys:
            entry = self.entries.get(key)
            if entry is None:
                found.append({"state": None, "driver": None})
            elif entry.host is None:
                found.append({"state": "waiting", "driver": None, "place": places[key]})
            else:
                host = self.hosts.get(entry.host)
                found.append({"state": "running", "driver": None if host is None else host.label})
        return found

    def hosts_for(self, entry: Entry) -> Hosts:
        """Asks the hosts whether they could run a job that is not in the queue; their answers, once they have come."""
        if entry.key not in self.entries:
            self.asked[entry.key] = entry
        now = time.monotonic()
        living = [host for host in self.hosts.values() if now - host.seen < _FORGOTTEN_S]
        found = [(host.label, host.checked[entry.key]) for host in living if entry.key in host.checked]
        able = entry.key in self.entries or any(why is None for _, why in found)
        problems = tuple(f"{label}: {why}" for label, why in found if why is not None)
        return Hosts(len(living), able, problems)


class QueuePlugin(SchedulerPlugin):  # type: ignore[misc]
    """Tells the queue which clients have gone."""

    name = NAME

    def __init__(self, queue: JobQueue) -> None:
        self.queue = queue

    def remove_client(self, scheduler: Any, client: str) -> None:
        self.queue.client_left(client)


# --- on the scheduler --------------------------------------------------------------------------------


def queue_of(dask_scheduler: Any) -> JobQueue:
    """The queue of a scheduler, made when it is first needed."""
    found = dask_scheduler.extensions.get(NAME)
    if found is None:
        found = dask_scheduler.extensions[NAME] = JobQueue()
        dask_scheduler.add_plugin(QueuePlugin(found), name=NAME)
    queue: JobQueue = found
    return queue


def enqueue(entry: Entry, dask_scheduler: Any = None) -> None:
    queue_of(dask_scheduler).add([entry])


def forget(key: str, dask_scheduler: Any = None) -> None:
    queue_of(dask_scheduler).forget(key)


def hosts_for(entry: Entry, dask_scheduler: Any = None) -> Hosts:
    return queue_of(dask_scheduler).hosts_for(entry)


def exchange(told: Turn, dask_scheduler: Any = None) -> Answer:
    return queue_of(dask_scheduler).turn(told)


def find_jobs(keys: list[str], dask_scheduler: Any = None) -> list[dict[str, Any]]:
    """Of each job: where it stands in the queue, and the workers that compute for it."""
    found = []
    for key, where in zip(keys, queue_of(dask_scheduler).describe(keys), strict=True):
        clients = [client for name, client in dask_scheduler.clients.items() if driver_name(key) in name]
        wanted = {task for client in clients for task in client.wants_what if task.processing_on is not None}
        busy = sorted({task.processing_on.address for task in wanted})
        found.append({**where, "connected": bool(clients), "busy": busy})
    return found


def driver_name(key: str) -> str:
    """Part of the name of the client of a job's driver."""
    return f"kme-driver-{key}"
