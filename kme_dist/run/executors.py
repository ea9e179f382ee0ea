"""Who does the work: this process, or the workers of a Dask cluster. Same calls, same order, same bits.

    executor = SerialExecutor()                      # no Dask at all, for debugging and small data
    executor = DaskExecutor(client)                  # plain tasks, named on the dashboard
    executor.map(function, calls, name="rcb-gradient")            # results in the order of `calls`
    executor.map_reduce(function, calls, combine, name="moments") # one result, combined by a fixed tree

`function` is a module-level function and must be free of side effects, since a call may run twice: a worker that died
is replaced by Dask itself, and a worker that hangs is found by a deadline, whereupon its calls are made again elsewhere
under new keys. Results are combined by `tree_combine`, whose shape depends on the number of calls alone, so that the
number of workers and the order of arrival never show in a result. Inside a call BLAS has one thread.

Plain tasks cost a few milliseconds more a round than actors, and are worth it: the dashboard shows them by name, and
Dask recovers them. Nothing is scattered and no future outlives its round, so a long loop leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from kme_dist.backend import blas_threads
from kme_dist.errors import RetryError

T = TypeVar("T")
Function = Callable[..., T]
_GRACE_S = 5.0  # for fetching what is already finished, once a round has gone wrong
_COUNT_EVERY_S = 5.0


class Executor(Protocol):
    """Ordered map and fixed-tree reduction, wherever they run."""

    @property
    def workers(self) -> int: ...
    def map(self, function: Function[T], calls: Sequence[tuple[Any, ...]], *, name: str) -> list[T]: ...
    def map_reduce(
        self, function: Function[T], calls: Sequence[tuple[Any, ...]], combine: Callable[[T, T], T], *, name: str
    ) -> T: ...


def tree_combine(items: Sequence[T], combine: Callable[[T, T], T]) -> T:
    """Combine neighbours, then neighbours of those, and so on: the order is a function of the count alone."""
    level = list(items)
    while len(level) > 1:
        pairs = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


class SerialExecutor:
    """Everything in this process, one call after the other."""

    workers = 1

    def map(self, function: Function[T], calls: Sequence[tuple[Any, ...]], *, name: str) -> list[T]:
        with blas_threads(1):
            return [function(*call) for call in calls]

    def map_reduce(
        self, function: Function[T], calls: Sequence[tuple[Any, ...]], combine: Callable[[T, T], T], *, name: str
    ) -> T:
        return tree_combine(self.map(function, calls, name=name), combine)


class DaskExecutor:
    """The workers of a `distributed.Client`.

    Parameters
    ----------
    client : distributed.Client
    patience_s : a round that takes longer than this, and ten times longer than any before it, has a worker that hangs
        (before the first round has ended nothing is known, and the wait is ten times as long)
    attempts : how often a round is begun before the cluster is given up
    direct : fetch results from the workers themselves instead of through the scheduler: quicker, where they can be
        reached
    """

    def __init__(self, client: Any, *, patience_s: float = 60.0, attempts: int = 5, direct: bool = False) -> None:
        self.client, self._direct = client, direct
        self.patience_s, self.attempts = patience_s, attempts
        self.retried = 0  # calls that had to be made again, for those who want to know
        self._run, self._round = uuid.uuid4().hex[:8], 0
        self._slowest: float | None = None
        self._suspects: set[str] = set()
        self._count, self._count_again = 1, 0.0

    @property
    def workers(self) -> int:
        """How many there are, as of a few seconds ago."""
        if time.monotonic() > self._count_again:
            self._count, self._count_again = max(1, len(self._addresses())), time.monotonic() + _COUNT_EVERY_S
        return self._count

    def map(self, function: Function[T], calls: Sequence[tuple[Any, ...]], *, name: str) -> list[T]:
        def submit(wanted: list[int], where: dict[str, Any]) -> dict[int, Any]:
            return dict(zip(wanted, self._submit_all(function, [calls[i] for i in wanted], name, where), strict=True))

        found = self._collect(submit, len(calls))
        return [found[i] for i in range(len(calls))]

    def map_reduce(
        self, function: Function[T], calls: Sequence[tuple[Any, ...]], combine: Callable[[T, T], T], *, name: str
    ) -> T:
        def submit(wanted: list[int], where: dict[str, Any]) -> dict[int, Any]:
            def join(left: Any, right: Any) -> Any:
                key = f"reduce-{name}-{self._label(0)}"
                return self.client.submit(_joined, combine, left, right, key=key, pure=False, **where)

            return {0: tree_combine(self._submit_all(function, list(calls), name, where), join)}

        result: T = self._collect(submit, 1)[0]
        return result

    # --- one round, until it is whole ----------------------------------------------------------------

    def _collect(self, submit: Callable[[list[int], dict[str, Any]], dict[int, Any]], count: int) -> dict[int, Any]:
        """Submit, wait with a deadline, and submit again what did not come back."""
        trouble = _cluster_trouble()
        self._round += 1
        found: dict[int, Any] = {}
        last: BaseException | None = None
        for attempt in range(self.attempts):
            missing = [i for i in range(count) if i not in found]
            began, futures = time.monotonic(), {}
            try:
                futures = submit(missing, self._away_from_suspects())
                waiting = list(futures.values())
                values = self.client.sync(_gather, self.client, waiting, self._direct, callback_timeout=self._deadline)
                found |= dict(zip(futures, values, strict=True))
            except trouble as error:
                last = error
                _raise_own(futures.values())
                self._check_alive(error)
                found |= self._finished(futures)
                self.retried += count - len(found)
                if isinstance(error, TimeoutError):
                    self._replace_hung()
            finally:
                for future in futures.values():
                    future.release()
            if len(found) == count:
                if attempt == 0:
                    self._slowest = max(self._slowest or 0.0, time.monotonic() - began)
                return found
        raise RetryError(
            f"the cluster at {_address(self.client)} did not finish a round of {count} tasks in {self.attempts} "
            f"attempts ({self.workers} workers are there now); look at its logs, then run the same command again"
        ) from last

    @property
    def _deadline(self) -> float:
        return 10 * self.patience_s if self._slowest is None else max(self.patience_s, 10 * self._slowest)

    def _label(self, place: int) -> str:
        # Digits first: the dashboard groups tasks by the words before the first number.
        return f"{self._round}-{place}-{uuid.uuid4().hex[:6]}-{self._run}"

    def _submit_all(
        self, function: Function[T], calls: list[tuple[Any, ...]], name: str, where: dict[str, Any]
    ) -> list[Any]:
        # One message for all of them: at eight calls a third quicker than as many submits.
        keys = [f"{name}-{self._label(i)}" for i in range(len(calls))]
        futures: list[Any] = self.client.map(
            _called, [function] * len(calls), calls, key=keys, pure=False, batch_size=len(calls), **where
        )
        return futures

    def _finished(self, futures: dict[int, Any]) -> dict[int, Any]:
        """What a broken round has finished all the same."""
        found = {}
        for i, future in futures.items():
            if future.status == "finished":
                with contextlib.suppress(*_cluster_trouble()):
                    found[i] = future.result(timeout=_GRACE_S)
        return found

    def _addresses(self) -> list[str]:
        return sorted(self.client.scheduler_info(n_workers=-1)["workers"])

    def _away_from_suspects(self) -> dict[str, Any]:
        if not self._suspects:
            return {}
        here = self._addresses()
        self._suspects &= set(here)
        good = [address for address in here if address not in self._suspects]
        # A preference only: a task bound to a worker that dies would wait for ever.
        return {"workers": good, "allow_other_workers": True} if self._suspects and good else {}

    def _replace_hung(self) -> None:
        """Whoever still holds a task of ours has had its time; its nanny, where it has one, starts it anew."""
        holding = [
            worker
            for worker, keys in self.client.processing().items()
            if any(self._run in str(key) for key in keys) and worker not in self._suspects
        ]
        self._suspects |= set(holding)
        if holding:
            with contextlib.suppress(OSError, ValueError, RuntimeError, TimeoutError):  # no nanny: avoid it, no more
                self.client.restart_workers(holding, timeout=30, raise_for_error=False)

    def _check_alive(self, error: BaseException) -> None:
        if self.client.status != "running" or self.client.scheduler is None:
            raise RetryError(
                f"the Dask scheduler at {_address(self.client)} was lost; start it again and run the same command"
            ) from error


async def _gather(client: Any, futures: list[Any], direct: bool) -> list[Any]:
    found: list[Any] = await client.gather(futures, asynchronous=True, direct=direct)
    return found


def _cluster_trouble() -> tuple[type[BaseException], ...]:
    """What is raised when workers die, hang or are out of reach; also, alas, by functions that read files."""
    from concurrent.futures import CancelledError

    from distributed import KilledWorker
    from distributed.client import ClosedClientError

    return (TimeoutError, OSError, CancelledError, KilledWorker, ClosedClientError)


def _raise_own(futures: Iterable[Any]) -> None:
    """A call that failed by itself would fail again: its error is the caller's."""
    from distributed import KilledWorker

    for future in futures:
        if future.status == "error":
            error = future.exception(timeout=_GRACE_S)
            if not isinstance(error, KilledWorker):
                raise error


def _address(client: Any) -> str:
    return str(client.scheduler.address if client.scheduler is not None else "an unknown address")


def _called(function: Function[T], call: tuple[Any, ...]) -> T:
    _hold_blas()
    return function(*call)


def _joined(combine: Callable[[T, T], T], left: T, right: T) -> T:
    _hold_blas()
    return combine(left, right)


@functools.cache
def _hold_blas() -> None:
    """Once in the life of a worker: nannies set the thread count of BLAS, workers without one do not."""
    import scipy.linalg  # noqa: F401  its own BLAS must be loaded to be held
    from threadpoolctl import threadpool_limits

    threadpool_limits(limits=1, user_api="blas")
