"""The choice of solver, by cost."""

from __future__ import annotations

from typing import NamedTuple

from kme_dist.core.kernels.base import FeatureMap
from kme_dist.errors import ConfigError
from kme_dist.run.fit import centres as nystrom
from kme_dist.run.fit import cholesky, features, pcg, tiled
from kme_dist.run.fit.problem import CENTRES, Size, Solver

SOLVERS: dict[str, Solver] = {
    "cholesky": cholesky,
    "tiled": tiled,
    "pcg": pcg,
    "nystrom": nystrom,
    "features": features,
}
EXACT_ROWS = 12_000  # above this `auto` does not factorise on one worker
_FLOPS, _PATIENCE_S = 2e10, 60.0  # of one worker in double precision; longest exact fit under "auto"


class Choice(NamedTuple):
    """A solver, and the reason for it."""

    solver: str
    reason: str


def choose(solver: str, n: int, centres: int | None, features: FeatureMap | None, room: int, dtype: str) -> Choice:
    """Resolve "auto", and refuse what does not fit in memory.

    The choice depends on the number of rows, never on the number of workers, so that a fit is the same in this process
    and on a cluster. `room`, the memory of one worker, matters only if it is too small for a single factorisation.
    """
    if features is not None and solver in ("auto", "features"):
        return Choice("features", "explicit features were given")
    if solver == "features":
        raise ConfigError("solver='features' requires a feature map; set `features`, or choose another solver")
    if solver not in ("auto", *SOLVERS):
        raise ConfigError(f"solver={solver!r} is unknown; choose 'auto', {', '.join(map(repr, SOLVERS))}")
    size = Size(n, basis=min(centres or CENTRES, n), dtype=dtype)
    found = _cheapest(size, centres, room) if solver == "auto" else Choice(solver, "requested")
    held = SOLVERS[found.solver].cost(size).memory
    if found.solver == "cholesky" and held > room:
        raise ConfigError(
            f"solver='cholesky' needs {held / 1e9:.1f} GB on one worker for {n} rows, {room / 1e9:.1f} GB are "
            "available; use solver='tiled', 'pcg', or 'nystrom' with `centres`"
        )
    if found.solver == "nystrom" and held > room:
        raise ConfigError(
            f"solver='nystrom' needs {held / 1e9:.1f} GB on one worker for {size.basis} centres, {room / 1e9:.1f} GB "
            "are available; set `centres` lower"
        )
    return found


def _cheapest(size: Size, centres: int | None, room: int) -> Choice:
    """The exact solver if it is fast enough, else centres."""
    if centres is not None:
        return Choice("nystrom", f"{centres} centres requested")
    one, many = cholesky.cost(size), tiled.cost(size)
    if size.rows <= EXACT_ROWS and one.memory < room:
        held = f"{one.memory / 1e6:.0f} MB on one worker"
        return Choice("cholesky", f"{size.rows} rows fit one exact factorisation ({held})")
    seconds = many.flops / _FLOPS
    if seconds <= _PATIENCE_S:
        return Choice("tiled", f"an exact factorisation of {size.rows} rows takes one worker about {seconds:.0f} s")
    return Choice(
        "nystrom",
        f"an exact factorisation of {size.rows} rows would take one worker about {seconds:.0f} s and "
        f"{many.scratch / 1e9:.1f} GB; solver='tiled' forces it",
    )
