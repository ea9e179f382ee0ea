"""Digests inside JSON records, so that a record that was damaged on its disk is noticed when it is read.

    text = json.dumps(seal(record))          # the record with one more key, `digest`
    record = unseal(json.loads(text))        # None if it is damaged

Records without a digest are accepted: earlier versions wrote none, and where damage hit the name of that key, all else
is whole.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kme_dist.errors import CorruptError

DIGEST = "digest"


def seal(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record, which must be plain JSON data, with its digest as last key."""
    return {**record, DIGEST: _digest(record)}


def unseal(record: Any) -> dict[str, Any] | None:
    """The record without its digest; None if it is not an object or does not match its digest."""
    if not isinstance(record, dict):
        return None
    rest = {key: value for key, value in record.items() if key != DIGEST}
    return rest if record.get(DIGEST, _digest(rest)) == _digest(rest) else None


def _digest(record: Mapping[str, Any]) -> str:
    as_read_back = json.loads(json.dumps(record))
    return hashlib.sha256(json.dumps(as_read_back, sort_keys=True).encode()).hexdigest()[:16]


def read_sealed(path: Path, advice: str) -> dict[str, Any] | None:
    """The record in a JSON file; None if there is no such file, CorruptError with `advice` if it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise CorruptError(f"{path} is not valid JSON ({error}); {advice}") from None
    if not isinstance(found, dict):
        raise CorruptError(f"{path} is not a JSON object; {advice}")
    record = unseal(found)
    if record is None:
        raise CorruptError(f"{path} does not match its digest, so it was damaged or edited; {advice}")
    return record
