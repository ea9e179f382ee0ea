"""The errors that kme-dist raises on purpose.

    KMEError                          exit code
    ├── ConfigError   (ValueError)        2   usage, configuration, arguments
    ├── DataError     (ValueError)        2   the user's tables: shapes, types, missing values, labels
    ├── NumericalError (ArithmeticError)  3   a factorisation or a solve failed after all fallbacks
    ├── CorruptError  (OSError)          65   stored data is damaged or missing
    └── RetryError    (RuntimeError)     75   try again: store unreachable, disk full, lease held, cluster lost

    PrecisionWarning (UserWarning)        -   a result with fewer digits than requested, or for a nearby setting
    AssumptionWarning (UserWarning)       -   how a table was read, where it could be read in another way

A message says what was found, what is required and what to do. Errors are sent between processes, so each one can be
pickled with its attributes. Any other exception is a bug of ours and exits with 1 and a traceback.

Numbers in messages have the right noun: `counted(1, "row")` is "1 row", `counted(2, "class")` is "2 classes".
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from types import FrameType


class KMEError(Exception):
    """Base of all errors of kme-dist; `exit_code` is the exit code of the command line."""

    exit_code = 1


class ConfigError(KMEError, ValueError):
    """A setting is wrong: an unknown name, a value out of range, settings that contradict each other."""

    exit_code = 2


class DataError(KMEError, ValueError):
    """The given data cannot be used as they are."""

    exit_code = 2


class NumericalError(KMEError, ArithmeticError):
    """Linear algebra failed after all fallbacks.

    Attributes: `rows`, `regularization`, `dtype` (None where not known).
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        rows: int | None = None,
        regularization: float | None = None,
        dtype: str | None = None,
    ) -> None:
        super().__init__(message, rows, regularization, dtype)
        self.rows = rows
        self.regularization = regularization
        self.dtype = dtype

    def __str__(self) -> str:
        return str(self.args[0])


class CorruptError(KMEError, OSError):
    """Stored data is damaged, incomplete or not of the format it declares."""

    exit_code = 65


class RetryError(KMEError, RuntimeError):
    """Nothing is wrong with the request; the infrastructure failed. The same command may succeed later."""

    exit_code = 75


class PrecisionWarning(UserWarning):
    """Double precision is not sufficient for the request; a nearby result was computed, and the message says which."""


class AssumptionWarning(UserWarning):
    """A table could be read in several ways; the message says which was chosen and the option that chooses another."""


def warn(words: str, category: type[Warning] = UserWarning) -> None:
    """A warning that points at the line of the user, the nearest one that is not in this package."""
    frame: FrameType | None = sys._getframe()
    package, depth = f"{__name__.partition('.')[0]}.", 1
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(package):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(words, category, stacklevel=depth)


@contextlib.contextmanager
def memory_errors(what: str, remedy: str) -> Iterator[None]:
    """Memory that does not suffice for `what` is a ConfigError that gives the remedy."""
    try:
        yield
    except MemoryError as error:
        raise ConfigError(f"{what}: out of memory ({error}); {remedy}, or give the worker more memory") from None


# --- words of messages that depend on a number ------------------------------------------------------------------


def plural(count: float, noun: str) -> str:
    """The noun for that many: `plural(1, "class")` is "class", `plural(2, "class")` is "classes"."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def counted(count: int, noun: str, form: str = "") -> str:
    """The number, in a format such as ",", and its noun: "1 row", "1,000 rows"."""
    return f"{count:{form}} {plural(count, noun)}"
