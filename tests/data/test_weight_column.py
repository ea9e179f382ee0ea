"""A column of weights: stored beside the labels, verified, appended, and read with exactly the rows it belongs to."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster

from kme_dist.data.append import append
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.dataset import describe_dataset, open_dataset
from kme_dist.data.ingest import ingest
from kme_dist.data.reading import Table, read_table
from kme_dist.data.rows import RowsRef
from kme_dist.data.statistics import Statistics
from kme_dist.errors import ConfigError, CorruptError, DataError

N = 700


def table(n=N, seed=0, low=1.0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 2)), rng.integers(0, 3, n), rng.uniform(low, low + 3, n)


def write(path, X, y, w, number=True):
    lines = ["a,importance,b,kind"]
    lines += [f"{row[0]!r},{v!r},{row[1]!r},c{k}" for row, k, v in zip(X.tolist(), y.tolist(), w.tolist(), strict=True)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "rows.csv", *table())


def stored(source, tmp_path, **options):
    return ingest(source, tmp_path / "rows.zarr", label="kind", weight="importance", **options)


def test_the_weight_column_is_stored_and_is_no_feature(source, tmp_path):
    data = stored(source, tmp_path)
    X, _, w = table()
    assert data.feature_names == ["a", "b"]
    np.testing.assert_array_equal(data.weights(), w)
    np.testing.assert_array_equal(data.read()[0], X)
    data.verify()
    shown = describe_dataset(data.attributes)["weight"]
    assert shown["column"] == "importance"
    assert shown["sum"] == pytest.approx(w.sum())
    json.dumps(shown)
    assert ingest(source, tmp_path / "other.zarr", label="kind").weights() is None


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": 3},
        {"split": "train=0.7,test=0.3"},
        {"split": "train=0.7,test=0.3", "stratify": True},
        {"split": "train=0:500,test=500:700"},
    ],
)
def test_weights_move_with_their_rows(source, tmp_path, options):
    data = stored(source, tmp_path, **options)
    X, _, w = table()
    found, _ = data.read()
    at = {tuple(row): i for i, row in enumerate(X.tolist())}
    order = [at[tuple(row)] for row in found.tolist()]
    np.testing.assert_array_equal(data.weights(), w[order])
    for split in data.splits:
        ((start, stop),) = data.splits[split]
        assert data.split_weight(split) == pytest.approx(data.weights()[start:stop].sum())


def test_any_way_to_read_rows_has_its_weights(source, tmp_path):
    data = stored(source, tmp_path, split="train=0:500,test=500:700")
    X, y, w = table()
    at = {tuple(row): i for i, row in enumerate(X.tolist())}
    own = lambda rows: w[[at[tuple(row)] for row in np.asarray(rows).tolist()]]  # noqa: E731
    for source in (data, ArrayRows(X[:500], y[:500], range(3), weights=w[:500])):
        rows = RowsRef.of(source)
        plan = rows.plan(64, 1)
        np.testing.assert_array_equal(rows.weights(), w[:500])
        np.testing.assert_array_equal(rows.weights(30, 90), own(rows.read(30, 90)[0]))
        np.testing.assert_array_equal(rows.batch_weights(plan, 5), own(rows.batch(plan, 5)[0]))
        np.testing.assert_array_equal(rows.sample_weights(100, 2), own(rows.sample(100, 2)[0]))
        part = rows.part(20, 75)
        np.testing.assert_array_equal(part.weights(), own(part.read()[0]))
        assert part.weight == pytest.approx(w[20:75].sum())
        assert rows.weight == pytest.approx(w[:500].sum())
        again = pickle.loads(pickle.dumps(rows))
        np.testing.assert_array_equal(again.weights(), rows.weights())
    plain = RowsRef.of(ArrayRows(X, y, range(3)))
    assert plain.weights() is None
    assert plain.sample_weights(5, 0) is None
    assert plain.weight == N


def test_rows_in_memory_and_on_disk_agree_in_every_bit(source, tmp_path):
    data = stored(source, tmp_path)
    X, y, w = table()
    rows = ArrayRows(X, y, ["c0", "c1", "c2"], ["a", "b"], weights=w)
    for name in ("count", "weight", "minimum", "maximum", "mean", "squares"):
        np.testing.assert_array_equal(getattr(rows.statistics, name), getattr(data.statistics, name))
    np.testing.assert_array_equal(rows.weight_totals(), data.weight_totals())
    assert rows.split_weight() == data.split_weight()
    assert rows.span_digests(0, N) == data.span_digests(0, N)
    rows.spill(tmp_path)
    arrived = pickle.loads(pickle.dumps(rows))
    assert arrived.digest == rows.digest
    np.testing.assert_array_equal(arrived.read_weights(3, 9), w[3:9])


def test_other_weights_are_other_data(tmp_path):
    X, y, w = table()
    one, two = (ArrayRows(X, y, range(3), weights=v) for v in (w, w + 1))
    assert one.digest != two.digest != ArrayRows(X, y, range(3)).digest
    assert one.span_digests(0, 5) != two.span_digests(0, 5)
    assert one.with_class_factors([1, 2, 3]).digest != one.digest


def test_appended_rows_bring_their_weights(source, tmp_path):
    data = stored(source, tmp_path, split="train=0.7,test=0.3")
    X, y, w = table(90, seed=4)
    more = append(data.path, write(tmp_path / "new.csv", X, y, w), split="train")
    assert more.rows == N + 90
    at = {tuple(row): i for i, row in enumerate(X.tolist())}  # new rows are shuffled among themselves
    order = [at[tuple(row)] for row in more.read_rows(N, N + 90)[0].tolist()]
    np.testing.assert_array_equal(more.weights()[-90:], w[order])
    assert more.split_weight() == pytest.approx(table()[2].sum() + w.sum())
    assert more.split_weight("train") == pytest.approx(data.split_weight("train") + w.sum())
    assert more.statistics.weight == pytest.approx(more.weights().sum())
    more.verify()
    bare = tmp_path / "bare.csv"
    bare.write_text("a,b,kind\n1,2,c0\n")
    with pytest.raises(DataError, match="'importance' is missing"):
        append(data.path, bare, split="train")
    with pytest.raises(ConfigError, match="weight cannot be set"):
        append(data.path, source, weight="b")


def test_damaged_weights_are_found(source, tmp_path):
    data = stored(source, tmp_path, compression="none")
    (file,) = (tmp_path / "rows.zarr" / "weight" / "c").iterdir()
    raw = bytearray(file.read_bytes())
    raw[100] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CorruptError, match="weight"):
        open_dataset(data.path).verify()


def test_new_rows_need_no_weights(source, tmp_path):
    data = stored(source, tmp_path)
    bare = tmp_path / "bare.csv"
    bare.write_text("b,a\n1,2\n3,4\n")
    new = ingest(bare, tmp_path / "new.zarr", like=data)
    assert new.weights() is None
    np.testing.assert_array_equal(new.read()[0], [[2, 1], [4, 3]])
    assert read_table(bare, schema=data.schema.without_label()).weights is None


def test_tables_and_matrices_have_weights_too(source, tmp_path):
    X, y, w = table()
    read = read_table(source, label="kind", weight="importance")
    np.testing.assert_array_equal(read.weights, w)
    again = ingest(read, tmp_path / "table.zarr")
    np.testing.assert_array_equal(again.weights(), w)
    assert again.schema.weight == "importance"
    matrix = ingest((np.column_stack([X, w]), y), tmp_path / "matrix.zarr", weight=-1, task="classification")
    assert matrix.features == 2
    np.testing.assert_array_equal(matrix.weights(), w)
    given = Table(X, y, ["a", "b"], [0, 1, 2], weights=w)
    np.testing.assert_array_equal(ingest(given, tmp_path / "given.zarr", task="classification").weights(), w)


@pytest.mark.parametrize(
    ("value", "words"),
    [("-1.5", "the weight is -1.5, it must be >= 0"), ("inf", "the weight is inf"), ("", "the weight is missing")],
)
def test_impossible_weights_are_refused_by_row_and_column(tmp_path, value, words):
    file = tmp_path / "rows.csv"
    file.write_text(f"a,w,k\n1,1,x\n2,{value},y\n3,2,y\n")
    with pytest.raises(DataError, match=rf"row 1 \(line 3\), column 'w': {words}"):
        ingest(file, tmp_path / "rows.zarr", label="k", weight="w")


def test_rows_without_a_weight_are_dropped_where_missing_values_are(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("a,w,k\n1,1,x\n2,,y\n3,2,y\n")
    data = ingest(file, tmp_path / "rows.zarr", label="k", weight="w", missing="drop")
    np.testing.assert_array_equal(data.weights(), [1, 2])


def test_a_weight_must_be_a_column_of_numbers_of_its_own(source, tmp_path):
    with pytest.raises(DataError, match="holds text values"):
        ingest(source, tmp_path / "x.zarr", weight="kind")
    with pytest.raises(ConfigError, match="both label and weight"):
        ingest(source, tmp_path / "x.zarr", label="kind", weight="kind")
    with pytest.raises(ConfigError, match="the weight 'b' is also listed in features"):
        ingest(source, tmp_path / "x.zarr", label="kind", weight="b", features=("a", "b"))
    with pytest.raises(DataError, match="Did you mean 'importance'"):
        ingest(source, tmp_path / "x.zarr", label="kind", weight="importanc")


# --- what weights mean -------------------------------------------------------------------------------


def test_statistics_of_integer_weights_are_those_of_repeated_rows(rng):
    X, counts = rng.normal(size=(300, 3)) + 1e6, rng.integers(0, 4, 300)
    X[counts == 0] = 1e9
    one, two = Statistics.of(X, counts.astype(float)), Statistics.of(np.repeat(X, counts, axis=0))
    for name in ("minimum", "maximum"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    np.testing.assert_allclose(one.mean, two.mean, rtol=1e-14)
    np.testing.assert_allclose(one.variance, two.variance, rtol=1e-9)
    halves = Statistics.of(X[:100], counts[:100].astype(float)) + Statistics.of(X[100:], counts[100:].astype(float))
    np.testing.assert_allclose(halves.variance, one.variance, rtol=1e-9)
    again = Statistics.from_json(one.to_json(), 3)
    assert again.weight == one.weight
    nothing = Statistics.of(X[:5], np.zeros(5))
    np.testing.assert_array_equal((nothing + one).mean, one.mean)
    assert (nothing + one).count == 305


def test_weights_below_one_on_average_are_scaled_up_and_others_are_not():
    X, y, w = table()
    heavy, light = (RowsRef.of(ArrayRows(X, y, range(3), weights=v)) for v in (w, w / w.sum()))
    np.testing.assert_array_equal(heavy.weights(), w)
    np.testing.assert_allclose(light.weights(), w / w.mean(), rtol=1e-13)
    assert light.weight == pytest.approx(N)


def test_factors_of_classes_multiply_the_weights(source, tmp_path):
    data = stored(source, tmp_path)
    X, y, w = table()
    factors = (2.0, 1.0, 0.0)
    for rows in (data, ArrayRows(X, y, range(3), weights=w)):
        found = pickle.loads(pickle.dumps(RowsRef.of(rows.with_class_factors(factors))))
        np.testing.assert_array_equal(found.weights(5, 60), (w * np.take(factors, y))[5:60])
        assert found.weight == pytest.approx((w * np.take(factors, y)).sum())
    plain = RowsRef.of(ArrayRows(X, y, range(3)).with_class_factors((3.0, 1.0, 1.0)))
    np.testing.assert_array_equal(plain.weights(), np.where(y == 0, 3.0, 1.0))
    with pytest.raises(DataError, match="all weights are 0"):
        RowsRef.of(ArrayRows(X, y, range(3), weights=0 * w)).weights()


def test_factors_of_classes_leave_the_original_alone(source, tmp_path):
    data = stored(source, tmp_path)
    before = RowsRef.of(pickle.loads(pickle.dumps(data))).weights()
    other = data.with_class_factors((2.0, 1.0, 1.0))
    assert data.class_factors is None
    assert pickle.loads(pickle.dumps(data)).class_factors is None
    assert pickle.loads(pickle.dumps(other)).class_factors == (2.0, 1.0, 1.0)
    np.testing.assert_array_equal(RowsRef.of(pickle.loads(pickle.dumps(data))).weights(), before)


def test_no_rows_have_no_weights(source, tmp_path):
    data = stored(source, tmp_path)
    for rows in (RowsRef.of(data), RowsRef.of(data.with_class_factors((1.0, 2.0, 3.0)))):
        assert rows.weights(5, 5).shape == (0,)


def test_workers_store_the_same_weights(tmp_path):
    X, y, w = table(9000)
    frame = pa.table({"a": X[:, 0], "b": X[:, 1], "kind": y, "importance": w})
    pq.write_table(frame, tmp_path / "rows.parquet", row_group_size=1000)
    options = {"label": "kind", "weight": "importance", "chunk_bytes": 16 << 10, "shard_bytes": 32 << 10}
    alone = ingest(tmp_path / "rows.parquet", tmp_path / "alone.zarr", **options)
    workers = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": ":0"}
    with LocalCluster(**workers) as cluster, Client(cluster) as client:
        spread = ingest(tmp_path / "rows.parquet", tmp_path / "spread.zarr", client=client, **options)
    assert len(alone.attributes["digests"]["weight"]) > 1
    assert spread.attributes["digests"] == alone.attributes["digests"]
    np.testing.assert_array_equal(spread.weight_totals(), alone.weight_totals())
    np.testing.assert_array_equal(spread.weights(), w)


@pytest.mark.parametrize(
    ("weights", "split", "said"),
    [
        ([0.0] * 8, None, "all weights 'w' are 0, so no row counts; at least one must be positive"),
        ([1.0] * 4 + [0.0] * 4, "train=0:4,test=4:8", "all weights 'w' in the split 'test' are 0"),
        (
            [1.0] * 3 + [1e308] * 5,
            None,
            r"row 3 .*column 'w': the weight is 1e\+308, it must be at most 1e\+100; divide",
        ),
        ([1.0] * 3 + [np.inf] * 5, None, "row 3 .*column 'w': the weight is inf, it must be at most"),
    ],
)
def test_weights_of_which_no_row_counts_or_that_overflow_are_refused(tmp_path, weights, split, said):
    lines = [f"{i},{i % 2},{w!r}" for i, w in enumerate(weights)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,w", *lines]))
    with pytest.raises(DataError, match=said):
        ingest(tmp_path / "t.csv", tmp_path / "d.zarr", label="y", weight="w", split=split)
    assert not (tmp_path / "d.zarr").exists()
