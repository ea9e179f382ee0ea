"""The right to drive a job, in epochs: whoever creates the next one has it, and all earlier holders have lost it.

    lease = EpochLease.take(place, wait_s=60)
    with lease:
        ...                        # the counter of its object advances meanwhile
        lease.check()              # right before a step that counts: raises LeaseLost when another took over

Each epoch is one object, `lease/000001.json`, made by create-if-absent, so of many contenders one wins, on disks and
in object stores alike. A contender watches the counter of the current holder (never a clock of another machine) and
makes the next epoch when it has stood still for several beats, or at once when the holder gave it back or was a
process of this machine that is gone. Unlike the kernel's locks of `leases.py` this works between hosts that share
nothing but the folder, and for holders that hang.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

from kme_dist.data.places import Place
from kme_dist.errors import KMEError, RetryError

BEAT_S = 2.0
BEATS_TO_EXPIRE = 15  # a factorisation may hold the interpreter for a while, and the beats with it
WATCH_S = 0.2
_KEY = re.compile(r"lease/(\d{6})\.json")


class LeaseLost(BaseException):
    """Another holder took over. Not an Exception: nothing but the outermost frame may go on after it."""


def latest_epoch(place: Place) -> tuple[int, dict[str, Any] | None]:
    """The number of the current epoch and what its holder wrote last; (0, None) before the first."""
    numbers = [int(match[1]) for key in place.sizes("lease") if (match := _KEY.fullmatch(key))]
    if not numbers:
        return 0, None
    try:
        record = json.loads(place.read(_key(max(numbers))))
    except (FileNotFoundError, ValueError):
        record = {}
    return max(numbers), record if isinstance(record, dict) else {}


def begin_epoch(place: Place, holder: str) -> None:
    """Take the job away from whoever has it, and leave it free."""
    while True:
        lease = EpochLease(place, latest_epoch(place)[0] + 1, holder, BEAT_S)
        if place.write(_key(lease.epoch), lease._content(released=True), only_if_absent=True):
            return


def _key(epoch: int) -> str:
    return f"lease/{epoch:06d}.json"


def _machine() -> str:
    """What tells one space of process numbers from another; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _gone(record: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that is no more."""
    machine, process = record.get("machine"), record.get("process")
    if not machine or machine != _machine() or not isinstance(process, int) or process <= 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


class EpochLease:
    """One epoch that this process holds; `progress` travels with its beats, for others to see."""

    def __init__(self, place: Place, epoch: int, holder: str, beat_s: float) -> None:
        self.place, self.epoch, self.holder, self.beat_s = place, epoch, holder, beat_s
        self.progress: dict[str, Any] | None = None
        self._counter = 0
        self._stop = Event()
        self._thread = Thread(target=self._beats, name="kme-epoch", daemon=True)

    @classmethod
    def take(
        cls,
        place: Place,
        *,
        holder: str | None = None,
        wait_s: float = 0.0,
        beat_s: float | None = None,
        finished: Callable[[], bool] = lambda: False,
    ) -> EpochLease | None:
        """The next epoch, as soon as nobody alive holds the current one; None when `finished()` comes true before.

        RetryError when a living holder keeps it for longer than `wait_s`. A holder is given the time of its beats to
        prove that it lives, however short `wait_s` is.
        """
        holder = holder or f"process {os.getpid()} on {socket.gethostname()}"
        beat_s = beat_s or BEAT_S
        began = since = time.monotonic()
        seen: tuple[int, dict[str, Any] | None] | None = None
        while not finished():
            found = latest_epoch(place)
            epoch, record = found
            moved = seen is not None and found != seen
            if found != seen:
                seen, since = found, time.monotonic()
            beat = float((record or {}).get("beat_s", beat_s))
            still = time.monotonic() - since > BEATS_TO_EXPIRE * beat
            if record is None or record.get("released") or still or _gone(record):
                lease = cls(place, epoch + 1, holder, beat_s)
                if place.write(_key(epoch + 1), lease._content(), only_if_absent=True):
                    return lease
            elif moved and time.monotonic() - began >= wait_s:
                raise RetryError(
                    f"{place}: {record.get('holder', 'another process')} is at work on it. Wait until it is done, or "
                    "stop it; then run this again."
                )
            time.sleep(WATCH_S)
        return None

    def __enter__(self) -> EpochLease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.place.write(_key(self.epoch), self._content(released=True), sync=False)

    @property
    def lost(self) -> bool:
        return self.place.exists(_key(self.epoch + 1))

    def check(self) -> None:
        if self.lost:
            raise LeaseLost(f"{self.place}: epoch {self.epoch + 1} has begun, the one of {self.holder} is over")

    def _content(self, released: bool = False) -> bytes:
        record = {
            "holder": self.holder,
            "machine": _machine(),
            "process": os.getpid(),
            "counter": self._counter,
            "beat_s": self.beat_s,
            "progress": self.progress,
            **({"released": True} if released else {}),
        }
        return json.dumps(record, default=str).encode()

    def _beats(self) -> None:
        while not self._stop.wait(self.beat_s):
            self._counter += 1
            try:
                self.place.write(_key(self.epoch), self._content(), sync=False)
            except KMEError:
                continue  # the store stumbled; the next beat tries again, and every step that counts asks `check`
