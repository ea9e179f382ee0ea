"""Leases: one writer at a time on one target, one driver at a time of one job.

    with writer_lease(place) as check:
        ...
        check()                    # right before the step that makes the work visible

    lease = EpochLease.take(place, wait_s=60)
    with lease:
        ...
        lease.check()              # raises LeaseLost when another process took over

A `Lease` is an object in a folder or an object store that its holder rewrites every beat with a counter one higher. A
contender watches the object (never the clock of another machine) and takes over when it has not changed for several
beats. There are two kinds:

    WriterLease   `NAME.lease` beside the target, in object stores. On local disks `writer_lease` uses a kernel lock
                  instead, which is released when its holder dies, so nothing ever waits for a dead process.
    EpochLease    `lease/000001.json`, `lease/000002.json`, ... in a job's folder: the process that creates the next
                  epoch holds the lease, and all earlier holders have lost it. Works between hosts that share only the
                  folder, and for holders that hang.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any, ClassVar, Self

from kme_dist.data.places import Place, store_errors
from kme_dist.errors import ConfigError, KMEError, RetryError
from kme_dist.failpoints import passing

Check = Callable[[], None]
_EPOCH_KEY = re.compile(r"lease/(\d{6})\.json")


class LeaseLost(BaseException):
    """Another holder took over. Not an Exception: only the outermost frame may continue after it."""


@dataclass(frozen=True)
class Observation:
    """What a contender sees of a lease: it is alive as long as `state` changes between two observations."""

    state: Any
    free: bool  # nobody holds it, or the holder is known to be dead
    beat_s: float  # how often its holder renews it


class Lease(abc.ABC):
    """A right that one process holds by rewriting an object every `beat_s`."""

    role: ClassVar[str]
    default_beat_s: ClassVar[float]
    beats_to_expire: ClassVar[int]

    def __init__(self, place: Place, holder: str | None = None, beat_s: float | None = None) -> None:
        self.place, self.holder, self.beat_s = place, holder or _this_process(), beat_s or self.default_beat_s
        self._counter = 0
        self._stop, self._renewal_refused = Event(), Event()
        self._thread = Thread(target=self._heartbeat, name="kme-lease", daemon=True)

    @abc.abstractmethod
    def _observe(self) -> Observation: ...

    @abc.abstractmethod
    def _claim(self, seen: Observation) -> bool:
        """Take over from what was seen; False when another contender was faster."""

    @abc.abstractmethod
    def _renew(self) -> bool:
        """Write the counter; False when the lease belongs to another."""

    @abc.abstractmethod
    def _release(self) -> None: ...

    @abc.abstractmethod
    def _current_holder(self) -> str: ...

    @abc.abstractmethod
    def check(self) -> None:
        """Raise when another process took over because this one had stalled."""

    def acquire(self, wait_s: float, finished: Callable[[], bool] = lambda: False) -> bool:
        """Wait until nobody alive holds the lease, and claim it; False when `finished()` comes true before.

        RetryError when a living holder keeps it for longer than `wait_s`. A holder is given the time of its beats to
        prove that it lives, however short `wait_s` is.
        """
        began = since = time.monotonic()
        last: Observation | None = None
        while not finished():
            seen = self._observe()
            changed = last is not None and seen.state != last.state
            if last is None or changed:
                since = time.monotonic()
            last = seen
            expired = time.monotonic() - since >= self.beats_to_expire * seen.beat_s
            if seen.free or expired:
                if self._claim(seen):
                    return True
            elif changed and time.monotonic() - began >= wait_s:
                raise _busy(self.place, self.role, self._current_holder())
            time.sleep(self._poll_s)
        return False

    @property
    def _poll_s(self) -> float:
        return self.beat_s

    def __enter__(self) -> Self:
        self._thread.start()
        passing("lease.after_claim")
        return self

    def __exit__(self, *_: object) -> None:
        passing("lease.before_release")
        self._stop.set()
        self._thread.join()
        self._release()

    def _heartbeat(self) -> None:
        while not self._stop.wait(self.beat_s):
            passing("lease.before_beat")
            self._counter += 1
            try:
                if not self._renew():
                    self._renewal_refused.set()
                    return
            except KMEError:
                continue  # the store failed for a moment; the next beat tries again, and every commit calls `check`


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _busy(place: Place | Path, role: str, holder: str) -> RetryError:
    return RetryError(
        f"{place}: another {role} is at work there ({holder}). Wait until it is done, or stop it; then run this again."
    )


# -------------------------------------------------------------------------------------------------
# One writer on one target


@contextlib.contextmanager
def writer_lease(place: Place, *, wait_s: float = 0.0, beat_s: float | None = None) -> Iterator[Check]:
    """Hold the only right to write at `place`; RetryError when another process has it for longer than `wait_s`.

    Yields a function to call right before each step that changes what others may have written by then, above all the
    one that makes the work visible: it raises RetryError when the lease was lost in the meantime, because this process
    had stalled for so long that another took over. It can be sent to workers.
    """
    if place.is_local:
        with _file_lock(place.path, wait_s) as check:
            yield check
        return
    lease = WriterLease(place, beat_s=beat_s)
    lease.acquire(wait_s)
    with lease:
        yield lease.held


def always_held() -> None:
    """The check on a disk, where the kernel takes no lock away from a living process; and of a task that has none."""


class _HeldInStore:
    """Asks an object store whether a lease is still the one with this token; of a worker's copy, for the driver."""

    def __init__(self, place: Place, home: Place, key: str, token: str, refused: Event | None = None) -> None:
        self._place, self._home, self._key, self._token, self._refused = place, home, key, token, refused

    def __reduce__(self) -> tuple[Any, ...]:
        return _HeldInStore, (self._place, self._home, self._key, self._token)  # events stay in their process

    def __call__(self) -> None:
        if (self._refused is not None and self._refused.is_set()) or not self.is_ours():
            raise _busy(self._place, WriterLease.role, "it took over because this process had stalled")

    def is_ours(self) -> bool:
        try:
            return self._token in self._home.read(self._key).decode(errors="replace")
        except FileNotFoundError:  # the other one is done already
            return False


class WriterLease(Lease):
    """The right to write at one address of an object store."""

    role = "writer"
    default_beat_s = 5.0
    beats_to_expire = 4

    def __init__(self, place: Place, holder: str | None = None, beat_s: float | None = None) -> None:
        if place.address.count("/") < 3:
            raise ConfigError(
                f"{place}: a whole bucket cannot be one data set; name a path in it, like {place}/data.zarr."
            )
        super().__init__(place, holder, beat_s)
        # Beside the group, not inside it: deleting the group must not delete the lease.
        self._home, self._key = Place.of(place.sibling("").address), f"{place.name}.lease"
        self._token = uuid.uuid4().hex
        self._version: str | None = None
        self.held = _HeldInStore(place, self._home, self._key, self._token, self._renewal_refused)

    def _observe(self) -> Observation:
        version = self._home.version(self._key)
        return Observation(version, free=version is None, beat_s=self.beat_s)

    def _claim(self, seen: Observation) -> bool:
        # The version is that of the write itself: one that is looked up later may be that of another holder.
        self._version = self._home.compare_and_write(self._key, self._content(), seen.state)
        return self._version is not None

    def _renew(self) -> bool:
        if self._version is not None:
            self._version = self._home.compare_and_write(self._key, self._content(), self._version)
        return self._version is not None

    def _release(self) -> None:
        if not self._renewal_refused.is_set() and self.held.is_ours():  # never that of another, who needs it
            self._home.delete(self._key)

    def _current_holder(self) -> str:
        try:
            return str(json.loads(self._home.read(self._key)).get("holder", "unknown"))
        except (FileNotFoundError, ValueError):
            return "unknown"

    def check(self) -> None:
        self.held()

    def _content(self) -> bytes:
        return json.dumps({"holder": self.holder, "token": self._token, "counter": self._counter}).encode()


@contextlib.contextmanager
def _file_lock(target: Path, wait_s: float) -> Iterator[Check]:
    path = target.with_name(f".{target.name}.lock")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:  # FileNotFoundError: file systems like /proc, where nobody can create a file
            if error.errno not in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS):
                with store_errors(str(target)):
                    raise
            raise ConfigError(
                f"{target}: cannot create a file in {target.parent} ({error.strerror}). Choose another path."
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise _busy(target, "writer", holder) from None
            time.sleep(0.05)
            continue
        try:
            current = os.stat(path).st_ino == os.fstat(descriptor).st_ino
        except FileNotFoundError:
            current = False
        if current:
            break
        os.close(descriptor)  # the previous holder removed the file between our open and our lock
    try:
        with contextlib.suppress(OSError):  # for people only; a disk may be full
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _this_process().encode(), 0)
        passing("lease.after_claim")
        yield always_held
        passing("lease.before_release")
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


# -------------------------------------------------------------------------------------------------
# One driver of one job


def latest_epoch(place: Place) -> tuple[int, dict[str, Any] | None]:
    """The number of the current epoch and what its holder wrote last; (0, None) before the first."""
    numbers = [int(match[1]) for key in place.sizes("lease") if (match := _EPOCH_KEY.fullmatch(key))]
    if not numbers:
        return 0, None
    try:
        record = json.loads(place.read(_epoch_key(max(numbers))))
    except (FileNotFoundError, ValueError):
        record = {}
    return max(numbers), record if isinstance(record, dict) else {}


def beat_age(place: Place) -> tuple[float | None, float]:
    """Seconds since the holder of the current epoch renewed it (None: there is none), and those after which it counts
    as dead. For what people are shown: who takes over watches the beats instead, and trusts no clock.
    """
    epoch, record = latest_epoch(place)
    limit = EpochLease.beats_to_expire * float((record or {}).get("beat_s") or EpochLease.default_beat_s)
    try:
        beaten = (place.path / _epoch_key(epoch)).stat().st_mtime
    except FileNotFoundError:
        return None, limit
    age = time.time() - beaten
    if age > limit:
        age = _now_at(place.path) - beaten
    return round(max(0.0, age), 1), limit


def _now_at(folder: Path) -> float:
    """The time of the machine that stores the folder: clocks of two hosts may differ by more than a few beats."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as probe:
            return os.stat(probe.name).st_mtime
    except OSError:  # it may be read, not written
        return time.time()


def begin_epoch(place: Place, holder: str) -> None:
    """Take the lease away from its holder, and leave it free."""
    lease = EpochLease(place, holder)
    while not lease.begin(latest_epoch(place)[0] + 1, released=True):
        pass


def _epoch_key(epoch: int) -> str:
    return f"lease/{epoch:06d}.json"


class EpochLease(Lease):
    """One epoch that this process holds; `progress` is written with every beat, for others to see."""

    role = "driver"
    default_beat_s = 2.0
    beats_to_expire = 15  # a factorisation may hold the interpreter for a while, and the beats with it
    poll_s = 0.2

    epoch = 0  # before one is claimed
    progress: dict[str, Any] | None = None

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
        """The next epoch, see `acquire`; None when `finished()` comes true before."""
        lease = cls(place, holder, beat_s)
        return lease if lease.acquire(wait_s, finished) else None

    @property
    def _poll_s(self) -> float:
        return self.poll_s

    def _observe(self) -> Observation:
        epoch, record = latest_epoch(self.place)
        free = record is None or bool(record.get("released")) or _died_here(record)
        return Observation((epoch, record), free, float((record or {}).get("beat_s", self.beat_s)))

    def _claim(self, seen: Observation) -> bool:
        epoch, _ = seen.state
        return self.begin(epoch + 1)

    def begin(self, epoch: int, released: bool = False) -> bool:
        """Create an epoch; False when another process has created it."""
        if not self.place.write(_epoch_key(epoch), self._content(released), only_if_absent=True):
            return False
        self.epoch = epoch
        return True

    def _renew(self) -> bool:
        return self.place.write(_epoch_key(self.epoch), self._content(), sync=False)

    def _release(self) -> None:
        self.place.write(_epoch_key(self.epoch), self._content(released=True), sync=False)

    def _current_holder(self) -> str:
        return str((latest_epoch(self.place)[1] or {}).get("holder", "unknown"))

    @property
    def lost(self) -> bool:
        return self.place.exists(_epoch_key(self.epoch + 1))

    def check(self) -> None:
        if self.lost:
            raise LeaseLost(f"{self.place}: epoch {self.epoch + 1} has begun; {self.holder} has lost the lease")

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


def _machine() -> str:
    """Identifies one space of process ids; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _died_here(record: dict[str, Any]) -> bool:
    """Whether the holder was a process of this machine that no longer exists."""
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
