"""Every source as a stream of blocks, so that the code downstream is independent of its format.

    open_source(source, options)   a path, a folder, or an object in memory -> TableSource or MatrixSource

A TableSource yields Arrow record batches with named columns of mixed types (csv, Parquet, Arrow, pandas, Dask data
frames); a MatrixSource yields numeric matrices, optionally with a target (npy, npz, LIBSVM, IDX, Zarr, NumPy, Dask
arrays). Blocks are small (`block_bytes`), come in row order, and record their file and first row, so that later errors
can name both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kme_dist.data.validation import check_collected
from kme_dist.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kme_dist.data.schema import Schema

Kind = Literal["number", "integer", "boolean", "text", "category", "date", "other"]
FORMATS = ("csv", "parquet", "npy", "npz", "libsvm", "idx", "zarr")
_SUFFIXES = {
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".npy": "npy",
    ".npz": "npz",
    ".libsvm": "libsvm",
    ".svm": "libsvm",
    ".svmlight": "libsvm",
    ".zarr": "zarr",
}
COMPRESSIONS = (".gz", ".zst", ".bz2", ".lz4")
MISSING_TEXTS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "#N/A", "?", "-nan", "<NA>")

UTF8 = "utf-8"  # unless another encoding of a text file is given

# Advice for a column that cannot be used; an option of `kme-dist ingest` and a key of section `data` of a config.
LEAVE_OUT = "leave the column out: list it in `exclude`"


@dataclass(frozen=True)
class FileOptions:
    """How to read a file, where its name and content do not determine it."""

    format: str | None = None  # one of FORMATS; None: from the file name
    delimiter: str | None = None  # csv; None: from the first line
    header: bool | None = None  # csv; None: yes, unless the first line contains a number
    names: tuple[str, ...] = ()  # csv: columns that it should have; a first line with all of them is the header
    decimal: str = "."  # csv: "." or ","
    quote: str = '"'
    encoding: str = UTF8
    missing_texts: tuple[str, ...] = MISSING_TEXTS
    target: str | None = None  # the labels: a second file, or a second array of the same npz or zarr
    array: str | None = None  # the array of features of an npz or zarr; None: X, or the only one
    block_bytes: int = 4 << 20
    window: tuple[int, int] | None = None  # only these rows; for sources that can be read from any row


@dataclass(frozen=True)
class Block:
    """Consecutive rows: a record batch, or a matrix with an optional target."""

    origin: str
    first_row: int  # counted within `origin`, from 0; messages count in the same way
    table: pa.RecordBatch | None = None
    matrix: np.ndarray | None = None
    target: np.ndarray | None = None
    weights: np.ndarray | None = None  # of a matrix, where they are no column of it
    line_of: Callable[[int], int | None] | None = None  # of a text file: the line of a row, from 1 as editors count

    def place(self, row: int) -> str:
        """A row of this block in words: the file, the row from 0, and its line in a text file."""
        number = self.first_row + row
        line = None if self.line_of is None else self.line_of(number)
        return f"{self.origin}: row {number}" + ("" if line is None else f" (line {line})")


@dataclass(frozen=True)
class TableSource:
    """Named columns. `blocks({name: type})` streams those, in that order.

    Text formats parse a column as the given type; typed formats return the stored type, which the encoder casts.
    """

    name: str
    kinds: dict[str, Kind]
    rows: int | None
    blocks: Callable[[Mapping[str, pa.DataType]], Iterator[Block]]
    notes: tuple[str, ...] = ()  # what was assumed, in lines
    options: FileOptions | None = None  # of text files: how they are read
    codes: Mapping[str, str] = field(default_factory=dict)  # columns of integers such as 007, with one; grows as read
    unnamed: tuple[str, ...] = ()  # columns whose names were made up
    types: Mapping[str, pa.DataType] = field(default_factory=dict)  # of sources whose columns are stored with a type


@dataclass(frozen=True)
class MatrixSource:
    """A matrix in blocks of rows, with optional feature names and an optional target."""

    name: str
    feature_names: list[str]
    dtype: np.dtype[Any]
    target_dtype: np.dtype[Any] | None
    rows: int | None
    sample_shape: tuple[int, ...]
    blocks: Callable[[], Iterator[Block]]
    class_names: tuple[Any, ...] | None = None  # of targets 0, 1, 2, ..., if the source has them
    whole_targets: bool = False  # float targets whose values are all integers (as LIBSVM writes classes)
    # Of rows that are encoded already: their encoding, the column of the weights that come with the blocks, and where
    # rows were before they came in another order.
    encoding: Schema | None = None
    weight: str | None = None
    positions: Callable[[np.ndarray], np.ndarray] | None = None


Source = TableSource | MatrixSource


def open_source(source: Any, options: FileOptions | None = None) -> Source:
    """Detect the format of `source` and prepare to stream it. Only headers are read."""
    options = options or FileOptions()
    if options.format is not None and options.format not in FORMATS:
        raise ConfigError(f"format {options.format!r} is unknown; choose one of {', '.join(FORMATS)}.")
    if isinstance(source, (TableSource, MatrixSource)):
        return source
    if isinstance(source, (list, tuple)) and source and all(isinstance(item, (str, os.PathLike)) for item in source):
        return _open_files([Path(item) for item in source], options)
    if isinstance(source, (str, os.PathLike)):
        return _open_path(os.fspath(source), options)
    return _open_object(source, options)


def _open_path(text: str, options: FileOptions) -> Source:
    from kme_dist.data.places import Place

    if "://" in text and not text.startswith("file://"):
        from kme_dist.data.matrix_readers import open_zarr

        if options.format not in (None, "zarr"):
            raise ConfigError(
                f"{text}: from object stores only Zarr can be read; copy {options.format} files to a disk first."
            )
        return open_zarr(Place.of(text), options)
    path = Place.of(text).path
    if not path.exists():
        raise DataError(f"{path}: file or folder does not exist.")
    if path.is_file():
        return _open_files([path], options)
    if options.format == "zarr" or (path / "zarr.json").exists():
        from kme_dist.data.matrix_readers import open_zarr

        return open_zarr(Place.of(path), options)
    files = sorted(
        file
        for file in path.rglob("*")
        if file.is_file() and not any(part.startswith(("_", ".")) for part in file.relative_to(path).parts)
    )
    formats = {file: format_of(file, options) for file in files if options.format or _known(file)}
    chosen = set(formats.values())
    if not chosen:
        raise DataError(f"{path}: no file of a known format in this folder; known suffixes: {', '.join(_SUFFIXES)}.")
    if len(chosen) > 1:
        raise DataError(
            f"{path}: the folder contains {' and '.join(sorted(chosen))} files; put each into its own folder."
        )
    return _open_files(list(formats), options, root=path)


def _known(file: Path) -> bool:
    return _bare(file).suffix.lower() in _SUFFIXES


def _bare(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def format_of(path: Path, options: FileOptions) -> str:
    """The format of a file from the option, its name, or its first line."""
    if options.format:
        return options.format
    bare = _bare(path)
    if known := _SUFFIXES.get(bare.suffix.lower()):
        return known
    if re.search(r"idx\d-(ubyte|byte|short|int|float|double)$|\.idx\d?$", bare.name):
        return "idx"
    if bare.suffix.lower() in (".txt", ".data", ".dat"):
        first = first_line(path, options.encoding)
        return "libsvm" if re.match(r"^\S+(\s+\d+:\S+)+\s*(#.*)?$", first) else "csv"
    raise DataError(
        f"{path}: the format cannot be inferred from the file name; rename it to end in one of {', '.join(_SUFFIXES)}, "
        "or ingest it with its format."
    )


def first_line(path: Path, encoding: str) -> str:
    with open_bytes(path) as stream:
        head = stream.read(1 << 16)
    return (
        head.decode(encoding, errors="replace").lstrip("\ufeff").lstrip("\r\n").splitlines()[0] if head.strip() else ""
    )


def open_bytes(path: Path) -> Any:
    """A file's bytes as a stream, decompressed if its suffix is that of gzip, zstd, bz2 or lz4."""
    try:
        return pa.input_stream(str(path), compression="detect")
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be opened ({error}).") from error


def _open_files(files: list[Path], options: FileOptions, root: Path | None = None) -> Source:
    from kme_dist.data import matrix_readers
    from kme_dist.data.csv_reader import open_csv_files

    for file in files:
        if not file.exists():
            raise DataError(f"{file}: file does not exist.")
    formats = {format_of(file, options) for file in files}
    if len(formats) > 1:
        raise DataError(f"the files are of formats {' and '.join(sorted(formats))}; ingest one format at a time.")
    kind = formats.pop()
    if kind == "csv":
        return open_csv_files(files, options)
    if kind == "parquet":
        return _open_parquet(files, root, options)
    if len(files) > 1:
        raise DataError(f"{files[0].parent}: several {kind} files; ingest one of them and append the others.")
    opener = {
        "npy": matrix_readers.open_npy,
        "npz": matrix_readers.open_npz,
        "libsvm": matrix_readers.open_libsvm,
        "idx": matrix_readers.open_idx,
    }.get(kind)
    if opener is None:
        raise DataError(f"{files[0]} is a file; a Zarr array or group is a folder.")
    return opener(files[0], options)


def _open_object(source: Any, options: FileOptions) -> Source:
    if isinstance(source, (pa.Table, pa.RecordBatch)):
        return _arrow_source(pa.table(source) if isinstance(source, pa.RecordBatch) else source, "Arrow table", options)
    if isinstance(source, np.ndarray):
        from kme_dist.data.matrix_readers import numpy_source

        return numpy_source(source, None, "NumPy array", options)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], np.ndarray):
        from kme_dist.data.matrix_readers import numpy_source

        return numpy_source(source[0], np.asarray(source[1]), "NumPy arrays", options)
    module = type(source).__module__.partition(".")[0]
    if module == "pandas":
        return _arrow_source(_from_pandas(source), "pandas data frame", options)
    if module in ("dask", "dask_expr") or (isinstance(source, tuple) and type(source[0]).__module__.startswith("dask")):
        from kme_dist.data.cluster import open_dask

        return open_dask(source, options)
    check_collected(source)
    if hasattr(source, "__arrow_c_stream__"):  # polars and other tables
        return _arrow_source(pa.table(source), f"{module} table", options)
    raise DataError(
        f"a source of type {type(source).__name__} is not supported; give a path, an Arrow table, a pandas "
        "or Dask data frame, "
        "a NumPy or Dask array, or a pair of arrays (X, y)."
    )


# ------------------------------------------------------------------------------------ Arrow, pandas, Parquet


def kind_of(data_type: pa.DataType) -> Kind:
    """The kind of a column, from its Arrow type."""
    types = pa.types
    if types.is_dictionary(data_type):  # numbers that were declared to be categories
        return "text" if kind_of(data_type.value_type) == "text" else "category"
    if types.is_boolean(data_type):
        return "boolean"
    if types.is_integer(data_type):
        return "integer"
    if types.is_floating(data_type) or types.is_decimal(data_type) or types.is_null(data_type):
        return "number"
    if types.is_duration(data_type):  # in seconds
        return "number"
    if types.is_string(data_type) or types.is_large_string(data_type) or types.is_string_view(data_type):
        return "text"
    if types.is_temporal(data_type) and not types.is_interval(data_type):
        return "date"
    return "other"


def check_names(name: str, columns: Sequence[str]) -> None:
    seen: set[str] = set()
    for column in columns:
        if column in seen:
            raise DataError(f"{name}: the column name {column!r} is used twice; rename one of them.")
        seen.add(column)


def _from_pandas(frame: Any) -> pa.Table:
    if type(frame).__name__ == "Series":
        frame = frame.to_frame()
    frame = frame.rename(columns=str)
    check_names("pandas data frame", list(frame.columns))
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise DataError(f"pandas data frame: {_mixed(frame) or '; '.join(map(str, error.args))}.") from error


def _mixed(frame: Any) -> str:
    """The column that mixes texts with other values, and where; empty if there is none."""
    for name in frame.columns:
        first: dict[bool, tuple[int, Any]] = {}
        for row, value in enumerate(frame[name].to_numpy(dtype=object)):
            if value is not None and value == value:
                first.setdefault(isinstance(value, str), (row, value))
        if len(first) == 2:
            seen = " and ".join(f"{value!r} ({type(value).__name__}) in row {row}" for row, value in first.values())
            return f"the column {name!r} mixes types of values, {seen}; make them all numbers or all texts"
    return ""


def _arrow_source(table: pa.Table, name: str, options: FileOptions) -> TableSource:
    check_names(name, table.column_names)
    rows = max(1, options.block_bytes // max(1, 8 * table.num_columns))

    def blocks(columns: Mapping[str, pa.DataType]) -> Iterator[Block]:
        at = 0
        for batch in table.select(list(columns)).to_batches(max_chunksize=rows):
            yield Block(name, at, table=batch)
            at += batch.num_rows

    types = {f.name: f.type for f in table.schema}
    return TableSource(name, {n: kind_of(t) for n, t in types.items()}, table.num_rows, blocks, types=types)


def _open_parquet(files: list[Path], root: Path | None, options: FileOptions) -> TableSource:
    """Parquet files, one after another; `key=value` folders below `root` become text columns."""
    schema, rows = None, 0
    begins: dict[Path, int] = {}
    sizes: dict[Path, int] = {}
    types: dict[str, pa.DataType] = {}
    for file in files:
        try:
            with pq.ParquetFile(file) as opened:
                found, begins[file], sizes[file] = opened.schema_arrow, rows, opened.metadata.num_rows
                rows += sizes[file]
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file}: not a readable Parquet file ({error}).") from error
        check_names(str(file), found.names)
        if schema is None:
            schema = found
        for known in schema:
            if known.name not in found.names:
                raise DataError(f"{file}: the column {known.name!r} of {files[0]} is missing.")
            own, stored_as = found.field(known.name).type, types.setdefault(known.name, known.type)
            if pa.types.is_null(stored_as):  # without a value so far
                types[known.name] = stored_as = own
            one_only = pa.types.is_duration(own) != pa.types.is_duration(stored_as) and not pa.types.is_null(own)
            if kind_of(own) != kind_of(known.type) or one_only:
                raise DataError(f"{file}: the column {known.name!r} holds {own}, in {files[0]} {stored_as}.")
    assert schema is not None
    folders = [_folder_values(file, root) for file in files]
    kinds = {f.name: kind_of(f.type) for f in schema} | {key: "text" for key in folders[0]}
    batch_rows = max(256, 4 * options.block_bytes // max(1, 8 * len(kinds)))  # decoding small batches is slow

    def blocks(columns: Mapping[str, pa.DataType]) -> Iterator[Block]:
        for file, values in zip(files, folders, strict=True):
            stored = [column for column in columns if column not in values]
            at, (low, high) = begins[file], window
            if high <= at or low >= at + sizes[file]:
                continue
            base, groups = at, _groups_within(file, low - at, high - at)
            at += groups[1]
            try:
                with pq.ParquetFile(file, pre_buffer=False) as opened:
                    for whole in opened.iter_batches(
                        batch_size=batch_rows, columns=stored, use_threads=True, row_groups=groups[0]
                    ):
                        skip = max(0, low - at)
                        batch = whole.slice(skip, max(0, min(at + whole.num_rows, high) - at - skip))
                        at += whole.num_rows
                        if not batch.num_rows:
                            continue
                        full = {**dict(zip(batch.schema.names, batch.columns, strict=True))}
                        for key, value in values.items():
                            full[key] = pa.array([value] * batch.num_rows, pa.string())
                        ordered = [full[column] for column in columns]
                        table = pa.RecordBatch.from_arrays(ordered, names=list(columns))
                        yield Block(str(file), at - base - whole.num_rows + skip, table=table)
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(f"{file}: damaged Parquet data after row {at - base} ({error}).") from error

    window = options.window or (0, rows)
    name = str(root or files[0])
    return TableSource(name, kinds, rows, blocks, types=types)


def _groups_within(file: Path, low: int, high: int) -> tuple[list[int], int]:
    """The row groups of a file that contain rows [low, high), and the first row of the first of them."""
    metadata = pq.read_metadata(file)
    edges = np.cumsum([0] + [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)])
    groups = [i for i in range(metadata.num_row_groups) if edges[i] < high and edges[i + 1] > low]
    return groups, int(edges[groups[0]]) if groups else 0


def _folder_values(file: Path, root: Path | None) -> dict[str, str]:
    if root is None:
        return {}
    parts = (part.partition("=") for part in file.relative_to(root).parts[:-1] if "=" in part)
    return {key: value for key, _, value in parts}
