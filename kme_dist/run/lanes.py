"""The quick way to workers: a call handed straight to a worker, beside the scheduler.

    lanes = Lanes(client)
    lanes.map(function, calls, deadline_s=1.0)      # {place: result}; what is missing is for somebody else to do

A round of plain tasks passes through three event loops twice and costs 10 to 20 ms; a call over an open connection to
the worker costs 1 to 2. It is worth that only to rounds so short that tasks would be a large part of them, and it shows
on no dashboard: see `DaskExecutor.map`, which sends a round as plain tasks about once a second all the same.

The call runs on the worker's own threads, after whatever tasks they are busy with, so a worker never computes with more
threads than it has. Nothing is kept anywhere: a call that is not answered in time, because its worker died, hangs or
cannot be reached from here, is simply missing from the answer, and the workers are left alone for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_OPERATION = "kme_dist_call"
_LOOK_EVERY_S = 2.0  # for workers that have come or gone
_REST_S = 5.0  # after trouble; doubled each time
_IN_FLIGHT = 2  # calls for each worker: one is computed, the next is on its way


class Lanes:
    """Open ways to the workers of a client."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._ready: set[str] = set()  # workers that have been told what the operation is
        self._here: list[tuple[str, dict[str, float]]] = []
        self._look_again = self._rest_until = 0.0
        self._rest_s = _REST_S

    @property
    def open(self) -> bool:
        return time.monotonic() >= self._rest_until

    def map(
        self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]], *, deadline_s: float, resource: str | None
    ) -> dict[int, Any]:
        """Results by place, for as many calls as were answered in time. An error of the function is raised."""
        answers: dict[int, tuple[bool, Any]] = {}
        with contextlib.suppress(TimeoutError, OSError, RuntimeError):  # RuntimeError: the client is closing
            self._look()
            addresses = [address for address, has in self._here if resource is None or has.get(resource)]
            work = (self._client, addresses, self._ready, function, calls, answers)
            self._client.sync(_play, *work, callback_timeout=deadline_s)
        done = dict(answers)  # a late answer must not show up half-way
        for fine, value in done.values():
            if not fine:
                raise value
        if len(done) < len(calls):
            self._rest_until, self._rest_s = time.monotonic() + self._rest_s, min(2 * self._rest_s, 600.0)
            self._look_again = 0.0
        else:
            self._rest_s = _REST_S
        return {place: value for place, (_, value) in done.items()}

    def _look(self) -> None:
        if time.monotonic() > self._look_again:
            workers = self._client.scheduler_info(n_workers=-1)["workers"]
            self._here = [(address, dict(worker.get("resources", {}))) for address, worker in sorted(workers.items())]
            self._ready &= set(workers)
            self._look_again = time.monotonic() + _LOOK_EVERY_S


async def _play(
    client: Any,
    addresses: list[str],
    ready: set[str],
    function: Callable[..., Any],
    calls: Sequence[tuple[Any, ...]],
    answers: dict[int, tuple[bool, Any]],
) -> None:
    """Hand out the calls, to each worker as it becomes free; `answers` fills up."""
    from distributed.protocol import to_serialize

    if fresh := [address for address in addresses if address not in ready]:
        ready |= set(await client.run(_listen, workers=fresh, on_error="ignore"))
    waiting = deque(enumerate(calls))

    async def serve(address: str) -> None:
        with contextlib.suppress(OSError):  # it died; what it had is missing, the others go on
            while waiting:
                place, call = waiting.popleft()
                ask = getattr(client.rpc(address), _OPERATION)
                reply = await ask(work=to_serialize((function, call)))
                answers[place] = reply["answer"]

    await asyncio.gather(*(serve(address) for address in [a for a in addresses if a in ready] * _IN_FLIGHT))


def _listen(dask_worker: Any) -> None:
    """Teach a worker the operation."""
    from distributed.protocol import to_serialize

    from kme_dist.run.executors import called

    async def answer(work: tuple[Callable[..., Any], tuple[Any, ...]]) -> Any:
        threads = dask_worker.executors["default"]
        try:
            value = await asyncio.get_running_loop().run_in_executor(threads, called, *work)
        except Exception as error:  # the caller's, and raised there
            return {"answer": to_serialize((False, error))}
        return {"answer": to_serialize((True, value))}

    dask_worker.handlers[_OPERATION] = answer
