"""Progress of the stages of a command: live bars on a terminal, a plain line every few seconds in logs.

    with RunProgress(sys.stderr) as progress:
        learn.run(config, name="digits", listener=progress.listener)

A bar ends at 100 %, or says that learning stopped early. A stage that cannot say how far it is (a factorisation) has a
bar that moves, with the time it has taken. What is shown fits the width of the terminal: of the numbers of a learning
step the first ones, in the order of `kme_dist.models.account`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from kme_dist.models.account import SECONDS_BETWEEN_LINES, numbers_in_words, rate_in_words
from kme_dist.pipelines.folder import Listener

_NAME_WIDTH, _OTHER_WIDTH = 24, 56  # columns of a name, and of everything but the numbers of a step
_STOPPED = "stopped early"


class _TimeColumn(ProgressColumn):
    """The time left; at the end of a bar, and where that is unknown, the time taken."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"{task.fields['ended']} {duration(task.finished_time or 0.0)}".strip())
        left = task.time_remaining
        return Text(duration(task.elapsed or 0.0) if left is None else f"{duration(left)} left")


@dataclass
class _Phase:
    """What is going on: the steps of one objective, or the units of one stage."""

    name: str
    began: float
    first: int  # units that were done at the first report, perhaps by an earlier command
    done: int = 0
    total: int | None = None
    bar: TaskID | None = None
    learning: bool = False

    def rate(self, now: float) -> float:
        return (self.done - self.first) / (now - self.began) if now > self.began else 0.0


class RunProgress:
    """Shows what a `Listener` is told; `progress(record)` is the callback of learning steps."""

    def __init__(
        self, stream: TextIO, *, quiet: bool = False, title: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.title, self.steps_done = title, 0
        self._quiet, self._stream, self._clock = quiet, stream, clock
        self._phase: _Phase | None = None
        self._pending = ""
        self._last_line = clock()
        self._bars: Progress | None = None
        if not quiet and stream.isatty():
            self._bars = Progress(
                TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=_NAME_WIDTH)),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True)),
                TextColumn("{task.fields[numbers]}", table_column=Column(no_wrap=True)),
                _TimeColumn(table_column=Column(no_wrap=True)),
                console=Console(file=stream),
                expand=True,
            )

    def __enter__(self) -> RunProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close()
        else:
            self.flush()
        if self._bars is not None:
            self._bars.stop()

    @property
    def listener(self) -> Listener:
        return Listener(start=self.rename, step=self, progress=self.count, say=self.say, begin=self.begin, end=self.end)

    def rename(self, title: str) -> None:
        """Set the name of the following steps, e.g. that of the next starting point."""
        self.title = title

    def __call__(self, record: Mapping[str, Any]) -> None:
        """A learning step."""
        self.steps_done += 1
        if self._quiet:
            return
        step, steps = int(record["step"]), int(record["steps"])
        name = " ".join(filter(None, (self.title, str(record.get("phase", ""))))) or "learning"
        now, phase = self._clock(), self._of(name, step)
        phase.done, phase.total, phase.learning = step, steps, True
        rate = rate_in_words(phase.rate(now))
        if self._bars is not None:
            self._show(phase, f"{step}/{steps}", self._fitting(f"{numbers_in_words(record)}  {rate}"))
        else:
            left = f"{(steps - step) / phase.rate(now):.0f} s" if phase.rate(now) > 0 else "unknown"
            self._print_later(f"{name}: step {step}/{steps}  {rate}  {numbers_in_words(record)}  ETA {left}", now)

    def count(self, stage: str, done: int, total: int | None) -> None:
        """Rows that are stored or predicted, or the units of another stage."""
        if self._quiet:
            return
        now, phase = self._clock(), self._of(stage, done)
        phase.done, phase.total = done, total
        rate = phase.rate(now)
        of = "" if total is None else f"/{total:,}"
        if self._bars is not None:
            self._show(phase, f"{done:,}{of}", f"{rate:,.0f}/s" if rate >= 10 else "")
        else:
            share = "" if not total else f" of {total:,} ({done / total:.0%})"
            left = f", {duration((total - done) / rate)} left" if total and rate > 0 and done < total else ""
            self._print_later(f"{stage}: {done:,}{share}{f', {rate:,.3g}/s' if rate > 0 else ''}{left}", now)

    def begin(self, stage: str) -> None:
        """A stage that may say nothing until it ends."""
        if self._bars is not None:
            self._close()
            self._show(self._of(stage, 0), "", "")

    def end(self, stage: str) -> None:
        if self._phase is not None and self._phase.name == stage:
            self._close()

    def say(self, line: str) -> None:
        """A message; the lines of a fit that say how far it is move its bar instead."""
        done, total = getattr(line, "done", None), getattr(line, "total", None)
        if self._quiet:
            return
        if self._bars is None:
            self.flush()
            print(line, file=self._stream, flush=True)
        elif done is not None and total is not None:
            self.count(line.partition(":")[0], done, total)
        else:
            self._bars.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def flush(self) -> None:
        """Print the last line of a phase, however short the phase was: before a message, at the end of the phase."""
        if self._pending:
            print(self._pending, file=self._stream, flush=True)
            self._pending = ""

    # --- phases ---

    def _of(self, name: str, done: int) -> _Phase:
        if self._phase is None or self._phase.name != name:
            self._close(replaced=True)
            self._phase = _Phase(name, self._clock(), done)
            self._last_line = self._phase.began
        return self._phase

    def _close(self, replaced: bool = False) -> None:
        """The end of a phase: a full bar, or the last line in a log. A stage that said nothing before a part of it
        began (`replaced`) needs no bar."""
        self.flush()
        phase, self._phase = self._phase, None
        if phase is None or phase.bar is None or self._bars is None:
            return
        if replaced and phase.total is None and not phase.done:
            self._bars.remove_task(phase.bar)
            return
        early = phase.learning and phase.total is not None and phase.done < phase.total
        whole = max(phase.done, 1)
        self._bars.update(phase.bar, completed=whole, total=whole, ended=_STOPPED if early else "")

    def _show(self, phase: _Phase, count: str, numbers: str) -> None:
        assert self._bars is not None
        facts = {"count": count, "numbers": numbers}
        if phase.bar is None:
            phase.bar = self._bars.add_task(phase.name, total=phase.total, completed=phase.done, ended="", **facts)
        self._bars.update(phase.bar, completed=phase.done, total=phase.total, **facts)

    def _fitting(self, numbers: str) -> str:
        """As many of the numbers as the terminal has room for."""
        assert self._bars is not None
        room, shown = self._bars.console.width - _OTHER_WIDTH, ""
        for number in numbers.split("  "):
            if len(shown) + len(number) + 2 > room:
                break
            shown = f"{shown}  {number}" if shown else number
        return shown

    def _print_later(self, line: str, now: float) -> None:
        self._pending = line
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.flush()


def duration(seconds: float) -> str:
    """Seconds as a person writes them: 12 s, 3 min, 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
