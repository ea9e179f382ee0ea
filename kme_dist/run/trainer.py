"""The training loop: run a round, update, record, save, stop.

    trainer = Trainer(start, LearnSettings(steps=500, learning_rate=0.1))
    outcome = trainer.run(run_round, identity, checkpoints=Checkpoints("run/checkpoints"), callback=report)

Every learner (kernels, networks, spectral maps, conditional means) provides `run_round`, a function of the number of
steps done and of the parameters that starts a `Round`. Batches and executors are outside this module (see
`kme_dist.run.learn`); parameters, optimiser, prior, stopping rule, averages and checkpoints are inside. A run that was
killed and resumed makes the same steps as an uninterrupted one.

The next round is sent as soon as its parameters are known: after the update, before records and checkpoints are
written. With `settings.delay` 1 it is sent before the round in progress has been collected, with the parameters known
then, so that workers never wait for the driver. For g(θ; t), the gradient of the batches of round t at θ,

    θ_{t+1} = θ_t - η g(θ_t; t)                    delay 0
    θ_{t+1} = θ_t - η g(θ_{max(t-1, 0)}; t)        delay 1: the gradient is one update old
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kme_dist.core import optim
from kme_dist.core.kernels.base import Kernel, length_scale_names
from kme_dist.core.objective import Objective
from kme_dist.errors import KMEError, NumericalError
from kme_dist.failpoints import passing
from kme_dist.run.checkpoints import Checkpoints, Snapshot
from kme_dist.run.executors import Started
from kme_dist.run.learners import LearnSettings, Record, short_digest, without_schedule

HISTORY_RECORDS = 1000  # kept if not all are; the callback receives every one
_MEAN, _SENT = "averaged", "sent"  # their slots among those of the optimiser
_DIVERGED = np.float64(1e100)  # a parameter, or a logarithm of one, that no learning leads to


class LengthScalePrior:
    """½ Σ_d (log ℓ_d - log ℓ_d⁰)² / width²: keeps length scales near their start unless the data say otherwise.

    With one length scale per feature and few rows, features look relevant by chance. Losses are summed over rows and
    the prior is not, so its influence fades with more rows; a batch has its share of it.
    """

    def __init__(
        self,
        kernel: Kernel,
        start: dict[str, np.ndarray],
        settings: LearnSettings,
        rows: int,
        weight: float | None = None,
    ) -> None:
        """`weight` is the sum of the weights of the rows, if they have any."""
        self._names = length_scale_names(kernel) if settings.prior_width else []
        self._common = settings.objective == "calibrated"  # a common factor costs nothing
        self._start = {name: start[name] for name in self._names}
        evaluated = 1 - settings.train_share if settings.objective == "validation" else 1.0
        per_row = 1.0 if settings.risk == "sum" else 1.0 / max(rows if weight is None else weight, 1)
        self._weight = per_row * evaluated / (rows * settings.prior_width**2) if settings.prior_width else 0.0

    def value(self, parameters: dict[str, np.ndarray], batch: int) -> float:
        squares = (np.sum(self._deviation(name, parameters) ** 2) for name in self._names)
        return 0.5 * self._weight * batch * float(sum(squares))

    def add_to(self, gradient: optim.Named, parameters: dict[str, np.ndarray], batch: int) -> optim.Named:
        pull = {name: self._weight * batch * self._deviation(name, parameters) for name in self._names}
        return {name: g + pull.get(name, 0.0) for name, g in gradient.items()}

    def _deviation(self, name: str, parameters: dict[str, np.ndarray]) -> np.ndarray:
        moved = np.asarray(parameters[name] - self._start[name])
        return moved - moved.mean() if self._common else moved


@dataclass(frozen=True)
class Stepper:
    """From gradients to parameters, the same on the driver and on workers."""

    settings: LearnSettings
    names: tuple[str, ...]  # of the learned parameters
    prior: LengthScalePrior | None = None
    after: Callable[[optim.Named, float], optim.Named] | None = None  # see `Trainer`

    @classmethod
    def of(
        cls,
        parameters: optim.Named,
        settings: LearnSettings,
        prior: LengthScalePrior | None = None,
        after: Callable[[optim.Named, float], optim.Named] | None = None,
    ) -> Stepper:
        return cls(without_schedule(settings), tuple(optim.learnable(parameters, settings.frozen)), prior, after)

    def start(self, parameters: optim.Named) -> optim.State:
        return self._optimizer.init({name: parameters[name] for name in self.names})

    def gradient(self, out: Objective, parameters: optim.Named, rows: int) -> optim.Named:
        """Gradient with the share of the prior for a batch of `rows`."""
        own = {name: _finite(out.gradient[name]) for name in self.names}
        return own if self.prior is None else self.prior.add_to(own, parameters, rows)

    def penalty(self, parameters: optim.Named, rows: int) -> float:
        """The value of that share."""
        return 0.0 if self.prior is None else self.prior.value(parameters, rows)

    def move(
        self, gradient: optim.Named, parameters: optim.Named, state: optim.State, rate: float
    ) -> tuple[optim.Named, optim.State]:
        delta, state = self._optimizer.update(optim.clip(gradient, self.settings.clip_norm), state, rate)
        kept = 1 - rate * self.settings.weight_decay
        moved = {name: (kept * parameters[name] if kept < 1 else parameters[name]) + delta[name] for name in delta}
        moved = {**parameters, **moved}
        return (moved if self.after is None else self.after(moved, rate)), state

    @property
    def _optimizer(self) -> optim.Optimizer:
        return optim.optimizer_by_name(self.settings.optimizer)


def _finite(value: np.ndarray) -> np.ndarray:
    return value if np.isfinite(value).all() else np.nan_to_num(value)


class PlateauWatch:
    """Early stopping on a noisy value; keeps the best parameters.

    The value is smoothed over about twenty steps; learning stops when the smoothed value has not decreased by 0.1 % for
    `patience` steps. With patience None it never stops.
    """

    def __init__(self, patience: int | None, smoothing: float = 0.95, tolerance: float = 1e-3) -> None:
        self._patience, self._smoothing, self._tolerance = patience, smoothing, tolerance
        self._mean, self._weight = 0.0, 0.0
        self._best, self._since = math.inf, 0
        self._parameters: dict[str, np.ndarray] | None = None

    def should_stop(self, value: float, parameters: dict[str, np.ndarray], steps: int = 1) -> bool:
        """`value` is the mean over a round of `steps`, which began with these parameters."""
        if self._patience is None:
            return False
        kept = self._smoothing**steps
        self._mean = kept * self._mean + (1 - kept) * value
        self._weight = kept * self._weight + (1 - kept)
        smooth, improved = self._mean / self._weight, False
        if smooth < self._best:
            improved = smooth < self._best - self._tolerance * abs(self._best) or math.isinf(self._best)
            self._best, self._parameters = smooth, parameters
        self._since = 1 if improved else self._since + steps  # a round longer than the patience may have improved
        return self._since > self._patience

    def state(self) -> dict[str, Any]:
        """The complete state, for a checkpoint."""
        numbers = {"mean": self._mean, "weight": self._weight, "least": self._best, "since": self._since}
        return {**numbers, "best": self._parameters}

    def restore(self, state: dict[str, Any]) -> None:
        self._mean, self._weight = state["mean"], state["weight"]
        self._best, self._since, self._parameters = state["least"], state["since"], state.get("best")

    def best_parameters(self, otherwise: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return otherwise if self._parameters is None else self._parameters


# --- the loop ---------------------------------------------------------------------------------------


class Round(NamedTuple):
    """The result of a round: the mean objective and gradient of its batches, and optionally the updated state."""

    objective: Objective
    rows: int  # of one batch
    facts: Record  # added to the record
    steps: int = 1
    reached: tuple[optim.Named, optim.State] | None = None  # None: the trainer makes one update with the gradient


# From the number of steps done before it and the parameters: a round in progress.
RoundFn = Callable[[int, optim.Named], Started[Round]]
# Called after every round with its record and the new parameters.
Callback = Callable[[Record, optim.Named], None]


@dataclass(frozen=True)
class TrainingOutcome:
    """The result of learning: the last iterate, or the best one if a stopping rule is set."""

    parameters: optim.Named
    history: list[Record] = field(repr=False)
    stopped_early: bool = False


class Trainer:
    """Parameters, optimiser state and stopping rule: everything that changes between rounds.

    Parameters
    ----------
    start : parameters as they are learned (positive ones as logarithms)
    settings : steps, rate, optimiser, patience, what is frozen
    prior : on length scales; None: no prior
    after : applied to the parameters after every update, with the rate of the step: a proximal operator
    average : above 0 the outcome, and what the callback sees, is the mean of the parameters over about 1/(1 - average)
        steps
    phase : name in the records; None: the objective
    keep_history : keep every record, also in checkpoints; otherwise only the last ones
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
        keep_history: bool = False,
    ) -> None:
        self.settings, self._average, self._phase = settings, average, phase
        self.parameters: optim.Named = dict(start)
        self._sent = self.parameters  # those that the next round to be collected is evaluated at
        self.stepper = Stepper.of(self.parameters, settings, prior, after)
        self.state = self.stepper.start(self.parameters)
        self._mean: optim.Named | None = dict(start) if average else None
        schedule = settings.schedule or (lambda rate, steps: optim.constant(rate))
        self.rate = schedule(settings.learning_rate, settings.steps)
        self.watch = PlateauWatch(settings.patience)
        self.step, self.stopped = 0, False
        self._keep_history = keep_history
        self.history: list[Record] | deque[Record] = [] if keep_history else deque(maxlen=HISTORY_RECORDS)
        self._began, self._earlier = time.perf_counter(), 0.0
        self._snapshot = self._make_snapshot()

    def run(
        self,
        run_round: RoundFn,
        identity: dict[str, Any],
        checkpoints: Checkpoints | None = None,
        callback: Callback | None = None,
    ) -> TrainingOutcome:
        """Run all remaining rounds, resuming from the last checkpoint if there is one."""
        if checkpoints is not None and (found := checkpoints.resume(identity)) is not None:
            checkpoints.refuse_beyond(self.settings.steps)
            self.restore(found)
        in_flight: deque[Started[Round]] = deque()
        with self._saved_on_exit(checkpoints, identity), _cancelled_on_exit(in_flight):
            self._send(run_round, in_flight)
            while in_flight and not self.stopped:
                record = self.advance(in_flight.popleft().results())
                passing("learn.after_step")
                self._send(run_round, in_flight)  # what follows is done while the workers compute
                if not self._keep_history:  # before the callback, which may fail
                    self._snapshot = self._make_snapshot()
                if callback is not None:
                    callback(record, self._shown)
                self.history.append(record)
                if self._keep_history:  # the callback may add to the record
                    self._snapshot = self._make_snapshot()
                if checkpoints is not None:
                    checkpoints.offer(self._snapshot, identity)
        return TrainingOutcome(self.result(), list(self.history), self.stopped)

    def _send(self, run_round: RoundFn, in_flight: deque[Started[Round]]) -> None:
        """Start the rounds that may be in flight now: one, and `delay` ahead of it."""
        if self.stopped:
            return
        last = min(self.step + self.settings.delay, self.settings.steps - 1)
        for step in range(self.step + len(in_flight), last + 1):
            at = self._sent if step == self.step else self.parameters
            in_flight.append(run_round(step, dict(at)))

    def result(self) -> optim.Named:
        return self._shown if self.settings.patience is None else self.watch.best_parameters(self._shown)

    @property
    def _shown(self) -> optim.Named:
        return self.parameters if self._mean is None else self._mean

    def advance(self, result: Round) -> Record:
        """Update the state by the result of a round; returns its record."""
        out, rows, at = result.objective, result.rows, self._sent
        gradient = self.stepper.gradient(out, at, rows)
        last = self.step + result.steps - 1
        lam = sum(float(value) for value in optim.from_log({k: at[k] for k in at if k == "regularization"}).values())
        record = step_record(self.settings, last, out, lam, optim.norm(gradient), rows, self.seconds)
        record = {name: value for name, value in record.items() if value == value}  # accuracy of numbers is NaN
        if self._phase is not None:
            record["phase"] = self._phase
        before = self.parameters
        if self.watch.should_stop(out.value + self.stepper.penalty(at, rows), at, result.steps):
            self.stopped = True
        elif result.reached is not None:
            self.parameters, self.state = result.reached
        else:
            self.parameters, self.state = self.stepper.move(gradient, self.parameters, self.state, self.rate(self.step))
        if self._mean is not None:
            kept = min(self._average, (1 + self.step) / (10 + self.step))  # forgets the large first steps soon
            self._mean = {name: kept * self._mean[name] + (1 - kept) * v for name, v in self.parameters.items()}
        self._check_size(last)
        self.step += result.steps
        self._sent = before if self.settings.delay else self.parameters
        return {**record, **result.facts}

    def _check_size(self, step: int) -> None:
        """Learning that diverged is an error here: what is made of such parameters fails in many other ways."""
        for name, value in self.parameters.items():
            if not (np.abs(value) < _DIVERGED).all():
                raise NumericalError(
                    f"learning diverged: {name!r} is beyond {_DIVERGED:.0e} after step {step + 1}; lower "
                    f"learning_rate={self.settings.learning_rate:g}"
                )

    # --- state -----------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        return self._earlier + time.perf_counter() - self._began

    def _make_snapshot(self) -> Snapshot:
        watch = {**self.watch.state(), "stopped": int(self.stopped)}
        state = self.state if self._mean is None else {**self.state, _MEAN: self._mean}
        state = {**state, _SENT: self._sent} if self.settings.delay else state
        history = self.history if isinstance(self.history, list) else []
        return Snapshot(self.step, self.parameters, state, watch, self.seconds, history)

    def restore(self, snapshot: Snapshot) -> None:
        self.step, self.parameters, state = snapshot.step, snapshot.parameters, dict(snapshot.optimizer)
        self._mean = state.pop(_MEAN, None)
        self._sent = state.pop(_SENT, self.parameters)
        self.state = state
        self.watch.restore(snapshot.watch)
        self.stopped = bool(snapshot.watch["stopped"])
        self.history.extend(snapshot.history)
        self._earlier, self._began = snapshot.seconds, time.perf_counter()
        self._snapshot = self._make_snapshot()

    @contextlib.contextmanager
    def _saved_on_exit(self, checkpoints: Checkpoints | None, identity: dict[str, Any]) -> Iterator[None]:
        """Save the state after the last complete round, also if the run is interrupted during the next one."""
        start = self.step
        try:
            yield
        except BaseException:
            if checkpoints is not None and self._snapshot.step > start:
                with contextlib.suppress(KMEError, OSError):  # the first error is reported
                    checkpoints.save(self._snapshot, identity)
            raise
        if checkpoints is not None and self.step > start:
            checkpoints.save(self._snapshot, identity)


@contextlib.contextmanager
def _cancelled_on_exit(in_flight: deque[Started[Round]]) -> Iterator[None]:
    """Rounds sent ahead are abandoned if learning stops early or fails."""
    try:
        yield
    finally:
        for started in in_flight:
            started.cancel()


def step_record(
    settings: LearnSettings, step: int, out: Objective, lam: float, gradient_norm: float, rows: int, seconds: float
) -> Record:
    return {
        "step": step + 1,
        "steps": settings.steps,
        "phase": settings.objective,
        "objective": out.value,
        "risk": out.risk,
        "complexity": out.complexity,
        "bound": out.bound,
        "accuracy": out.accuracy,
        "regularization": lam,
        "gradient_norm": gradient_norm,
        "rows": rows,
        "seconds": seconds,
    }


def run_identity(
    settings: LearnSettings, own: Mapping[str, Any], model: Mapping[str, Any], start: Mapping[str, Any], data: str
) -> dict[str, Any]:
    """What must be the same for a checkpoint to be resumed: plain data, with the names of the config."""
    chosen = {name: value for name, value in vars(settings).items() if name != "schedule"}
    for name in ("weight_decay", "delay"):  # unknown to older checkpoints
        if not chosen[name]:
            del chosen[name]
    if settings.schedule is None:
        del chosen["steps"]  # a run may be extended; only a schedule depends on the number of steps
    else:
        chosen["schedule"] = getattr(settings.schedule, "__qualname__", type(settings.schedule).__name__)
    tree = {
        "learn": {**chosen, **own},
        "model": model,
        "start": {name: short_digest(np.asarray(value)) for name, value in start.items()},
        "data": data,
    }
    plain: dict[str, Any] = json.loads(json.dumps(tree, default=vars))
    return plain
