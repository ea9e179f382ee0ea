"""Columns of Arrow tables as numbers, days and texts.

days_of(pa.array([datetime.date(1970, 1, 2)]))       # 1.0
as_text(pa.array([1.0, 2.5]), "size")                # "1", "2.5"
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kme_dist.errors import DataError

DAY = {"s": 86_400.0, "ms": 86_400e3, "us": 86_400e6, "ns": 86_400e9}
_DATE_TYPES = [pa.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("us", "ns")]


def is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def decoded(array: pa.Array) -> pa.Array:
    """A dictionary as the values that it stands for; any other array as it is."""
    if not pa.types.is_dictionary(array.type):
        return array
    if pa.types.is_string_view(array.type.value_type):  # of polars; Arrow cannot look such texts up by their numbers
        array = array.cast(pa.dictionary(array.type.index_type, pa.string()))
    return array.dictionary_decode()


def days_of(array: pa.Array) -> np.ndarray:
    """Dates and times as days since 1970 (UTC), times of the day and durations as days; NaN where missing."""
    kind = array.type
    if pa.types.is_null(kind):
        return np.full(len(array), np.nan)
    in_one = 1.0 if pa.types.is_date32(kind) else DAY["ms"] if pa.types.is_date64(kind) else DAY[kind.unit]
    whole = array.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
    return np.asarray(whole.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False) / in_one)


def parsed_days(texts: pa.Array) -> np.ndarray | None:
    """The days of texts of one format: ISO 8601 with a time zone or without, or a time of the day; None if they are
    not."""
    texts = texts.cast(pa.string()) if pa.types.is_string_view(texts.type) else texts
    for kind in _DATE_TYPES:
        with contextlib.suppress(pa.ArrowInvalid):
            return days_of(texts.cast(kind))
    if not pc.all(pc.match_substring(texts, ":")).as_py():  # 12 may be anything, 12:00 is a time
        return None
    clock = pc.binary_join_element_wise(pa.scalar("1970-01-01", texts.type), texts, pa.scalar(" ", texts.type))
    with contextlib.suppress(pa.ArrowInvalid):
        return days_of(clock.cast(_DATE_TYPES[0]))
    return None


def as_text(array: pa.Array, column: str) -> pa.Array:
    """A column as strings; integral floats without '.0', so that a key is the same in every format."""
    array = decoded(array)
    if pa.types.is_floating(array.type):
        return pa.array(texts_of(array.to_numpy(zero_copy_only=False)), pa.string())
    try:
        return array if pa.types.is_string(array.type) else array.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        what = f"the column {column!r} holds values of type {array.type}, which are neither numbers nor texts"
        raise DataError(f"{what}; convert them, or leave the column out.") from None


def texts_of(values: np.ndarray) -> list[str | None]:
    plain = values.tolist()
    return [
        None
        if isinstance(v, float) and v != v
        else str(int(v))
        if isinstance(v, (float, bool)) and _whole(v)
        else str(v)
        for v in plain
    ]


def _whole(value: float) -> bool:
    return abs(value) < 1e15 and value == int(value)
