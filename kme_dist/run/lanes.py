"""Direct calls to workers, bypassing the scheduler.

    lanes = Lanes(client)
    sent = lanes.start(function, calls, resource=None)
    sent.results(deadline_s=1.0)                    # {index: result}; the caller handles missing ones

A round of plain tasks passes through three event loops twice and costs 10 to 20 ms; a call over an open connection to
the worker costs 1 to 2 ms. This pays only for rounds so short that the overhead of tasks would dominate, and it is not
shown on the dashboard: see `DaskExecutor.map`, which still sends about one round per second as plain tasks.

The call runs on the worker's own threads, after the tasks they are busy with, so a worker never uses more threads than
it has. No state is kept: a call that is not answered in time, because its worker died, hangs or is unreachable, is
missing from the result, and the lanes are not used for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

_OPERATION = "kme_dist_call"
_REFRESH_EVERY_S = 2.0  # how often the list of workers is refreshed
_BACKOFF_S = 5.0  # after a failure; doubled each time
_IN_FLIGHT = 2  # calls per worker: one is computed, the next is in transit


class Lanes:
    """Open connections to the workers of a client."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._ready: set[str] = set()  # workers that have registered the operation
        self._busy: Counter[str] = Counter()  # calls of rounds in progress by worker; used by the event loop only
        self._workers: list[tuple[str, dict[str, float]]] = []
        self._refresh_at = self._retry_at = 0.0
        self._backoff_s = _BACKOFF_S

    @property
    def available(self) -> bool:
        return time.monotonic() >= self._retry_at

    def start(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], *, resource: str | None
    ) -> LaneCalls:
        """Send the calls now, to the workers that have the resource."""
        sent = LaneCalls(self, len(calls))
        with contextlib.suppress(TimeoutError, OSError, RuntimeError):  # RuntimeError: the client is closing
            self._refresh()
            loop = self._client.loop.asyncio_loop
            addresses = [address for address, has in self._workers if resource is None or has.get(resource)]
            work = _distribute(self._client, addresses, self._ready, self._busy, function, calls, sent.answers)
            sent.progress = asyncio.run_coroutine_threadsafe(work, loop)
        return sent

    def note(self, *, complete: bool) -> None:
        """Whether all calls of a round were answered; if not, lanes are not used for a while."""
        if complete:
            self._backoff_s = _BACKOFF_S
        else:
            self._retry_at, self._backoff_s = time.monotonic() + self._backoff_s, min(2 * self._backoff_s, 600.0)
            self._refresh_at = 0.0

    def _refresh(self) -> None:
        if time.monotonic() > self._refresh_at:
            found = self._client.scheduler_info(n_workers=-1)["workers"]
            self._workers = [(address, dict(worker.get("resources", {}))) for address, worker in sorted(found.items())]
            self._ready &= set(found)
            self._refresh_at = time.monotonic() + _REFRESH_EVERY_S


class LaneCalls:
    """The calls of one round, in progress."""

    def __init__(self, lanes: Lanes, count: int) -> None:
        self._lanes, self._count = lanes, count
        self.answers: dict[int, tuple[bool, Any]] = {}
        self.progress: Future[None] | None = None  # None: nothing could be sent

    def results(self, *, deadline_s: float) -> dict[int, Any]:
        """Results by index, of the calls answered within `deadline_s` from now. An error of the function is raised."""
        with contextlib.suppress(TimeoutError, OSError, RuntimeError, CancelledError):
            if self.progress is not None:
                self.progress.result(deadline_s)
        self.cancel()
        done = dict(self.answers)  # a late answer must not appear half-way
        for ok, value in done.values():
            if not ok:
                raise value
        self._lanes.note(complete=len(done) == self._count)
        return {index: value for index, (_, value) in done.items()}

    def cancel(self) -> None:
        """Wait for no further answers."""
        if self.progress is not None:
            self.progress.cancel()


async def _distribute(
    client: Any,
    addresses: list[str],
    ready: set[str],
    busy: Counter[str],
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    answers: dict[int, tuple[bool, Any]],
) -> None:
    """Send the calls, to each worker as it becomes free; fills `answers`."""
    from distributed.protocol import to_serialize

    if fresh := [address for address in addresses if address not in ready]:
        ready |= set(await client.run(_register, workers=fresh, on_error="ignore"))
    waiting = deque(enumerate(calls))

    async def serve(address: str) -> None:
        with contextlib.suppress(OSError):  # it died; its calls are missing, the others continue
            while waiting:
                index, call = waiting.popleft()
                ask = getattr(client.rpc(address), _OPERATION)
                reply = await ask(work=to_serialize((function, call)))
                answers[index] = reply["answer"]

    # Workers that have calls of the round before come last.
    usable = sorted((a for a in addresses if a in ready), key=lambda address: busy[address])
    chosen = (usable * _IN_FLIGHT)[: len(calls)]
    busy.update(chosen)
    try:
        await asyncio.gather(*(serve(address) for address in chosen))
    finally:
        busy.subtract(chosen)


def _register(dask_worker: Any) -> None:
    """Register the operation on a worker."""
    from distributed.protocol import to_serialize

    from kme_dist.run.executors import run_call

    async def answer(work: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        threads = dask_worker.executors["default"]
        try:
            value = await asyncio.get_running_loop().run_in_executor(threads, run_call, *work)
        except Exception as error:  # raised at the caller
            return {"answer": to_serialize((False, error))}
        return {"answer": to_serialize((True, value))}

    dask_worker.handlers[_OPERATION] = answer


def aligned(value: Any) -> Any:
    """The same value with aligned arrays: those received over the network may be unaligned.

    NumPy multiplies unaligned arrays on another code path, which rounds differently.
    """
    if isinstance(value, np.ndarray):
        return value if value.flags.aligned else value.copy(order="K")
    if type(value) in (tuple, list):
        items = [aligned(item) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else type(value)(items)
    if type(value) is dict:
        found = {key: aligned(item) for key, item in value.items()}
        return value if all(found[key] is item for key, item in value.items()) else found
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            old = getattr(value, part.name)
            if (new := aligned(old)) is not old:
                object.__setattr__(value, part.name, new)  # what was received is not shared
    return value
