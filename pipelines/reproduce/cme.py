"""Section 5.1 of Grünewälder, Lever, Baldassarre, Patterson, Gretton and Pontil: sparse embeddings and the pendulum.

200 transitions from uniform states and torques; reward exp(-θ² - 0.2 ω²). The paper shows curves and no numbers: sparse
embeddings by FISTA are nearer to the dense one than incomplete Cholesky of as many entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kme_dist.errors import NumericalError
from kme_dist.pipelines import pendulum

if TYPE_CHECKING:
    from kme_dist.pipelines.reproduce.folds import Fold


def pendulum_trial(fold: Fold, X: None, y: None) -> dict[str, Any]:
    """Of one seed: seconds to swing up; entries of the sparsest embedding that holds it, in per cent; or by how much
    FISTA is nearer than incomplete Cholesky at the level where it gains least, in per cent of the dense norm."""
    c = pendulum.PendulumConfig(seed=fold.fold, levels=int(fold.settings["levels"]))
    dense = pendulum.embed(c)
    if fold.method == "dense, s":
        seconds = pendulum.attempt(pendulum.Policy(dense, c), c).swing_up_seconds
        if seconds is None:
            raise NumericalError(f"seed {fold.fold}: the policy of the dense embedding does not hold it upright")
        return {"value": seconds}
    test = pendulum.transitions(c.test_samples, c, np.random.default_rng([c.seed, 1]))
    levels = list(pendulum.sparse_levels(dense, *test, c))
    if fold.method == "sparsest, %":
        held = [level.density for level in levels if level.trial.swing_up_seconds is not None]
        if not held:
            raise NumericalError(f"seed {fold.fold}: no sparse form holds it upright")
        return {"value": 100 * min(held)}
    shown = [
        {
            "density": level.density,
            "FISTA": level.penalised,
            "FISTA, refitted": level.distance,
            "Cholesky": min(level.both_sides, level.one_side),
        }
        for level in levels
    ]
    return {"value": 100 * min(s["Cholesky"] - s["FISTA, refitted"] for s in shown), "levels": shown}
