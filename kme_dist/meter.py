"""Time and counts of the work in this process, for a worker's metrics and Dask's fine performance metrics.

    with metered("gram"):          # time of a block, under one of STAGES, without the time of nested blocks
        ...
    observed(function, call)       # a call with its time, its rows and whether it failed; used by executors

Without a registered meter (in the driver, or without a cluster) either costs less than a microsecond.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
STAGES = ("read", "gram", "factorise", "reduce", "write")  # names for `metered`


class Meter(Protocol):
    """Receives the calls and stage times of this process; see `kme_dist.ops.dashboard.TileMeter`."""

    def call(self, name: str, seconds: float, result: Any, *, failed: bool) -> None: ...
    def stage(self, name: str, seconds: float) -> None: ...


_meters: list[Meter] = []  # of this process: one for each worker in it


def register(meter: Meter) -> None:
    """Report every call and stage of this process to `meter` from now on."""
    if meter not in _meters:
        _meters.append(meter)


def unregister(meter: Meter) -> None:
    if meter in _meters:
        _meters.remove(meter)


def observed(function: Callable[..., T], call: tuple[Any, ...], *, new: bool = True) -> T:
    """`function(*call)`, metered: calls, seconds and, if the result is `new`, its rows and bytes."""
    if not _meters:
        return function(*call)
    began = time.perf_counter()
    name = getattr(function, "__name__", type(function).__name__).strip("_")
    try:
        result = function(*call)
    except BaseException:
        for meter in _meters:
            meter.call(name, time.perf_counter() - began, None, failed=True)
        raise
    for meter in _meters:
        meter.call(name, time.perf_counter() - began, result if new else None, failed=False)
    return result


def metered(name: str) -> contextlib.AbstractContextManager[None]:
    """Time spent in the block, by name in `kme_stage_seconds_total` and in Dask's fine performance metrics."""
    return _Timed(name) if _meters else _UNTIMED


_here = threading.local()
_UNTIMED = contextlib.nullcontext()


class _Timed:
    """One block; its time excludes that of nested blocks, so that stages add up."""

    __slots__ = ("_began", "_name", "_outer", "inside")

    def __init__(self, name: str) -> None:
        self._name, self.inside = name, 0.0

    def __enter__(self) -> None:
        self._outer: _Timed | None = getattr(_here, "block", None)
        _here.block = self
        self._began = time.perf_counter()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        taken = time.perf_counter() - self._began
        _here.block = self._outer
        if self._outer is not None:
            self._outer.inside += taken
        if kind is not None:
            return  # failed stages are not reported
        dask = sys.modules.get("distributed.metrics")
        if dask is not None:
            dask.context_meter.digest_metric(self._name, taken - self.inside, "seconds")
        for meter in _meters:
            meter.stage(self._name, taken - self.inside)
