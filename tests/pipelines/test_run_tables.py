"""Rows of a run that are not held in memory: the same rows, splits, weights, encoding and task as those that are."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

import kme_dist as kme
from kme_dist.config import DataConfig, parse_config
from kme_dist.data.ingest import ingest
from kme_dist.errors import ConfigError, DataError
from kme_dist.pipelines import run, tables
from kme_dist.pipelines.folder import Listener

LABELS = {"classification": "kind", "regression": "price"}


def rows(n=90, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"size": rng.normal(5, 1, n), "city": rng.choice(["Oslo", "Paris", "Rome"], n)})
    frame.loc[::9, "size"] = np.nan
    frame["since"] = (pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 999, n), "D")).strftime("%Y-%m-%d")
    frame["importance"] = rng.integers(1, 5, n)
    frame["kind"] = np.where((frame["city"] == "Rome") ^ (rng.random(n) > 0.9), "a", "b")
    frame["price"] = (3.0 * (frame["city"] == "Rome") + rng.normal(size=n)).round(3)
    return frame


def data_set(folder, task, **settings):
    others = tuple(set(LABELS.values()) - {LABELS[task]})
    rows().to_csv(folder / "rows.csv", index=False)
    settings = {"exclude": others, "weight": "importance", "missing": "indicator", **settings}
    return ingest(folder / "rows.csv", folder / "rows.zarr", label=LABELS[task], **settings)


@pytest.fixture
def small_memory(monkeypatch):
    monkeypatch.setattr(tables, "IN_MEMORY_BYTES", 100)


def stored(data, folder, **settings):
    given = DataConfig(source=str(data.path), **settings)
    return tables.stored(given, folder, tables.checked(given))


def by_row(data, split):
    """The rows of a split, in the order of their source: features, targets, weights."""
    where = np.concatenate([data.row.read(*span) for span in data.ranges(split)])
    X, y = data.read(split)
    order = np.argsort(where)
    return where[order], X[order], np.asarray(y)[order], data.weights(split)[order]


@pytest.mark.parametrize("task", LABELS)
def test_a_data_set_with_both_parts_is_used_where_it_lies(task, tmp_path):
    data = data_set(tmp_path, task, split="train=0.7,test=0.3")
    found = tables.checked(DataConfig(source=data.path))
    assert isinstance(found, kme.Dataset)
    assert found.path == data.path


@pytest.mark.parametrize("task", LABELS)
def test_a_large_data_set_that_is_divided_keeps_weights_and_encoding(task, tmp_path, small_memory):
    data = data_set(tmp_path, task)
    divided = stored(data, tmp_path / "divided.zarr", test_fraction=0.3)
    assert (divided.split_rows("train"), divided.split_rows("test")) == (63, 27)
    assert divided.attributes["schema"] == data.attributes["schema"]
    assert (divided.classes, divided.label) == (data.classes, LABELS[task])
    X, y = data.read()
    for split in ("train", "test"):
        where, *found = by_row(divided, split)
        for seen, wanted in zip(found, (X, y, data.weights()), strict=True):
            np.testing.assert_array_equal(seen, wanted[where])


@pytest.mark.parametrize("task", LABELS)
def test_stored_splits_of_a_large_data_set_are_kept_with_other_columns(task, tmp_path, monkeypatch):
    """Also splits of several ranges of rows, and beside others; the same rows as from memory."""
    data = data_set(tmp_path, task, split="train=0.5,test=0.2,validation=0.3", shuffle=3)
    rows(20, seed=1).to_csv(tmp_path / "more.csv", index=False)
    data = data.append(tmp_path / "more.csv", split="train")
    assert len(data.ranges("train")) == 2
    own = stored(data, tmp_path / "memory.zarr", exclude=["size"])
    monkeypatch.setattr(tables, "IN_MEMORY_BYTES", 100)
    large = stored(data, tmp_path / "large.zarr", exclude=["size"])
    assert isinstance(tables.checked(DataConfig(source=data.path, exclude=["size"])), tables.Large)
    assert large.feature_names == own.feature_names
    assert "size" not in large.feature_names
    assert list(large.splits) == ["train", "test"]
    assert (large.split_rows("train"), large.split_rows("test")) == (65, 18)
    for split in ("train", "test"):
        for seen, wanted in zip(by_row(large, split), by_row(own, split), strict=True):
            np.testing.assert_array_equal(seen, wanted)


@pytest.mark.parametrize("task", LABELS)
@pytest.mark.parametrize("source", ["rows.csv", "rows.zarr"])
def test_a_run_on_a_large_source_reads_new_rows_as_they_come(task, source, tmp_path, small_memory):
    data_set(tmp_path, task)
    settings = {"source": str(tmp_path / source)}
    if source.endswith("csv"):
        settings |= {"label": LABELS[task], "weight": "importance", "missing": "indicator"}
        settings["exclude"] = list(set(LABELS.values()) - {LABELS[task]})
    config = {
        "data": settings,
        "learn": {"steps": 2},
        "cluster": {"kind": "serial"},
        "output": {"folder": str(tmp_path / "run")},
    }
    lines = []
    summary = run.run(parse_config(config), name="large", listener=Listener(say=lines.append))
    assert ("rmse" in summary) == (task == "regression")
    assert any("the label 'price' is a number: regression" in line for line in lines) == (task == "regression")
    assert kme.open_dataset(tmp_path / "run" / "data.zarr").has_weights
    new = rows(12, seed=2).drop(columns=["kind", "price", "importance"])[["since", "city", "size"]]
    new.to_csv(tmp_path / "new.csv", index=False)
    outcome = kme.predict(tmp_path / "run", tmp_path / "new.csv", tmp_path / "scores.csv")
    assert (outcome.rows, outcome.unseen) == (12, {})


def test_what_is_wrong_with_a_large_data_set_is_said_before_anything_is_stored(tmp_path, small_memory):
    data = data_set(tmp_path, "regression")
    with pytest.raises(ConfigError, match=r"data.label is 'kind', but .* has its own labels"):
        tables.checked(DataConfig(source=data.path, label="kind"))
    with pytest.raises(ConfigError, match=r"data.weight is 'size', but .* has its own, 'importance'"):
        tables.checked(DataConfig(source=data.path, weight="size"))
    bare = ingest(tmp_path / "rows.csv", tmp_path / "bare.zarr", missing="indicator")
    with pytest.raises(DataError, match="has no labels"):
        tables.checked(DataConfig(source=bare.path))
    with pytest.raises(ConfigError, match=r"data.label is missing: .*rows.csv .* its columns are 'size', 'city'"):
        tables.checked(DataConfig(source=str(tmp_path / "rows.csv")))


def test_without_a_label_the_columns_of_the_file_are_named(tmp_path):
    rows().to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(ConfigError, match=r"its columns are 'size', 'city', 'since', 'importance', 'kind', 'price'$"):
        tables.load(DataConfig(source=str(tmp_path / "rows.csv"), missing="indicator"))


@pytest.mark.parametrize(("given", "words"), [(1, "has 1 row"), (2, "has 2 rows"), (3, None)])
def test_the_number_of_rows_that_a_run_needs_is_said(given, words, tmp_path):
    pd.DataFrame({"x": np.arange(given) / 3, "y": np.arange(given) / 7}).to_csv(tmp_path / "few.csv", index=False)
    settings = DataConfig(source=str(tmp_path / "few.csv"), label="y", task="regression")
    if words is None:
        assert len(tables.load(settings).X_train) == 2
        return
    with pytest.raises(DataError, match=rf"few.csv {words}, and data.test_fraction 0.2 needs at least 3, two of them"):
        tables.load(settings)


@pytest.mark.parametrize("limit", [100, 1 << 29])
def test_numbers_are_not_read_as_classes_because_a_config_says_so(limit, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "IN_MEMORY_BYTES", limit)
    data = data_set(tmp_path, "regression", split="train=0.7,test=0.3")
    config = {"data": {"source": data.path, "task": "classification"}, "output": {"folder": str(tmp_path / "run")}}
    with pytest.raises(ConfigError, match="'price' is stored as numbers; ingest the table again with --task class"):
        run.run(parse_config(config), name="x")


@pytest.mark.parametrize("suffix", ["csv", "npz"])
@pytest.mark.parametrize("limit", [100, 1 << 29])
@pytest.mark.parametrize(
    ("label", "numeric"),
    [
        (np.arange(300) % 3, False),
        ((np.arange(300) % 3).astype(float), False),
        (np.arange(300) % 101, True),
        (np.arange(300) % 100, False),
        ((np.arange(300) % 21).astype(float), True),
        (np.concatenate([np.arange(299) % 3, [0.5]]), True),
        (np.array(["yes", "no", "no"] * 100), False),
    ],
)
def test_the_task_follows_from_the_label_for_every_size(limit, label, numeric, suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "IN_MEMORY_BYTES", limit)
    x = np.random.default_rng(0).normal(size=len(label))
    source = tmp_path / f"rows.{suffix}"
    if suffix == "npz":
        np.savez(source, X=x[:, None], y=label)
    else:
        getattr(pd.DataFrame({"x": x, "target": label}), f"to_{suffix}")(source, index=False)
    settings = DataConfig(source=str(source), label=None if suffix == "npz" else "target", test_fraction=0.4)
    found = tables.checked(settings)
    assert isinstance(found, tables.Large) == (limit == 100)
    assert found.numeric is numeric
    data = tables.stored(settings, tmp_path / "data.zarr", found)
    assert (data.classes is None) is numeric
    assert data.rows == 300


def test_an_integer_label_of_very_many_values_is_a_number(tmp_path):
    """More than the classes that a label may have."""
    n = 12_000
    pd.DataFrame({"x": np.arange(n) / n, "target": np.arange(n)}).to_csv(tmp_path / "rows.csv", index=False)
    found = tables.load(DataConfig(source=str(tmp_path / "rows.csv"), label="target"))
    assert found.numeric
    assert sorted([*found.y_train, *found.y_test]) == list(range(n))


def test_a_copy_of_a_data_set_keeps_what_it_knows(tmp_path):
    data = data_set(tmp_path, "classification")
    copy = ingest(data.path, tmp_path / "copy.zarr")
    assert json.dumps(copy.attributes["schema"]) == json.dumps(data.attributes["schema"])
    np.testing.assert_array_equal(copy.weights(), data.weights())
    assert (copy.classes, copy.label) == (data.classes, "kind")
    some = ingest(data.path, tmp_path / "some.zarr", features=["size", "city=Rome"])
    assert [column.kind for column in some.schema.columns] == ["number", "number"]
    np.testing.assert_array_equal(some.weights(), data.weights())
