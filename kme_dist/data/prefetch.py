"""Run an iterator ahead of its consumer, on a separate thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
_END = object()


class Prefetched(Generic[Item]):
    """The items of `make()` in order, computed up to `depth` ahead.

    An error of the producer is raised at its position in the sequence. `waited_s` is the time that the consumer waited,
    `items` the number of items it took. Close it (or use it as a context manager) to stop early.
    """

    def __init__(self, make: Callable[[], Iterable[Item]], depth: int = 2) -> None:
        self.waited_s, self.items = 0.0, 0
        self._queue: Queue[Any] = Queue(max(1, depth))
        self._stop = Event()
        self._done = False
        self._thread = Thread(target=self._produce, args=(make,), name="kme-prefetch", daemon=True)
        self._thread.start()

    def _produce(self, make: Callable[[], Iterable[Item]]) -> None:
        try:
            for item in make():
                if not self._put((item, None)):
                    return
            self._put((_END, None))
        except BaseException as error:
            self._put((_END, error))

    def _put(self, entry: tuple[Any, BaseException | None]) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
                return True
            except Full:
                continue
        return False

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._done:
            raise StopIteration
        begin = time.perf_counter()
        item, error = self._queue.get()
        self.waited_s += time.perf_counter() - begin
        if item is _END:
            self._done = True
            if error is not None:
                raise error
            raise StopIteration
        self.items += 1
        return item  # type: ignore[no-any-return]

    def close(self) -> None:
        """Stop the producer and wait for it; items computed ahead are dropped."""
        self._done = True
        self._stop.set()
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            pass
        self._thread.join()

    def __enter__(self) -> Prefetched[Item]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
