"""Rules for the settings of estimators: declared in a table, checked at the start of `fit`.

    _RULES = {"steps": integer(0), "batch_size": integer(1, optional=True), "dtype": one_of("float32", "float64")}

A rule is a predicate and the error message for values that fail it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kme_dist.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    is_valid: Callable[[Any], bool]
    message: str  # after "name=value"

    def check(self, name: str, value: Any) -> None:
        if not self.is_valid(value):
            raise ConfigError(f"{name}={value!r}{self.message}")


def integer(least: int, *, optional: bool = False) -> Rule:
    """An integer, Python's or NumPy's."""
    return _number(int | np.integer, lambda value: value >= least, f"an integer >= {least}", optional)


def positive(*, optional: bool = False) -> Rule:
    return _number(int | float | np.number, lambda value: 0 < value < math.inf, "a positive number", optional)


def non_negative() -> Rule:
    return _number(int | float | np.number, lambda value: 0 <= value < math.inf, "a number >= 0", False)


def below_one(*, optional: bool = False) -> Rule:
    return _number(int | float | np.number, lambda value: 0 <= value < 1, "a number >= 0 and < 1", optional)


def up_to_one() -> Rule:
    return _number(int | float | np.number, lambda value: 0 < value <= 1, "a number > 0 and <= 1", False)


def one_of(*known: str | None) -> Rule:
    shown = [repr(name) for name in known]
    choices = f"{', '.join(shown[:-1])} or {shown[-1]}"
    return Rule(
        lambda value: (value is None or isinstance(value, str)) and value in known, f" is unknown; choose {choices}"
    )


def class_weights() -> Rule:
    """None, "balanced", or a mapping of labels to numbers >= 0."""

    def is_valid(value: Any) -> bool:
        if isinstance(value, Mapping):
            numbers = [isinstance(v, int | float | np.number) and 0 <= v < math.inf for v in value.values()]
            return bool(numbers) and all(numbers)
        return value is None or (isinstance(value, str) and value == "balanced")

    return Rule(is_valid, ": must be None, 'balanced', or a mapping of labels to numbers >= 0")


def _number(kinds: Any, within: Callable[[Any], bool], wanted: str, optional: bool) -> Rule:
    def is_valid(value: Any) -> bool:
        return (optional and value is None) or (isinstance(value, kinds) and bool(within(value)))

    return Rule(is_valid, f": must be {wanted}{', or None' if optional else ''}")
