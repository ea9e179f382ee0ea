"""Ports for servers that must be told theirs beforehand."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_held = []  # locks of this process, for as long as it lives


def free_port():
    """A port that nobody has, and that nobody is given before it is used.

    To bind port 0 and let go of it is no way to find one: the system may hand the same number to the next connection
    of any process. This one lies below the range the system hands out from, and a locked file keeps other test runs
    on this machine away from it.
    """
    low = 32768
    limits = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if limits.exists():
        low = int(limits.read_text().split()[0])
    first, last = (10_000, low - 1) if low > 11_000 else (1_024, 65_535)
    folder = Path(tempfile.gettempdir()) / f"kme-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    draw = random.Random(os.urandom(8))
    for _ in range(1000):
        port = draw.randint(first, last)
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except OSError:
            lock.close()
            continue
        _held.append(lock)
        return port
    raise OSError(f"no free port between {first} and {last}")
