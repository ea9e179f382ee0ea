"""A schedule for a machine without cron: `kme-dist schedule CONFIG --cron "0 2 * * *"`.

    times = fire_times("0 2 * * *", "Europe/Berlin")
    keep_schedule(times, start=lambda when: ["kme-dist", "schedule", "nightly.yaml", "--once", "--at", stamp(when)])

Every run is a separate process, started for one scheduled time, so that a crash affects that run only. Runs are jobs
whose id contains that time (see kme_dist.ops.jobs): starting one twice, here or on another machine, gives one result.
Runs never overlap; of the times missed during a run only the last is made up for. Whether a run is retried follows from
its exit code (`should_retry`), the same rule as in the files for cron, systemd and Kubernetes.

    times = backfill_times(trigger, "2026-03-01..2026-03-31", zone)
    backfill(times, start=..., is_done=...)     # in order, each once; the same call resumes where it was stopped

Paths in the configuration may contain `{date}` and `{time}` of the scheduled time (`dated`).
"""

from __future__ import annotations

import datetime
import importlib
import subprocess
import threading
import zoneinfo
from collections.abc import Callable, Iterator
from typing import Any

from kme_dist.config import Config, parse_config
from kme_dist.errors import ConfigError
from kme_dist.ops.jobs import PATH_KEYS

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
        trigger = triggers.CronTrigger.from_crontab(cron, timezone=zone_of(timezone))
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--cron {cron!r} is not a cron expression such as '0 2 * * *': {error}") from None
    if next_time(trigger, utc_now()) is None:
        raise ConfigError(f"--cron {cron!r} names no day that exists; '0 2 * * *' is every night at two")
    return trigger


def next_time(trigger: Any, after: datetime.datetime) -> datetime.datetime | None:
    """The first scheduled time that is not before `after`; None if there is none.

    The trigger counts hours of local days, and so misses a time on the day after clocks were put forward, if it is
    asked from before; asked from later hours as well, it finds all.
    """
    start = after.astimezone(datetime.UTC)
    found: list[datetime.datetime] = []
    for hours in (0, 6, 12, 18, 24):
        when = trigger.get_next_fire_time(None, start + datetime.timedelta(hours=hours))
        if when is None:  # nor from later on
            break
        found.append(when)
    return min(found, default=None)


def _following(trigger: Any, when: datetime.datetime) -> datetime.datetime | None:
    return next_time(trigger, when + datetime.timedelta(microseconds=1))


def zone_of(timezone: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(timezone)
    except (zoneinfo.ZoneInfoNotFoundError, OSError, ValueError):
        raise ConfigError(f"--timezone {timezone!r} is unknown; use a name such as UTC or Europe/Berlin") from None


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
    due = next_time(trigger, clock())
    while due is not None and not stop.is_set():
        while (wait_s := (due - clock()).total_seconds()) > 0:
            if stop.wait(min(wait_s, 60.0)):  # in pieces: after the machine was suspended the time left is different
                return
        while (later := _following(trigger, due)) is not None and later <= clock():
            due = later
        yield due
        due = _following(trigger, due)


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
    say(f"next run at {_stamp_or_never(next_time(trigger, clock()))}")
    for due in scheduled_times(trigger, stop, clock):
        _run_with_retries(due, start, stop, say, pause_s)
        if stop.is_set():
            return
        say(f"next run at {_stamp_or_never(_following(trigger, max(due, clock())))}")


def _stamp_or_never(when: datetime.datetime | None) -> str:
    return "no further time" if when is None else stamp(when)


def _run_with_retries(
    due: datetime.datetime,
    start: Callable[[datetime.datetime], list[str]],
    stop: threading.Event,
    say: Callable[[str], None],
    pause_s: float,
) -> int:
    """The exit code of the last attempt."""
    code = 0
    for attempt in range(1, ATTEMPTS + 1):
        say(f"run of {stamp(due)}, attempt {attempt}")
        code = _run(start(due), stop)
        say(f"run of {stamp(due)} ended with exit code {code}")
        if not should_retry(code, attempt) or stop.wait(pause_s * 2 ** (attempt - 1)):
            break
    return code


# --- times in the past ------------------------------------------------------------------------------


def backfill_times(trigger: Any, text: str, zone: datetime.tzinfo, clock: Clock = utc_now) -> list[datetime.datetime]:
    """The scheduled times of a range `FROM..TO`, both included; a date is the whole day. None of them in the future."""
    first, separator, last = text.partition("..")
    if not separator:
        raise ConfigError(f"--backfill {text!r}: must be FROM..TO, like 2026-03-01..2026-03-31")
    begin, end = _day(first, zone)[0], _day(last, zone)[1]
    if begin >= end:
        raise ConfigError(f"--backfill {text}: ends before it begins")
    times: list[datetime.datetime] = []
    due = next_time(trigger, begin)
    while due is not None and due < end and due <= clock():
        times.append(due)
        due = _following(trigger, due)
    if not times:
        raise ConfigError(f"--backfill {text}: no time of --cron in that range is in the past")
    return times


def _day(text: str, zone: datetime.tzinfo) -> tuple[datetime.datetime, datetime.datetime]:
    """From when to when (not included) a date or a time is."""
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"--backfill: {text!r} is not a date or time; write it like 2026-03-01") from None
    found = found.replace(tzinfo=zone) if found.tzinfo is None else found
    is_date = len(text.strip()) <= len("2026-03-01")
    return found, found + (datetime.timedelta(days=1) if is_date else datetime.timedelta(microseconds=1))


def backfill(
    times: list[datetime.datetime],
    *,
    start: Callable[[datetime.datetime], list[str]],
    is_done: Callable[[datetime.datetime], bool],
    stop: threading.Event,
    say: Callable[[str], None],
    pause_s: float = FIRST_PAUSE_S,
) -> int:
    """Run the commands of all times in order, without those that are done; stops at the first that fails, since later
    ones may build on it, and returns its exit code. 0: all are done."""
    left = [due for due in times if not is_done(due)]
    say(f"{len(times)} scheduled times from {stamp(times[0])} to {stamp(times[-1])}, {len(times) - len(left)} done")
    for number, due in enumerate(left):
        code = _run_with_retries(due, start, stop, say, pause_s)
        if code or stop.is_set():
            say(f"stopped at {stamp(due)}, {len(left) - number} left; resume with the same command")
            return code
    return 0


def dated(config: Config, when: datetime.datetime, zone: datetime.tzinfo) -> Config:
    """The configuration of a scheduled time: `{date}` and `{time}` in its paths are those of that time."""
    local = when.astimezone(zone)
    words = {"{date}": f"{local:%Y-%m-%d}", "{time}": f"{local:%Y-%m-%dT%H%M}"}
    tree = config.model_dump(mode="json", exclude_unset=True)
    for section, key in PATH_KEYS:
        text = (tree.get(section) or {}).get(key)
        if isinstance(text, str):
            for word, value in words.items():
                text = text.replace(word, value)
            tree[section][key] = text
    return parse_config(tree, "the configuration")


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
