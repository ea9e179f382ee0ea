"""What `verbose` prints during a fit, to stderr.

account = Account(verbose, "MCEClassifier")      # 0: nothing, 1: a short account, 2: also every step
account.say("150 rows, 4 features, 3 classes")
learn(..., callback=account.step)                # a line every few seconds, and one when an objective is done
account.finish_learning()
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from kme_dist.errors import counted

SECONDS_BETWEEN_LINES = 5.0
_SHOWN = (
    ("objective", "q {:.4g}"),
    ("risk", "risk {:.4g}"),
    ("complexity", "r {:.3g}"),
    ("regularization", "lambda {:.3g}"),
    ("gradient_norm", "gradient {:.3g}"),
    ("rows_per_second", "{:,.0f} rows/s"),
    ("waiting_share", "waiting {:.0%}"),
    ("watched_accuracy", "watched accuracy {:.4f}"),
)
_MAIN = ("objective", "risk", "complexity", "regularization", "watched_accuracy")


class Account:
    """A readable account of one fit; `clock` is that of the progress lines."""

    def __init__(
        self,
        level: int,
        name: str,
        patience: Callable[[str], int | None] = lambda phase: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._level, self._name, self._patience, self._clock = int(level), name, patience, clock
        self._began = self._last_line = self._phase_began = clock()
        self._first_step = 0
        self._last: Mapping[str, Any] | None = None
        self._said: set[str] = set()

    def begin(self, line: str) -> None:
        self._print(f"{self._name}: {line}")

    def say(self, line: str) -> None:
        self._print(f"  {line}")

    def _print(self, line: str) -> None:
        if self._level > 0:
            print(line, file=sys.stderr, flush=True)

    def say_once(self, line: str) -> None:
        """For the stages of a fit, which are the same for every candidate."""
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    def step(self, record: Mapping[str, Any]) -> None:
        """Callback of learning."""
        if self._level <= 0:
            return
        now = self._clock()
        if self._last is None or record["phase"] != self._last["phase"]:
            self.finish_learning()
            self._phase_began = self._last_line = now
            self._first_step = int(record["step"])
            self.say(f"{record['phase']}: starts with {_main_numbers(record)}")
        self._last = record
        if self._level > 1 or now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            step, steps, elapsed = int(record["step"]), int(record["steps"]), now - self._phase_began
            rate = (step - self._first_step) / elapsed if elapsed > 0 else 0.0
            left = f"{(steps - step) / rate:.0f} s" if rate > 0 else "unknown"
            numbers = f"{numbers_in_words(record)}  {rate_in_words(rate)}  ETA {left}"
            self.say(f"{record['phase']}: step {step}/{steps}  {numbers}")

    def finish_learning(self) -> None:
        """The line of the objective that was learned last: how many steps, and why no more."""
        if self._last is None:
            return
        last, seconds = self._last, self._clock() - self._phase_began
        step, steps, patience = int(last["step"]), int(last["steps"]), self._patience(str(last["phase"]))
        if step >= steps:
            why = "all steps made"
        else:
            why = "stopped at a plateau" + (f" of {patience} steps" if patience else "")
        self.say(
            f"{last['phase']}: {step} of {counted(steps, 'step')} in {seconds:.1f} s, {why}; {_main_numbers(last)}"
        )
        self._last = None

    def done(self) -> None:
        self.say(f"done in {self._clock() - self._began:.1f} s")


def rate_in_words(steps_per_second: float) -> str:
    if 0 < steps_per_second < 1:
        return f"{1 / steps_per_second:.1f} s/step"
    return f"{steps_per_second:.3g} steps/s"


def numbers_in_words(record: Mapping[str, Any]) -> str:
    """The numbers of a step, with the names of the paper; those missing from the record are omitted."""
    return "  ".join(form.format(record[name]) for name, form in _SHOWN if record.get(name) is not None)


def _main_numbers(record: Mapping[str, Any]) -> str:
    return numbers_in_words({name: record[name] for name in _MAIN if name in record})
