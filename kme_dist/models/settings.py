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

from kme_dist.core.kernels.base import Kernel
from kme_dist.errors import ConfigError

RandomState = int | np.random.RandomState | np.random.Generator | None
_SEEDS = 2**31 - 1  # drawn seeds are below; scikit-learn's own splitters take no more than 2**32 - 1


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


def non_negative(*, optional: bool = False) -> Rule:
    return _number(int | float | np.number, lambda value: 0 <= value < math.inf, "a number >= 0", optional)


def below_one(*, optional: bool = False) -> Rule:
    return _number(int | float | np.number, lambda value: 0 <= value < 1, "a number >= 0 and < 1", optional)


def up_to_one() -> Rule:
    return _number(int | float | np.number, lambda value: 0 < value <= 1, "a number > 0 and <= 1", False)


def fraction() -> Rule:
    return _number(int | float | np.number, lambda value: 0 < value < 1, "a number between 0 and 1", False)


def seed() -> Rule:
    """What scikit-learn accepts as `random_state`, and a Generator; see `drawn_seed`."""
    whole = integer(0)

    def is_valid(value: Any) -> bool:
        given = value is None or isinstance(value, np.random.RandomState | np.random.Generator)
        return given or (whole.is_valid(value) and not isinstance(value, bool))

    return Rule(is_valid, f"{whole.message}, a numpy.random.RandomState or Generator, or None")


def jobs() -> Rule:
    return _number(int | np.integer, lambda value: value != 0, "an integer other than 0 (-1: every core)", True)


def drawn_seed(random_state: RandomState) -> int:
    """The seed that `random_state` stands for: itself, a draw from a generator, or a random one for None."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(_SEEDS))
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(_SEEDS))
    return int(random_state)


def one_of(*known: str | None) -> Rule:
    shown = [repr(name) for name in known]
    choices = f"{', '.join(shown[:-1])} or {shown[-1]}"
    return Rule(
        lambda value: (value is None or isinstance(value, str)) and value in known, f" is unknown; choose {choices}"
    )


def truth() -> Rule:
    return Rule(lambda value: isinstance(value, bool | np.bool_), ": must be True or False")


def truth_or(*known: str) -> Rule:
    """True, False, or one of some words."""
    words = " or ".join(repr(name) for name in known)
    return Rule(
        lambda value: isinstance(value, bool | np.bool_) or (isinstance(value, str) and value in known),
        f": must be True, False or {words}",
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


# --- stored -----------------------------------------------------------------------------------------


def to_json(setting: Any) -> Any:
    """A setting as JSON; None if JSON cannot represent it."""
    try:
        return plain(setting)
    except TypeError:
        return None


def plain(value: Any) -> Any:
    """A value as JSON represents it; TypeError if it cannot."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Kernel):
        return value.to_config()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    raise TypeError(f"{type(value).__name__} cannot be represented in JSON")
