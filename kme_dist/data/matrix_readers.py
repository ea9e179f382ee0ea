"""Sources that are plain matrices: npy, npz, LIBSVM, IDX, Zarr and NumPy arrays, in blocks of rows.

Nothing is loaded at once: npy files are memory-mapped, members of an npz and compressed files are decoded as streams,
Zarr is read by chunks. A row that is itself an array (an image) is flattened; its shape is kept.
"""

from __future__ import annotations

import io
import math
import shutil
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy

from kme_dist.data.places import Place
from kme_dist.data.readers import COMPRESSIONS, Block, FileOptions, MatrixSource, open_bytes
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError

if TYPE_CHECKING:
    from kme_dist.data.dataset import Dataset

# What the parsers of npy and zip files raise for damaged ones.
_DAMAGED = (
    *(ValueError, OSError, EOFError, SyntaxError, KeyError, TypeError, OverflowError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)
MOST_FEATURES = 1_000_000  # of dense rows; every feature has a name and statistics
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
RowReader = Callable[[int, int], np.ndarray]  # rows [start, stop), called in order
RowOpener = Callable[[ExitStack], RowReader]  # files it opens are closed with the stack


def numpy_source(X: np.ndarray, y: np.ndarray | None, name: str, options: FileOptions) -> MatrixSource:
    X = np.asarray(X)
    return _matrix_source(
        name,
        X.shape,
        X.dtype,
        lambda _: lambda a, b: X[a:b],
        None if y is None else (y.shape, y.dtype, lambda _: lambda a, b: y[a:b]),
        options,
    )


def _matrix_source(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    rows_of: RowOpener,
    target: tuple[tuple[int, ...], np.dtype[Any], RowOpener] | None,
    options: FileOptions,
) -> MatrixSource:
    """A source from functions that open a reader of consecutive rows."""
    if dtype.kind not in "biuf":
        raise DataError(f"{name}: values of type {dtype} are not numeric.")
    if not 1 <= len(shape) <= 8:
        raise DataError(f"{name}: an array of {len(shape)} dimensions; expected 1 to 8, rows first.")
    rows, sample = shape[0], shape[1:]
    width = _checked_width(name, math.prod(sample))
    if target is not None:
        if target[0] not in ((rows,), (rows, 1)):
            raise DataError(f"{name}: got {rows} rows but labels of shape {target[0]}; give one label per row.")
        if target[1].kind not in "biufU":
            raise DataError(f"{name}: labels of type {target[1]} are not supported; use numbers or text.")
    step = max(1, options.block_bytes // max(1, width * max(4, dtype.itemsize)))

    def blocks() -> Iterator[Block]:
        first, last = options.window or (0, rows)
        with ExitStack() as stack:
            read = rows_of(stack)
            read_target = target[2](stack) if target is not None else None
            for start in range(first, last, step):
                stop = min(last, start + step)
                labels = None if read_target is None else read_target(start, stop).reshape(-1)
                yield Block(name, start, matrix=read(start, stop).reshape(stop - start, width), target=labels)

    names = [f"x{i}" for i in range(width)]
    target_dtype = target[1] if target is not None else None
    return MatrixSource(name, names, dtype, target_dtype, rows, sample, blocks)


def _checked_width(name: str, width: int) -> int:
    """The number of features; rows of none, and of more than anything real has, are damaged headers."""
    if not 1 <= width <= MOST_FEATURES:
        raise DataError(f"{name}: rows of {width:,} values; they must have 1 to {MOST_FEATURES:,}.")
    return width


# ------------------------------------------------------------------------------------------- npy and npz


def open_npy(path: Path, options: FileOptions) -> MatrixSource:
    matrix = _map_npy(path)
    target = None
    if options.target is not None:
        labels = _map_npy(Path(options.target))
        target = (labels.shape, labels.dtype, lambda _: lambda a, b: np.asarray(labels[a:b]))
    return _matrix_source(
        str(path), matrix.shape, matrix.dtype, lambda _: lambda a, b: np.asarray(matrix[a:b]), target, options
    )


def _map_npy(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except _DAMAGED as error:
        raise DataError(f"{path}: not a readable npy file of numbers ({_one_line(error)}).") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def open_npz(path: Path, options: FileOptions) -> MatrixSource:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except _DAMAGED as error:
        raise DataError(f"{path}: not a readable npz file ({_one_line(error)}).") from error
    features = _pick(str(path), members, options.array, ("X", "x", "data", "features"))
    label = options.target
    if label is None:
        label = next((name for name in ("y", "Y", "target", "labels", "label") if name in members), None)
    elif label not in members:
        raise DataError(f"{path} has no array {label!r}; its arrays: {', '.join(members)}.")
    shape, dtype = _member_header(path, features)
    target = None
    if label is not None and label != features:
        label_shape, label_dtype = _member_header(path, label)
        target = (label_shape, label_dtype, lambda stack: _member_reader(stack, path, str(label)))
    return _matrix_source(str(path), shape, dtype, lambda stack: _member_reader(stack, path, features), target, options)


def _pick(name: str, members: list[str], wanted: str | None, usual: tuple[str, ...]) -> str:
    if wanted is not None:
        if wanted not in members:
            raise DataError(f"{name} has no array {wanted!r}; its arrays: {', '.join(members) or 'none'}.")
        return wanted
    found = next((candidate for candidate in usual if candidate in members), None)
    if found is None and len(members) == 1:
        found = members[0]
    if found is None:
        raise DataError(
            f"{name}: which array holds the features? Name it {usual[0]}; its arrays: {', '.join(members) or 'none'}."
        )
    return found


def _member_header(path: Path, member: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(member + ".npy") as stream:
            shape, _, dtype = _read_header(path, stream)
            held = archive.getinfo(member + ".npy").file_size
    except _DAMAGED as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: array {member!r} is damaged ({_one_line(error)}).") from error
    if math.prod(shape) * dtype.itemsize > held:
        raise DataError(f"{path}: array {member!r} declares the shape {shape}, but holds {held:,} bytes.")
    return shape, dtype


def _read_header(path: Path, stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except _DAMAGED as error:
        raise DataError(f"{path}: damaged npy data ({_one_line(error)}).") from error
    if any(size < 0 for size in shape):
        raise DataError(f"{path}: damaged npy data (shape {shape}).")
    if dtype.hasobject:
        raise DataError(f"{path} contains Python objects, which are never loaded. Save plain numbers.")
    return shape, fortran, dtype


def _member_reader(stack: ExitStack, path: Path, member: str) -> RowReader:
    archive = stack.enter_context(zipfile.ZipFile(path))
    stream = stack.enter_context(archive.open(member + ".npy"))
    shape, fortran, dtype = _read_header(path, stream)
    if fortran and len(shape) > 1:
        # In Fortran order rows can only be read from a memory-mapped file.
        spool = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        try:
            shutil.copyfileobj(stream, spool)
            spool.flush()
            mapped = np.memmap(spool, dtype, "r", shape=shape, order="F")
        except _DAMAGED as error:
            raise DataError(f"{path}: array {member!r} is damaged ({_one_line(error)}).") from error
        return lambda a, b: np.ascontiguousarray(mapped[a:b])
    row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def read(start: int, stop: int) -> np.ndarray:
        try:
            raw = stream.read((stop - start) * row_bytes)
        except _DAMAGED as error:
            raise DataError(f"{path}: array {member!r} is damaged after row {start} ({_one_line(error)}).") from error
        if len(raw) != (stop - start) * row_bytes:
            raise DataError(f"{path}: array {member!r} ends within rows {start} to {stop}; the file is truncated.")
        return np.frombuffer(raw, dtype).reshape(stop - start, *shape[1:])

    return read


# ------------------------------------------------------------------------------------------------- IDX


def open_idx(path: Path, options: FileOptions) -> MatrixSource:
    """IDX, the format of the MNIST files; the labels file next to an images file is found by its name."""
    shape, dtype, _ = _idx_header(path)
    label_path = Path(options.target) if options.target else None
    if label_path is None and "images" in path.name:
        guess = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1"))
        label_path = guess if guess.exists() else None
    target = None
    if label_path is not None:
        found = label_path
        label_shape, label_dtype, _ = _idx_header(found)
        target = (label_shape, label_dtype, lambda stack: _idx_reader(stack, found))
    return _matrix_source(str(path), shape, dtype, lambda stack: _idx_reader(stack, path), target, options)


def _idx_header(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    if not path.exists():
        raise DataError(f"{path}: there is no such file.")
    with open_bytes(path) as stream:
        head = bytes(stream.read(4))
        if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_TYPES or not 1 <= head[3] <= 8:
            raise DataError(
                f"{path} is not an IDX file: it must start with two zero bytes, type, number of dimensions."
            )
        sizes = bytes(stream.read(4 * head[3]))
    shape = tuple(int.from_bytes(sizes[4 * i : 4 * i + 4], "big") for i in range(head[3]))
    dtype, offset = np.dtype(_IDX_TYPES[head[2]]), 4 + 4 * head[3]
    if path.suffix.lower() not in COMPRESSIONS and path.stat().st_size < offset + math.prod(shape) * dtype.itemsize:
        raise DataError(f"{path}: the header declares an array of shape {shape}, but the file is shorter.")
    return shape, dtype, offset


def _idx_reader(stack: ExitStack, path: Path) -> RowReader:
    shape, dtype, offset = _idx_header(path)
    if path.suffix.lower() not in COMPRESSIONS:
        mapped = np.memmap(path, dtype, "r", offset=offset, shape=shape)
        return lambda a, b: np.asarray(mapped[a:b])
    stream = stack.enter_context(open_bytes(path))
    stream.read(offset)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def read(start: int, stop: int) -> np.ndarray:
        raw = bytes(stream.read((stop - start) * row_bytes))
        if len(raw) != (stop - start) * row_bytes:
            raise DataError(f"{path}: ends within rows {start} to {stop}; the file is truncated.")
        return np.frombuffer(raw, dtype).reshape(stop - start, *shape[1:])

    return read


# ---------------------------------------------------------------------------------------------- LIBSVM


def open_libsvm(path: Path, options: FileOptions) -> MatrixSource:
    """LIBSVM/SVMlight text. A first pass finds the number of features and whether indices start at 0 or 1."""
    rows, lowest, highest, whole, exact = 0, 1, 0, True, True
    for first, lines in _line_blocks(path, 8 << 20):
        sparse, y = _parse_libsvm(path, first, lines, None, zero_based=True)
        rows += sparse.shape[0]
        if sparse.nnz:
            lowest = min(lowest, int(sparse.indices.min()))
            highest = max(highest, int(sparse.indices.max()))
            with np.errstate(over="ignore"):
                exact = exact and bool(np.all(_in_single(sparse.data)))
        whole = whole and bool(np.all(y == np.round(y)))
    width = highest + 1 - lowest
    if rows == 0 or width < 1:
        raise DataError(f"{path}: no rows with features in this LIBSVM file.")
    _checked_width(str(path), width)
    dtype = np.dtype(np.float32 if exact else np.float64)
    row_bytes = dtype.itemsize * width
    # A text line is rarely longer than its dense row; if it is shorter, the dense block must still fit.
    density = max(1, rows * row_bytes // max(1, path.stat().st_size))
    text_bytes = max(1 << 14, options.block_bytes // density)

    def blocks() -> Iterator[Block]:
        for first, lines in _line_blocks(path, text_bytes):
            sparse, y = _parse_libsvm(path, first, lines, width, zero_based=lowest == 0)
            yield Block(str(path), first, matrix=sparse.toarray(), target=y)

    names = [f"x{i}" for i in range(width)]
    return MatrixSource(str(path), names, dtype, np.dtype(np.float64), rows, (width,), blocks, whole_targets=whole)


def _in_single(values: np.ndarray) -> np.ndarray:
    """Where single precision is enough: seven digits of a fraction, but every digit of a whole number."""
    rounded = values.astype(np.float32)
    return np.asarray((rounded == values) | ((values != np.round(values)) & (np.abs(values) < 2**24)))


def _line_blocks(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """(row number of the first line, complete lines); the parser removes comments and empty lines."""
    row, rest = 0, b""
    with open_bytes(path) as stream:
        while True:
            try:
                data = bytes(stream.read(size))
            except OSError as error:
                raise DataError(f"{path}: damaged after row {row} ({error}).") from error
            text = rest + data
            cut = text.rfind(b"\n") + 1 if data else len(text)
            lines, rest = text[:cut], text[cut:]
            if lines:
                yield row, lines
                row += sum(1 for line in lines.split(b"\n") if line.split(b"#", 1)[0].strip())
            if not data:
                return


def _parse_libsvm(
    path: Path, first: int, lines: bytes, width: int | None, *, zero_based: bool
) -> tuple[Any, np.ndarray]:
    from sklearn.datasets import load_svmlight_file

    try:
        sparse, y = load_svmlight_file(io.BytesIO(lines), n_features=width, dtype=np.float64, zero_based=zero_based)
        return sparse, y
    except (ValueError, OverflowError, IndexError) as error:
        row = first
        for line in lines.split(b"\n"):
            fields = line.split(b"#", 1)[0].split()
            if not fields:
                continue
            row += 1
            for column, field in enumerate(fields):
                index, _, value = field.rpartition(b":")
                try:
                    float(value)
                    good = index == b"" if column == 0 else index == b"qid" or int(index) >= 0
                except ValueError:
                    good = False
                if not good:
                    shown = field[:60].decode(errors="replace")
                    raise DataError(
                        f"{path}: row {row}, column {column}: {shown!r} is not "
                        f"{'a label' if column == 0 else 'index:value'}."
                    ) from None
        raise DataError(f"{path}: rows {first + 1} to {row}: not LIBSVM text ({error}).") from error


# ------------------------------------------------------------------------------------------------ Zarr


def open_zarr(place: Place, options: FileOptions) -> MatrixSource:
    """An array, or a group with arrays X and optionally y (or those named), of any Zarr v3 layout on the allow-list."""
    from kme_dist.data.chunks import read_metadata
    from kme_dist.data.store import foreign_array

    try:
        metadata = read_metadata(place)
    except FileNotFoundError:
        raise DataError(f"{place} is not a Zarr v3 array or group (looked for zarr.json).") from None
    attributes = metadata.get("attributes")
    if isinstance(attributes, dict) and attributes.get("format") == "kme-dist/dataset":
        from kme_dist.data.dataset import open_dataset

        return dataset_source(open_dataset(place, cache_bytes=0), options)
    if metadata.get("node_type") == "array":
        X, y = foreign_array(place), None
        if options.target is not None:
            raise ConfigError(f"{place} is a single array; there is no second one called {options.target!r}.")
    else:
        keys = [key.split("/") for key in place.sizes()]
        members = sorted({parts[0] for parts in keys if len(parts) == 2 and parts[1] == "zarr.json"})
        X = foreign_array(place, _pick(str(place), members, options.array, ("X", "x", "data")))
        label = options.target or ("y" if "y" in members else None)
        y = foreign_array(place, label) if label is not None else None

    def reader(array: Any) -> RowOpener:
        def read(start: int, stop: int) -> np.ndarray:
            try:
                return np.asarray(array[start:stop])
            except _DAMAGED as error:
                if isinstance(error, KMEError):
                    raise
                raise CorruptError(f"{place}: rows {start} to {stop} are damaged ({_one_line(error)}).") from error

        return lambda _: read

    target = None if y is None else (y.shape, np.dtype(y.dtype), reader(y))
    step = max(1, X.chunks[0] * X.dtype.itemsize * math.prod(X.shape[1:]))
    aligned = replace(options, block_bytes=max(options.block_bytes // step, 1) * step)
    return _matrix_source(str(place), X.shape, np.dtype(X.dtype), reader(X), target, aligned)


def dataset_source(data: Dataset, options: FileOptions, splits: Sequence[str] | None = None) -> MatrixSource:
    """The rows of a data set, or of some of its splits one after another, with names, weights and encoding.

    A missing chunk is an error.
    """
    spans = [span for name in splits or (None,) for span in data.ranges(name)]
    whole = spans == [(0, data.rows)]
    rows = sum(stop - start for start, stop in spans)

    def reader(read: RowReader) -> RowReader:
        return (
            read if whole else lambda start, stop: np.concatenate([read(*part) for part in _within(spans, start, stop)])
        )

    target: tuple[tuple[int, ...], np.dtype[Any], RowOpener] | None = None
    if (y := data.y) is not None:
        target = ((rows,), y.layout.dtype, lambda _: reader(y.read))
    shape = (rows, *data.sample_shape)
    source = _matrix_source(str(data.place), shape, data.dtype, lambda _: reader(data.X.read), target, options)
    source = replace(
        source,
        feature_names=data.feature_names,
        class_names=None if data.classes is None else tuple(data.classes),
        encoding=data.schema,
        positions=None if whole else lambda numbers: _positions(spans, numbers),
    )
    if data.weight is None:
        return source
    return with_weights(source, data.schema.weight or "weight", reader(data.weight.read))


def with_weights(source: MatrixSource, name: str, read: RowReader) -> MatrixSource:
    """The same rows with their weights."""
    plain = source.blocks

    def blocks() -> Iterator[Block]:
        for block in plain():
            assert block.matrix is not None
            yield replace(block, weights=read(block.first_row, block.first_row + len(block.matrix)))

    return replace(source, weight=name, blocks=blocks)


def _within(spans: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of `spans` that are rows [start, stop) if spans are counted one after another."""
    found, at = [], 0
    for low, high in spans:
        first, last = max(start - at, 0), min(stop - at, high - low)
        if first < last:
            found.append((low + first, low + last))
        at += high - low
    return found


def _positions(spans: Sequence[tuple[int, int]], numbers: np.ndarray) -> np.ndarray:
    """Where rows are that are counted over the spans, one after another."""
    starts = np.array([low for low, _ in spans])
    begins = np.cumsum([0, *(high - low for low, high in spans)])[:-1]
    span = np.searchsorted(begins, numbers, side="right") - 1
    return np.asarray(numbers - begins[span] + starts[span])
