"""Executors run calls in this process or on the workers of a Dask cluster. Same calls, same order, same bits.

    executor = SerialExecutor()                      # no Dask; SerialExecutor(threads=4) uses four cores
    executor = DaskExecutor(client)                  # plain tasks, named on the dashboard
    executor.map(function, calls, name="rcb-gradient")            # results in the order of `calls`
    started = executor.start(function, calls, name="gradient")    # the same in two parts: started.results() waits
    executor.map_reduce(function, calls, combine, name="moments") # one result, combined by a fixed tree
    executor.stream(function, calls, name="predict-chunk")        # (index, result or error) as calls finish

`function` is a module-level function and must be free of side effects, since a call may run twice: Dask reruns calls of
dead workers, and a hung worker is detected by a deadline, after which its calls are resubmitted elsewhere under new
keys. Results are combined by `tree_combine`, whose shape depends only on the number of calls, so the result does not
depend on the number of workers or the order of arrival. Inside a call BLAS has one thread.

Calls are plain tasks: the dashboard shows them by name, and Dask recovers them. A round of tasks costs 10 to 20 ms,
too much for rounds of a few tens of milliseconds, which are marked `quick`: those go straight to the workers (see
`lanes`), except about one per second, which goes as plain tasks so that the dashboard shows what the workers do.
Nothing is scattered, no future outlives its round, and what the scheduler notes of them is trimmed now and then, so a
long loop does not leak memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures as local
from typing import Any, Generic, Protocol, TypeVar

from kme_dist.backend import blas_threads, free_bytes
from kme_dist.errors import RetryError
from kme_dist.failpoints import passing
from kme_dist.meter import metered, observed
from kme_dist.run.gathering import GRACE_S, Stalled, cluster_errors, fetch, gather_from_live, raise_own
from kme_dist.run.lanes import Lanes, aligned
from kme_dist.run.streams import Calls, Done, Stream, shorten_logs, trim_notes

T = TypeVar("T")
U = TypeVar("U")
Function = Callable[..., T]
_COUNT_EVERY_S = 5.0
_QUICK_S = 0.25  # rounds shorter than this bypass the scheduler, whose 10 to 20 ms would be a tenth of them
_SHOWN_EVERY_S = 1.0  # and still use it about this often, to show on the dashboard
_TRIM_EVERY = 500  # rounds of plain tasks
USABLE = 0.6  # of the memory of a worker: the rest is for the process, rows and copies
FAN_IN = 4  # results that a task of a reduction combines: a power of 2, so that the tree is the same as in pairs
GPU = "GPU"  # the resource of workers with a device: `dask worker --resources GPU=1`
# Calls whose results become the last argument of each call: function, calls, calls of the next round, name.
Feed = tuple[Callable[..., Any], Sequence[tuple[Any, ...]], Sequence[tuple[Any, ...]], str]
# From the indices of calls, and where they should run: a future for each.
Submit = Callable[[list[int], dict[str, Any]], dict[int, Any]]


@dataclasses.dataclass(frozen=True)
class Started(Generic[T]):
    """Work that runs somewhere: `results` waits for it and returns what came of it, `cancel` abandons it."""

    results: Callable[[], T]
    cancel: Callable[[], None] = lambda: None

    def then(self, finish: Callable[[T], U]) -> Started[U]:
        """The same work, with results as `finish` returns them."""
        return Started(lambda: finish(self.results()), self.cancel)


class Executor(Protocol):
    """Ordered map and fixed-tree reduction, wherever they run."""

    @property
    def workers(self) -> int: ...
    @property
    def solo_threads(self) -> int: ...
    @property
    def memory(self) -> tuple[int, int]: ...
    @property
    def has_readers(self) -> bool: ...
    def map(
        self,
        function: Function[T],
        calls: Sequence[tuple[Any, ...]],
        *,
        name: str,
        quick: bool = False,
        gpu: bool = False,
        feed: Feed | None = None,
    ) -> list[T]: ...
    def start(
        self,
        function: Function[T],
        calls: Sequence[tuple[Any, ...]],
        *,
        name: str,
        quick: bool = False,
        gpu: bool = False,
        feed: Feed | None = None,
    ) -> Started[list[T]]: ...
    def map_reduce(
        self,
        function: Function[T],
        calls: Sequence[tuple[Any, ...]],
        combine: Callable[[T, T], T],
        *,
        name: str,
        sticky: bool = False,
    ) -> T: ...
    def stream(
        self, function: Function[T], calls: Calls, *, name: str, ahead: int | None = None
    ) -> Iterator[tuple[int, T | Exception]]: ...
    def failure(self, what: str, error: Exception) -> Exception: ...


def tree_combine(items: Sequence[T], combine: Callable[[T, T], T]) -> T:
    """Combine neighbours, then neighbours of those, and so on: the order depends only on the count."""
    level = list(items)
    while len(level) > 1:
        pairs = [combine(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


class SerialExecutor:
    """Everything in this process: one call after the other, or as many at a time as there are `threads`.

    The work of a call is in BLAS and NumPy, which release the interpreter lock. Calls and their order are the same for
    any number of threads, and so are the bits.
    """

    has_readers = False

    def __init__(self, threads: int = 1) -> None:
        self.workers = self.solo_threads = max(1, threads)

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes for each of as many calls as run at the same time, and for a call that runs by itself."""
        found = int(USABLE * free_bytes("numpy"))
        return found // self.workers, found

    def map(
        self,
        function: Function[T],
        calls: Sequence[tuple[Any, ...]],
        *,
        name: str,
        quick: bool = False,
        gpu: bool = False,
        feed: Feed | None = None,
    ) -> list[T]:
        with blas_threads(1):
            if feed is not None:
                calls = [(*call, feed[0](*read)) for call, read in zip(calls, feed[1], strict=True)]
            if self.workers == 1 or len(calls) < 2:
                return [function(*call) for call in calls]
            with local.ThreadPoolExecutor(self.workers) as pool:
                return list(pool.map(lambda call: function(*call), calls))

    def start(self, function: Function[T], calls: Sequence[tuple[Any, ...]], **options: Any) -> Started[list[T]]:
        """Evaluated when collected."""
        return Started(lambda: self.map(function, calls, **options))

    def map_reduce(
        self,
        function: Function[T],
        calls: Sequence[tuple[Any, ...]],
        combine: Callable[[T, T], T],
        *,
        name: str,
        sticky: bool = False,
    ) -> T:
        return tree_combine(self.map(function, calls, name=name), combine)

    def stream(
        self, function: Function[T], calls: Calls, *, name: str, ahead: int | None = None
    ) -> Iterator[tuple[int, T | Exception]]:
        def attempt(call: tuple[Any, ...]) -> T | Exception:
            try:
                with blas_threads(1):
                    return function(*call)
            except Exception as error:  # the caller decides what a failed call means for the others
                return error

        if self.workers == 1:
            yield from ((index, attempt(call)) for index, call in enumerate(calls))
            return
        waiting, in_flight = enumerate(calls), dict[local.Future[T | Exception], int]()
        with local.ThreadPoolExecutor(self.workers) as pool:
            while True:
                for index, call in itertools.islice(waiting, (ahead or self.workers) - len(in_flight)):
                    in_flight[pool.submit(attempt, call)] = index
                if not in_flight:
                    return
                for future in local.wait(in_flight, return_when=local.FIRST_COMPLETED).done:
                    yield in_flight.pop(future), future.result()

    def failure(self, what: str, error: Exception) -> Exception:
        """What to raise for the error of a call of a stream."""
        return error


class DaskExecutor:
    """The workers of a `distributed.Client`.

    Parameters
    ----------
    client : distributed.Client
    patience_s : a worker that holds the same tasks for longer than this, and ten times longer than earlier tasks of
        their name took, is hung (before any task of that name has finished, ten times this)
    attempts : how often a round is tried before giving up
    direct : fetch results from the workers instead of through the scheduler: faster, if they can be reached
    solo_threads : threads that a call may use when it is the only one: more than one if the workers have the machine
        to themselves
    """

    def __init__(
        self, client: Any, *, patience_s: float = 60.0, attempts: int = 5, direct: bool = False, solo_threads: int = 1
    ) -> None:
        self.client, self._direct, self.solo_threads = client, direct, solo_threads
        self.patience_s, self.attempts = patience_s, attempts
        self.retried = 0  # calls that had to be repeated
        self._run, self._round = uuid.uuid4().hex[:8], 0
        self._slowest: dict[str, float] = {}  # seconds of a task, by name
        self._suspects: set[str] = set()
        self._kinds, self._count_again = (1, 0), 0.0  # workers without and with a GPU
        self._lanes = Lanes(client)
        # Quick rounds: duration, when one was last sent as tasks, when one was last collected.
        self._typical_s, self._shown_at, self._collected_at = math.inf, 0.0, 0.0
        self._ahead: dict[Any, Any] = {}  # futures of the inputs of the next round

    @property
    def workers(self) -> int:
        """Number of workers, at most a few seconds old."""
        return max(1, sum(self._counts()))

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes for each of the tasks that run on a worker at the same time, and for a task that runs there by itself:
        of the smallest worker, by the limits that the workers were started with."""
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        limits = [(w["memory_limit"] // max(1, w["nthreads"]), w["memory_limit"]) for w in workers if w["memory_limit"]]
        task, alone = (min(found, default=2**63) for found in (*zip(*limits, strict=True),) or ((), ()))
        return int(USABLE * task), int(USABLE * alone)

    @property
    def gpus(self) -> int:
        """Number of workers with the resource `GPU`."""
        return self._counts()[1]

    @property
    def has_readers(self) -> bool:
        """Whether some workers have a GPU and others do not: the latter read, the former compute."""
        return all(self._counts())

    def _counts(self) -> tuple[int, int]:
        if time.monotonic() > self._count_again:
            workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
            with_gpu = sum(bool(worker.get("resources", {}).get(GPU)) for worker in workers)
            self._kinds, self._count_again = (len(workers) - with_gpu, with_gpu), time.monotonic() + _COUNT_EVERY_S
        return self._kinds

    def map(self, function: Function[T], calls: Sequence[tuple[Any, ...]], **options: Any) -> list[T]:
        """Results in the order of the calls; options as of `start`."""
        return self.start(function, calls, **options).results()

    def start(
        self,
        function: Function[T],
        calls: Sequence[tuple[Any, ...]],
        *,
        name: str,
        quick: bool = False,
        gpu: bool = False,
        feed: Feed | None = None,
    ) -> Started[list[T]]:
        """Send the calls now; results in their order are collected later, and what is missing then is repeated.

        Parameters
        ----------
        name : of the tasks, on the dashboard
        quick : one of very many rounds, which may bypass the scheduler if they are short
        gpu : only workers with the resource `GPU` may run the calls
        feed : calls of another function, run by any worker, whose results become the last arguments of `calls`
        """
        began, resources = time.monotonic(), {"resources": {GPU: 1}} if gpu else {}
        shown = not quick or feed is not None or not self._bypasses(began)

        def by_tasks(indices: list[int]) -> Started[dict[int, T]]:
            return self._tasks(function, calls, indices, name, resources, feed)

        def in_order(found: dict[int, T]) -> list[T]:
            if missing := [i for i in range(len(calls)) if i not in found]:
                self.retried += len(missing)
                found |= by_tasks(missing).results()
            if quick:
                self._note_pace(began, shown)
            return [aligned(found[i]) for i in range(len(calls))]

        if shown:
            return by_tasks(list(range(len(calls)))).then(in_order)
        sent = self._lanes.start(function, calls, resource=GPU if gpu else None)
        return Started(lambda: sent.results(deadline_s=max(1.0, 10 * self._typical_s)), sent.cancel).then(in_order)

    def _bypasses(self, now: float) -> bool:
        """Whether this round may bypass the scheduler."""
        return self._typical_s < _QUICK_S and now - self._shown_at < _SHOWN_EVERY_S and self._lanes.available

    def _note_pace(self, sent_at: float, shown: bool) -> None:
        """Of a quick round: without the time in which the round before it was still in progress."""
        began, self._collected_at = max(sent_at, self._collected_at), time.monotonic()
        took, self._shown_at = self._collected_at - began, sent_at if shown else self._shown_at
        self._typical_s = took if math.isinf(self._typical_s) else 0.8 * self._typical_s + 0.2 * took

    def _tasks(
        self,
        function: Function[T],
        calls: Sequence[tuple[Any, ...]],
        indices: list[int],
        name: str,
        resources: dict[str, Any],
        feed: Feed | None,
    ) -> Started[dict[int, Any]]:
        """The calls at `indices` as plain tasks; results by index."""

        def submit(wanted: list[int], where: dict[str, Any]) -> dict[int, Any]:
            chosen = [indices[i] for i in wanted]
            fed = None if feed is None else self._inputs(feed, chosen)
            futures = self._submit_all(function, [calls[i] for i in chosen], name, {**where, **resources}, fed)
            return dict(zip(wanted, futures, strict=True))

        started = self._submitted(submit, len(indices), name)
        return started.then(lambda found: {index: found[i] for i, index in enumerate(indices)})

    def _inputs(self, feed: Feed, indices: list[int]) -> list[Any]:
        """Futures of the inputs of the calls; those of the next round are submitted at the same time."""
        read, reads, ahead, name = feed
        submitted = {call: future for call, future in self._ahead.items() if future.status in ("pending", "finished")}
        wanted = [reads[i] for i in indices]
        fresh = [call for call in [*wanted, *ahead] if call not in submitted]
        submitted |= dict(zip(fresh, self._submit_all(read, fresh, name, self._without_gpu()), strict=True))
        self._ahead = {call: submitted[call] for call in ahead}  # all others are released
        return [submitted[call] for call in wanted]

    def _without_gpu(self) -> dict[str, Any]:
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        readers = [address for address, worker in workers.items() if not worker.get("resources", {}).get(GPU)]
        return {"workers": readers, "allow_other_workers": True} if readers else {}

    def map_reduce(
        self,
        function: Function[T],
        calls: Sequence[tuple[Any, ...]],
        combine: Callable[[T, T], T],
        *,
        name: str,
        sticky: bool = False,
    ) -> T:
        """One result, combined by a fixed tree. `sticky` calls prefer the worker that ran the same index before."""

        def submit(wanted: list[int], where: dict[str, Any]) -> dict[int, Any]:
            if sticky and not where:
                futures = self._submit_near(function, list(calls), name)
            else:
                futures = self._submit_all(function, list(calls), name, where)
            return {0: self._submit_tree(combine, futures, name, where)}

        result: T = aligned(self._submitted(submit, 1, name, len(calls)).results()[0])
        return result

    def _submit_tree(self, combine: Callable[[T, T], T], futures: list[Any], name: str, where: dict[str, Any]) -> Any:
        """The future of `tree_combine`: tasks of `FAN_IN` neighbours, which are whole branches of that tree."""
        level = futures
        while len(level) > 1:
            groups = [level[i : i + FAN_IN] for i in range(0, len(level), FAN_IN)]
            columns = ([combine] * len(groups), groups)
            level = self._submit_tasks(_combine_task, columns, f"reduce-{name}", where)
        return level[0]

    def stream(
        self, function: Function[T], calls: Calls, *, name: str, ahead: int | None = None
    ) -> Iterator[tuple[int, T | Exception]]:
        """Results as calls finish, each with the index of its call; an error of a call is returned, not raised.

        At most `ahead` calls are in flight (default: two tasks per worker; see `streams`), so that memory, here and on
        the scheduler, does not grow with the number of calls.
        """
        for index, result in Stream(self, function, name, ahead).run(calls):
            yield index, aligned(result)

    def submit_calls(self, function: Function[T], groups: Sequence[Sequence[tuple[Any, ...]]], name: str) -> list[Any]:
        """A future for each group of calls: a task that makes them."""
        self._begin_round()
        return self._submit_tasks(make_calls, ([function] * len(groups), groups), name, self._away_from_suspects())

    def fetch(self, futures: list[Any]) -> dict[Any, Any]:
        """Results of finished tasks by one message, of those that were not lost."""
        found: dict[Any, Any] = self.client.sync(fetch, self.client, futures, self._direct, callback_timeout=GRACE_S)
        return found

    def outcome(self, future: Any, otherwise: Any) -> Any:
        """The result or error of a task that is no longer pending; `otherwise` if it cannot be fetched."""
        try:
            if future.status == "error":
                return future.exception(timeout=GRACE_S)
            if future.status == "finished":
                return self.fetch([future]).get(future, otherwise)
        except cluster_errors() as error:
            self.check_alive(error)
        return otherwise

    # --- one round, until complete -------------------------------------------------------------------

    def _submitted(self, submit: Submit, count: int, name: str, tasks: int | None = None) -> Started[dict[int, Any]]:
        """Submit; results are collected later. `tasks` are made for them, by default one for each."""
        futures: dict[int, Any] = {}
        with contextlib.suppress(*cluster_errors()):  # submitted again when collected
            self._begin_round()
            futures = submit(list(range(count)), self._away_from_suspects())

        def release() -> None:
            for future in futures.values():
                future.release()

        return Started(lambda: self._collect(submit, count, futures, name, tasks or count), release)

    def _begin_round(self) -> None:
        """A number for the tasks that are submitted together; now and then what Dask notes of them is dropped."""
        if self._round % _TRIM_EVERY == 0:
            with contextlib.suppress(Exception):  # a scheduler that accepts no functions or lacks ours keeps its notes
                self.client.run_on_scheduler(trim_notes, _TRIM_EVERY)
            shorten_logs([self.client.scheduler_comm])
        self._round += 1

    def _collect(self, submit: Submit, count: int, futures: dict[int, Any], name: str, tasks: int) -> dict[int, Any]:
        """Wait for `futures` as long as their workers get on, and resubmit what is missing."""
        lost = cluster_errors()
        found: dict[int, Any] = {}
        last: BaseException | None = None
        for attempt in range(self.attempts):
            began = time.monotonic()
            try:
                futures = futures or submit([i for i in range(count) if i not in found], self._away_from_suspects())
                waiting = list(futures.values())
                limit = self.limit(self._slowest.get(name))
                values = self.client.sync(gather_from_live, self.client, waiting, self._direct, self._run, limit)
                found |= dict(zip(futures, values, strict=True))
            except lost as error:
                last = error
                raise_own(futures.values())
                self.check_alive(error)
                found |= self._finished(futures)
                self.retried += count - len(found)
                if isinstance(error, Stalled):
                    self.replace_hung(error.workers)
            finally:
                for future in futures.values():
                    future.release()
                futures = {}
            if len(found) == count:
                if attempt == 0:  # a worker makes several tasks, one after the other
                    task_s = (time.monotonic() - began) / max(1, -(-tasks // self.workers))
                    self._slowest[name] = max(self._slowest.get(name, 0.0), task_s)
                return found
        raise self.gave_up(f"a round of {count} tasks", last) from last

    def failure(self, what: str, error: Exception) -> Exception:
        """What to raise for the error of a call of a stream: one that killed its workers may not do so again."""
        from distributed import KilledWorker

        return self.gave_up(what, error) if isinstance(error, KilledWorker) else error

    def gave_up(self, what: str, last: BaseException | None = None) -> RetryError:
        from distributed import KilledWorker

        if isinstance(last, KilledWorker):
            name, limit = re.split(r"-\d+-\d+-", str(last.task))[0], last.last_worker.memory_limit
            return RetryError(
                f"every worker that ran a task named {name} died ({last.allowed_failures + 1} in each of "
                f"{self.attempts} attempts); mostly they exceed their memory limit"
                f"{f', here {limit / 2**20:.0f} MiB' if limit else ''}: start workers with more memory "
                "(cluster.memory), or use smaller chunks (ingest), a smaller learn.batch_size or fewer fit.centres"
            )
        return RetryError(
            f"the cluster at {_address(self.client)} did not finish {what} in {self.attempts} "
            f"attempts (workers now: {self.workers}); check its logs, then run the same command again"
        )

    def limit(self, slowest: float | None) -> float:
        """Seconds without progress after which a worker is hung."""
        return 10 * self.patience_s if slowest is None else max(self.patience_s, 10 * slowest)

    def _label(self, index: int) -> str:
        # Digits first: the dashboard groups tasks by the words before the first number.
        return f"{self._round}-{index}-{uuid.uuid4().hex[:6]}-{self._run}"

    def _submit_all(
        self,
        function: Function[T],
        calls: list[tuple[Any, ...]],
        name: str,
        where: dict[str, Any],
        fed: list[Any] | None = None,
        first: int = 0,
    ) -> list[Any]:
        if not calls:
            return []
        columns = ([function] * len(calls), calls, *([] if fed is None else [fed]))
        return self._submit_tasks(run_call, columns, name, where, first)

    def _submit_tasks(
        self, body: Callable[..., Any], columns: tuple[Any, ...], name: str, where: dict[str, Any], first: int = 0
    ) -> list[Any]:
        # One message for all of them: with eight calls a third faster than eight submits.
        count = len(columns[0])
        keys = [f"{name}-{self._label(first + i)}" for i in range(count)]
        futures: list[Any] = self.client.map(body, *columns, key=keys, pure=False, batch_size=count, **where)
        return futures

    def _submit_near(self, function: Function[T], calls: list[tuple[Any, ...]], name: str) -> list[Any]:
        """Equal shares of neighbouring calls, always to the same worker while the set of workers is unchanged."""
        addresses = self._addresses() or [""]
        futures = []
        for i, address in enumerate(addresses):
            start, stop = (j * len(calls) // len(addresses) for j in (i, i + 1))
            where = {"workers": [address], "allow_other_workers": True} if address else {}
            futures += self._submit_all(function, calls[start:stop], name, where, first=start)
        return futures

    def _finished(self, futures: dict[int, Any]) -> dict[int, Any]:
        """Results of a failed round that are available."""
        finished = {future: i for i, future in futures.items() if future.status == "finished"}
        with contextlib.suppress(*cluster_errors()):
            return {finished[future]: value for future, value in self.fetch(list(finished)).items()}
        return {}

    def _addresses(self) -> list[str]:
        return sorted(self.client.scheduler_info(n_workers=-1)["workers"])

    def _away_from_suspects(self) -> dict[str, Any]:
        if not self._suspects:
            return {}
        present = self._addresses()
        self._suspects &= set(present)
        good = [address for address in present if address not in self._suspects]
        # Only a preference: a task bound to a worker that dies would wait forever.
        return {"workers": good, "allow_other_workers": True} if self._suspects and good else {}

    def replace_hung(self, workers: Iterable[str]) -> None:
        """Restart these workers, if they have a nanny; avoid them in any case."""
        fresh = [worker for worker in workers if worker not in self._suspects]
        self._suspects |= set(fresh)
        if fresh:
            with contextlib.suppress(OSError, ValueError, RuntimeError, TimeoutError):  # no nanny: only avoid it
                self.client.restart_workers(fresh, timeout=30, raise_for_error=False)

    def holding(self, keys: Iterable[str]) -> list[str]:
        """The workers that hold one of these tasks."""
        wanted = set(keys)
        return [worker for worker, held in self.client.processing().items() if wanted & set(map(str, held))]

    def check_alive(self, error: BaseException) -> None:
        if self.client.status != "running" or self.client.scheduler is None:
            raise RetryError(
                f"the Dask scheduler at {_address(self.client)} was lost; restart it and run the same command"
            ) from error


def _address(client: Any) -> str:
    return str(client.scheduler.address if client.scheduler is not None else "an unknown address")


def run_call(function: Function[T], call: tuple[Any, ...], *fed: Any) -> T:
    """The body of every task: the function applied to its arguments, with one BLAS thread, metered.

    Nannies set the thread count of BLAS, workers without one do not, and workers may share a process.
    """
    with blas_threads(1):
        return observed(function, aligned((*call, *fed)))


def make_calls(function: Function[T], calls: list[tuple[Any, ...]]) -> Done:
    """The body of a task of a stream: several calls, one after the other."""
    began = time.perf_counter()
    results = tuple(run_call(function, call) for call in calls)
    return Done(results, time.perf_counter() - began)


def _combine_task(combine: Callable[[T, T], T], parts: list[T]) -> T:
    with blas_threads(1):
        joined: T = observed(reduced, (combine, parts), new=False)  # their rows are counted already
    return joined


def reduced(combine: Callable[[T, T], T], parts: list[T]) -> T:
    passing("fit.before_combine")
    with metered("reduce"):
        return tree_combine(parts, combine)
