"""Ingest: whatever the format, the same rows; whatever the option, what it says."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from kme_dist.cli.app import IngestOptions
from kme_dist.config import DataConfig
from kme_dist.data.dataset import open_dataset
from kme_dist.data.ingest import ingest, parse_bytes
from kme_dist.data.reading import read_table
from kme_dist.data.schema import Schema
from kme_dist.data.splits import Split, cut_points, order_keys
from kme_dist.data.statistics import Statistics
from kme_dist.errors import AssumptionWarning, ConfigError, DataError

ROWS, WIDTH = 5000, 7
CLASSES = ["oak", "ash", "fir"]


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(0)
    X = random.standard_normal((ROWS, WIDTH), dtype=np.float32)
    X[:, 0] = np.arange(ROWS)
    return X, random.integers(0, 3, ROWS)


def as_table(X, y, *, names=CLASSES) -> pa.Table:
    columns = {f"f{j}": pa.array(X[:, j]) for j in range(X.shape[1])}
    return pa.table({**columns, "tree": pa.array([names[k] for k in y])})


def write_libsvm(path: Path, X, y) -> None:
    rows = (" ".join(f"{j + 1}:{float(v)!r}" for j, v in enumerate(row)) for row in X)
    path.write_text("".join(f"{label} {row}\n" for label, row in zip(y, rows, strict=True)))


def write_idx(path: Path, array: np.ndarray) -> None:
    codes = {"uint8": 8, "float32": 13}
    head = bytes([0, 0, codes[array.dtype.name], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(head + array.astype(array.dtype.newbyteorder(">")).tobytes())


def make_source(kind: str, folder: Path, X, y):
    """A source of one kind, and the options to ingest it with."""
    table = as_table(X, y)
    if kind == "csv":
        pa.csv.write_csv(table, folder / "t.csv")
        return folder / "t.csv", {"label": "tree"}
    if kind == "csv.gz":
        pa.csv.write_csv(table, folder / "t.csv")
        (folder / "t.csv.gz").write_bytes(gzip.compress((folder / "t.csv").read_bytes()))
        return folder / "t.csv.gz", {"label": -1}
    if kind == "tsv.zst":
        pa.csv.write_csv(table, folder / "t.tsv", pa.csv.WriteOptions(delimiter="\t", include_header=False))
        (folder / "t.tsv.zst").write_bytes(pa.compress((folder / "t.tsv").read_bytes(), codec="zstd", asbytes=True))
        return folder / "t.tsv.zst", {"label": str(WIDTH), "header": False}
    if kind == "csv folder":
        for i in range(3):
            part = table.slice(i * 2000, 2000)
            (folder / "parts").mkdir(exist_ok=True)
            pa.csv.write_csv(part, folder / "parts" / f"{i}.csv")
        return folder / "parts", {"label": "tree"}
    if kind == "parquet":
        pq.write_table(table, folder / "t.parquet", row_group_size=700)
        return folder / "t.parquet", {"label": "tree"}
    if kind == "parquet folder":
        for i in range(3):
            (folder / "parts" / f"day={i}").mkdir(parents=True, exist_ok=True)
            pq.write_table(table.slice(i * 2000, 2000), folder / "parts" / f"day={i}" / "x.parquet")
        return folder / "parts", {"label": "tree", "exclude": ["day"]}
    if kind == "npy":
        np.save(folder / "X.npy", X)
        np.save(folder / "y.npy", y)
        return folder / "X.npy", {"target": str(folder / "y.npy")}
    if kind == "npz":
        np.savez(folder / "t.npz", X=X, y=y)
        return folder / "t.npz", {"label": "y"}
    if kind == "npz by columns":
        np.savez_compressed(folder / "t.npz", X=np.asfortranarray(X), y=y)
        return folder / "t.npz", {}
    if kind == "libsvm":
        write_libsvm(folder / "t.libsvm", X, y)
        return folder / "t.libsvm", {}
    if kind == "idx":
        write_idx(folder / "train-images-idx2-float32", X)
        write_idx(folder / "train-labels-idx1-ubyte", y.astype(np.uint8))
        return folder / "train-images-idx2-float32", {
            "format": "idx",
            "target": str(folder / "train-labels-idx1-ubyte"),
        }
    if kind == "zarr":
        group = zarr.open_group(folder / "t.zarr", mode="w")
        group.create_array("X", data=X, chunks=(333, 3))
        group.create_array("y", data=y, chunks=(1000,))
        return folder / "t.zarr", {}
    if kind == "arrow":
        return table, {"label": "tree"}
    if kind == "pandas":
        return table.to_pandas(), {"label": "tree"}
    assert kind == "numpy"
    return (X, y), {}


KINDS = [
    "csv",
    "csv.gz",
    "tsv.zst",
    "csv folder",
    "parquet",
    "parquet folder",
    "npy",
    "npz",
    "npz by columns",
    "libsvm",
    "idx",
    "zarr",
    "arrow",
    "pandas",
    "numpy",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows(kind, tmp_path, rows):
    X, y = rows
    source, options = make_source(kind, tmp_path, X, y)
    options["dtype"] = "float32"
    data = ingest(source, tmp_path / "out.zarr", memory="16MiB", block_bytes=20_000, **options)
    got_X, got_y = data.read()
    np.testing.assert_array_equal(got_X, X)
    assert got_X.dtype == np.float32
    expected = np.array(CLASSES)[y] if isinstance(data.classes[0], str) else y
    np.testing.assert_array_equal(np.array(data.classes)[got_y], expected)
    assert data.classes == sorted(data.classes)
    assert data.class_counts == [int((expected == c).sum()) for c in data.classes]
    data.verify()
    table = read_table(source, **options)
    np.testing.assert_array_equal(table.X, X)
    np.testing.assert_array_equal(np.array(table.class_names)[table.y], expected)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_statistics_in_the_attributes_are_those_of_the_rows(tmp_path, rows):
    X, y = rows
    data = ingest((X, y), tmp_path / "d.zarr", shuffle=1, split="train=0.7,test=0.3")
    np.testing.assert_array_equal(data.statistics.minimum, X.min(axis=0))
    np.testing.assert_array_equal(data.statistics.maximum, X.max(axis=0))
    np.testing.assert_allclose(data.statistics.mean, X.mean(axis=0, dtype=float), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(data.statistics.variance, X.var(axis=0, dtype=float), rtol=1e-12)
    train, labels = data.read("train")
    np.testing.assert_allclose(
        data.split_statistics("train").mean, train.mean(axis=0, dtype=float), rtol=1e-10, atol=1e-10
    )
    assert data.attributes["splits"]["train"]["class_counts"] == np.bincount(labels).tolist()


def test_variance_of_a_large_offset_survives():
    values = 1e9 + np.random.default_rng(0).standard_normal((50_000, 1))
    joined = Statistics.of(values[:17]) + Statistics.of(values[17:])
    np.testing.assert_allclose(joined.variance, values.var(axis=0), rtol=1e-8)
    naive = (values**2).mean() - values.mean() ** 2
    assert abs(naive - values.var()) > 1e-3, "the naive formula must fail here, or this shows nothing"


# ------------------------------------------------------------------------------------ columns and types


MIXED = """city,rooms,price,when,lift
Rome,3,1.5,2024-01-01,true
Oslo,4,2.5,2024-01-02,false
Rome,5,,2024-01-03,true
"""


@pytest.fixture
def mixed(tmp_path):
    (tmp_path / "m.csv").write_text(MIXED)
    return tmp_path / "m.csv"


def test_text_is_one_hot_and_booleans_are_numbers(mixed):
    table = read_table(mixed, exclude=["when"], missing=0.0)
    assert table.feature_names == ["city=Oslo", "city=Rome", "rooms", "price", "lift"]
    np.testing.assert_array_equal(table.X, [[0, 1, 3, 1.5, 1], [1, 0, 4, 2.5, 0], [0, 1, 5, 0, 1]])


def test_ordinal_columns_become_one_number(mixed):
    table = read_table(mixed, features=["city", "rooms"], ordinal=["city"])
    np.testing.assert_array_equal(table.X, [[1, 3], [0, 4], [1, 5]])


def test_dates_become_days_since_1970(tmp_path):
    """With their place in every period that they cover twice, and in the day if their times differ."""
    (tmp_path / "t.csv").write_text("when\n2024-01-02\n2024-01-03 12:00\n2024-01-20T06:00\n")
    table = read_table(tmp_path / "t.csv")
    waves = [f"when:{wave}({period})" for period in ("week", "day") for wave in ("sin", "cos")]
    assert table.feature_names == ["when", *waves]
    np.testing.assert_allclose(table.X[:, 0], [19724, 19725.5, 19742.25])
    np.testing.assert_allclose(table.X[:, 3:], [[0, 1], [0, -1], [1, 0]], atol=1e-9)
    again = read_table(tmp_path / "t.csv", schema=table.schema)
    np.testing.assert_array_equal(again.X, table.X)
    frame = pd.DataFrame({"when": pd.to_datetime(["2024-01-02 00:00", "2024-01-03 12:00", "2024-01-20 06:00"])})
    np.testing.assert_array_equal(read_table(frame).X, table.X)
    zoned = frame.assign(when=frame["when"].dt.tz_localize("Asia/Tokyo"))
    np.testing.assert_allclose(read_table(zoned).X[:, 0], table.X[:, 0] - 9 / 24)
    (tmp_path / "t.csv").write_text("at\n06:00\n\n12:00:00\n")
    clock = read_table(tmp_path / "t.csv", missing=0)
    assert clock.feature_names == ["at", "at:sin(day)", "at:cos(day)"]
    np.testing.assert_allclose(clock.X, [[0.25, 1, 0], [0.5, 0, -1]], atol=1e-9)
    (tmp_path / "t.csv").write_text("when\n2024-01-02\nsoon\n")
    with pytest.raises(DataError, match=r"row 1 \(line 3\), column 'when': 'soon' is not a date or time"):
        read_table(tmp_path / "t.csv", schema=table.schema)


def test_missing_values_may_have_features_of_their_own():
    """Only columns with missing values get one; the fill is the mean, or no category at all."""
    frame = pd.DataFrame({"a": [1.0, None, 4.0], "b": [1, 2, 3], "c": ["x", None, "y"], "d": [True, None, False]})
    table = read_table(frame, missing="indicator")
    assert table.feature_names == ["a", "a:missing", "b", "c=x", "c=y", "c:missing", "d", "d:missing"]
    wanted = [[1, 0, 1, 1, 0, 0, 1, 0], [2.5, 1, 2, 0, 0, 1, 0.5, 1], [4, 0, 3, 0, 1, 0, 0, 0]]
    np.testing.assert_array_equal(table.X, wanted)
    stored = json.loads(json.dumps(table.schema.encoding_json()))
    assert Schema.from_json(stored) == table.schema


@pytest.mark.parametrize(
    ("values", "advice", "options", "numbers"),
    [
        ("1,5 2,25", "set `decimal` to ','", {"decimal": ","}, [1.5, 2.25]),
        ("1,234 5,678", "set `thousands` to ',' or set `decimal` to ','", {"thousands": ","}, [1234, 5678]),
        ("1,234 5,678", "set `thousands` to ',' or set `decimal` to ','", {"decimal": ","}, [1.234, 5.678]),
        ("1.234,5 7", "set `decimal` to ',' and `thousands` to '.'", {"decimal": ",", "thousands": "."}, [1234.5, 7]),
        ("10% 2.5%", "set `percent` to true", {"percent": True}, [0.1, 0.025]),
        ("1_000 2_000", "set `thousands` to '_'", {"thousands": "_"}, [1000, 2000]),
        ("€5 €6", "write them as 1234.5", None, None),
    ],
)
def test_numbers_in_another_notation_are_refused_or_read_as_asked(tmp_path, values, advice, options, numbers):
    """Never silently categories; the notation stays with the encoding, for new rows."""
    texts = values.split()
    (tmp_path / "t.csv").write_text("x;y\n" + "".join(f"{value};a\n" for value in texts))
    with pytest.raises(
        DataError, match=r"column 'x' holds texts such as .*may be numbers in another notation"
    ) as found:
        read_table(tmp_path / "t.csv", label="y")
    assert advice in str(found.value)
    assert read_table(tmp_path / "t.csv", label="y", categories=["x"]).feature_names == [
        f"x={t}" for t in sorted(texts)
    ]
    if options is None:
        return
    table = read_table(tmp_path / "t.csv", label="y", **options)
    np.testing.assert_allclose(table.X[:, 0], numbers, rtol=1e-15)
    schema = Schema.from_json(json.loads(json.dumps(table.schema.encoding_json())))
    again = read_table(tmp_path / "t.csv", schema=schema)
    np.testing.assert_array_equal(again.X, table.X)
    typed = read_table(pd.DataFrame({"x": table.X[:, 0]}), schema=schema)
    np.testing.assert_array_equal(typed.X, table.X)
    with pytest.raises(DataError, match=r"row 1, column 'x': 'many' is not a number with `"):
        read_table(pd.DataFrame({"x": [texts[0], "many"]}), schema=schema)
    targets = read_table(tmp_path / "t.csv", label="x", features=["y"], task="regression", **options)
    np.testing.assert_array_equal(targets.y, table.X[:, 0])
    with pytest.raises(DataError, match=r"labels 'x' such as .* may be numbers in another notation"):
        ingest(tmp_path / "t.csv", tmp_path / "d.zarr", label="x")
    classes = ingest(tmp_path / "t.csv", tmp_path / "d.zarr", label="x", task="classification")
    assert classes.classes == sorted(texts)


def test_grouped_digits_are_thousands_only_in_groups_of_three(tmp_path):
    (tmp_path / "t.csv").write_text("x;y\n1,234;a\n1,5;b\n")
    with pytest.raises(DataError, match=r"column 'x' holds texts such as '1,.*notation: set `decimal` to ','; or list"):
        read_table(tmp_path / "t.csv", label="y", thousands=",")
    for wrong in ({"decimal": "x"}, {"thousands": "x"}, {"decimal": ",", "thousands": ","}):
        with pytest.raises(ConfigError, match="must"):
            read_table(tmp_path / "t.csv", label="y", **wrong)


def test_decimal_commas_between_semicolons_without_a_header(tmp_path):
    (tmp_path / "t.csv").write_text("1,5;2,5;a\n3,5;4,5;b\n")
    with pytest.warns(AssumptionWarning) as found:
        table = read_table(tmp_path / "t.csv", label=2, decimal=",")
    np.testing.assert_array_equal(table.X, [[1.5, 2.5], [3.5, 4.5]])
    said = [str(warning.message) for warning in found]
    assert "fields end at ';', since ',' is within numbers" in said[0]
    assert "no header, since '1,5' in the first line is a number" in said[1]


@pytest.mark.parametrize(
    ("text", "names", "said"),
    [
        ("1.5,2.5\n3.5,4.5\n", ["column_0", "column_1"], "no header, since '1.5' in the first line is a number"),
        ("1,2\n3,4\n", ["column_0", "column_1"], "no header, since '1'"),
        ("id,2019\n7,1.5\n8,2.5\n", ["id", "2019"], "the first line is the header, although '2019' is a number"),
        ("2019,2020,2021\n1.5,2.5,3.5\n", None, "may be a header or a row; set `header` to true or false"),
        ("2010,2015,2017\n7,5,3\n", None, "may be a header or a row"),
        ("0,1,2\n1.5,2.5,3.5\n", None, "may be a header or a row"),
    ],
)
def test_a_header_of_numbers_is_asked_about_and_what_was_assumed_is_said(tmp_path, text, names, said):
    (tmp_path / "t.csv").write_text(text)
    first, count = text.splitlines()[0].split(","), len(text.splitlines())
    if names is None:
        with pytest.raises(DataError, match=said):
            read_table(tmp_path / "t.csv")
    else:
        with pytest.warns(AssumptionWarning, match=said):
            assert read_table(tmp_path / "t.csv").feature_names == names
    named = read_table(tmp_path / "t.csv", header=True)
    assert (named.feature_names, len(named.X)) == (first, count - 1)
    if "id" not in first:
        assert len(read_table(tmp_path / "t.csv", header=False).X) == count


def test_codes_with_leading_zeros_are_kept_as_labels_and_said_as_features(tmp_path):
    (tmp_path / "t.csv").write_text("zip,y\n007,1\n07,2\n7,2\n")
    with pytest.warns(AssumptionWarning, match=r"column 'zip' is read as numbers, so that '007' is 7; .*`categories`"):
        np.testing.assert_array_equal(read_table(tmp_path / "t.csv", label="y").X, [[7], [7], [7]])
    kept = read_table(tmp_path / "t.csv", label="y", categories=["zip"])
    assert sorted(kept.feature_names) == ["zip=007", "zip=07", "zip=7"]
    np.testing.assert_array_equal(kept.X.sum(axis=1), 1)
    with pytest.warns(AssumptionWarning, match=r"labels 'zip' are texts, since integers such as '007'"):
        assert read_table(tmp_path / "t.csv", label="zip").class_names == ["007", "07", "7"]


def test_integer_labels_above_64_bits_are_classes(tmp_path):
    big = [str(2**64 + i) for i in range(2)]
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{i},{big[i % 2]}\n" for i in range(6)))
    with pytest.warns(AssumptionWarning, match=rf"labels 'y' are texts, since integers such as '{big[0]}'"):
        table = read_table(tmp_path / "t.csv", label="y")
    assert table.class_names == big
    with pytest.raises(DataError, match=rf"row 0 \(line 2\), column 'y': the integer {big[0]}, and beyond 2\*\*53"):
        read_table(tmp_path / "t.csv", label="y", task="regression")


def test_texts_that_differ_by_spaces_are_refused_unless_it_is_said_what_is_right(tmp_path):
    (tmp_path / "t.csv").write_text("x,y,z\np, u,1\n p,u,2\nq,v,4\n")
    with pytest.raises(DataError, match=r"column 'x' holds '.*p' and '.*p', which differ by spaces only; set `strip`"):
        read_table(tmp_path / "t.csv", label="y")
    with pytest.raises(DataError, match="column 'y' holds"):
        ingest(tmp_path / "t.csv", tmp_path / "t.zarr", label="y", exclude=["x"])
    table = read_table(tmp_path / "t.csv", label="y", strip=True)
    assert (table.feature_names, table.class_names) == (["x=p", "x=q", "z"], ["u", "v"])
    again = read_table(tmp_path / "t.csv", schema=table.schema)
    np.testing.assert_array_equal(again.X, [[1, 0, 1], [1, 0, 2], [0, 1, 4]])
    both = read_table(tmp_path / "t.csv", label="y", strip=False)
    assert (len(both.feature_names), len(both.class_names)) == (4, 3)


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_missing_values_of_a_table_have_a_default_that_is_said(tmp_path, kind):
    """The mean or no category, with a feature that marks them; of numbers alone, too. The same in every table."""
    frame = pd.DataFrame({"a": [1.0, None, 4.0], "b": [1.5, 2.5, 3.5], "y": ["u", "v", "u"]})
    sources = {"csv": tmp_path / "t.csv", "parquet": tmp_path / "t.parquet", "frame": frame}
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    with pytest.warns(AssumptionWarning, match=r"missing values in 'a' \(1 row\) are the mean or no category"):
        table = read_table(sources[kind], label="y")
    assert table.feature_names == ["a", "a:missing", "b"]
    np.testing.assert_array_equal(table.X, [[1, 0, 1.5], [2.5, 1, 2.5], [4, 0, 3.5]])
    with pytest.warns(AssumptionWarning, match="missing values in 'a'"):
        data = ingest(sources[kind], tmp_path / "d.zarr", label="y")
    np.testing.assert_array_equal(data.read()[0], table.X)
    assert data.schema.columns == table.schema.columns
    assert read_table(frame.drop(columns="a"), label="y").schema.missing == "error"  # complete numbers: as they are


def test_missing_values_of_a_matrix_are_an_error():
    with pytest.raises(DataError, match=r"row 1, column 'x0': the value is missing"):
        read_table((np.array([[1.0], [np.nan]]), np.array([0, 1])))


def test_a_text_in_a_column_of_numbers_is_named(tmp_path):
    schema = read_table(pd.DataFrame({"a": [1.0, 2.0]})).schema
    with pytest.raises(DataError, match="row 1, column 'a': 'two' is not a number"):
        read_table(pd.DataFrame({"a": ["1", "two"]}), schema=schema)
    np.testing.assert_array_equal(read_table(pd.DataFrame({"a": ["true", "FALSE"]}), schema=schema).X, [[1], [0]])


@pytest.mark.parametrize(("policy", "expected"), [("mean", 2.0), ("median", 1.5), (-1.0, -1.0), ("drop", None)])
def test_missing_values_follow_the_policy(mixed, tmp_path, policy, expected):
    data = ingest(mixed, tmp_path / "d.zarr", features=["rooms", "price"], missing=policy)
    X, _ = data.read()
    if expected is None:
        np.testing.assert_array_equal(X, [[3, 1.5], [4, 2.5]])
        np.testing.assert_array_equal(data.row.read(0, 2), [0, 1])
        assert data.attributes["source"] == {"name": str(mixed), "rows": 3, "dropped": 1}
    else:
        assert X[2, 1] == expected


def test_a_missing_value_is_an_error_with_row_and_column(mixed):
    with pytest.raises(DataError, match=r"m\.csv: row 2 \(line 4\), column 'price': the value is missing"):
        read_table(mixed, exclude=["when"], missing="error")


def test_the_median_is_exact(tmp_path):
    random = np.random.default_rng(3)
    values = np.concatenate([random.standard_normal(501), -(10.0 ** random.uniform(-30, 30, 500))]).astype(np.float32)
    column = values.astype(object)
    column[::7] = None
    table = read_table(pa.table({"a": pa.array(column, pa.float32()), "b": pa.array(values)}), missing="median")
    there = np.sort(values[np.array([v is not None for v in column])])
    assert table.X[0, 0] == there[(len(there) - 1) // 2]


def test_the_median_of_doubles_is_one_of_them():
    """Of values that single precision cannot tell apart, of both signs, and of all sizes."""
    random = np.random.default_rng(4)
    seconds = 1.7e9 + random.permutation(601)
    tiny = np.concatenate([-seconds[:301], 10.0 ** random.uniform(-300, 300, 300)])
    columns = {"seconds": seconds, "negative": -seconds / 3, "sizes": tiny, "zeros": np.zeros(601)}
    holes = {name: [None, *values.tolist()] for name, values in columns.items()}
    table = read_table(pa.table(holes), missing="median")
    assert table.X[0].tolist() == [np.sort(values)[300] for values in columns.values()]


def test_a_missing_label_is_an_error_or_dropped(tmp_path):
    (tmp_path / "t.csv").write_text("a,label\n1,x\n2,\n3,y\n")
    with pytest.raises(DataError, match=r"row 1 \(line 3\), column 'label'"):
        read_table(tmp_path / "t.csv", label="label")
    assert read_table(tmp_path / "t.csv", label="label", missing="drop").class_names == ["x", "y"]


@pytest.mark.chaos(12)
def test_infinite_and_too_large_values_are_named(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3,1e39\n")
    with pytest.raises(DataError, match=r"row 1 \(line 3\), column 'b'.*too large for float32"):
        read_table(tmp_path / "t.csv", dtype="float32")
    assert read_table(tmp_path / "t.csv").X[1, 1] == 1e39


def test_values_stay_apart_in_every_source(tmp_path):
    """Consecutive seconds, of which single precision would make four values, are stored in double or refused."""
    seconds = 1_700_000_000 + np.arange(400)
    table = pa.table({"time": seconds, "value": np.linspace(0, 1, 400)})
    pa.csv.write_csv(table, tmp_path / "t.csv")
    pq.write_table(table, tmp_path / "t.parquet")
    wide = np.column_stack([seconds, np.linspace(0, 1, 400)])
    rows = zip(seconds.tolist(), np.linspace(0, 1, 400).tolist(), strict=True)
    (tmp_path / "t.libsvm").write_text("".join(f"{i % 2} 1:{t} 2:{v!r}\n" for i, (t, v) in enumerate(rows)))
    files = [tmp_path / f"t.{kind}" for kind in ("csv", "parquet", "libsvm")]
    for source in (*files, table, wide, seconds[:, None]):
        found = read_table(source).X
        assert found.dtype == np.float64
        assert len(np.unique(found[:, 0])) == 400
    assert read_table(wide.astype(np.float32)).X.dtype == np.float32
    for source in (*files, wide):
        with pytest.raises(
            DataError, match=r"float32 cannot tell the values of the feature '(time|x0)' apart, which are"
        ):
            read_table(source, dtype="float32")
    with pytest.raises(DataError, match=r"feature 'time' apart, which are about 1\.7e"):
        ingest(tmp_path / "t.csv", tmp_path / "t.zarr", dtype="float32")
    assert not (tmp_path / "t.zarr").exists()
    assert read_table(tmp_path / "t.csv", features=["value"], dtype="float32").X.dtype == np.float32
    assert ingest(tmp_path / "t.csv", tmp_path / "t.zarr").dtype == np.float64


def test_bytes_stay_bytes_and_images_keep_their_shape(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (100, 4, 5), np.uint8)
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", (np.arange(100) % 10).astype(np.uint8))
    data = ingest(tmp_path / "train-images-idx3-ubyte", tmp_path / "d.zarr")
    assert data.dtype == np.uint8
    assert data.sample_shape == (4, 5)
    np.testing.assert_array_equal(data.read()[0].reshape(images.shape), images)
    assert data.classes == list(range(10)), "the labels beside the images are found by name"


def test_labels_decide_the_task(tmp_path):
    X = np.zeros((4, 2), np.float32)
    assert ingest((X, np.array([1.5, 2, 3, 4])), tmp_path / "r.zarr").task == "regression"
    assert ingest((X, np.array([3, 1, 3, 7])), tmp_path / "c.zarr").classes == [1, 3, 7]
    data = ingest((X, np.array([3, 1, 3, 7])), tmp_path / "q.zarr", task="regression")
    assert data.task == "regression"
    assert data.attributes["target_statistics"]["maximum"] == [7.0]
    assert ingest(X, tmp_path / "n.zarr").task == "none"
    named = ingest((X, np.array([0, 1, 1, 0])), tmp_path / "m.zarr", class_names=["no", "yes"])
    assert named.classes == ["no", "yes"]
    np.testing.assert_array_equal(named.read()[1], [0, 1, 1, 0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"label": "tre"}, DataError, "Did you mean 'tree'"),
        ({"label": 99}, DataError, "has no column 99"),
        ({"features": ["f0", "tree"], "label": "tree"}, ConfigError, "also listed in features"),
        ({"missing": "guess"}, ConfigError, "missing is 'guess'"),
        ({"dtype": "int4"}, ConfigError, "dtype"),
        ({"compression": "rar"}, ConfigError, "compression"),
        ({"memory": "much"}, ConfigError, "not a size"),
        ({"lable": "tree"}, ConfigError, "Did you mean 'label'"),
        ({"split": "train=0.5,test=0.6"}, ConfigError, "sum to 1"),
        ({"split": "half"}, ConfigError, "use e.g."),
        ({"split_key": "f0"}, ConfigError, "require a split with fractions"),
        ({"split": "a=0:10,b=5:20"}, ConfigError, "overlap"),
        ({"split": "a=0:10,b=10:20"}, DataError, "not in any range"),
    ],
)
def test_wrong_options_are_named(tmp_path, rows, options, error, message):
    with pytest.raises(error, match=message):
        ingest(as_table(*rows), tmp_path / "d.zarr", **{"label": "tree", **options})
    assert list(tmp_path.iterdir()) == [], "a refused ingest leaves nothing"


def test_a_text_column_with_endless_values_is_refused(tmp_path, rows):
    table = as_table(*rows).append_column("id", pa.array([str(i) for i in range(ROWS)]))
    with pytest.raises(DataError, match="'id' has more than 256"):
        read_table(table, label="tree")
    assert read_table(table, label="tree", id="id").ids[3] == "3"


def test_an_existing_data_set_is_replaced_only_when_asked(tmp_path, rows):
    ingest(rows, tmp_path / "d.zarr")
    with pytest.raises(ConfigError, match="overwrite"):
        ingest(rows, tmp_path / "d.zarr")
    ingest((rows[0][:10], rows[1][:10]), tmp_path / "d.zarr", overwrite=True)
    assert open_dataset(tmp_path / "d.zarr").rows == 10
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(ConfigError, match="is not overwritten"):
        ingest(rows, tmp_path / "mine", overwrite=True)


@pytest.mark.chaos(21)
def test_no_rows_is_a_data_set_without_rows(tmp_path):
    data = ingest((np.zeros((0, 3), np.float32), np.zeros(0, np.int64)), tmp_path / "d.zarr")
    assert data.rows == 0
    assert data.read()[0].shape == (0, 3)
    data.verify()


def test_chunks_are_cut_by_bytes_and_shards_hold_many(tmp_path):
    X = np.random.default_rng(0).standard_normal((40_000, 64), dtype=np.float32)
    data = ingest(X, tmp_path / "d.zarr", chunk_bytes="256KiB", shard_bytes="2MiB")
    assert (data.chunk_rows, data.shard_rows) == (1024, 8192)
    assert data.attributes["compression"] == "none", "random floats do not compress"
    assert len(list((tmp_path / "d.zarr" / "X").glob("c/*/0"))) == 5
    assert zarr.open_array(tmp_path / "d.zarr" / "X", mode="r").shards == (8192, 64)
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "d.zarr" / "X", mode="r")[:], X)
    flat = ingest(np.round(X), tmp_path / "e.zarr")
    assert flat.attributes["compression"] == "zstd", "a few values compress well"
    np.testing.assert_array_equal(zarr.open_array(tmp_path / "e.zarr" / "X", mode="r")[:], np.round(X))
    np.testing.assert_array_equal(flat.read()[0], np.round(X))


@pytest.mark.parametrize(
    ("text", "value"), [("16MiB", 16 << 20), ("2GB", 2 * 10**9), ("100", 100), ("1.5k", 1500), (7, 7)]
)
def test_sizes_are_read(text, value):
    assert parse_bytes(text) == value


# ----------------------------------------------------------------------------------- shuffle and split


def source_rows(data) -> np.ndarray:
    return data.row.read(0, data.rows)


def test_a_shuffle_is_a_permutation_decided_by_the_seed_alone(tmp_path, rows):
    X, y = rows
    first = ingest((X, y), tmp_path / "a.zarr", shuffle=5)
    order = source_rows(first)
    np.testing.assert_array_equal(np.sort(order), np.arange(ROWS))
    np.testing.assert_array_equal(first.read()[0], X[order])
    np.testing.assert_array_equal(first.read()[1], y[order])
    other_memory = ingest((X, y), tmp_path / "b.zarr", shuffle=5, memory="16MiB", block_bytes=3000)
    np.testing.assert_array_equal(source_rows(other_memory), order)
    assert (source_rows(ingest((X, y), tmp_path / "c.zarr", shuffle=6)) != order).mean() > 0.9


def test_a_shuffle_larger_than_memory_splits_its_buckets_again(tmp_path, monkeypatch, rows):
    from kme_dist.data.writer import Spool

    monkeypatch.setattr(Spool, "FAN_OUT_BITS", 1)
    X = np.arange(400_000, dtype=np.float32).reshape(-1, 2)
    data = ingest(X, tmp_path / "d.zarr", shuffle=1, memory=16 << 20)
    monkeypatch.undo()
    expected = np.argsort(order_keys(1, np.arange(len(X))), kind="stable")
    np.testing.assert_array_equal(source_rows(data), expected)
    np.testing.assert_array_equal(data.read()[0], X[expected])


def test_order_keys_look_random():
    keys = order_keys(0, np.arange(100_000)) / 2.0**64
    counts = np.histogram(keys, 64, (0, 1))[0]
    assert ((counts - 100_000 / 64) ** 2 / (100_000 / 64)).sum() < 120, "chi-squared, 63 degrees of freedom"
    place = np.argsort(keys)
    assert abs(np.corrcoef(place[:-1], place[1:])[0, 1]) < 0.02


def test_fractions_are_exact(tmp_path, rows):
    data = ingest(rows, tmp_path / "d.zarr", shuffle=0, split={"train": 0.8, "validation": 0.1, "test": 0.1})
    assert data.splits == {"train": ((0, 4000),), "validation": ((4000, 4500),), "test": ((4500, 5000),)}
    np.testing.assert_array_equal(data.read("test")[0], rows[0][source_rows(data)[4500:]])
    assert len(set(source_rows(data))) == ROWS


def test_stratified_fractions_keep_class_shares(tmp_path):
    y = np.repeat([0, 1, 2], [900, 90, 10])
    data = ingest(
        (np.arange(1000, dtype=np.float32)[:, None], y), tmp_path / "d.zarr", split="train=0.7,test=0.3", stratify=True
    )
    assert data.attributes["splits"]["train"]["class_counts"] == [630, 63, 7]
    assert data.attributes["splits"]["test"]["class_counts"] == [270, 27, 3]
    np.testing.assert_array_equal(np.sort(source_rows(data)), np.arange(1000))
    np.testing.assert_array_equal(data.read()[1], y[source_rows(data)])


def test_a_key_never_lands_on_both_sides(tmp_path, rows):
    X, y = rows
    subject = [f"subject {i % 97}" for i in range(ROWS)]
    table = as_table(X, y).append_column("who", pa.array(subject))
    data = ingest(table, tmp_path / "d.zarr", label="tree", split="train=0.7,test=0.3", split_key="who", shuffle=3)
    assert "who" not in "".join(data.feature_names)
    order = source_rows(data)
    (a, b), (c, d) = data.splits["train"][0], data.splits["test"][0]
    train, test = {subject[i] for i in order[a:b]}, {subject[i] for i in order[c:d]}
    assert train.isdisjoint(test)
    assert len(train) + len(test) == 97
    assert 0.5 < len(train) / 97 < 0.85


def test_a_column_names_the_split_and_order_is_kept(tmp_path, rows):
    X, y = rows
    part = ["test" if i % 5 == 0 else "train" for i in range(ROWS)]
    table = as_table(X, y).append_column("part", pa.array(part))
    data = ingest(table, tmp_path / "d.zarr", label="tree", split_column="part")
    assert data.splits == {"train": ((0, 4000),), "test": ((4000, 5000),)}
    np.testing.assert_array_equal(source_rows(data)[4000:], np.arange(0, ROWS, 5))
    assert data.shuffled is None


def test_row_ranges_split_as_they_say(tmp_path, rows):
    data = ingest(rows, tmp_path / "d.zarr", split="test=0:1000,train=1000:5000")
    np.testing.assert_array_equal(data.read("test")[0], rows[0][:1000])
    np.testing.assert_array_equal(data.read("train")[0], rows[0][1000:])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 10_000))
def test_cuts_are_within_one_row_of_their_share(weights, count):
    shares = [w / sum(weights) for w in weights]
    cuts = cut_points(tuple((str(i), s) for i, s in enumerate(shares)), count)
    assert cuts[0] == 0
    assert cuts[-1] == count
    assert all(abs((b - a) - s * count) <= 1 for a, b, s in zip(cuts, cuts[1:], shares, strict=False))


def test_a_split_survives_its_json():
    split = Split.of("train=0.8,test=0.2", stratify=True, seed=4)
    assert Split.from_json(split.to_json()) == split
    split = Split.of({"a": (0, 5), "b": "5:9"})
    assert Split.from_json(split.to_json()) == split


def test_one_of_our_own_data_sets_is_a_source_with_its_names(tmp_path, rows):
    first = ingest(as_table(*rows), tmp_path / "a.zarr", label="tree")
    second = ingest(tmp_path / "a.zarr", tmp_path / "b.zarr", shuffle=1)
    order = source_rows(second)
    assert second.feature_names == first.feature_names
    assert second.classes == sorted(CLASSES)
    np.testing.assert_array_equal(second.read()[0], first.read()[0][order])
    np.testing.assert_array_equal(second.read()[1], first.read()[1][order])


def test_progress_counts_every_row(tmp_path, rows):
    seen = []
    ingest(rows, tmp_path / "d.zarr", shuffle=1, block_bytes=5000, progress=lambda *event: seen.append(event))
    assert ("reading", ROWS, ROWS) in seen
    assert seen[-1] == ("storing", ROWS, ROWS)
    assert [done for stage, done, _ in seen if stage == "reading"] == sorted(
        done for s, done, _ in seen if s == "reading"
    )


def test_a_word_among_numbers_is_refused_unless_the_column_is_listed(tmp_path):
    rows = "\n".join(f"{i}.5,{'ab'[i % 2]}" for i in range(8))
    (tmp_path / "t.csv").write_text(f"x,y\n{rows}\noops,a\n")
    with pytest.raises(DataError, match="column 'x': 'oops' is text among numbers"):
        ingest(tmp_path / "t.csv", tmp_path / "t.zarr", label="y")
    assert not (tmp_path / "t.zarr").exists()
    assert ingest(tmp_path / "t.csv", tmp_path / "t.zarr", label="y", one_hot=("x",)).features == 9


def test_many_small_chunks_fit_the_one_shard_of_a_small_table(tmp_path):
    X = np.arange(200_000.0).reshape(-1, 2)
    data = ingest(X, tmp_path / "small.zarr", chunk_bytes=8192)
    assert data.rows / data.chunk_rows > 64
    np.testing.assert_array_equal(data.read()[0], X)


def test_a_word_among_many_decimals_is_named_with_its_row(tmp_path):
    lines = [f"{i}.25,{'ab'[i % 2]}" for i in range(600)]
    lines[300] = "old,a"
    (tmp_path / "t.csv").write_text("age,y\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"t\.csv: row 300 \(line 302\), column 'age': 'old' is text among numbers"):
        ingest(tmp_path / "t.csv", tmp_path / "t.zarr", label="y")


def test_a_missing_category_is_named_by_the_column_of_the_file(tmp_path):
    (tmp_path / "t.csv").write_text("city,y\nBonn,a\nKöln,b\n,a\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"row 2 \(line 4\), column 'city': the value is missing"):
        ingest(tmp_path / "t.csv", tmp_path / "t.zarr", label="y", missing="error")


@pytest.mark.parametrize("missing", ["mean", "median"])
def test_no_rows_have_no_mean(tmp_path, missing):
    (tmp_path / "t.csv").write_text("age,y\n")
    with pytest.raises(DataError, match=rf"t\.csv has no rows, so no column has a {missing}"):
        ingest(tmp_path / "t.csv", tmp_path / "t.zarr", label="y", missing=missing)


@pytest.mark.parametrize(
    "table",
    [
        "name,y\n" + "".join(f"person {i},a\n" for i in range(300)),
        "x,y\n1.5,a\n2.5,a\noops,b\n3.5,b\n",
        "x,y\n1.5,a\n2.5,\n",
        "0,1,y\n1.5,2.5,a\n2.5,3.5,b\n",
        'x,y\n"1,5",a\n"2,5",b\n',
        'x,y\n1,"1,234"\n2,"5,678"\n',
        "x,y\np,a\n p,b\n",
    ],
    ids=["identifiers", "a word", "missing label", "header", "notation", "notation of labels", "spaces"],
)
def test_advice_works_on_the_command_line_in_a_config_and_in_python(tmp_path, table):
    """An option that a message names (in backticks) is one of `ingest` and a key of section `data`."""
    (tmp_path / "t.csv").write_text(table)
    with pytest.raises(DataError) as error:
        ingest(tmp_path / "t.csv", tmp_path / "t.zarr", label="y")
    named = re.findall(r"`(\w+)`", str(error.value))
    assert named
    assert set(named) <= set(DataConfig.model_fields)
    assert set(named) <= {field.name for field in dataclasses.fields(IngestOptions)}
    assert not re.search(r"\w+=['\[]|one_hot|max_categories", str(error.value)), "the spelling of Python alone"


NESTED = {
    "list": pa.array([[1.0], [2.0]]),
    "struct": pa.array([{"z": 1}, {"z": 2}]),
    "bytes": pa.array([b"\xff", b"\xfe"]),
    "interval": pa.array([(1, 2, 3), (4, 5, 6)], pa.month_day_nano_interval()),
}


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize("wanted", ["number", "text", "date"])
def test_columns_of_other_types_are_refused_by_name(kind, wanted):
    """As features, as categories, as keys of a split, and where numbers, texts or dates are expected of new rows."""
    values = {"number": [1.0, 2.0], "text": ["u", "v"], "date": pd.to_datetime(["2024-01-01", "2024-05-01"])}
    schema = read_table(pd.DataFrame({"a": values[wanted]})).schema
    table = pa.table({"a": NESTED[kind], "b": [1, 2]})
    with pytest.raises(DataError, match=r"column 'a'"):
        read_table(table, schema=schema)
    with pytest.raises(DataError, match=r"column 'a' holds"):
        read_table(table)
    with pytest.raises(DataError, match=r"column 'a' holds values of type"):
        read_table(table, features=["b"], id="a")


def test_a_header_that_declares_more_than_the_file_holds_is_refused(tmp_path):
    """Before anything of that size is built."""
    huge = b"\0\0\x08\x02" + (3).to_bytes(4, "big") + (2**31).to_bytes(4, "big")
    (tmp_path / "t.idx2").write_bytes(huge)
    with pytest.raises(DataError, match="the file is shorter"):
        read_table(tmp_path / "t.idx2", format="idx")
    (tmp_path / "t.libsvm").write_text("1 1:1 9999999:2\n")
    with pytest.raises(DataError, match="rows of 9,999,999 values; they must have 1 to 1,000,000"):
        read_table(tmp_path / "t.libsvm")
    np.save(tmp_path / "t.npy", np.zeros((5, 0)))
    with pytest.raises(DataError, match="rows of 0 values"):
        read_table(tmp_path / "t.npy")


def test_values_whose_squares_overflow_are_refused_by_the_name_of_their_column(tmp_path):
    X = np.random.default_rng(0).normal(size=(50, 2))
    X[7, 1] = 1e200
    with pytest.raises(DataError, match=r"column 'x1' has values up to 1e\+200"), np.errstate(over="ignore"):
        ingest((X, np.arange(50) % 2), tmp_path / "d.zarr")
    assert not (tmp_path / "d.zarr").exists()


LONG = 1_700_000_000_000_000_000  # nanoseconds since 1970


@pytest.mark.parametrize("form", ["csv", "parquet", "uint64", "decimal", "npy", "numpy", "frame", "notation"])
def test_integers_beyond_2_53_are_refused_by_column_in_every_source(tmp_path, form):
    t = np.arange(40) + LONG
    options: dict = {"label": "y"}
    frame = pd.DataFrame({"y": np.arange(40) % 2, "t": t})
    source: object = tmp_path / f"t.{form}"
    if form == "csv":
        frame.to_csv(source, index=False)
    elif form == "notation":
        source, options = tmp_path / "t.csv", {**options, "thousands": ","}
        source.write_text("y,t\n" + "".join(f'{i % 2},"{v:,}"\n' for i, v in enumerate(t.tolist())))
    elif form == "npy":
        np.save(source, frame.to_numpy())
        options = {"label": 0}
    elif form == "numpy":
        source, options = (frame.to_numpy(), np.arange(40) % 2), {}
    elif form == "frame":
        source = frame
    else:
        kind = {"parquet": pa.int64(), "uint64": pa.uint64(), "decimal": pa.decimal128(20, 0)}[form]
        source = tmp_path / "t.parquet"
        pq.write_table(pa.table({"y": np.arange(40) % 2, "t": pa.array(t).cast(kind)}), source)
    column = "x1" if form in ("npy", "numpy") else "t"
    with pytest.raises(DataError, match=rf"column '{column}': the integer {LONG // 10**6}\d+, and beyond 2\*\*53"):
        ingest(source, tmp_path / "d.zarr", **options)
    assert not (tmp_path / "d.zarr").exists()


@pytest.mark.parametrize("form", ["csv", "parquet", "numpy"])
def test_integer_targets_beyond_2_53_are_refused(tmp_path, form):
    frame = pd.DataFrame({"x": np.arange(40) / 8, "t": 2**60 + np.arange(40)})
    source: object = tmp_path / f"t.{form}"
    options: dict = {"label": "t"}
    if form == "csv":
        frame.to_csv(source, index=False)
    elif form == "parquet":
        frame.to_parquet(source)
    else:
        source, options = (frame[["x"]].to_numpy(), frame["t"].to_numpy()), {}
    with pytest.raises(DataError, match=r"column '[ty]': the integer 11529215046068\d+, and beyond 2\*\*53"):
        read_table(source, task="regression", **options)
    kept = read_table(source, task="classification", **options)  # classes stay the integers that they are
    assert kept.class_names == [2**60 + i for i in range(40)]


def test_integers_up_to_2_53_are_numbers_in_every_source(tmp_path):
    t = [2**53, -(2**53), 9_007_199_254_740_991]
    (tmp_path / "t.csv").write_text("t,y\n" + "".join(f"{value},1\n" for value in t))
    pq.write_table(pa.table({"t": t, "y": [1, 1, 1]}), tmp_path / "t.parquet")
    for source in (tmp_path / "t.csv", tmp_path / "t.parquet"):
        assert read_table(source, label="y").X[:, 0].tolist() == t
    (tmp_path / "t.csv").write_text("t,y\n1e18,1\n9007199254740993.5,2\n")  # no integers, as in memory
    assert read_table(tmp_path / "t.csv", label="y").X[0, 0] == 1e18


def after_a_megabyte(path: Path, first: str, last: str, header: str = "x,y") -> Path:
    path.write_text(f"{header}\n" + first * (-(-(1 << 20) // len(first)) + 100) + last)
    return path


def test_codes_after_the_first_megabyte_are_said_as_features_and_refused_as_labels(tmp_path):
    path = after_a_megabyte(tmp_path / "t.csv", "1,0\n2,1\n", "007,1\n")
    with pytest.warns(AssumptionWarning, match=r"column 'x' is read as numbers, so that '007' is 7; .*`categories`"):
        assert ingest(path, tmp_path / "d.zarr", label="y").read_rows(0, 1)[0].shape == (1, 1)
    path = after_a_megabyte(tmp_path / "t.csv", "1,0\n2,1\n", "1,01\n2,001\n")
    with pytest.raises(DataError, match=r"row \d{6} \(line \d+\), column 'y': the label '01' would be .*`categories`"):
        read_table(path, label="y")
    assert read_table(path, label="y", categories=["y"]).class_names == ["0", "001", "01", "1"]


def test_long_integers_after_the_first_megabyte_are_refused(tmp_path):
    for value in ("18446744073709551617", " +9007199254740993", "-9007199254740993"):
        path = after_a_megabyte(tmp_path / "t.csv", "1,0\n2,1\n", f"{value},1\n")
        with pytest.raises(DataError, match=r"row 2\d+ \(line \d+\), column 'x': the integer .* beyond 2\*\*53"):
            read_table(path, label="y")
    text = "2026-01-05 09:30,0123,12345678901234567890"  # elsewhere they are texts, and no reason to refuse
    path = after_a_megabyte(tmp_path / "t.csv", f"1,0,{text}\n", f"3,1,{text}\n", "x,y,when,zip,id")
    assert read_table(path, label="y", exclude=["when", "zip", "id"]).X.max() == 3


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_codes_are_found_in_other_encodings(tmp_path, encoding):
    (tmp_path / "t.csv").write_bytes(f"x,y\n1,0\n{LONG},1\n".encode(encoding))
    with pytest.raises(DataError, match=r"row 1 \(line 3\), column 'x': the integer 17"):
        read_table(tmp_path / "t.csv", label="y", encoding=encoding)
