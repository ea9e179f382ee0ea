"""One writer at a time on one target.

On local disks the lease is a lock that the kernel gives back when its holder dies, so nothing ever waits for a dead
process. In object stores it is an object made by create-if-absent, whose counter the holder advances: a second
writer watches the counter (never a clock) and takes over only when it has stood still for several beats.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread

from kme_dist.data.places import Place
from kme_dist.errors import ConfigError, KMEError, RetryError

Check = Callable[[], None]
BEAT_S = 5.0
BEATS_TO_EXPIRE = 4


@contextlib.contextmanager
def writer_lease(place: Place, *, wait_s: float = 0.0, beat_s: float = BEAT_S) -> Iterator[Check]:
    """Hold the only right to write at `place`; RetryError when somebody else has it for longer than `wait_s`.

    Yields a function to call right before the step that makes the work visible: it raises RetryError when the lease was
    lost in the meantime, because this process stood still for so long that another took over.
    """
    lease = _local_lease(place.path, wait_s) if place.is_local else _remote_lease(place, wait_s, beat_s)
    with lease as check:
        yield check


def _busy(place: Place | Path, holder: str) -> RetryError:
    return RetryError(
        f"{place}: another writer is at work there ({holder}). Wait until it is done, or stop it; then run this again."
    )


def _always_held() -> None:
    """The kernel never takes a lock away from a living process."""


def _whoami() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


@contextlib.contextmanager
def _local_lease(target: Path, wait_s: float) -> Iterator[Check]:
    path = target.with_name(f".{target.name}.lock")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:  # file systems like /proc, where nobody can make a file
            raise ConfigError(f"{target}: no file can be made in {target.parent}. Choose another path.") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise _busy(target, holder) from None
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
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _whoami().encode(), 0)
        yield _always_held
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def _remote_lease(place: Place, wait_s: float, beat_s: float) -> Iterator[Check]:
    if place.address.count("/") < 3:
        raise ConfigError(f"{place}: a whole bucket cannot be one data set; name a path in it, like {place}/data.zarr.")
    # Beside the group, not inside it: sweeping the group must not sweep the lease.
    home, key = place.sibling(""), f"{place.name}.lease"
    home = Place.of(home.address)
    token = uuid.uuid4().hex

    def content(counter: int) -> bytes:
        return json.dumps({"holder": _whoami(), "token": token, "counter": counter}).encode()

    _acquire(home, key, content(0), place, wait_s, beat_s)
    stop, lost = Event(), Event()

    def beat() -> None:
        counter, version = 0, home.version(key)
        while not stop.wait(beat_s):
            counter += 1
            try:
                if version is None or not home.write(key, content(counter), replacing=version):
                    lost.set()
                    return
                version = home.version(key)
            except KMEError:
                continue  # the store stumbled; the next beat tries again, and the commit checks `lost`

    thread = Thread(target=beat, name="kme-lease", daemon=True)
    thread.start()

    def check() -> None:
        if lost.is_set() or token not in home.read(key).decode():
            raise _busy(place, "it took over while this one made no progress")

    try:
        yield check
    finally:
        stop.set()
        thread.join()
        if not lost.is_set():
            home.delete(key)


def _acquire(home: Place, key: str, content: bytes, place: Place, wait_s: float, beat_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while not home.write(key, content, only_if_absent=True):
        seen = home.version(key)
        if seen is None:
            continue
        still = True
        for _ in range(BEATS_TO_EXPIRE):
            time.sleep(beat_s)
            now = home.version(key)
            if now != seen:
                still = False
                break
        if still and home.write(key, content, replacing=seen):
            return
        if not still and now is not None and time.monotonic() >= deadline:
            try:
                holder = str(json.loads(home.read(key)).get("holder", "unknown"))
            except (FileNotFoundError, ValueError):
                holder = "unknown"
            raise _busy(place, holder)
