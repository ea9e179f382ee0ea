"""Results of tasks, fetched from the workers that hold them, without waiting for workers that are gone.

    await gather(client, futures, direct)       # results in the order of the futures, when all tasks are done
    await gather_from_live(client, futures, direct, ours, limit_s)     # the same, unless a worker is stalled
    await fetch(client, futures, direct)        # {future: result} of finished tasks: of those that can be had now

If a worker dies while its result is fetched, Dask's own `client.gather` keeps connecting to its address, for minutes
with the settings of a production cluster, although the scheduler knows of the death at once and has the result
recomputed elsewhere. So the scheduler is asked again while a fetch takes long, and the fetch is abandoned when the
workers it started from no longer hold the results.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

GRACE_S = 5.0  # for fetching finished results after a round has failed
_LOOK_EVERY_S = 10.0  # how often the tasks of the workers are looked at while a round lasts
_CHECK_EVERY_S = 1.0  # how often the scheduler is asked during a fetch; most fetches take milliseconds
_PAUSE_S = 0.05
_FETCHES = 20  # in vain, of a result that the scheduler believes to be there


async def gather(client: Any, futures: Sequence[Any], direct: bool) -> list[Any]:
    """Results of all tasks; the error of a task that failed is raised, OSError if a result cannot be fetched."""
    found: dict[Any, Any] = {}
    for _ in range(_FETCHES):
        missing = [future for future in futures if future not in found]
        await _all_done(missing)
        try:
            found |= await fetch(client, missing, direct)
        except OSError:
            if client.status != "running":
                raise
        if len(found) == len(futures):
            return [found[future] for future in futures]
        await asyncio.sleep(_PAUSE_S)
    raise OSError(f"results of {len(futures) - len(found)} finished tasks cannot be fetched from their workers")


class Stalled(TimeoutError):
    """Workers that hold the same tasks of ours for too long; none if no worker takes them."""

    def __init__(self, workers: Sequence[str], seconds: float) -> None:
        super().__init__(f"no progress in {seconds:.0f} s on {', '.join(workers) or 'any worker'}")
        self.workers = tuple(workers)


async def gather_from_live(client: Any, futures: Sequence[Any], direct: bool, ours: str, limit_s: float) -> list[Any]:
    """As `gather`; Stalled if a worker holds the same tasks, of those with `ours` in their keys, for `limit_s`.

    A round as a whole may take as long as it needs: how long depends on the number of tasks.
    """
    gathered = asyncio.ensure_future(gather(client, futures, direct))
    held, since = dict[str, frozenset[str]](), dict[str, float]()
    waited, clock = 0, asyncio.get_running_loop().time
    began = clock()
    try:
        while not (await asyncio.wait({gathered}, timeout=min(limit_s / 4, _LOOK_EVERY_S)))[0]:
            now, before = clock(), held
            processing = (await client.scheduler.processing(workers=None)).items()
            held = {worker: mine for worker, keys in processing if (mine := _ours(keys, ours))}
            since = {worker: since[worker] if held[worker] == before.get(worker) else now for worker in held}
            finished = sum(future.done() for future in futures)
            if held or finished != waited:
                began, waited = now, finished
            if late := [worker for worker, first in since.items() if now - first > limit_s]:
                raise Stalled(late, limit_s)
            if now - began > limit_s:
                raise Stalled((), limit_s)
        return gathered.result()
    finally:
        gathered.cancel()


def _ours(keys: Sequence[Any], ours: str) -> frozenset[str]:
    return frozenset(str(key) for key in keys if ours in str(key))


async def fetch(client: Any, futures: Sequence[Any], direct: bool) -> dict[Any, Any]:
    """Results of finished tasks; those that are missing were lost, and their futures are pending again."""
    keys = [future.key for future in futures]
    held = {key: workers for key, workers in (await client.scheduler.who_has(keys=keys)).items() if workers}
    data = await _while_held(client, held, direct) if held else {}
    for future in futures:
        if future.key not in data:
            # The scheduler answers when it has the result, or has forgotten the task: the future is cancelled then.
            client._send_to_scheduler({"op": "report-key", "key": future.key})
            future._state.reset()
    return {future: data[future.key] for future in futures if future.key in data}


async def _while_held(client: Any, held: dict[str, Any], direct: bool) -> dict[str, Any]:
    """The data of the keys, or none if workers that held some of them disappear meanwhile."""
    transfer = asyncio.ensure_future(_transfer(client, held, direct))
    try:
        while not (await asyncio.wait({transfer}, timeout=_CHECK_EVERY_S))[0]:
            now = await client.scheduler.who_has(keys=list(held))
            if any(not set(workers) & set(now.get(key, ())) for key, workers in held.items()):
                return {}
        return transfer.result()
    finally:
        transfer.cancel()


async def _transfer(client: Any, held: dict[str, Any], direct: bool) -> dict[str, Any]:
    """The data that arrive, straight from the workers or through the scheduler."""
    from distributed.utils_comm import gather_from_workers

    data, rest = dict[str, Any](), list(held)
    if direct:
        data, missing, failed, _ = await gather_from_workers(held, rpc=client.rpc)
        rest = [*missing, *failed]  # perhaps the scheduler can reach them
    while rest:
        answer = await client.scheduler.gather(keys=rest)
        if answer["status"] == "OK":
            return {**data, **answer["data"]}
        rest = [key for key in rest if key not in answer["keys"]]
    return data


async def _all_done(futures: Sequence[Any]) -> None:
    """Wait for the tasks; raises the first error among them at once."""
    waits = [asyncio.ensure_future(_done(future)) for future in futures]
    try:
        await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()


async def _done(future: Any) -> None:
    state = future._state
    await state.wait()
    if state.status in ("error", "cancelled"):
        raise state.exception.with_traceback(state.traceback)


def cluster_errors() -> tuple[type[BaseException], ...]:
    """Errors raised when workers die, hang or are unreachable; functions that read files raise some of them, too."""
    from concurrent.futures import CancelledError

    from distributed import KilledWorker
    from distributed.client import ClosedClientError

    return (TimeoutError, OSError, CancelledError, KilledWorker, ClosedClientError)


def raise_own(futures: Iterable[Any]) -> None:
    """Raise the error of a call that failed by itself: it would fail again."""
    from distributed import KilledWorker

    for future in futures:
        if future.status == "error":
            error = future.exception(timeout=GRACE_S)
            if not isinstance(error, KilledWorker):
                raise error
