"""Checkpoints of a learning run: written atomically, verified when read, only the newest kept.

    checkpoints = Checkpoints("runs/covtype/checkpoints", every_steps=50, every_s=60, keep=3)
    checkpoints.resume(identity)            # the newest Snapshot, or None
    checkpoints.offer(snapshot, identity)   # writes if due

`identity` is plain data that identifies the run: settings, starting point, digests of data and plan. A checkpoint of
another run is never resumed and never overwritten; the error names the difference. A damaged checkpoint is skipped for
the one before it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kme_dist.core.optim import Named, State
from kme_dist.data import store
from kme_dist.errors import ConfigError, CorruptError, DataError

FORMAT = "kme-dist/checkpoint"


@dataclass(frozen=True)
class Snapshot:
    """Everything that the next step depends on, except the data."""

    step: int  # steps done
    parameters: Named  # logarithms
    optimizer: State
    watch: dict[str, Any]  # stopping rule: numbers, and `best`, the best iterate, if any
    seconds: float = 0.0  # spent so far
    history: list[dict[str, Any]] = field(default_factory=list)  # records of all steps, if kept


class Checkpoints:
    """A folder of snapshots of one run."""

    def __init__(
        self, folder: str | Path, *, every_steps: int | None = 100, every_s: float | None = 60.0, keep: int = 3
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep={keep}: must be an integer >= 1")
        self.folder = Path(folder)
        self.every_steps, self.every_s, self.keep = every_steps, every_s, keep
        self.damaged: list[str] = []  # skipped by `resume`: path and error
        self._last_step, self._last_time = 0, time.monotonic()

    def beside(self, name: str) -> Checkpoints:
        """A sibling folder for another learner of the same run."""
        folder = self.folder.with_name(f"{self.folder.name}-{name}")
        return Checkpoints(folder, every_steps=self.every_steps, every_s=self.every_s, keep=self.keep)

    def offer(self, snapshot: Snapshot, identity: Mapping[str, Any]) -> bool:
        """Write the snapshot if enough steps or seconds have passed since the last one."""
        steps, seconds = snapshot.step - self._last_step, time.monotonic() - self._last_time
        due = (self.every_steps and steps >= self.every_steps) or (self.every_s and seconds >= self.every_s)
        if due:
            self.save(snapshot, identity)
        return bool(due)

    def save(self, snapshot: Snapshot, identity: Mapping[str, Any]) -> None:
        watch = dict(snapshot.watch)
        slots = {"parameters": snapshot.parameters}
        slots |= {f"optimizer/{slot}": named for slot, named in snapshot.optimizer.items()}
        if (best := watch.pop("best", None)) is not None:
            slots["best"] = best
        arrays = {slot: _flat(named) for slot, named in slots.items()}
        attributes = {
            "format": FORMAT,
            "step": snapshot.step,
            "seconds": snapshot.seconds,
            "watch": {name: _written(value) for name, value in watch.items()},
            "layout": {slot: [_shape_of(name, v) for name, v in named.items()] for slot, named in slots.items()},
            "history": snapshot.history,
            "identity": dict(identity),
        }
        store.save_arrays(self.folder / f"step-{snapshot.step:010d}.zarr", arrays, attributes)
        self._last_step, self._last_time = snapshot.step, time.monotonic()
        for old in self._paths()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
            old.with_name(f".{old.name}.lock").unlink(missing_ok=True)

    def resume(self, identity: Mapping[str, Any]) -> Snapshot | None:
        """The newest complete snapshot; ConfigError if it belongs to another run."""
        for path in reversed(self._paths()):
            try:
                arrays, found = store.load_arrays(path)
                snapshot = _read(arrays, found)
            except (CorruptError, DataError, KeyError, TypeError, ValueError) as error:
                self.damaged.append(f"{path}: {error}")
                continue
            different = _difference(found.get("identity", {}), identity)
            if different:
                raise ConfigError(
                    f"{self.folder} holds checkpoints of another run: {different}. Choose another output.folder, "
                    "start over with --fresh, or restore the settings and data of that run."
                )
            self._last_step, self._last_time = snapshot.step, time.monotonic()
            return snapshot
        return None

    def refuse_beyond(self, steps: int) -> None:
        """ConfigError if the newest snapshot was made after more steps: parameters after fewer are not kept."""
        reached = max((int(path.stem.removeprefix("step-")) for path in self._paths()), default=0)
        if reached > steps:
            raise ConfigError(
                f"{self.folder} has learned {reached} steps, and {steps} are requested: raise learn.steps to {reached} "
                "or more, choose another output.folder, or start over with --fresh"
            )

    def clear(self) -> None:
        """Delete all snapshots."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.zarr"))


def _flat(named: Named) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(np.asarray(value, np.float64).ravel() for value in named.values())])


def _shape_of(name: str, value: np.ndarray) -> list[Any]:
    return [name, list(value.shape), np.dtype(value.dtype).str]


def _read(arrays: Mapping[str, np.ndarray], found: Mapping[str, Any]) -> Snapshot:
    if found.get("format") != FORMAT:
        raise DataError(f"{found.get('format')!r} is not a checkpoint")
    slots: dict[str, Named] = {}
    for slot, layout in found["layout"].items():
        named, start = {}, 0
        for name, shape, *dtype in layout:
            size = math.prod(shape)
            named[name] = arrays[slot][start : start + size].reshape(shape).astype(dtype[0] if dtype else np.float64)
            start += size
        slots[slot] = named
    watch: dict[str, Any] = {name: _number(value) for name, value in found["watch"].items()}
    if "best" in slots:
        watch["best"] = slots.pop("best")
    parameters = slots.pop("parameters")
    optimizer = {slot.removeprefix("optimizer/"): named for slot, named in slots.items()}
    history = list(found.get("history", []))
    return Snapshot(int(found["step"]), parameters, optimizer, watch, float(found["seconds"]), history)


def _written(value: float) -> float | str:
    """As text: JSON has no infinity, and hexadecimal keeps every bit."""
    return value if isinstance(value, int) else float(value).hex()


def _number(value: float | str) -> float:
    return float.fromhex(value) if isinstance(value, str) else value


def _difference(stored: Any, wanted: Any, where: str = "") -> str:
    """The first difference between two trees of plain data, in words; empty if they are equal."""
    if isinstance(stored, Mapping) and isinstance(wanted, Mapping):
        for key in sorted({*stored, *wanted}):
            inner = f"{where}.{key}" if where else str(key)
            if key not in stored or key not in wanted:
                return f"{inner} is {'new' if key in wanted else 'missing'}"
            if different := _difference(stored[key], wanted[key], inner):
                return different
        return ""
    if stored == wanted:
        return ""
    return f"{where} was {_short(stored)}, is now {_short(wanted)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_checkpoints(place: str | Path | Checkpoints | None) -> Checkpoints | None:
    """Checkpoints in a folder, saved by time: steps on features take milliseconds or minutes."""
    if place is None or not isinstance(place, str | Path):
        return place
    return Checkpoints(place, every_steps=None, every_s=30.0)
