"""Progress of learning: a live bar on a terminal, a plain line every few seconds in logs.

    with StepProgress(stream=sys.stderr) as progress:
        clf.fit(X, y, callback=progress)

The callback takes the record of a learning step: `step`, `steps`, `phase`, `objective`, `risk` and `complexity`; if
present also `regularization`, `gradient_norm`, `rows_per_second` and `waiting_share`, the fraction of time that the
workers wait. `progress.rename(...)` sets the name of what follows, e.g. of the next starting point.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kme_dist.models.account import SECONDS_BETWEEN_LINES, numbers_in_words, rate_in_words


class StepProgress:
    """A callback for learning steps that shows rate, objective, risk, complexity and time left."""

    def __init__(self, stream: TextIO, *, quiet: bool = False, title: str = "") -> None:
        self.title = title
        self.steps_done = 0
        self._quiet = quiet
        self._stream = stream
        self._key: tuple[str, str] | None = None
        self._began = self._last_line = time.monotonic()
        self._first_step = 0
        self._pending = ""
        self._bar: Progress | None = None
        if not quiet and stream.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(compact=True, elapsed_when_finished=True),
                console=Console(file=stream),
                expand=True,
            )
            self._task: Any = None

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        self.flush()

    def rename(self, title: str) -> None:
        """Set the name of the following steps."""
        self.title = title

    @property
    def _name(self) -> str:
        return " ".join(filter(None, self._key or ())) or "learning"

    def __call__(self, record: Mapping[str, Any]) -> None:
        self.steps_done += 1
        if self._quiet:
            return
        now, step, steps = time.monotonic(), int(record["step"]), int(record["steps"])
        key = (self.title, str(record.get("phase", "")))
        if key != self._key:
            self.flush()
            self._key, self._began, self._first_step = key, now, step
            self._last_line = now
            if self._bar is not None:
                self._task = self._bar.add_task(self._name, total=steps, numbers="")
        elapsed = now - self._began
        rate = (step - self._first_step) / elapsed if elapsed > 0 else 0.0
        numbers = f"{rate_in_words(rate)}  {numbers_in_words(record)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=steps, numbers=numbers)
        else:
            left = f"{(steps - step) / rate:.0f} s" if rate > 0 else "unknown"
            self._pending = f"{self._name}: step {step}/{steps}  {numbers}  ETA {left}"
            if now - self._last_line >= SECONDS_BETWEEN_LINES:
                self._last_line = now
                self.flush()

    def flush(self) -> None:
        """Print the last line of a phase, however short the phase was: before a message, at the end of the phase."""
        if self._pending:
            print(self._pending, file=self._stream, flush=True)
            self._pending = ""
