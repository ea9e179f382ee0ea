"""Delimited text by Arrow's streaming reader, with errors that name file, row and column.

Arrow reads fast and gives few details when it fails. So the fast path runs first, with checks for what Arrow accepts
(NUL bytes, an unclosed quote), and only on an error the file is read again by Python's csv module, slowly, to find the
first bad place.

Types are fixed by the first block: a column whose first values are numbers is numeric to the end, and a later word in
it is an error with its row, not a silent change of type. Rows count from 0, without the header; lines count from 1, as
in an editor.

Integers that are not the numbers that they are read as (007, or beyond 2**53) are recognised by their bytes while a
file is read; only then its columns of integers are read once more, as texts, to say which value it is, and where.

What the first lines do not determine is said (`TableSource.notes`), or refused with the option that determines it.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pac
import pyarrow.csv as pc

from kme_dist.data.notation import long_integer_among
from kme_dist.data.readers import LEAVE_OUT, Block, FileOptions, Kind, TableSource, check_names, kind_of, open_bytes
from kme_dist.data.validation import long_integer_words
from kme_dist.errors import ConfigError, DataError

_DELIMITERS = ",;\t|"
_MAX_BLOCK = 64 << 20
_SAMPLE = 1_000  # records of the first megabyte that are looked at
_YEARS = range(1900, 2101)
_CODE = re.compile(r"[+-]?0\d+", re.ASCII)
_CODES = r"^\s*[+-]?0\d+\s*$"
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_BINARY = {
    b"PAR1": "a Parquet file",
    b"PK\3\4": "a zip archive (as of npz and xlsx)",
    b"\x93NUMPY": "an npy file",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"BZh": "compressed by bzip2",
    b"\xd0\xcf\x11\xe0": "an old Office document (as of xls)",
}
_LIGHT = np.isin(np.arange(256), list(b" \t+-"))  # bytes before the digits of a number


class _Watched(io.RawIOBase):
    """A byte stream that counts quotes and detects NUL bytes as it is read, and fields that begin like 007 or with 16
    digits; where these cannot be told (`delimiter` is empty), there may be some."""

    def __init__(self, stream: Any, quote: bytes, delimiter: bytes) -> None:
        super().__init__()
        self.stream, self.quote = stream, quote
        self.quotes, self.has_nul, self.has_codes = 0, False, not delimiter
        self._begins = np.zeros(256, bool)  # bytes after which a field begins
        self._begins[list(b"\r\n" + quote + delimiter)] = True
        self._last = b"\n"
        self.end = b""  # is read after the first bytes

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data: bytes = self.stream.read(size if size >= 0 else None)
        data, self.end = data + self.end, b""
        if self.quote:
            self.quotes += data.count(self.quote)
        self.has_nul = self.has_nul or b"\0" in data
        if not self.has_codes and data:
            seen = self._last + data
            self.has_codes, self._last = self._begin_codes(np.frombuffer(seen, np.uint8)), seen[-64:]
        return data

    def _begin_codes(self, text: np.ndarray) -> bool:
        """Whether a field begins like 007 or with 16 digits, after a sign or spaces."""
        run = digits = text - ord("0") < 10  # unsigned: anything below "0" is large
        begins, light = self._begins[text], _LIGHT[text]
        light[1:] &= begins[:-1] | light[:-1]
        begins |= light
        if bool((begins[:-2] & (text[1:-1] == ord("0")) & digits[2:]).any()):
            return True
        for step in (1, 2, 4, 8):
            run = run[:-step] & run[step:]
        return bool((begins[: len(run[1:])] & run[1:]).any())

    def close(self) -> None:
        self.stream.close()
        super().close()


def _wait_for(gone: weakref.ref[_Watched] | None) -> None:
    """Wait until Arrow's threads have released a finished stream.

    They read ahead, and a thread that still holds a Python object when the interpreter shuts down aborts the process.
    """
    deadline = time.monotonic() + 2.0
    while gone is not None and gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)


def open_csv_files(files: list[Path], options: FileOptions) -> TableSource:
    """One or more files with the same columns, read one after another."""
    shapes = [_Shape.of(file, options) for file in files]
    first = shapes[0]
    for shape in shapes[1:]:
        if shape.names != first.names:
            raise DataError(f"{shape.path}: the columns {shape.names} differ from {first.names} in {first.path}.")
    kinds = first.kinds()
    for shape in shapes[1:]:
        shape.integers, shape.codes = first.integers, first.codes

    def blocks(columns: Mapping[str, pa.DataType]) -> Iterator[Block]:
        for shape in shapes:
            yield from shape.blocks(dict(columns))

    name = str(files[0]) if len(files) == 1 else str(files[0].parent)
    return TableSource(name, kinds, None, blocks, first.notes, options, first.codes, first.unnamed)


class _Shape:
    """A file's dialect and column names, what was assumed about them, and the columns of codes such as 007."""

    def __init__(self, path: Path, options: FileOptions, delimiter: str, header: int, names: list[str]) -> None:
        self.path, self.options, self.delimiter, self.names = path, options, delimiter, names
        self.header = header  # number of lines of the header, including empty ones before it; 0: no header
        self.notes: tuple[str, ...] = ()
        self.unnamed: tuple[str, ...] = ()  # columns without a name
        self.has_rows = True
        self.codes: dict[str, str] = {}  # grows while the file is read
        self.integers: set[str] = set()  # columns whose first values are integers, or missing
        self._looked_at: set[str] = set()

    @classmethod
    def of(cls, path: Path, options: FileOptions) -> _Shape:
        try:
            "".encode(options.encoding)
        except LookupError:
            raise ConfigError(f"encoding {options.encoding!r} is unknown to Python.") from None
        for what, text in (("delimiter", options.delimiter), ("quote", options.quote)):
            if text is not None and (len(text) > 1 or not text.isascii() or (what == "delimiter" and not text)):
                raise ConfigError(f"{what} is {text!r}; it must be one ASCII character.")
        delimiter, (fields, *records), lines, notes = _first_records(path, options)
        if any("\0" in field for field in fields):
            raise DataError(f"{path}: a NUL byte in the first line (the header); convert it to utf-8 if it is UTF-16.")
        if any("\ufffd" in field for field in fields):
            raise DataError(f"{path}: bytes in the first line (the header) that are not {options.encoding}. {_CONVERT}")
        header, assumed = _has_header(path, options, fields, records)
        names = [field.strip() or f"column_{i}" for i, field in enumerate(fields)]
        if not header:
            names, records = [f"column_{i}" for i in range(len(fields))], [fields, *records]
        check_names(str(path), names)
        shape = cls(path, options, delimiter, lines if header else 0, names)
        shape.notes = (*notes, *assumed)
        shape.unnamed = tuple(name for name, field in zip(names, fields, strict=True) if header and not field.strip())
        shape.has_rows = bool(records)
        shape.codes = _codes(names, records, options)
        return shape

    def _reader(self, types: dict[str, pa.DataType] | None, block_bytes: int) -> tuple[Any, _Watched]:
        # UTF-16 and similar encodings contain NUL bytes and quotes before decoding; Arrow decodes after us.
        ascii_like = "".join(map(chr, range(32, 127))).encode(self.options.encoding) == bytes(range(32, 127))
        quote, delimiter = (text.encode() if ascii_like else b"" for text in (self.options.quote, self.delimiter))
        watched = _Watched(open_bytes(self.path), quote, delimiter)
        if ascii_like and not self.has_rows:
            watched.end = b"\n"  # for a header without one
        reader = pc.open_csv(
            pa.PythonFile(watched, mode="r"),
            read_options=pc.ReadOptions(
                use_threads=True,
                block_size=block_bytes,
                column_names=self.names,
                skip_rows=self.header,
                encoding=self.options.encoding,
            ),
            parse_options=pc.ParseOptions(
                delimiter=self.delimiter,
                quote_char=self.options.quote or False,
                double_quote=True,
                newlines_in_values=True,
                ignore_empty_lines=True,
            ),
            convert_options=pc.ConvertOptions(
                column_types=types,
                include_columns=list(types) if types is not None else None,
                null_values=list(self.options.missing_texts),
                strings_can_be_null=True,
                check_utf8=True,
                decimal_point=self.options.decimal,
                true_values=["true", "True", "TRUE"],  # and no 1 and 0, of which others are numbers
                false_values=["false", "False", "FALSE"],
            ),
        )
        return reader, watched

    def kinds(self) -> dict[str, Kind]:
        """The kind of each column, from the first block."""
        try:
            reader, watched = self._reader(None, 1 << 20)
            schema = reader.schema
            reader.close()
            watched.close()
            gone = weakref.ref(watched)
            del reader, watched
            _wait_for(gone)
        except (pa.ArrowInvalid, pa.ArrowKeyError, UnicodeError, OSError) as error:
            raise self._explain(error, {}) from error
        kinds: dict[str, Kind] = {}
        for field in schema:
            if pa.types.is_binary(field.type):
                raise self._explain(DataError("bytes that are not text"), {})
            kinds[field.name] = kind_of(field.type)
            if pa.types.is_integer(field.type) or pa.types.is_null(field.type) or field.name in self.codes:
                self.integers.add(field.name)
        return kinds

    def blocks(self, types: dict[str, pa.DataType]) -> Iterator[Block]:
        # Above a megabyte Arrow's blocks no longer fit the processor's cache and parsing slows down.
        block_bytes = min(self.options.block_bytes, 1 << 20)
        at = 0
        if not types:
            raise ConfigError(f"{self.path}: no column is selected; name at least one feature.")
        reader = watched = gone = None
        try:
            reader, watched = self._reader(types, block_bytes)
            gone = weakref.ref(watched)
            for batch in reader:
                if watched.has_nul and self._is_ascii_like():
                    raise pa.ArrowInvalid("NUL byte")
                if watched.has_codes:
                    self._check_integers(types)
                if batch.num_rows:
                    yield Block(str(self.path), at, table=batch, line_of=self.line_of)
                    at += batch.num_rows
            if watched.quotes % 2:
                self._check_closed_quotes()
            watched.close()
        except (pa.ArrowInvalid, pa.ArrowKeyError, UnicodeError, OSError) as error:
            if isinstance(error, DataError):
                raise
            raise self._explain(error, types) from error
        finally:
            if reader is not None:
                reader.close()
            del reader, watched
            _wait_for(gone)

    def _check_integers(self, types: dict[str, pa.DataType]) -> None:
        """Refuse integers beyond 2**53 that are read as numbers, and labels such as 007 that are read as integers;
        other codes are kept in `codes`, which is said."""
        plain = {name: kind for name, kind in types.items() if name in self.integers and not pa.types.is_string(kind)}
        names = sorted(plain.keys() - self._looked_at)
        self._looked_at.update(names)
        if not names:
            return
        reader, watched = self._reader(dict.fromkeys(names, pa.string()), 1 << 20)
        at = 0
        for batch in reader:
            for name, texts in zip(names, batch.columns, strict=True):
                as_class = pa.types.is_integer(plain[name])
                if not as_class and (row := long_integer_among(texts)) is not None:
                    words = long_integer_words(*2 * [int(texts[row].as_py())])
                    hint = f"subtract an offset, or {LEAVE_OUT} if it is an identifier"
                    raise self._bad_integer(at + row, name, f"{words}; {hint}")
                row = pac.index(pac.match_substring_regex(texts, _CODES), True).as_py()
                if row < 0:
                    continue
                code = texts[row].as_py()
                if as_class:
                    what = f"the label {code!r} would be read as {int(code)}, like the integers before it"
                    raise self._bad_integer(at + row, name, f"{what}; write it so, or list the column in `categories`")
                self.codes.setdefault(name, code.strip())
            at += batch.num_rows
        reader.close()
        watched.close()

    def _bad_integer(self, row: int, column: str, what: str) -> DataError:
        return DataError(f"{Block(str(self.path), row, line_of=self.line_of).place(0)}, column {column!r}: {what}.")

    def _is_ascii_like(self) -> bool:
        return "a".encode(self.options.encoding) == b"a"

    def _check_closed_quotes(self) -> None:
        """An odd number of quotes: harmless inside a field, an error if the last one is not closed."""
        last: tuple[int, int, list[str]] = (-1, self.header, [])
        try:
            for row, line, fields in self._rows(strict=True):
                last = (row, line, fields)
        except csv.Error as error:
            # Strict mode also rejects text after a closing quote, which is read as it is without loss.
            if "unexpected end of data" not in str(error):
                return
            raise DataError(
                f"{self.path}: row {last[0] + 1} (after line {last[1]}), column {self._quoted_column(last[1])}: "
                "a quote "
                "opens and never closes. "
                "Close it, or pass quote='' if quotes are ordinary text here."
            ) from None

    def _quoted_column(self, line: int) -> str:
        """The column of the opening quote in the row that starts after `line`."""
        with open_bytes(self.path) as raw:
            text = io.TextIOWrapper(raw, self._decoder(), newline=None)
            rest = "".join(part for i, part in enumerate(text) if line <= i < line + 100)
        opened = rest.rstrip("\r\n").split(self.delimiter)
        position = next((i for i, field in enumerate(opened) if field.startswith(self.options.quote)), 0)
        return repr(self.names[min(position, len(self.names) - 1)])

    def _rows(self, strict: bool = False) -> Iterator[tuple[int, int, list[str]]]:
        """Row number (from 0), line number (from 1) and fields of each row, by Python's csv module."""
        csv.field_size_limit(2**31 - 1)
        with open_bytes(self.path) as raw:
            text = io.TextIOWrapper(raw, self._decoder(), newline="")
            reader = csv.reader(text, delimiter=self.delimiter, strict=strict, **_quoting(self.options))
            row = -1 if self.header else 0
            for fields in reader:
                if not fields:
                    continue
                if row >= 0:
                    yield row, reader.line_num, fields
                row += 1

    def line_of(self, row: int) -> int | None:
        """The line of a row; None if the file no longer is what it was."""
        try:
            return next((line for number, line, _ in self._rows() if number == row), None)
        except (UnicodeError, csv.Error, OSError, pa.ArrowInvalid):
            return None

    def _decoder(self) -> str:
        return (
            "utf-8-sig"
            if self.options.encoding.lower().replace("_", "-") in ("utf-8", "utf8")
            else self.options.encoding
        )

    def _explain(self, error: Exception, types: dict[str, pa.DataType]) -> DataError:
        """Read the file again to find the first bad place."""
        row, line = -1, self.header
        try:
            for row, line, fields in self._rows():
                if complaint := self._complaint(fields, types):
                    column, what = complaint
                    return DataError(f"{self.path}: row {row} (line {line}), column {column}: {what}")
        except UnicodeError:
            return DataError(
                f"{self.path}: {self._undecodable()}: bytes that are not {self.options.encoding}. {_CONVERT}"
            )
        except csv.Error as bad:
            return DataError(f"{self.path}: row {row + 1} (after line {line}), column 0 or later: {bad}.")
        except (OSError, pa.ArrowInvalid) as bad:
            return DataError(f"{self.path}: the file is damaged after row {row} (line {line}): {bad}.")
        reason = " ".join(str(error).split())[:200]
        where = f"row 0 to {row}, all columns: " if row >= 0 else ""
        return DataError(f"{self.path}: {where}cannot be read as a table ({reason}).")

    def _undecodable(self) -> str:
        """Row and column of the first bytes that do not decode, found by reading the file as bytes."""
        twin = _Shape(self.path, replace(self.options, encoding="latin-1"), self.delimiter, self.header, self.names)
        for row, line, fields in twin._rows():
            for i, field in enumerate(fields):
                try:
                    field.encode("latin-1").decode(self.options.encoding)
                except UnicodeError:
                    column = repr(self.names[i]) if i < len(self.names) else str(i)
                    return f"row {row} (line {line}), column {column}"
        return "the first line (the header)"

    def _complaint(self, fields: list[str], types: dict[str, pa.DataType]) -> tuple[str, str] | None:
        for i, field in enumerate(fields):
            name = repr(self.names[i]) if i < len(self.names) else str(i)
            if "\0" in field:
                return name, "a NUL byte. Clean the file, or convert it to utf-8 if it is UTF-16."
            if len(field) > _MAX_BLOCK or len(field) > min(self.options.block_bytes, 1 << 20):
                return name, f"a field of {len(field)} characters; no number or class name is that long."
        if len(fields) != len(self.names):
            column = str(min(len(fields), len(self.names)))
            return column, f"{len(fields)} fields instead of {len(self.names)} (delimiter {self.delimiter!r})."
        for name, field in zip(self.names, fields, strict=True):
            wanted = types.get(name)
            if wanted is None or pa.types.is_string(wanted) or field in self.options.missing_texts:
                continue
            good = _is_number(field) if not pa.types.is_boolean(wanted) else field.strip().lower() in _BOOLEANS
            if good and pa.types.is_integer(wanted):
                good = _integer(field) is not None
            if not good:
                what = "true or false" if pa.types.is_boolean(wanted) else "a number"
                if pa.types.is_integer(wanted):
                    what = "an integer"
                hint = f"correct it, or, before a fit, {LEAVE_OUT}"
                return repr(name), f"{field[:60]!r} is not {what}, as this column requires; {hint}."
        return None


_CONVERT = "Convert the file to utf-8, or ingest it with its encoding, e.g. latin-1."
_BOOLEANS = ("true", "false")


def _quoting(options: FileOptions) -> dict[str, Any]:
    return {"quotechar": options.quote} if options.quote else {"quoting": csv.QUOTE_NONE}


def _is_number(field: str) -> bool:
    try:
        value = float(field)
    except ValueError:
        return False
    # Python also accepts 1_000 and "inf"; in a table, as in Arrow, these are not numbers.
    return "_" not in field and (
        math.isfinite(value) or field.strip().lower().lstrip("+-") in ("inf", "infinity", "nan")
    )


def _integer(field: str) -> int | None:
    """An integer of 64 bits; None for anything else."""
    digits = field.strip()
    value = int(digits) if _INTEGER.fullmatch(digits) and len(digits.lstrip("+-0")) < 20 else None
    return value if value is not None and -(2**63) <= value < 2**63 else None


def _first_records(path: Path, options: FileOptions) -> tuple[str, list[list[str]], int, list[str]]:
    """The delimiter, the first records, the number of lines up to the end of the first one, and what was assumed."""
    try:
        with open_bytes(path) as stream:
            raw = bytes(stream.read(1 << 20))
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error
    if (other := next((what for magic, what in _BINARY.items() if raw.startswith(magic)), None)) is not None:
        raise DataError(
            f"{path}: the content is {other}, not text; name the file after its content (.parquet, .npz, .csv.gz, "
            "...), or export it as text."
        )
    head = raw.decode(options.encoding, errors="replace").lstrip("\ufeff")
    lines = [line for line in head.splitlines() if line]
    if not lines:
        raise DataError(f"{path}: the file is empty; it must have a header or at least one row.")
    delimiter, notes = (options.delimiter, []) if options.delimiter else _sniff(lines, path)
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, **_quoting(options))
    records: list[list[str]] = []
    end = 0
    try:
        for fields in reader:
            if fields:
                end = end or reader.line_num
                records.append(fields)
            if len(records) > _SAMPLE:
                break
        notes = [*notes, *_text_after_quotes(path, head, delimiter, end, options)]
    except csv.Error as error:
        if not records:
            raise DataError(f"{path}: the first line, column 0 or later: {error}.") from error
    if len(raw) == 1 << 20 and len(records) > 1:  # the last one may be cut
        del records[-1]
    return delimiter, records, end, notes


def _text_after_quotes(path: Path, head: str, delimiter: str, start: int, options: FileOptions) -> list[str]:
    """A line on the first field such as "p"x, which is read as px, among the first records."""
    if not options.quote or not re.search(
        rf"{re.escape(options.quote)}[^{re.escape(delimiter + options.quote)}\r\n]", head
    ):
        return []
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, strict=True, **_quoting(options))
    try:
        for _ in itertools.islice(reader, _SAMPLE):
            pass
    except csv.Error as error:
        if "expected after" in str(error):
            return [
                f"{path}: text follows the closing quote of a field in line {reader.line_num} and is read as part "
                f"of it ({options.quote}p{options.quote}x as px); if quotes are ordinary text here, pass quote=''"
            ]
    return []


def _sniff(lines: list[str], path: Path) -> tuple[str, list[str]]:
    """The delimiter, and what was assumed: of decimal commas between semicolons there may be more than semicolons."""
    if ".tsv" in path.name or ".tab" in path.name:
        return "\t", []
    outside = ["".join(part for i, part in enumerate(line.split('"')) if i % 2 == 0) for line in lines[:20]]
    best = max(_DELIMITERS, key=outside[0].count)
    within = any(re.fullmatch(r"[+-]?\d+,\d+", field.strip()) for field in outside[0].split(";"))
    if best == "," and within and ";" in outside[0] and len({line.count(";") for line in outside}) == 1:
        return ";", [f"{path}: fields end at ';', since ',' is within numbers; pass delimiter=',' if it is not"]
    return (best if best in outside[0] else ","), []


def _has_header(
    path: Path, options: FileOptions, fields: list[str], records: list[list[str]]
) -> tuple[bool, list[str]]:
    """Whether the first line is the header, and what was assumed in order to say so.

    It is one if none of its fields is a number, or if a text in it is above numbers. Otherwise it is a row, unless its
    numbers look like names (0, 1, 2 or 2019, 2020), which is refused.
    """
    if options.header is not None:
        return options.header, []
    stripped = {field.strip() for field in fields}
    if options.names and stripped.issuperset(options.names):
        return True, []
    if options.names and all(name.startswith("column_") for name in options.names):
        return False, []

    def is_number(field: str) -> bool:
        return _is_number(field if options.decimal == "." else field.replace(options.decimal, ".", 1))

    numbers = [i for i, field in enumerate(fields) if is_number(field)]
    if not numbers:
        return True, []
    below = [record for record in records if len(record) == len(fields)]
    first, choose = fields[numbers[0]].strip(), "set `header` to true or false (--header, --no-header)"
    for i, field in enumerate(fields):
        values = [record[i] for record in below if record[i] not in options.missing_texts]
        if i not in numbers and field.strip() and values and all(map(is_number, values)):
            return True, [
                f"{path}: the first line is the header, although {first!r} is a number, since {field.strip()!r} is "
                f"above numbers; {choose}"
            ]
    if _like_names([fields[i] for i in numbers]) and not (
        below and _like_names([below[0][i] for i in numbers if is_number(below[0][i])])
    ):
        shown = ", ".join(field.strip() for field in fields[:6])
        raise DataError(f"{path}: the first line ({shown}) may be a header or a row; {choose}.")
    named = f"named column_0 to column_{len(fields) - 1}"
    return False, [f"{path}: no header, since {first!r} in the first line is a number; columns are {named}; {choose}"]


def _like_names(numbers: list[str]) -> bool:
    """Two or more increasing integers with equal steps, or years."""
    found = [_integer(number) for number in numbers]
    values = [value for value in found if value is not None]
    if len(values) < 2 or len(values) < len(found):
        return False
    steps = {b - a for a, b in itertools.pairwise(values)}
    return min(steps) > 0 and (len(steps) == 1 or all(value in _YEARS for value in values))


def _codes(names: list[str], records: list[list[str]], options: FileOptions) -> dict[str, str]:
    """Columns of integers of which some are not the numbers that they would be read as: 007, or above 64 bits."""
    found: dict[str, str] = {}
    for i, name in enumerate(names):
        values = [row[i].strip() for row in records if len(row) == len(names) and row[i] not in options.missing_texts]
        if values and all(map(_INTEGER.fullmatch, values)):
            strange = next((value for value in values if _CODE.fullmatch(value) or _integer(value) is None), None)
            if strange is not None:
                found[name] = strange
    return found
