"""Numbers as people write them: a decimal comma, separators between thousands, percent signs.

    Notation(decimal=",", thousands=".").numbers(pa.array(["1.234,5", "7"]))     # 1234.5, 7, and where there is none
    in_other_notation(["1,5", "2,25"])                                          # "1,5": not 1.5 unless asked for
    suggestion(["1,5", "2,25"])                                                 # "set `decimal` to ','"
    like_numbers(["<1.5", "2"])                                                 # "<1.5": in no notation
    unit_of(["1 kg", "2.5 kg"])                                                 # "kg"
    long_integer_among(pa.array(["1", "9007199254740993"]))                     # 1, the row of the first one
    unreadable(pa.array(["1.5", "x"]))                                          # where texts are no numbers for Arrow

A text such as 1,234 may be 1.234 or 1234, so no notation is guessed: one is given, by the names of these options, and
kept with the data set and the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kme_dist.data.validation import LARGEST_INTEGER
from kme_dist.errors import ConfigError

DECIMALS = (".", ",")
THOUSANDS = ("", ",", ".", "_", "'", " ")

# Numbers with a decimal comma, separators between thousands, a percent sign or a currency.
_SPACES = "\u00a0\u2009\u202f"  # that do not break, or are thin: they separate thousands like others
_OTHER = re.compile(rf"[$€£]?\s*[+-]?\d[\d.,_' {_SPACES}]*\s*[%$€£]?")
_MARKS = re.compile(rf"[,_'%$€£ {_SPACES}]")
# A number with something that no notation has: <1.5, (1), 1-, 1.0D+02, −1.5 with the minus sign of typesetters, digits
# of other scripts, a space between thousands that does not break.
_SIGN = r"[+\-\u2212\u2013]?"
_LIKE = re.compile(rf"[(<>=≤≥~≈±]*\s*{_SIGN}\s*\d[\d,_'’٬\s]*([.٫]\d*)?([eEdD]{_SIGN}\d+)?\s*[)\-\u2212+*%‰]*")
_UNIT = re.compile(rf"{_SIGN}\d[\d.,_'\s]*([A-Za-zµμ°Ω][^\d]*)", re.ASCII)
_PLAIN_NUMBER = r"^-?[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?$"  # for Arrow


@dataclass(frozen=True)
class Notation:
    """How numbers are written in a table. A percent sign divides by 100."""

    decimal: str = "."
    thousands: str = ""
    percent: bool = False

    def __post_init__(self) -> None:
        if self.decimal not in DECIMALS:
            raise ConfigError(f"decimal is {self.decimal!r}; it must be '.' or ','.")
        if self.thousands not in THOUSANDS:
            known = ", ".join(map(repr, THOUSANDS[1:]))
            raise ConfigError(f"thousands is {self.thousands!r}; it must be one of {known}, or empty.")
        if self.decimal == self.thousands:
            raise ConfigError(f"decimal and thousands are both {self.decimal!r}; they must differ.")

    @property
    def is_plain(self) -> bool:
        return self == Notation()

    @property
    def _pattern(self) -> str:
        group = f"[ {_SPACES}]" if self.thousands == " " else re.escape(self.thousands)
        # A first group of 0 rules separators out: 0,126 is a fraction.
        whole = rf"([1-9]\d{{0,2}}({group}\d{{3}})+|\d+)" if self.thousands else r"\d+"
        point = re.escape(self.decimal)
        number = rf"({whole}({point}\d*)?|{point}\d+)([eE][+-]?\d+)?"
        return rf"^[+-]?{number}{'( ?%)?' if self.percent else ''}$"

    def accepts(self, text: str) -> bool:
        return re.match(self._pattern, text.strip(), re.ASCII) is not None

    def numbers(self, texts: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """The numbers, NaN where the text is missing or not one; and where it is not one."""
        trimmed = pc.utf8_trim_whitespace(texts)
        good = pc.match_substring_regex(trimmed, self._pattern)
        plain = pc.if_else(good, trimmed, pa.scalar(None, trimmed.type))
        plain = self.without_thousands(plain) if self.thousands else plain
        plain = pc.replace_substring(plain, self.decimal, ".") if self.decimal != "." else plain
        percent = pc.fill_null(pc.ends_with(plain, "%"), False)
        plain = pc.utf8_rtrim(plain, " %")
        found = plain.cast(pa.float64()).to_numpy(zero_copy_only=False)
        found = np.where(percent.to_numpy(zero_copy_only=False), found / 100, found)
        return found, pc.fill_null(pc.invert(good), False).to_numpy(zero_copy_only=False)

    def without_thousands(self, texts: pa.Array) -> pa.Array:
        for mark in (self.thousands, *(_SPACES if self.thousands == " " else "")):
            texts = pc.replace_substring(texts, mark, "") if mark else texts
        return texts

    @property
    def given(self) -> list[str]:
        """The options that differ from the default, in words."""
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return [f"`{name}` to {'true' if value is True else repr(value)}" for name, value in changed]

    def __str__(self) -> str:
        return "set " + " and ".join(self.given)

    def to_json(self) -> dict[str, Any]:
        return {"decimal": self.decimal, "thousands": self.thousands, "percent": self.percent}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Notation:
        return cls(str(stored["decimal"]), str(stored["thousands"]), bool(stored["percent"]))


_OTHERS = tuple(
    Notation(decimal, thousands, percent)
    for percent in (False, True)
    for decimal in DECIMALS
    for thousands in THOUSANDS
    if decimal != thousands and (decimal, thousands, percent) != (".", "", False)
)


def in_other_notation(values: Collection[str]) -> str | None:
    """One of the texts that marks them all as numbers in another notation (1,5, 10%, 1_000); None if they are not."""
    marked = next((value for value in values if _MARKS.search(value.strip())), None)
    whole = marked is not None and all(_OTHER.fullmatch(value.strip()) for value in values)
    return marked if whole else None


def like_numbers(values: Collection[str]) -> str | None:
    """One of the texts that is no number, where all of them look like numbers; None if they do not."""
    strange = next((value for value in values if not Notation().accepts(value)), None)
    return strange if strange is not None and all(_LIKE.fullmatch(value.strip()) for value in values) else None


def unit_of(values: Collection[str]) -> str | None:
    """The unit of texts that are all numbers with one and the same unit; None if they are not."""
    found = {match[1].strip() if (match := _UNIT.fullmatch(value.strip())) else None for value in values}
    return found.pop() if len(found) == 1 and len(values) > 1 else None


def suggestion(values: Collection[str]) -> str:
    """The options with which all of these texts are numbers, the simplest ones."""
    fitting = [notation for notation in _OTHERS if all(map(notation.accepts, values))]
    simple = min((len(notation.given) for notation in fitting), default=0)
    found = " or ".join(str(notation) for notation in fitting if len(notation.given) == simple)
    return found or "write them as 1234.5"


def long_integer_among(texts: pa.Array) -> int | None:
    """The row of the first integer beyond 2**53 among texts; None if there is none."""
    digits = pc.utf8_ltrim(pc.utf8_trim_whitespace(texts), "+-0")
    long = pc.match_substring_regex(digits, r"^[0-9]{17,}$")
    sixteen = pc.match_substring_regex(digits, r"^[0-9]{16}$")
    if pc.any(sixteen).as_py():
        values = pc.if_else(sixteen, digits, pa.scalar(None, digits.type)).cast(pa.int64())
        long = pc.or_(long, pc.fill_null(pc.greater(values, LARGEST_INTEGER), False))
    row: int = pc.index(long, True).as_py()
    return None if row < 0 else row


def unreadable(texts: pa.Array) -> pa.Array:
    """Where texts are not numbers; null where they are missing. Only those that look odd are tried one by one."""
    odd = texts.filter(pc.invert(pc.match_substring_regex(texts, _PLAIN_NUMBER))).unique()
    wrong = [text for text in odd if not _is_castable(text)]
    found = pc.is_in(texts, pa.array([text.as_py() for text in wrong], texts.type))
    return pc.if_else(texts.is_null(), pa.scalar(None, pa.bool_()), found)


def _is_castable(text: pa.Scalar) -> bool:
    try:
        text.cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True
