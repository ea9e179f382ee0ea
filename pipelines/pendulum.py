"""Swing-up of a pendulum by kernel policy iteration, with dense and with sparse conditional embeddings.   [CME, 5.1]

    kme-dist pendulum configs/pendulum.yaml
    python -m kme_dist.pipelines.pendulum configs/pendulum.yaml --set pendulum.samples=300

The motor is too weak to lift the pendulum directly (torque up to 5, gravity 9.81); it has to be swung up. The dynamics
are known only by `samples` transitions from uniformly drawn states and torques. From them

1. a conditional mean embedding of the next state (sin, cos, velocity) given state and torque is fitted,
2. sparse forms of it are computed along a path of γ, and by incomplete Cholesky for comparison,
3. values V(y) = r(y) + d max_u E[V(S') | y, u] of the sampled next states are iterated to their fixed point,
4. a policy looks `lookahead` steps ahead through the embedding, and is run in the true dynamics from hanging down.

Dynamics: φ'' = (-b φ' + m g l sin φ + u)/(m l²), φ = 0 upright   [Deisenroth, Rasmussen, Peters 2009]
The results are result.json, model.zarr (the dense embedding) and report.html in the run folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kme_dist import ConditionalMeanEmbedding, kernels
from kme_dist.config import MAX_CONFIG_BYTES, parse_yaml
from kme_dist.core import sparse
from kme_dist.errors import ConfigError, KMEError
from kme_dist.report import page as draw

GRAVITY = 9.81
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
UPRIGHT = 0.35  # radians from the top that count as up
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class PendulumConfig(BaseModel):
    """All settings of the example; physical units."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    samples: Annotated[int, Field(ge=10, le=3000)] = Field(default=200, description="transitions to learn from")
    test_samples: Count = Field(default=500, description="transitions to evaluate predictions on")
    seed: int = Field(default=0, ge=0, description="random seed")
    time_step: Positive = Field(default=0.2, description="seconds between decisions")
    torque: Positive = Field(default=5.0, description="largest torque, N m")
    velocity: Positive = Field(default=7.0, description="largest angular velocity of the samples, rad/s")
    mass: Positive = Field(default=1.0, description="kg")
    length: Positive = Field(default=1.0, description="m")
    friction: Positive = Field(default=0.05, description="N m s")
    length_scale: list[Positive] = Field(
        default=[0.8, 0.8, 3.0, 8.0],
        min_length=4,
        max_length=4,
        description="length scales of sin, cos, velocity and torque",
    )
    target_length_scale: list[Positive] = Field(
        default=[0.7, 0.7, 3.5], min_length=3, max_length=3, description="length scales of the next state"
    )
    regularization: Positive = Field(default=5e-4, description="lambda of the dense embedding")
    levels: Annotated[int, Field(ge=2, le=50)] = Field(default=10, description="sparse forms along the path")
    torques: Annotated[int, Field(ge=2, le=101)] = Field(default=15, description="torques to choose from")
    discount: Annotated[float, Field(gt=0, lt=1)] = Field(default=0.9, description="discount factor per step")
    velocity_cost: Annotated[float, Field(ge=0)] = Field(
        default=0.2, description="reward is exp(-angle^2 - this times the squared velocity), as published"
    )
    sweeps: Count = Field(default=60, description="value iterations")
    lookahead: Annotated[int, Field(ge=1, le=3)] = Field(default=2, description="steps that the policy looks ahead")
    seconds: Positive = Field(default=10.0, description="duration of a trial")


class PendulumFile(BaseModel):
    """The config file: settings and output."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    pendulum: PendulumConfig
    output: dict[str, str] = Field(default_factory=dict, description="folder: path of the run folder")


def load(path: str | Path, overrides: Iterable[str] = ()) -> PendulumFile:
    """Read the YAML file and apply `pendulum.key=value` overrides; every mistake is one ConfigError."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} has more than {MAX_CONFIG_BYTES} bytes; is it a data file, not a config?")
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from None
    if not isinstance(tree, dict) or "pendulum" not in tree:
        raise ConfigError(f"{path}: the section `pendulum` is missing; see configs/pendulum.yaml")
    for override in overrides:
        key, equals, text = override.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot or section not in ("pendulum", "output"):
            raise ConfigError(f"--set {override}: must be pendulum.key=value, e.g. --set pendulum.samples=300")
        tree[section] = {**(tree.get(section) or {}), name: parse_yaml(text, f"--set {override}")}
    try:
        found = PendulumFile.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        known = ", ".join(PendulumConfig.model_fields)
        hint = f"; known: {known}" if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{path}: `{key}`: {first['msg']}{hint}") from None
    unknown = sorted(set(found.output) - {"folder"})
    if unknown:
        raise ConfigError(f"{path}: unknown key `output.{unknown[0]}`; known: folder")
    return found


# --- the pendulum ------------------------------------------------------------------------------------------


def advance(
    angle: np.ndarray, velocity: np.ndarray, torque: np.ndarray, c: PendulumConfig
) -> tuple[np.ndarray, np.ndarray]:
    """State after one time step under a constant torque, by Runge-Kutta steps of a hundredth of a second."""
    inertia = c.mass * c.length**2

    def slope(a: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return w, (-c.friction * w + c.mass * GRAVITY * c.length * np.sin(a) + torque) / inertia

    steps = max(1, math.ceil(c.time_step / 0.01))
    h = c.time_step / steps
    for _ in range(steps):
        k1 = slope(angle, velocity)
        k2 = slope(angle + h / 2 * k1[0], velocity + h / 2 * k1[1])
        k3 = slope(angle + h / 2 * k2[0], velocity + h / 2 * k2[1])
        k4 = slope(angle + h * k3[0], velocity + h * k3[1])
        angle = angle + h / 6 * (k1[0] + 2 * k2[0] + 2 * k3[0] + k4[0])
        velocity = velocity + h / 6 * (k1[1] + 2 * k2[1] + 2 * k3[1] + k4[1])
    return angle, velocity


def features(angle: np.ndarray, velocity: np.ndarray) -> np.ndarray:
    """sin, cos, velocity: an angle without a jump."""
    return np.column_stack([np.sin(angle), np.cos(angle), velocity])


def transitions(count: int, c: PendulumConfig, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs (sin, cos, velocity, torque) and next states (sin, cos, velocity) from uniform states and torques."""
    angle = rng.uniform(-np.pi, np.pi, count)
    velocity = rng.uniform(-c.velocity, c.velocity, count)
    torque = rng.uniform(-c.torque, c.torque, count)
    return np.column_stack([features(angle, velocity), torque]), features(*advance(angle, velocity, torque, c))


# --- policy ------------------------------------------------------------------------------------------------


class Policy:
    """Values of the embedding's target states, and the torque of the highest expected value.

    The embedding gives E[V(S') | s, u] = Σ_i a_i(s, u) V(y_i) for any values at its targets y_i, so iterating values
    means iterating a vector. With `lookahead` > 1 the first steps use the expected next state, whose reward is known,
    and only the last uses the values: a few hundred samples resolve the values coarsely.
    """

    def __init__(self, model: ConditionalMeanEmbedding, c: PendulumConfig) -> None:
        self.model, self.config = model, c
        self.torques = np.linspace(-c.torque, c.torque, c.torques)
        self.states = np.asarray(model.embedding_.targets)
        rewards = self.reward(self.states)
        least, most = rewards.min() / (1 - c.discount), 1 / (1 - c.discount)
        weights = self._weights(self.states)
        self.values = rewards
        self.changes = []
        for _ in range(c.sweeps):
            # Weights may be negative, so only the clip makes this a contraction.
            best = (weights @ self.values).reshape(len(rewards), -1).max(axis=1)
            new = np.clip(rewards + c.discount * best, least, most)
            self.changes.append(float(np.abs(new - self.values).max()))
            self.values = new

    def reward(self, states: np.ndarray) -> np.ndarray:
        """exp(-θ² - 0.2 ω²), θ the angle from upright   [CME, 5.1]"""
        angle = np.arctan2(states[:, 0], states[:, 1])
        return np.asarray(np.exp(-(angle**2) - self.config.velocity_cost * states[:, 2] ** 2))

    def _weights(self, states: np.ndarray) -> np.ndarray:
        """a(s, u) for every state and torque, (states x torques, targets)."""
        every = np.column_stack([np.repeat(states, len(self.torques), axis=0), np.tile(self.torques, len(states))])
        return self.model.coefficients(every)

    def gains(self, states: np.ndarray, steps: int) -> np.ndarray:
        """The expected value of every torque, (states, torques)."""
        weights = self._weights(states)
        if steps == 1:
            return np.asarray((weights @ self.values).reshape(len(states), -1))
        ahead = weights @ self.states
        ahead[:, :2] /= np.maximum(np.hypot(ahead[:, 0], ahead[:, 1]), 1e-9)[:, None]
        later = self.gains(ahead, steps - 1).max(axis=1)
        return np.asarray((self.reward(ahead) + self.config.discount * later).reshape(len(states), -1))

    def torque(self, angle: float, velocity: float) -> float:
        state = features(np.array([angle]), np.array([velocity]))
        return float(self.torques[int(self.gains(state, self.config.lookahead)[0].argmax())])


@dataclass(frozen=True)
class Trial:
    """A trial in the true dynamics: angles in (-π, π], 0 upright."""

    angles: np.ndarray
    torques: np.ndarray
    time_step: float

    @property
    def swing_up_seconds(self) -> float | None:
        """The time from which it stays upright until the end; None if it is not upright for the last two seconds."""
        up = np.abs(self.angles) < UPRIGHT
        down = np.flatnonzero(~up)
        first = 0 if not len(down) else int(down[-1]) + 1
        needed = math.ceil(2.0 / self.time_step)
        return None if len(up) - first < needed else first * self.time_step


def attempt(policy: Policy, c: PendulumConfig) -> Trial:
    """From hanging down at rest."""
    angle, velocity = np.pi, 0.0
    angles, torques = [], []
    for _ in range(math.ceil(c.seconds / c.time_step)):
        torque = policy.torque(angle, velocity)
        angles.append(math.atan2(math.sin(angle), math.cos(angle)))
        torques.append(torque)
        a, w = advance(np.array([angle]), np.array([velocity]), np.array([torque]), c)
        angle, velocity = float(a[0]), float(w[0])
    return Trial(np.array(angles), np.array(torques), c.time_step)


# --- the run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """One sparse form, compared with incomplete Cholesky of at least as many entries."""

    density: float
    inputs: int
    targets: int
    penalised: float  # distance of the solution of FISTA, relative to the norm of the dense embedding
    distance: float  # the same after refitting the entries that were kept
    both_sides: float  # incomplete Cholesky of inputs and targets
    one_side: float  # incomplete Cholesky of the inputs alone
    error: float  # held-out error relative to that of the dense embedding
    trial: Trial


def embed(c: PendulumConfig) -> ConditionalMeanEmbedding:
    """The dense embedding of the next state given state and torque."""
    kernel, target = kernels.Gaussian(length_scale=c.length_scale), kernels.Gaussian(length_scale=c.target_length_scale)
    model = ConditionalMeanEmbedding(kernel, target, c.regularization, solver="cholesky", scaling=None)
    return model.fit(*transitions(c.samples, c, np.random.default_rng([c.seed, 0])))


def sparse_levels(
    dense: ConditionalMeanEmbedding, X_test: np.ndarray, Y_test: np.ndarray, c: PendulumConfig
) -> Iterator[Level]:
    """The sparse forms along the path, each with its policy tried."""
    W, K, L = dense.dense_weights()
    baseline, error = _Baseline(W, K, L), -dense.score(X_test, Y_test)
    for form in dense.sparsify(gammas=c.levels):
        count = round(form.density_ * W.size)
        if not count:
            continue
        both, one = baseline.distances(count)
        yield Level(
            form.density_,
            form.inputs_kept_,
            form.targets_kept_,
            form.penalised_distance_,
            form.relative_distance_,
            both,
            one,
            -form.score(X_test, Y_test) / error,
            attempt(Policy(form, c), c),
        )


def run(
    config: PendulumFile, *, name: str = "pendulum", say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Fit, sparsify, run trials, report; returns the content of `result.json`."""
    began, c = time.perf_counter(), config.pendulum
    folder = Path(config.output.get("folder", f"runs/{name}"))
    folder.mkdir(parents=True, exist_ok=True)
    dense = embed(c)
    X_test, Y_test = transitions(c.test_samples, c, np.random.default_rng([c.seed, 1]))
    error = -dense.score(X_test, Y_test)
    rmse = float(np.sqrt(np.mean((dense.predict(X_test) - Y_test) ** 2)))
    say(f"dense embedding of {c.samples} transitions: held-out error {error:.4f}")
    policy = Policy(dense, c)
    trial = attempt(policy, c)
    say(_outcome("dense policy", trial))
    levels = []
    for level in sparse_levels(dense, X_test, Y_test, c):
        levels.append(level)
        say(_outcome(f"{100 * level.density:.1f} % of the entries, distance {level.distance:.3f}", level.trial))
    dense.save(folder / "model.zarr")
    result = _result(c, error, rmse, policy, trial, levels, time.perf_counter() - began)
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    page = _report(name, c, result, trial, levels)
    (folder / "report.html").write_text(page, encoding="utf-8")
    return {**result, "folder": str(folder), "report": str(folder / "report.html")}


def summary(result: dict[str, Any]) -> str:
    """The outcome in one line."""
    up, held = result["swing_up_seconds"], [v for v in result["levels"] if v["swing_up_seconds"] is not None]
    dense = "not held upright" if up is None else f"upright from {up:.1f} s on"
    least = f", down to {100 * min(v['density'] for v in held):.1f} % of the entries" if held else ""
    nearer = "at every level nearer to" if result["sparse_never_farther"] else "not at every level nearer to"
    return f"dense policy {dense}{least}; FISTA is {nearer} the dense embedding than incomplete Cholesky"


class _Baseline:
    """The dense embedding projected on pivots of an incomplete Cholesky factorisation."""

    def __init__(self, W: np.ndarray, K: np.ndarray, L: np.ndarray) -> None:
        self.W, self.K, self.L = W, K, L
        self.inputs, self.targets = sparse.pivots(K, len(K)), sparse.pivots(L, len(L))
        self.whole = sparse.operator_distance(0 * W, W, K, L)

    def distances(self, entries: int) -> tuple[float, float]:
        """With at least `entries` entries: on pivots of both sides, and on pivots of the inputs with all targets."""
        both = min(math.ceil(math.sqrt(entries)), len(self.inputs), len(self.targets))
        one = min(math.ceil(entries / len(self.L)), len(self.inputs))
        every = np.arange(len(self.L))
        square = sparse.project(self.W, self.K, self.L, self.targets[:both], self.inputs[:both])
        tall = sparse.project(self.W, self.K, self.L, every, self.inputs[:one])
        return square.distance / self.whole, tall.distance / self.whole


def _outcome(what: str, trial: Trial) -> str:
    up = trial.swing_up_seconds
    return f"{what}: {'not held upright' if up is None else f'upright from {up:.1f} s on'}"


def _result(
    c: PendulumConfig, error: float, rmse: float, policy: Policy, trial: Trial, levels: list[Level], seconds: float
) -> dict[str, Any]:
    return {
        "samples": c.samples,
        "held_out_error": error,
        "state_rmse": rmse,
        "last_value_change": policy.changes[-1],
        "swing_up_seconds": trial.swing_up_seconds,
        "sparse_never_farther": all(v.penalised <= min(v.both_sides, v.one_side) for v in levels),
        "levels": [
            {
                "density": v.density,
                "inputs_kept": v.inputs,
                "targets_kept": v.targets,
                "relative_distance": v.penalised,
                "relative_distance_refitted": v.distance,
                "incomplete_cholesky_both_sides": v.both_sides,
                "incomplete_cholesky_inputs": v.one_side,
                "held_out_error_relative_to_dense": v.error,
                "swing_up_seconds": v.trial.swing_up_seconds,
            }
            for v in levels
        ],
        "seconds": seconds,
    }


# --- the report ----------------------------------------------------------------------------------------------


def _report(name: str, c: PendulumConfig, result: dict[str, Any], trial: Trial, levels: list[Level]) -> str:
    good = [v for v in levels if v.trial.swing_up_seconds is not None]
    sparsest = min(good, key=lambda v: v.density) if good else max(levels, key=lambda v: v.density)
    share = f"{100 * sparsest.density:.1f} %"
    up = result["swing_up_seconds"]
    pictures = [
        draw.Picture(
            "Distance to the dense embedding, and error, against sparsity",
            sparsity_figure(levels),
            "Left: how far a sparse embedding is from the dense one, as a share of its norm, before and after the kept "
            "entries are refitted; incomplete Cholesky has at least as many entries. Right: error on "
            "held-out transitions as a multiple of the dense embedding's; filled "
            "marks swing the pendulum up and hold it.",
            wide=True,
        ),
        draw.Picture(
            "Swing-up, frame by frame",
            strip_figure(trial),
            "The policy of the dense embedding in the true dynamics, from hanging down. The arc shows the torque: its "
            "side is the direction, its length the size.",
            wide=True,
        ),
        draw.Picture("The policy of the dense embedding", animation(trial, "dense"), "In real time, repeated."),
        draw.Picture(
            f"With {share} of the entries",
            animation(sparsest.trial, "sparse"),
            "The sparsest form that holds it upright.",
        ),
        draw.Picture(
            "Angle and torque",
            time_figure({"dense": trial, f"sparse, {share}": sparsest.trial}),
            "Upright is angle 0, within the grey band.",
            wide=True,
        ),
    ]
    columns = [
        "entries kept",
        "inputs",
        "targets",
        "FISTA",
        "refitted",
        "both sides",
        "inputs only",
        "error",
        "upright from",
    ]
    rows = [
        [
            f"{100 * v.density:.2f} %",
            str(v.inputs),
            str(v.targets),
            f"{v.penalised:.4f}",
            f"{v.distance:.4f}",
            f"{v.both_sides:.4f}",
            f"{v.one_side:.4f}",
            f"{v.error:.2f}",
            "-" if v.trial.swing_up_seconds is None else f"{v.trial.swing_up_seconds:.1f} s",
        ]
        for v in levels
    ]
    return draw.render_html(
        name,
        subtitle=f"Kernel policy iteration from {c.samples} random transitions",
        headline=[
            ("Swing-up", "not reached" if up is None else f"{up:.1f} s", "dense embedding, from hanging down"),
            ("Sparsest that holds", share if good else "none", "of the entries of the dense weights"),
            ("Held-out error", f"{result['held_out_error']:.4f}", "squared distance in the target's Hilbert space"),
            ("State error", f"{result['state_rmse']:.3f}", "root mean square of sin, cos and velocity"),
        ],
        figures=pictures,
        tables=[("Sparse forms compared with incomplete Cholesky", columns, rows)],
        config_text=json.dumps(c.model_dump(), indent=2),
        footer=f"{result['seconds']:.1f} s",
    )


def sparsity_figure(levels: Sequence[Level]) -> str:
    """Distance to the dense embedding and held-out error, both against the share of entries kept."""
    density = [100 * v.density for v in levels]

    def plot(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        curves = (
            ("FISTA", [v.penalised for v in levels], draw.PALETTE[2], "o-"),
            ("FISTA, refitted", [v.distance for v in levels], draw.PALETTE[1], "D-"),
            ("incomplete Cholesky, both sides", [v.both_sides for v in levels], draw.PALETTE[0], "s--"),
            ("incomplete Cholesky, inputs only", [v.one_side for v in levels], draw.PALETTE[4], "^:"),
        )
        for label, values, color, style in curves:
            left.plot(density, values, style, color=color, label=label, linewidth=1.6, markersize=5)
        left.set_ylabel("relative distance to dense")
        left.set_yscale("log")
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(curves))
        for v in levels:
            held = v.trial.swing_up_seconds is not None
            right.plot(100 * v.density, v.error, "o", color=draw.PALETTE[2], fillstyle="full" if held else "none")
        right.plot(density, [v.error for v in levels], color=draw.PALETTE[2], linewidth=1.0)
        right.axhline(1.0, color=draw.INK, linewidth=0.8, linestyle=":")
        right.set_yscale("log")
        right.set_ylabel("error relative to dense")
        for axes in (left, right):
            axes.set_xscale("log")
            axes.set_xlabel("entries kept, %")
            axes.grid(visible=True, axis="y")
            for axis, ticks in ((axes.xaxis, (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)), (axes.yaxis, _TICKS)):
                low, high = axis.get_view_interval()
                axis.set_major_locator(FixedLocator([tick for tick in ticks if low <= tick <= high]))
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axis.set_minor_formatter(NullFormatter())

    return draw.svg(plot, (10.5, 4.2), "sparsity")


def strip_figure(trial: Trial, frames: int = 16) -> str:
    """The pendulum at evenly spaced times until it stays upright, and the torque at each."""
    up = trial.swing_up_seconds
    last = len(trial.angles) if up is None else min(len(trial.angles), round(up / trial.time_step) + 6)
    chosen = np.unique(np.linspace(0, last - 1, frames).round().astype(int))
    largest = float(np.abs(trial.torques).max()) or 1.0

    def plot(figure: Figure) -> None:
        grid = figure.subplots(2, math.ceil(len(chosen) / 2), squeeze=False).ravel()
        for axes in grid:
            axes.axis("off")
        for axes, i in zip(grid, chosen, strict=False):
            angle, torque = trial.angles[i], trial.torques[i] / largest
            x, y = np.sin(angle), np.cos(angle)
            axes.plot([0, x], [0, y], color=draw.INK, linewidth=1.6)
            axes.plot([x], [y], "o", color=draw.PALETTE[1] if abs(angle) < UPRIGHT else draw.PALETTE[2], markersize=8)
            turn = np.linspace(0, torque * np.pi / 2, 20)
            axes.plot(0.4 * np.sin(turn), 0.4 * np.cos(turn), color=draw.PALETTE[0], linewidth=2)
            axes.set_xlim(-1.25, 1.25)
            axes.set_ylim(-1.25, 1.25)
            axes.set_aspect("equal")
            axes.set_title(f"{i * trial.time_step:.1f} s", loc="center", fontsize=9)

    return draw.svg(plot, (10.5, 3.2), "strip")


def time_figure(trials: dict[str, Trial]) -> str:
    """Angle and torque over time, one line for each trial."""

    def plot(figure: Figure) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True)
        top.axhspan(-UPRIGHT, UPRIGHT, color=draw.GRID, alpha=0.6, linewidth=0)
        styles = zip((draw.PALETTE[2], draw.PALETTE[0]), ("-", "--"), strict=True)
        for (label, trial), (color, style) in zip(trials.items(), styles, strict=True):
            moments = np.arange(len(trial.angles)) * trial.time_step
            angles = np.unwrap(trial.angles)  # unwrapped, ending near 0 if it ends upright
            angles -= 2 * np.pi * np.round(angles[-1] / (2 * np.pi))
            top.plot(moments, angles, style, color=color, label=label, linewidth=1.5)
            bottom.step(moments, trial.torques, style, where="post", color=color, linewidth=1.2)
        top.set_ylabel("angle, rad")
        bottom.set_ylabel("torque, N m")
        bottom.set_xlabel("seconds")
        top.legend(loc="upper right")

    return draw.svg(plot, (10.5, 4.2), "time")


def animation(trial: Trial, name: str) -> str:
    """The moving pendulum as an SVG animation without scripts."""
    degrees = np.degrees(np.unwrap(trial.angles))
    values = ";".join(f"{angle:.1f}" for angle in degrees)
    seconds = len(degrees) * trial.time_step
    return (
        '<svg viewBox="-1.3 -1.3 2.6 2.6" role="img" style="max-height: 320px">'
        '<circle r="1" fill="none" stroke="var(--grid)" stroke-width="0.02"/>'
        f'<g id="{name}-arm" transform="rotate({degrees[-1]:.1f})">'
        '<line y2="-1" stroke="currentColor" stroke-width="0.05" stroke-linecap="round"/>'
        f'<circle cy="-1" r="0.12" fill="{draw.PALETTE[2]}"/>'
        f'<animateTransform attributeName="transform" type="rotate" values="{values}" dur="{seconds:.1f}s" '
        'repeatCount="indefinite"/></g><circle r="0.05" fill="currentColor"/></svg>'
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m kme_dist.pipelines.pendulum CONFIG`"""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="PENDULUM.KEY=VALUE")
    typed = parser.parse_args(arguments)
    try:
        result = run(load(typed.config, typed.overrides), name=typed.config.stem, say=lambda line: print(line))
    except KMEError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(summary(result))
    print(f"report: {result['report']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
