"""The one loop of learning: ask for a round, make the update, leave a record, save, stop.

    trainer = Trainer(start, settings)
    outcome = trainer.run(play, identity, checkpoints=Checkpoints("run/checkpoints"), callback=report)

Whoever learns anything (kernels, networks, spectral maps, conditional means) says with `play` what one round is worth:
a function of the number of steps made and of the parameters that returns a `Round`. Where its batches come from and who
computes them is the business of `play`; parameters, optimiser, stopping rule, averages and checkpoints are kept here. A
run that was killed and resumed makes the steps of one that was not.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kme_dist.core import optim
from kme_dist.core.objective import Objective
from kme_dist.errors import KMEError
from kme_dist.run.checkpoints import Checkpoints, Snapshot
from kme_dist.run.learn import LearnSettings, LengthScalePrior, PlateauWatch, Record, Stepper, step_record

HISTORY_RECORDS = 1000  # kept where not all of them are; the callback sees every one
_MEAN = "averaged"  # beside the slots of the optimiser


class Round(NamedTuple):
    """What a round has found: the mean objective and gradient of its batches, or already where it leads."""

    objective: Objective
    rows: int  # of one batch
    facts: Record  # further entries of the record
    steps: int = 1
    reached: tuple[optim.Named, optim.State] | None = None  # None: one update with the gradient is still to be made


# From the number of steps made and the parameters: a round. Its last two fields may be left out.
PlayRound = Callable[[int, optim.Named], Round | tuple[Objective, int, Record]]
# Told after every round: its record, and the parameters that it led to.
Callback = Callable[[Record, optim.Named], None]


@dataclass(frozen=True)
class Outcome:
    """Where learning ended: the last iterate, or the best where a stopping rule watched."""

    parameters: optim.Named
    history: list[Record] = field(repr=False)
    stopped_early: bool = False


class Trainer:
    """Parameters, optimiser state and stopping rule: all that changes from round to round.

    Parameters
    ----------
    start : parameters as they are learned (positive ones as logarithms)
    settings : steps, rate, optimiser, patience, what is frozen
    prior : what length scales are held by; None: nothing
    after : applied to the parameters after every update, with the rate of the step: a proximal operator
    average : above 0 the outcome, and what the callback sees, is the mean of the parameters over about 1/(1 - average)
        steps
    phase : how records call it; None: by the objective
    remember : keep every record, and save them with the checkpoints; otherwise the last ones
    """

    def __init__(
        self,
        start: Mapping[str, np.ndarray],
        settings: LearnSettings,
        *,
        prior: LengthScalePrior | None = None,
        after: Callable[[optim.Named, float], optim.Named] | None = None,
        average: float = 0.0,
        phase: str | None = None,
        remember: bool = False,
    ) -> None:
        self.settings, self._after, self._average, self._phase = settings, after, average, phase
        self.parameters: optim.Named = dict(start)
        self.stepper = Stepper.of(self.parameters, settings, prior)
        self.state = self.stepper.start(self.parameters)
        self._mean: optim.Named | None = dict(start) if average else None
        schedule = settings.schedule or (lambda rate, steps: optim.constant(rate))
        self.rate = schedule(settings.learning_rate, settings.steps)
        self.watch = PlateauWatch(settings.patience)
        self.step, self.stopped = 0, False
        self._remember = remember
        self.history: list[Record] | deque[Record] = [] if remember else deque(maxlen=HISTORY_RECORDS)
        self._began, self._earlier = time.perf_counter(), 0.0
        self._snapshot = self._take()

    def run(
        self,
        play: PlayRound,
        identity: dict[str, Any],
        checkpoints: Checkpoints | None = None,
        callback: Callback | None = None,
    ) -> Outcome:
        """Round after round to the end, from the last checkpoint where there is one."""
        if checkpoints is not None and (found := checkpoints.resume(identity)) is not None:
            self.restore(found)
        with self._saved_on_the_way_out(checkpoints, identity):
            while self.step < self.settings.steps and not self.stopped:
                played = Round(*play(self.step, dict(self.parameters)))
                record = self.advance(played)
                if not self._remember:  # the round is made, whatever the callback does
                    self._snapshot = self._take()
                if callback is not None:
                    callback(record, self._shown)
                self.history.append(record)
                if self._remember:  # what the callback adds to the record belongs to it
                    self._snapshot = self._take()
                if checkpoints is not None:
                    checkpoints.offer(self._snapshot, identity)
        return Outcome(self.result(), list(self.history), self.stopped)

    def result(self) -> optim.Named:
        return self._shown if self.settings.patience is None else self.watch.best_parameters(self._shown)

    @property
    def _shown(self) -> optim.Named:
        return self.parameters if self._mean is None else self._mean

    def advance(self, played: Round) -> Record:
        """To where the round leads; returns its record."""
        out, rows = played.objective, played.rows
        gradient = self.stepper.gradient(out, self.parameters, rows)
        last = self.step + played.steps - 1
        lam = float(optim.from_log(self.parameters)["regularization"]) if "regularization" in self.parameters else 0.0
        record = step_record(self.settings, last, out, lam, optim.norm(gradient), rows, self.seconds)
        record = {name: value for name, value in record.items() if value == value}  # the accuracy of numbers is NaN
        if self._phase is not None:
            record["phase"] = self._phase
        if self.watch.should_stop(out.value + self.stepper.penalty(self.parameters, rows), self.parameters):
            self.stopped = True
        elif played.reached is not None:
            self.parameters, self.state = played.reached
        else:
            rate = self.rate(self.step)
            self.parameters, self.state = self.stepper.move(gradient, self.parameters, self.state, rate)
            if self._after is not None:
                self.parameters = self._after(self.parameters, rate)
        if self._mean is not None:
            kept = min(self._average, (1 + self.step) / (10 + self.step))  # the first steps go far: soon forgotten
            self._mean = {name: kept * self._mean[name] + (1 - kept) * v for name, v in self.parameters.items()}
        self.step += played.steps
        return {**record, **played.facts}

    # --- where it stands -------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return self._earlier + time.perf_counter() - self._began

    def _take(self) -> Snapshot:
        watch = {**self.watch.state(), "stopped": int(self.stopped)}
        state = self.state if self._mean is None else {**self.state, _MEAN: self._mean}
        history = self.history if isinstance(self.history, list) else []
        return Snapshot(self.step, self.parameters, state, watch, self.seconds, history)

    def restore(self, snapshot: Snapshot) -> None:
        self.step, self.parameters, state = snapshot.step, snapshot.parameters, dict(snapshot.optimizer)
        self._mean = state.pop(_MEAN, None)
        self.state = state
        self.watch.restore(snapshot.watch)
        self.stopped = bool(snapshot.watch["stopped"])
        self.history.extend(snapshot.history)
        self._earlier, self._began = snapshot.seconds, time.perf_counter()
        self._snapshot = self._take()

    @contextlib.contextmanager
    def _saved_on_the_way_out(self, checkpoints: Checkpoints | None, identity: dict[str, Any]) -> Iterator[None]:
        """Save the last whole round, whether the run ends well or is interrupted in the middle of the next one."""
        start = self.step
        try:
            yield
        except BaseException:
            if checkpoints is not None and self._snapshot.step > start:
                with contextlib.suppress(KMEError, OSError):  # the first error is the one to report
                    checkpoints.save(self._snapshot, identity)
            raise
        if checkpoints is not None and self.step > start:
            checkpoints.save(self._snapshot, identity)
