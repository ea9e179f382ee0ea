"""Faults on request, at named places of the code, for tests of reliability.

    KME_FAILPOINTS="predict.after_chunk@3:kill,commit.before_manifest:hang=5" kme-dist predict ...

Each entry is PLACE[@N]:ACTION. It acts when this process passes the place for the N-th time (the first). Actions:

    kill          SIGKILL to this process
    hang[=S]      wait S seconds; without S until the marker is removed (see `once`), or for ever
    slow=S        wait S seconds, this time and every later time
    raise[=NAME]  OSError with this name of errno (EIO), such as ENOSPC: a full disk
    corrupt       flip one bit in the middle of the largest file that was written there

An entry `once=FOLDER` makes each of the others act in one process only, so that a worker that is started again does not
die for ever: the first process creates the file FOLDER/PLACE, which contains its number, right before it acts. A
test that waits for this file knows that the fault has happened.

The variable is read when this module is imported. Without it `passing` costs one comparison, and nothing can act.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kme_dist.errors import ConfigError

VARIABLE = "KME_FAILPOINTS"
PLACES = {
    "ingest.before_shard": "a worker or the driver has encoded the rows of a shard of a data set",
    "ingest.after_shard": "the shard is stored; no metadata name it",
    "learn.before_batch": "a worker is about to compute the gradient of a batch",
    "learn.after_step": "the driver has updated the parameters; no checkpoint has them",
    "fit.before_part": "a worker is about to compute its part of a sum over all rows",
    "fit.before_combine": "a worker has the parts of a sum and is about to add them",
    "predict.before_chunk": "a worker is about to read the rows of a chunk",
    "predict.after_chunk": "the outputs of a chunk are stored; it has no receipt",
    "predict.after_receipt": "the receipt is stored; the driver does not know of it",
    "predict.after_publish": "the driver has given the outputs of a chunk their final names",
    "commit.before_data_set": "all shards are stored; the attributes that make them a data set are not",
    "commit.before_arrays": "a model or checkpoint is written under a temporary name",
    "commit.after_arrays": "a model or checkpoint has its final name",
    "commit.before_manifest": "all chunks of predictions have receipts; no manifest lists them",
    "commit.before_state": "the manifest is written; the record does not say that the job is complete",
    "commit.after_state": "the record says that the job is complete; the command has not ended",
    "lease.after_claim": "this process has taken a lease and done nothing with it",
    "lease.before_beat": "a heartbeat is due",
    "lease.before_release": "the work is done; the lease is still held",
    "job.before_run": "the driver of a job has its lease; the pipeline has not started",
    "job.before_result": "the pipeline has ended; its result is not stored",
    "job.after_result": "the result is stored; no event says so",
}
ACTIONS = ("kill", "hang", "slow", "raise", "corrupt")

Written = Callable[[], Iterable[Path]]
_SETTING = os.environ.get(VARIABLE, "")


@dataclass(frozen=True)
class Fault:
    """One entry of the variable."""

    place: str
    turn: int
    action: str
    argument: str

    @property
    def seconds(self) -> float | None:
        return float(self.argument) if self.argument else None


def passing(place: str, written: Written | None = None) -> None:
    """Act here if the environment says so. `written`: the local files or folders stored just before, for `corrupt`."""
    if _SETTING:
        _state.passing(place, written)


def parse(setting: str) -> tuple[tuple[Fault, ...], Path | None]:
    """The faults of the variable, and the folder of `once`; ConfigError names what is known."""
    faults, once = [], None
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        if entry.startswith("once="):
            once = Path(entry.removeprefix("once="))
            continue
        name, _, what = entry.partition(":")
        place, _, turn = name.partition("@")
        action, _, argument = what.partition("=")
        if place not in PLACES:
            raise ConfigError(f"{VARIABLE}: unknown place {place!r}; known: {', '.join(PLACES)}")
        if action not in ACTIONS:
            raise ConfigError(f"{VARIABLE}: unknown action {action!r} of {place}; known: {', '.join(ACTIONS)}")
        if turn and not (turn.isdecimal() and int(turn) > 0):
            raise ConfigError(f"{VARIABLE}: {place}@{turn}: the turn must be an integer >= 1")
        _check_argument(place, action, argument)
        faults.append(Fault(place, int(turn or 1), action, argument))
    return tuple(faults), once


def _check_argument(place: str, action: str, argument: str) -> None:
    if action in ("hang", "slow"):
        try:
            valid = float(argument) >= 0 if argument or action == "slow" else True
        except ValueError:
            valid = False
        needed = "a number of seconds >= 0"
    else:
        valid = not argument or (action == "raise" and isinstance(getattr(errno, argument, None), int))
        needed = "a name of errno, such as ENOSPC" if action == "raise" else "nothing"
    if not valid:
        raise ConfigError(f"{VARIABLE}: {place}:{action}={argument}: {action} takes {needed}")


class _State:
    """How often this process has passed each place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: tuple[Fault, ...] | None = None
        self._once: Path | None = None
        self._passed: dict[str, int] = {}

    def passing(self, place: str, written: Written | None) -> None:
        with self._lock:
            if self._faults is None:
                self._faults, self._once = parse(_SETTING)
            count = self._passed[place] = self._passed.get(place, 0) + 1
        for fault in self._faults:
            due = count == fault.turn or (fault.action == "slow" and count > fault.turn)
            if fault.place == place and due and self._first(fault, count):
                self._act(fault, written)

    def _first(self, fault: Fault, count: int) -> bool:
        """Whether no other process was first; a slow one is slow again."""
        if self._once is None:
            return True
        marker = self._once / fault.place
        try:
            with open(marker, "x", encoding="ascii") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return fault.action == "slow" and count > fault.turn and marker.read_text() == str(os.getpid())
        return True

    def _act(self, fault: Fault, written: Written | None) -> None:
        match fault.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "slow":
                time.sleep(fault.seconds or 0.0)
            case "hang":
                self._hang(fault)
            case "raise":
                number = getattr(errno, fault.argument or "EIO")
                raise OSError(number, f"{os.strerror(number)} (failpoint {fault.place})")
            case "corrupt":
                _flip_a_bit(fault.place, written)

    def _hang(self, fault: Fault) -> None:
        marker = None if self._once is None else self._once / fault.place
        end = None if fault.seconds is None else time.monotonic() + fault.seconds
        while (end is None or time.monotonic() < end) and (end is not None or marker is None or marker.exists()):
            time.sleep(0.02)


def _flip_a_bit(place: str, written: Written | None) -> None:
    paths = [] if written is None else written()
    found = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    files = [file for file in found if file.is_file()]
    if not files:
        raise ConfigError(f"{VARIABLE}: {place}:corrupt: no local file is written at this place")
    largest = max(files, key=lambda file: (file.stat().st_size, str(file)))
    body = bytearray(largest.read_bytes())
    body[len(body) // 2] ^= 1
    largest.write_bytes(body)


_state = _State()
