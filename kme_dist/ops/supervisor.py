"""Keeps submitted jobs going without a hand: in every driver host and schedule, and by `kme-dist jobs keep`.

    supervisor = Supervisor(root, cluster, say=print, notices=Notices(command=["notify-operator"]))
    supervisor.keep(stop)           # looks at all jobs under the root every few seconds

A job that was submitted to a scheduler is resubmitted when it has no driver any more: the scheduler does not know it
and it has not changed since the last look, or it failed because of the infrastructure (exit code 75). Resubmissions of
a job get further apart, and after `limit` of them it is marked as failed. How often a job was resubmitted, and which
notices were sent, is written to the job's folder, so that the supervisor itself may be killed and started again.

A notice is sent for each job that succeeds, fails or is lost: as JSON on the standard input of a command, to a URL by
POST, or both. A failure that is followed by a resubmission is not told. Noted as sent is what was sent: a notice that
cannot be delivered is tried again, and a supervisor that is killed between the two sends it a second time.
"""

from __future__ import annotations

import contextlib
import datetime
import http.client
import json
import math
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

from kme_dist.config import ClusterConfig
from kme_dist.data.leases import latest_epoch, writer_lease
from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError, RetryError
from kme_dist.ops.jobs import ENDED, Job, list_jobs, redact
from kme_dist.ops.submit import GONE, belongs_elsewhere, on_scheduler, submit

EVERY_S = 10.0
LIMIT = 5
PAUSE_S = 10.0  # between the first two resubmissions of a job; doubled each time
_LONGEST_PAUSE_S = 600.0
UNRECOVERED_S = 600.0  # after which a failure is told that nobody has followed by a resubmission
_COMMAND_S, _POST_S = 60.0, 10.0
NOTICED = ("succeeded", "failed", "lost")


@dataclass(frozen=True)
class Notices:
    """Whom to tell. Neither of the two may delay the jobs: a notice that cannot be sent is an error line."""

    command: Sequence[str] = ()
    url: str | None = None

    def __post_init__(self) -> None:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"--notify-url {self.url}: must be an http:// or https:// address")

    def send(self, status: Mapping[str, Any], told: set[str]) -> list[str]:
        """Send the status of a job to those who are not in `told`, and add them; returns what went wrong."""
        keys = ("id", "name", "pipeline", "state", "error", "exit_code", "submitted", "ended", "folder")
        body = redact(json.dumps({key: status[key] for key in keys if status.get(key) is not None})).encode()
        problems = []
        if self.command and "command" not in told:
            try:
                done = subprocess.run(self.command, input=body, capture_output=True, timeout=_COMMAND_S, check=False)
                if done.returncode:
                    problems.append(f"{self.command[0]} ended with exit code {done.returncode}")
                else:
                    told.add("command")
            except (OSError, subprocess.TimeoutExpired) as error:
                problems.append(f"{self.command[0]}: {error}")
        if self.url is not None and "url" not in told:
            request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=_POST_S):
                    told.add("url")
            except (OSError, http.client.HTTPException, ValueError) as error:
                problems.append(f"{self.url}: {error}")
        return problems

    def __bool__(self) -> bool:
        return bool(self.command or self.url)


@dataclass(frozen=True)
class _Look:
    """What the folder of a job says at one moment."""

    status: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    traces: Any  # which change whenever a driver or a supervisor does something

    @classmethod
    def at(cls, job: Job) -> _Look:
        lease, events = latest_epoch(job.place), job.events()  # before the status, which may only be newer
        return cls(job.status(), events, (lease, len(events)))

    @property
    def submissions(self) -> list[Mapping[str, Any]]:
        return [event for event in self.events if "scheduler" in event]

    @property
    def resubmissions(self) -> int:
        count = self.submissions[-1].get("resubmission", 0) if self.submissions else 0
        return count if isinstance(count, int) else 0

    def is_for_now(self, job: Job) -> bool:
        """Whether this is a failure after which a supervisor resubmits the job."""
        return self.status["state"] == "failed" and self.is_ours(job)

    def is_ours(self, job: Job) -> bool:
        """Whether a scheduler was to run the job, and it should be running."""
        if job.stop_requested or not self.submissions:
            return False
        if self.status["state"] == "failed":
            return self.status.get("exit_code") == RetryError.exit_code and not self.events[-1].get("given_up")
        return self.status["state"] not in ENDED


@dataclass
class _Notice:
    """One that could not be sent to everybody yet."""

    told: set[str] = field(default_factory=set)
    failures: int = 0
    due: float = -math.inf


@dataclass
class Supervisor:
    """Looks at the jobs under `root` that were submitted to the scheduler of `cluster`."""

    root: Path
    cluster: ClusterConfig
    say: Callable[[str], None] = lambda line: None
    limit: int = LIMIT
    pause_s: float = PAUSE_S
    notices: Notices = field(default_factory=Notices)
    _seen: dict[str, Any] = field(default_factory=dict, repr=False)  # what a job looked like at the last look
    _counted: dict[str, tuple[int, float]] = field(default_factory=dict, repr=False)  # resubmissions; of the last, when
    _unsent: dict[tuple[str, str], _Notice] = field(default_factory=dict, repr=False)  # by job and kind
    _given_up: list[tuple[Job, _Look]] = field(default_factory=list, repr=False)  # during this look
    _said: dict[str, str] = field(default_factory=dict, repr=False)  # the last line about each job; "": about all

    def keep(self, stop: Event, every_s: float | None = None) -> None:
        """Look every `every_s` until `stop` is set. No error ends it: nobody would notice."""
        while True:
            try:
                self.look()
                self._said.pop("", None)
            except KMEError as error:  # mostly the scheduler is away; jobs are resubmitted when it is back
                self._say_once("", str(error))
            except Exception as error:
                self._say_once("", f"jobs could not be looked at ({type(error).__name__}: {error}); trying again")
            if stop.wait(EVERY_S if every_s is None else every_s):
                return

    def look(self) -> list[str]:
        """One look at all jobs; returns the ids of those that were resubmitted."""
        found: list[tuple[Job, _Look]] = []
        active: list[tuple[Job, _Look]] = []
        for job in list_jobs(self.root):
            with self._apart(job):
                look = _Look.at(job)
                if look.is_ours(job):
                    active.append((job, look))
                    self._count(job, look)
                found.append((job, look))
        try:
            return self._keep_going(active)
        finally:  # jobs come first: a notice may take a minute
            self._notify_all(found)

    def _keep_going(self, active: list[tuple[Job, _Look]]) -> list[str]:
        if not active:
            return []
        resubmitted: list[str] = []
        elsewhere: dict[str, str | None] = {}
        known = on_scheduler([job for job, _ in active], self.cluster)
        for (job, look), there in zip(active, known, strict=True):
            if not self._has_stalled(job, look, there["state"]):
                continue
            address = str(look.submissions[-1]["scheduler"])
            if address not in elsewhere:
                elsewhere[address] = belongs_elsewhere(address, self.cluster)
            if (why := elsewhere[address]) is not None:
                self._say_once(job.id, f"{job.id}: left alone: {why}")
            elif self._resubmit(job, look):
                resubmitted.append(job.id)
        return resubmitted

    @contextlib.contextmanager
    def _apart(self, job: Job) -> Iterator[None]:
        """What is wrong with one job is said once, and is no obstacle for the others."""
        try:
            yield
        except (CorruptError, DataError, FileNotFoundError):  # damaged or just deleted: not ours to mend
            pass
        except (KMEError, OSError) as error:
            self._say_once(job.id, f"{job.id}: {error}")

    def _count(self, job: Job, look: _Look) -> None:
        """Note when the job was resubmitted, by whomever: the next time is later."""
        if job.id not in self._counted:
            self._counted[job.id] = look.resubmissions, -math.inf
        elif self._counted[job.id][0] != look.resubmissions:
            self._counted[job.id] = look.resubmissions, time.monotonic()

    def _has_stalled(self, job: Job, look: _Look, there: str | None) -> bool:
        if there not in GONE:
            self._seen.pop(job.id, None)
            return False
        if look.status["state"] == "failed":
            return True
        # One look alone proves nothing: a driver of another scheduler may be at work, and shows it by its beats.
        before, self._seen[job.id] = self._seen.get(job.id), look.traces
        return bool(before == look.traces)

    def _resubmit(self, job: Job, look: _Look) -> bool:
        """Whether the job was resubmitted. Of several supervisors one does so, and the others find that it was done."""
        earlier, since = self._counted[job.id]
        if time.monotonic() - since < min(self.pause_s * 2 ** max(0, earlier - 1), _LONGEST_PAUSE_S):
            return False
        with contextlib.ExitStack() as stack:
            current = None
            with self._apart(job):
                try:
                    stack.enter_context(writer_lease(job.place))  # which ends with this process, whatever ends that
                except RetryError:  # another supervisor is at it
                    return False
                current = _Look.at(job)
            if current is None or current.traces != look.traces or not current.is_ours(job):
                return False
            return self._resubmit_alone(job, look)

    def _resubmit_alone(self, job: Job, look: _Look) -> bool:
        state, earlier = look.status["state"], look.resubmissions
        if earlier >= self.limit:
            with self._apart(job):
                self._give_up(job, look)
            return False
        try:
            submit(job, self.cluster, resubmission=earlier + 1)
        except RetryError:  # of no use to try the others now
            raise
        except (KMEError, OSError) as error:  # e.g. other versions: a person has to act, the other jobs go on
            self._counted[job.id] = earlier, time.monotonic()
            self._say_once(job.id, f"{job.id}: cannot be resubmitted: {error}")
            return False
        self._counted[job.id] = earlier + 1, time.monotonic()
        self.say(f"{job.id}: was {state} without a driver; resubmitted ({earlier + 1} of {self.limit})")
        return True

    def _give_up(self, job: Job, look: _Look) -> None:
        count, why = look.resubmissions, look.status.get("error") or f"it was {look.status['state']} without a driver"
        job.event("failed", exit_code=RetryError.exit_code, given_up=True,
                  error=f"given up after {count} resubmissions: {why}")  # fmt: skip
        job.log(f"given up after {count} resubmissions", level="error")
        self.say(f"{job.id}: given up after {count} resubmissions; see `kme-dist jobs logs {job.id}`")
        self._given_up.append((job, _Look.at(job)))

    def _notify_all(self, found: list[tuple[Job, _Look]]) -> None:
        if not self.notices:
            return
        looks, self._given_up = [*self._given_up, *found], []
        for job, look in looks:
            if look.status["state"] in NOTICED:
                with self._apart(job):
                    if not self._notify(job, look):
                        return  # whoever is told does not answer: the others wait for the next look

    def _notify(self, job: Job, look: _Look) -> bool:
        """Whether all is well: the notice was sent, now or before, or is not due."""
        kind = f"{look.status['state']}-{look.status['drivers']}"
        if look.is_for_now(job):
            if _seconds_since(look.status["ended"]) < UNRECOVERED_S:
                return True
            kind += "-for-now"  # a notice of its own: the job may still be given up
        marker = job.folder / "notices" / kind
        note = self._unsent.setdefault((job.id, kind), _Notice())
        if time.monotonic() < note.due:
            return True
        with contextlib.ExitStack() as stack:
            try:  # of several supervisors one sends it
                stack.enter_context(writer_lease(Place.of(job.folder.with_name(f"{job.id}.notices"))))
            except RetryError:
                return True
            problems = [] if marker.exists() else self.notices.send(look.status, note.told)
            if not problems:
                job.place.write(f"notices/{kind}", b"", only_if_absent=True)
                note.due = math.inf
                return True
        note.due = time.monotonic() + min(self.pause_s * 2**note.failures, _LONGEST_PAUSE_S)
        note.failures += 1
        for problem in problems:
            self._say_once(f"{job.id} {problem}", f"{job.id}: the notice was not sent: {problem}; it is tried again")
        return False

    def _say_once(self, about: str, line: str) -> None:
        if line != self._said.get(about):
            self._said[about] = line
            self.say(line)


def _seconds_since(text: str) -> float:
    try:
        return (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(text)).total_seconds()
    except (TypeError, ValueError):  # a damaged line
        return math.inf


def resubmissions(job: Job) -> int:
    """How often the job was resubmitted since a person submitted it."""
    return _Look.at(job).resubmissions
