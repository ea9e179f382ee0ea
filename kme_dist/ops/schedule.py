"""A schedule for a machine without cron: `kme-dist schedule CONFIG --cron "0 2 * * *"`.

    times = fire_times("0 2 * * *", "Europe/Berlin")
    keep_schedule(times, start=lambda when: ["kme-dist", "schedule", "nightly.yaml", "--once", "--at", stamp(when)])

Every run is a separate process, started for one scheduled time, so that a crash affects that run only. Runs are jobs
whose id contains that time (see kme_dist.ops.jobs): starting one twice, here or on another machine, gives one result.
Runs never overlap; of the times missed during a run only the last is made up for. Whether a run is retried follows from
its exit code (`should_retry`), the same rule as in the files for cron, systemd and Kubernetes.
"""

from __future__ import annotations

import datetime
import importlib
import subprocess
import threading
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any

from kme_dist.errors import ConfigError

RETRY_CODE = 75
ATTEMPTS = 3
FIRST_PAUSE_S = 60.0
STOP_S = 30.0  # time for a run to save its state when the schedule is stopped

Clock = Callable[[], datetime.datetime]


def should_retry(exit_code: int, attempt: int) -> bool:
    """Whether a run is retried: only after an infrastructure failure or a death by a signal."""
    return attempt < ATTEMPTS and (exit_code == RETRY_CODE or exit_code < 0)


def fire_times(cron: str, timezone: str = "UTC") -> Any:
    """The times of a cron expression (minute, hour, day, month, weekday), as an APScheduler trigger."""
    try:
        triggers = importlib.import_module("apscheduler.triggers.cron")
    except ModuleNotFoundError:
        raise ConfigError(
            "a schedule requires the package apscheduler; install it with `pip install 'kme-dist[schedule]'`"
        ) from None
    try:
        trigger = triggers.CronTrigger.from_crontab(cron, timezone=zoneinfo.ZoneInfo(timezone))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--cron {cron!r} is not a cron expression such as '0 2 * * *': {error}") from None
    except (zoneinfo.ZoneInfoNotFoundError, OSError):
        raise ConfigError(f"--timezone {timezone!r} is unknown; use a name such as UTC or Europe/Berlin") from None
    if trigger.get_next_fire_time(None, utc_now()) is None:
        raise ConfigError(f"--cron {cron!r} names no day that exists; '0 2 * * *' is every night at two")
    return trigger


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def stamp(when: datetime.datetime) -> str:
    return when.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> datetime.datetime:
    """A scheduled time in ISO 8601; without an offset it is UTC."""
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--at {text!r} is not a time; write it like 2026-03-01T02:00:00Z") from None
    return when.replace(tzinfo=datetime.UTC) if when.tzinfo is None else when


def scheduled_times(trigger: Any, stop: threading.Event, clock: Clock = utc_now) -> Iterator[datetime.datetime]:
    """Yield each scheduled time when it is due, until `stop`; of those missed in the meantime only the last."""
    last: datetime.datetime | None = None
    after = clock()
    while not stop.is_set():
        due = trigger.get_next_fire_time(last, after)
        if due is None:
            return
        while (wait_s := (due - clock()).total_seconds()) > 0:
            if stop.wait(min(wait_s, 60.0)):  # in pieces: after the machine was suspended the time left is different
                return
        while (later := trigger.get_next_fire_time(due, due)) is not None and later <= clock():
            due = later
        yield due
        last, after = due, due


def keep_schedule(
    trigger: Any,
    *,
    start: Callable[[datetime.datetime], list[str]],
    stop: threading.Event,
    say: Callable[[str], None],
    clock: Clock = utc_now,
    pause_s: float = FIRST_PAUSE_S,
) -> None:
    """Run the command of each scheduled time when it is due, until `stop` is set or the trigger has no more times."""
    say(f"next run at {stamp(trigger.get_next_fire_time(None, clock()))}")
    for due in scheduled_times(trigger, stop, clock):
        for attempt in range(1, ATTEMPTS + 1):
            say(f"run of {stamp(due)}, attempt {attempt}")
            code = _run(start(due), stop)
            say(f"run of {stamp(due)} ended with exit code {code}")
            if not should_retry(code, attempt) or stop.wait(pause_s * 2 ** (attempt - 1)):
                break
        if stop.is_set():
            return
        say(f"next run at {stamp(trigger.get_next_fire_time(due, max(due, clock())))}")


def _run(command: list[str], stop: threading.Event) -> int:
    """Run a command and return its exit code; it is stopped with the schedule, with time to save its state."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        while not stop.is_set():
            try:
                return process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                continue
        return _end(process)
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
