"""Which solver: the one choice, by what each of them costs."""

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
EXACT_ROWS = 12_000  # beyond this `auto` does not factorise in one worker
_FLOPS, _PATIENCE_S = 2e10, 60.0  # of one worker in double precision; what an exact fit may take under "auto"


class Choice(NamedTuple):
    """A solver, and in words why it is this one."""

    solver: str
    reason: str


def choose(solver: str, n: int, centres: int | None, features: FeatureMap | None, room: int, dtype: str) -> Choice:
    """Resolve "auto" and refuse what cannot fit, with the reason in words.

    By the number of rows, never by the number of workers, so that a fit alone and on a cluster are the same. `room`,
    the memory of one worker, decides only where it is too small for one factorisation of rows that are few enough.
    """
    if features is not None and solver in ("auto", "features"):
        return Choice("features", "explicit features were given")
    if solver == "features":
        raise ConfigError("solver='features' needs a feature map; give `features`, or choose another solver")
    if solver not in ("auto", *SOLVERS):
        raise ConfigError(f"solver={solver!r} is unknown; choose 'auto', {', '.join(map(repr, SOLVERS))}")
    size = Size(n, basis=min(centres or CENTRES, n), dtype=dtype)
    found = _cheapest(size, centres, room) if solver == "auto" else Choice(solver, "asked for")
    held = SOLVERS[found.solver].cost(size).memory
    if found.solver == "cholesky" and held > room:
        raise ConfigError(
            f"solver='cholesky' needs {held / 1e9:.1f} GB in one worker for {n} rows, {room / 1e9:.1f} GB are "
            "available; use solver='tiled', 'pcg', or 'nystrom' with `centres`"
        )
    if found.solver == "nystrom" and held > room:
        raise ConfigError(
            f"solver='nystrom' needs {held / 1e9:.1f} GB in one worker for {size.basis} centres, {room / 1e9:.1f} GB "
            "are available; set `centres` lower"
        )
    return found


def _cheapest(size: Size, centres: int | None, room: int) -> Choice:
    """The exact solver that ends soon enough, else centres."""
    if centres is not None:
        return Choice("nystrom", f"{centres} centres were asked for")
    one, many = cholesky.cost(size), tiled.cost(size)
    if size.rows <= EXACT_ROWS and one.memory < room:
        held = f"{one.memory / 1e6:.0f} MB in one worker"
        return Choice("cholesky", f"{size.rows} rows fit one exact factorisation ({held})")
    seconds = many.flops / _FLOPS
    if seconds <= _PATIENCE_S:
        return Choice("tiled", f"an exact factorisation of {size.rows} rows takes one worker about {seconds:.0f} s")
    return Choice(
        "nystrom",
        f"an exact factorisation of {size.rows} rows would take one worker about {seconds:.0f} s and "
        f"{many.scratch / 1e9:.1f} GB; solver='tiled' does it all the same",
    )
