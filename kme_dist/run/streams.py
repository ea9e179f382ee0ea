"""A stream of calls over the workers of a Dask cluster: at most a window of tasks in flight, results as they finish.

    Stream(executor, function, name, ahead=None).run(calls)       # (index, result or error)

What a task costs driver and scheduler does not depend on how many are in flight. `distributed.wait` over all of them
would start a coroutine for each at every call, so futures report themselves here; finished ones are fetched and
replaced in batches. A scheduler manages a few hundred tasks per second. Where more calls than that would finish, a task
makes several: as many as needed, and fewer towards the end, so that all workers end at about the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kme_dist.errors import RetryError

Call = tuple[Any, ...]
CHECK_EVERY_S = 2.0  # how often calls are checked for being overdue
TASKS_PER_S = 50.0  # beyond this, a task makes several calls
_LINGER = (0.1, 0.03)  # how long finished calls are collected: seconds, and share of the time of a call, at most
_MOST_FETCHED = 100  # results fetched by one message, and held here at the same time
MOST_CALLS = 64  # of a task
_SHARE = 0.5  # a task of several calls makes at most this share of what is left for a worker
_NOTED = 4  # messages that a connection keeps after they were sent
_PENDING = object()


class Calls(Protocol):
    """Calls whose number is known; each may be made only when it is sent."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Call]: ...


class Tasks(Protocol):
    """What a stream needs from `kme_dist.run.executors.DaskExecutor`."""

    attempts: int
    retried: int

    @property
    def workers(self) -> int: ...
    def submit_calls(self, function: Callable[..., Any], groups: Sequence[Sequence[Call]], name: str) -> list[Any]: ...
    def fetch(self, futures: list[Any]) -> dict[Any, Any]: ...
    def outcome(self, future: Any, otherwise: Any) -> Any: ...
    def replace_hung(self, workers: Iterable[str]) -> None: ...
    def holding(self, keys: Iterable[str]) -> list[str]: ...
    def check_alive(self, error: BaseException) -> None: ...
    def limit(self, slowest: float | None) -> float: ...
    def gave_up(self, what: str) -> RetryError: ...


@dataclass(frozen=True)
class Done:
    """Of a task: the results of its calls, and the seconds they took."""

    results: tuple[Any, ...]
    seconds: float


@dataclass
class Flight:
    """A task in flight: its calls, each with its index."""

    calls: list[tuple[int, Call]]
    attempt: int = 0
    began: float = 0.0

    def singly(self) -> list[Flight]:
        return [Flight([call]) for call in self.calls]


def calls_per_task(workers: int, call_s: float, left: int, before: int) -> int:
    """So many that tasks finish at `TASKS_PER_S`, but no more than a share of the `left` calls of a worker; at most
    twice `before`, because the time after which a worker counts as hung follows that of earlier tasks."""
    if call_s <= 0:
        return before
    wanted = math.ceil(workers / (call_s * TASKS_PER_S))
    return max(1, min(wanted, 2 * before, MOST_CALLS, int(_SHARE * left / workers)))


@dataclass
class Stream:
    """One stream. `ahead`: calls in flight at most, one per task; by default two tasks per worker."""

    tasks: Tasks
    function: Callable[..., Any]
    name: str
    ahead: int | None = None
    _flights: dict[Any, Flight] = field(default_factory=dict)
    _arrived: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _slowest: float | None = None  # seconds of a task, waiting included
    _call_s: float = 0.0  # seconds of a call on its worker, the mean
    _finished: int = 0
    _left: int = 0  # calls that were not sent yet
    _per_task: int = 1

    def run(self, calls: Calls) -> Iterator[tuple[int, Any]]:
        """Results as calls finish, each with the index of its call; an error of a call is returned, not raised."""
        waiting, again, self._left = enumerate(calls), list[Flight](), len(calls)
        check_at = time.monotonic() + CHECK_EVERY_S
        try:
            while True:
                self._launch(again + self._fresh(waiting, -len(again)))
                again = []
                if not self._flights:
                    return
                batch = self._next_batch()
                if self.ahead is None:  # before results are fetched, which takes as long as some calls
                    self._launch(self._fresh(waiting, len(batch)))
                lost = []
                for future, outcome in self._outcomes(batch).items():
                    if isinstance(outcome, Done):
                        yield from self._landed(future, outcome)
                    elif outcome is not _PENDING and len(self._flights[future].calls) > 1:
                        again += self._taken(future).singly()  # to see which of them failed
                    elif outcome is not _PENDING:
                        yield self._taken(future).calls[0][0], outcome
                    elif future.status in ("cancelled", "lost"):
                        lost.append(future)
                    else:
                        self._watch([future])
                if lost or time.monotonic() >= check_at:
                    check_at = time.monotonic() + CHECK_EVERY_S
                    again += self._lost_or_overdue(lost)
                if any(flight.attempt >= self.tasks.attempts for flight in again):
                    raise self.tasks.gave_up(f"a task named {self.name}")
        finally:
            for future in self._flights:
                future.release()

    def _fresh(self, waiting: Iterator[tuple[int, Call]], ended: int) -> list[Flight]:
        """New tasks, as many as there is room for if `ended` of those in flight are as good as gone."""
        found: list[Flight] = []
        workers, before = self.tasks.workers, self._per_task
        for _ in range((self.ahead or 2 * workers) - len(self._flights) + ended):
            if self.ahead is None:
                self._per_task = calls_per_task(workers, self._call_s, self._left, before)
            group = list(itertools.islice(waiting, self._per_task))
            if not group:
                break
            self._left -= len(group)
            found.append(Flight(group))
        return found

    def _launch(self, flights: list[Flight]) -> None:
        if not flights:
            return
        now = time.monotonic()
        for flight in flights:
            flight.attempt, flight.began = flight.attempt + 1, now
        groups = [[call for _, call in flight.calls] for flight in flights]
        futures = self.tasks.submit_calls(self.function, groups, self.name)
        self._flights |= dict(zip(futures, flights, strict=True))
        self._watch(futures)

    def _watch(self, futures: list[Any]) -> None:
        for future in futures:
            future.add_done_callback(self._arrived.put)

    def _next_batch(self) -> list[Any]:
        """Futures that are no longer pending: waits for the first, then a little for others.

        A batch costs the scheduler two messages, one to fetch the results and one with the next calls.
        """
        found: list[Any] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._arrived.get(timeout=CHECK_EVERY_S))
            until = time.monotonic() + min(_LINGER[0], _LINGER[1] * (self._slowest or 0.0))
            while len(found) < _MOST_FETCHED:
                found.append(self._arrived.get(timeout=max(0.0, until - time.monotonic())))
        return [future for future in found if future in self._flights]

    def _outcomes(self, futures: list[Any]) -> dict[Any, Any]:
        """Results and errors of tasks, fetched by one message if all can be; _PENDING for those that cannot."""
        finished = [future for future in futures if future.status == "finished"]
        found: dict[Any, Any] = {}
        if len(finished) > 1:
            with contextlib.suppress(Exception):  # each by itself, and its error is seen there
                found = self.tasks.fetch(finished)
        return {
            future: found[future] if future in found else self.tasks.outcome(future, _PENDING) for future in futures
        }

    def _landed(self, future: Any, done: Done) -> Iterator[tuple[int, Any]]:
        flight = self._taken(future)
        self._call_s = (self._call_s * self._finished + done.seconds) / (self._finished + len(flight.calls))
        self._finished += len(flight.calls)
        for (index, _), result in zip(flight.calls, done.results, strict=True):
            yield index, result

    def _taken(self, future: Any) -> Flight:
        """The flight of a task that has ended."""
        flight = self._flights.pop(future)
        self._slowest = max(self._slowest or 0.0, time.monotonic() - flight.began)
        future.release()
        return flight

    def _lost_or_overdue(self, lost: list[Any]) -> list[Flight]:
        """Tasks to repeat, no longer in flight; hung workers are replaced.

        Those `lost` a moment ago are repeated even if Dask has recomputed them since: nobody watches them any more.
        """
        limit, now = self.tasks.limit(self._slowest), time.monotonic()
        gone = lost + [future for future in self._flights if future.status in ("cancelled", "lost")]
        overdue = [future for future, flight in self._flights.items() if now - flight.began > limit]
        if gone:
            self.tasks.check_alive(RuntimeError("tasks were cancelled"))
        if overdue:
            self.tasks.replace_hung(self.tasks.holding(future.key for future in overdue))
        again = []
        for future in dict.fromkeys(gone + overdue):
            again.append(self._flights.pop(future))
            future.release()
        self.tasks.retried += sum(len(flight.calls) for flight in again)
        return again


# --- what Dask keeps of finished tasks ---------------------------------------------------------------


def trim_notes(rounds: int, dask_scheduler: Any) -> None:
    """On the scheduler: for its diagnostics, Dask notes every submission as long as the scheduler runs, and the last
    thousand messages to each worker, with the arguments of the calls in them. Keep the latest."""
    for span in getattr(dask_scheduler.extensions.get("spans"), "spans", {}).values():
        if noted := getattr(span, "_metadata", None):
            del noted["collections"][:-rounds]
            span._metadata_seen.clear()
    shorten_logs([*dask_scheduler.stream_comms.values(), *dask_scheduler.client_comms.values()])


def shorten_logs(connections: Iterable[Any]) -> None:
    for connection in connections:
        if hasattr(connection, "recent_message_log"):
            connection.recent_message_log = deque(connection.recent_message_log, maxlen=_NOTED)
