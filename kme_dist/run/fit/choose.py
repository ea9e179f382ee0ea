"""The choice of solver, by cost: exact if that is affordable, else as many centres as are.

What is affordable depends on the number of rows only, so that a fit is the same on every machine, in this process and
on a cluster; with a budget in seconds, also on the measured speed of this machine.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kme_dist.backend import blas_threads, cholesky, empty_square
from kme_dist.core.kernels.base import FeatureMap
from kme_dist.errors import ConfigError, counted
from kme_dist.run.fit import centres as nystrom
from kme_dist.run.fit import cholesky as one_factor
from kme_dist.run.fit import falkon, features, pcg, tiled
from kme_dist.run.fit.centres import MOST_PIVOTS
from kme_dist.run.fit.problem import CENTRES, Room, Size, Solver

SOLVERS: dict[str, Solver] = {
    "cholesky": one_factor,
    "tiled": tiled,
    "pcg": pcg,
    "nystrom": nystrom,
    "falkon": falkon,
    "features": features,
}
WORK = 1.25e12  # operations of a solve under "auto": half a minute of one core
FACTOR_WORK = 4e11  # of that in a factorisation, 10,600 rows; from there on conjugate gradients take less for the same
ITERATED_WORK, _ITERATED_ROWS = 2.5e12, 32_000  # of conjugate gradients on all rows; their tiles take 2 GB
TOLERANCE = 2e-2  # of conjugate gradients under "auto": decisions at the rows of the fit are off by less than that
MANY_WORK = 1e13  # the same for centres by conjugate gradients, for each 100,000 rows: about two minutes of one core
_MOST_CENTRES = 50_000
NO_LIMIT = Room()


class Choice(NamedTuple):
    """A solver, and the reason for it."""

    solver: str
    reason: str
    centres: int | None = None
    tolerance: float = 1e-6  # of an iteration, if the caller does not say


def choose(
    solver: str,
    size: Size,
    centres: int | None = None,
    features: FeatureMap | None = None,
    room: Room = NO_LIMIT,
    seconds: float | None = None,
    iterate: bool = True,
) -> Choice:
    """Resolve "auto", and refuse what does not fit in memory.

    The choice never depends on the number of workers. `room` matters only if it is too small for what the work
    allows; the reason says so. `seconds` is a budget of processor time for the solve. Without
    `iterate` all rows are fitted by a factorisation only.
    """
    if features is not None and solver in ("auto", "features"):
        return Choice("features", "explicit features were given")
    if solver == "features":
        raise ConfigError("solver='features' requires a feature map; set `features`, or choose another solver")
    if solver not in ("auto", *SOLVERS):
        raise ConfigError(f"solver={solver!r} is unknown; choose 'auto', {', '.join(map(repr, SOLVERS))}")
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"fit_seconds={seconds!r}: must be a positive number")
    if not size.width:
        found = _for_objects(solver, centres)
    elif solver == "auto":
        found = _affordable(size, centres, room, seconds, iterate)
    else:
        default = CENTRES if solver in ("nystrom", "falkon") else None
        found = Choice(solver, "requested", centres or default)
    n, size = size.rows, replace(size, basis=min(found.centres or CENTRES, size.rows))
    held = SOLVERS[found.solver].cost(size).memory
    if found.solver == "cholesky" and held > room.alone:
        other = "use solver='tiled', 'pcg', or 'nystrom' with `centres`" if size.width else "fit fewer rows"
        raise ConfigError(
            f"solver='cholesky' needs {_size(held)} on one worker for {n} rows, {_size(room.alone)} are available; "
            f"{other}"
        )
    if found.solver in ("nystrom", "falkon") and held > room.task:
        iterated = found.solver == "nystrom" and size.labelled and falkon.cost(size).memory <= room.task
        better = "solver='falkon', or fewer `centres`" if iterated else "fewer `centres`, or give it more memory"
        raise ConfigError(
            f"solver={found.solver!r} needs {_size(held)} on one worker for {size.basis} centres, {_size(room.task)} "
            f"are available; use {better}"
        )
    return found


def _for_objects(solver: str, centres: int | None) -> Choice:
    """For texts, sequences and bags, which the other solvers cannot cut into tiles or store as arrays."""
    if solver not in ("auto", "cholesky") or (solver == "auto" and centres is not None):
        given = f"solver={solver!r}" if solver != "auto" else f"centres={centres}"
        raise ConfigError(
            f"{given} requires rows of numbers, and these are texts, sequences or bags: use solver='cholesky' without "
            "`centres`, or features of the rows as numbers"
        )
    return Choice("cholesky", "one exact factorisation: rows that are not numbers" if solver == "auto" else "requested")


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.2g} MB"


def _affordable(size: Size, centres: int | None, room: Room, seconds: float | None, iterate: bool) -> Choice:
    """An exact solver if the budget allows, else as many centres as it does."""
    if centres is not None:
        asked = f"{counted(centres, 'centre')} requested" + (", there are fewer rows" if centres > size.rows else "")
        return Choice(_with(centres, size), asked, centres)
    work = WORK if seconds is None else seconds * measured_speed()
    exact, held = one_factor.cost(size).flops, one_factor.cost(size).memory
    if iterate and exact > FACTOR_WORK and size.labelled and _iterates(size, seconds and work, room):
        reason = f"all {size.rows} rows, to a residual of {TOLERANCE:g}; solver='cholesky' is exact"
        return Choice("pcg", reason, tolerance=TOLERANCE)
    if exact <= work and held < room.alone:
        return Choice("cholesky", f"one exact factorisation, {_size(held)}")
    if exact <= work and tiled.cost(size).memory < room.task:
        return Choice("tiled", f"a factorisation needs {_size(held)}, more than a worker has")
    count, possible = (_count_for(size, work, allowed, seconds) for allowed in (room, NO_LIMIT))
    if exact <= work:
        why = f"a factorisation needs {_size(held)}, more than a worker has"
    elif seconds is None:
        why = f"an exact factorisation of {size.rows} rows is {exact / WORK:.2g} times the work that is affordable"
    else:
        why = f"an exact factorisation of {size.rows} rows takes {exact / measured_speed():.2g} s of {seconds:g} s"
    if count < possible:
        why += f"; with more memory on a worker or in the scratch folder there would be {possible}"
    return Choice(
        _with(count, size),
        f"{counted(count, 'centre')}: {why}; fit_seconds or centres change that, solver='tiled' is exact",
        count,
    )


def _count_for(size: Size, work: float, room: Room, seconds: float | None) -> int:
    """The number of centres that work and memory allow, by either solver."""
    count = _centres_for(size, work, room.task, least=100 if seconds is not None else CENTRES)
    if not size.labelled:
        return count
    more = MANY_WORK * max(1.0, size.rows / 1e5) if seconds is None else work
    return max(count, _many_centres_for(size, more, room))


def _iterates(size: Size, work: float | None, room: Room) -> bool:
    """Whether conjugate gradients on all rows are affordable. Tiles that do not fit in memory are computed again in
    every step, so the choice does not depend on it."""
    cost = pcg.cost(size)
    most = min(work or ITERATED_WORK, one_factor.cost(size).flops)
    return size.rows <= _ITERATED_ROWS and cost.flops <= most and cost.memory <= room.task


def _with(centres: int, size: Size) -> str:
    """The solver for a number of centres."""
    return "falkon" if centres > MOST_PIVOTS and size.labelled and centres < size.rows else "nystrom"


def _centres_for(size: Size, work: float, room: int, least: int) -> int:
    """The largest multiple of 100 whose sums and solve are within the work and the memory; of the work at least that of
    `least` centres. Fewer than 100 only where memory is too small for these."""
    count = min(100, size.rows)
    while count > 10 and nystrom.cost(replace(size, basis=count)).memory > room:
        count = max(10, count // 2)
    if count < min(100, size.rows):
        return count
    while count + 100 <= min(size.rows, MOST_PIVOTS):
        cost = nystrom.cost(replace(size, basis=count + 100))
        if (cost.flops > work and count >= least) or cost.memory > 0.5 * room:
            break
        count += 100
    return count


def _many_centres_for(size: Size, work: float, room: Room) -> int:
    """The largest multiple of 500 for conjugate gradients, at most half the rows; 0 if not above `MOST_PIVOTS`."""
    found = 0
    for count in range(MOST_PIVOTS + 500, min(size.rows // 2, _MOST_CENTRES) + 1, 500):
        cost = falkon.cost(replace(size, basis=count))
        if cost.flops > work or cost.memory > room.task or cost.scratch > room.scratch:
            break
        found = count
    return found


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
