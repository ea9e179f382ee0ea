"""The choice of solver, by cost: exact if that is affordable, else as many centres as are.

What is affordable depends on the number of rows only, so that a fit is the same on every machine, in this process and
on a cluster; with a budget in seconds, also on the measured speed of this machine.
"""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import numpy as np

from kme_dist.backend import blas_threads, cholesky, empty_square
from kme_dist.core.kernels.base import FeatureMap
from kme_dist.errors import ConfigError
from kme_dist.run.fit import centres as nystrom
from kme_dist.run.fit import cholesky as one_factor
from kme_dist.run.fit import features, pcg, tiled
from kme_dist.run.fit.problem import CENTRES, Size, Solver

SOLVERS: dict[str, Solver] = {
    "cholesky": one_factor,
    "tiled": tiled,
    "pcg": pcg,
    "nystrom": nystrom,
    "features": features,
}
WORK = 1.25e12  # operations of a solve under "auto": 15,500 rows exactly, in about half a minute of one core
_MOST_CENTRES = 20_000


class Choice(NamedTuple):
    """A solver, and the reason for it."""

    solver: str
    reason: str
    centres: int | None = None


def choose(
    solver: str,
    n: int,
    centres: int | None,
    features: FeatureMap | None,
    room: int,
    dtype: str,
    seconds: float | None = None,
) -> Choice:
    """Resolve "auto", and refuse what does not fit in memory.

    The choice never depends on the number of workers. `room`, the memory of one worker, matters only if it is too small
    for what the work allows; `seconds` is a budget of processor time for the solve.
    """
    if features is not None and solver in ("auto", "features"):
        return Choice("features", "explicit features were given")
    if solver == "features":
        raise ConfigError("solver='features' requires a feature map; set `features`, or choose another solver")
    if solver not in ("auto", *SOLVERS):
        raise ConfigError(f"solver={solver!r} is unknown; choose 'auto', {', '.join(map(repr, SOLVERS))}")
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"fit_seconds={seconds!r}: must be a positive number")
    found = _affordable(n, centres, room, dtype, seconds) if solver == "auto" else Choice(solver, "requested", centres)
    size = Size(n, basis=min(found.centres or CENTRES, n), dtype=dtype)
    held = SOLVERS[found.solver].cost(size).memory
    if found.solver == "cholesky" and held > room:
        raise ConfigError(
            f"solver='cholesky' needs {_size(held)} on one worker for {n} rows, {_size(room)} are "
            "available; use solver='tiled', 'pcg', or 'nystrom' with `centres`"
        )
    if found.solver == "nystrom" and held > room:
        raise ConfigError(
            f"solver='nystrom' needs {_size(held)} on one worker for {size.basis} centres, {_size(room)} "
            "are available; set `centres` lower"
        )
    return found


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.2g} MB"


def _affordable(n: int, centres: int | None, room: int, dtype: str, seconds: float | None) -> Choice:
    """The exact solver if the budget allows, else as many centres as it does."""
    if centres is not None:
        return Choice("nystrom", f"{centres} centres requested", centres)
    work = WORK if seconds is None else seconds * measured_speed()
    size = Size(n, dtype=dtype)
    exact, held = one_factor.cost(size).flops, one_factor.cost(size).memory
    if exact <= work and held < room:
        return Choice("cholesky", f"one exact factorisation, {_size(held)}")
    if exact <= work and tiled.cost(size).memory < room:
        return Choice("tiled", f"a factorisation needs {_size(held)}, more than a worker has")
    count = _centres_for(n, work, room, dtype, least=100 if seconds is not None else CENTRES)
    if exact <= work:
        why = f"a factorisation needs {_size(held)}, more than a worker has"
    elif seconds is None:
        why = f"an exact factorisation of {n} rows is {exact / WORK:.1f} times the work that is affordable"
    else:
        why = f"an exact factorisation of {n} rows takes about {exact / measured_speed():.2g} s of {seconds:g} s"
    return Choice(
        "nystrom", f"{count} centres: {why}; fit_seconds or centres change that, solver='tiled' is exact", count
    )


def _centres_for(n: int, work: float, room: int, dtype: str, least: int) -> int:
    """The largest multiple of 100 whose sums and solve are within the work and the memory; of the work at least that of
    `least` centres."""
    count = min(100, n)
    while count + 100 <= min(n, _MOST_CENTRES):
        cost = nystrom.cost(Size(n, basis=count + 100, dtype=dtype))
        if (cost.flops > work and count >= least) or cost.memory > 0.5 * room:
            break
        count += 100
    return count


@functools.cache
def measured_speed() -> float:
    """Operations a second of a factorisation in double precision on one core of this machine."""
    n, best = 1_024, 0.0
    for _ in range(3):
        A = empty_square(n, np.zeros(1))
        A[...] = np.eye(n)
        with blas_threads(1):
            began = time.perf_counter()
            cholesky(A)
        best = max(best, n**3 / 3 / max(time.perf_counter() - began, 1e-9))
    return best
