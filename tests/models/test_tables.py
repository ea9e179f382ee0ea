"""Data frames as people have them: estimators encode categories, dates, booleans and holes, and keep the encoding."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kme_dist as kme
from kme_dist.cli import app as cli
from kme_dist.data.frames import encode_table, table_schema
from kme_dist.data.reading import read_table
from kme_dist.errors import AssumptionWarning, DataError

# What is assumed about missing values is said by one test below.
pytestmark = pytest.mark.filterwarnings("ignore::kme_dist.errors.AssumptionWarning")
WAYS = {
    "mce": lambda: kme.MCEClassifier(objective="rcb", steps=3, random_state=0),
    "cen": lambda: kme.CENClassifier(hidden=(4,), steps=3),
    "askl": lambda: kme.ASKLClassifier(features=8, epochs=1, loss="cross_entropy"),
    "parzen": lambda: kme.ParzenClassifier(folds=2),
}


def table(n=120, seed=0):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "colour": pd.Categorical(rng.choice(["red", "green", "blue"], n)),
            "level": pd.Categorical(rng.choice([10, 20, 30], n)),  # numbers that are names
            "size": rng.normal(size=n),
            "when": pd.Timestamp("2023-01-01") + pd.to_timedelta(rng.integers(0, 900, n), "D"),
            "old": rng.random(n) > 0.5,
            "shop": rng.choice(["north", "south"], n).astype(object),
        }
    )
    y = np.where((frame["colour"] == "red") ^ (frame["size"] > 0), "yes", "no")
    frame.loc[rng.random(n) < 0.1, "size"] = np.nan
    frame.loc[rng.random(n) < 0.1, "when"] = pd.NaT
    frame.loc[rng.random(n) < 0.1, "shop"] = None
    return frame, y


@pytest.mark.parametrize("way", WAYS)
def test_a_table_is_encoded_and_its_encoding_is_saved(way, tmp_path):
    frame, y = table()
    model = WAYS[way]().fit(frame, y)
    assert model.feature_names_in_.tolist() == frame.columns.tolist()
    assert model.n_features_in_ == 6
    names = model.encoded_feature_names_
    assert names[:6] == ["colour=blue", "colour=green", "colour=red", "level=10", "level=20", "level=30"]
    assert {"size:missing", "when:missing", "shop:missing", "when:sin(year)", "shop=north"} <= set(names)
    assert "old:missing" not in names
    wanted = model.predict_proba(frame)
    shuffled = frame[["shop", "when", "old", "size", "level", "colour"]].assign(more=1)
    np.testing.assert_array_equal(model.predict_proba(shuffled), wanted)
    np.testing.assert_array_equal(model.predict_proba(pa.Table.from_pandas(frame)), wanted)
    model.save(tmp_path / "m.zarr")
    loaded = kme.load(tmp_path / "m.zarr")
    assert loaded.encoding_ == model.encoding_
    assert loaded.n_features_in_ == 6
    np.testing.assert_allclose(loaded.predict_proba(shuffled), wanted, atol=1e-6)


@pytest.mark.filterwarnings("default")
def test_missing_values_are_filled_as_in_a_file_and_said_in_one_line(tmp_path):
    frame, y = table()
    with pytest.warns(AssumptionWarning) as found:
        model = kme.MCEClassifier(steps=0).fit(frame, y)
    [line] = [str(warning.message) for warning in found]
    assert re.match(r"X: missing values in 'size' \(\d+ rows\), 'when' \(\d+ rows\), 'shop' \(\d+ rows\) are the", line)
    with pytest.warns(AssumptionWarning, match=line[3:80].replace("(", r"\(").replace(")", r"\)")):
        data = kme.ingest(frame.assign(y=y), tmp_path / "d.zarr", label="y")
    assert data.schema.columns == model.encoding_.columns
    other = kme.MCEClassifier(steps=0).fit(data)
    np.testing.assert_allclose(other.predict_proba(frame), model.predict_proba(frame), atol=1e-6)


def test_the_encoding_is_that_of_ingest(tmp_path):
    """The same rows as a data set, fitted in the same way: the same numbers in, the same probabilities out."""
    frame, y = table()
    data = kme.ingest(frame.assign(y=y), tmp_path / "d.zarr", label="y", missing="indicator")
    settings = {"kernel": "gaussian", "steps": 0, "objective": "rcb"}
    stored, direct = kme.MCEClassifier(**settings).fit(data), kme.MCEClassifier(**settings).fit(frame, y)
    assert stored.encoding_.columns == direct.encoding_.columns
    assert stored.encoded_feature_names_ == direct.encoded_feature_names_ == data.feature_names
    np.testing.assert_array_equal(stored.predict_proba(frame), direct.predict_proba(frame))
    np.testing.assert_array_equal(stored.predict_proba(data.read()[0]), direct.predict_proba(frame))


def test_an_unknown_category_is_none_of_the_known_ones_and_is_counted():
    frame, y = table()
    model = WAYS["mce"]().fit(frame, y)
    new = frame.head(5).assign(colour=["red", "mauve", "mauve", None, "blue"])
    with pytest.warns(UserWarning, match=r"2 rows of column 'colour' \(first: 'mauve'\)"):
        found = model.predict_proba(new)
    known = frame.head(5).assign(colour=["red", None, None, None, "blue"])  # no colour was missing at the fit
    with pytest.warns(UserWarning, match="missing values, .*: 3 rows of column 'colour'"):
        np.testing.assert_array_equal(found, model.predict_proba(known))
    with pytest.raises(DataError, match="row 1, column 'colour': the category 'mauve' is unknown"):
        kme.predict(model, new, unseen="error")


def test_a_hole_in_a_column_without_holes_is_the_mean():
    frame, y = table()
    model = WAYS["mce"]().fit(frame.assign(size=frame["size"].fillna(0.5)), y)
    assert "size:missing" not in model.encoded_feature_names_
    hole, mean = frame.head(1).assign(size=np.nan), frame["size"].fillna(0.5).mean()
    with pytest.warns(UserWarning, match="filled in with the mean.*: 1 row of column 'size'"):
        found = model.predict_proba(hole)
    np.testing.assert_allclose(found, model.predict_proba(hole.assign(size=mean)))


def test_holes_are_filled_as_in_the_data_set_of_the_fit(tmp_path):
    frame, y = table()
    numbers = frame[["size"]].assign(other=1.0 * np.arange(len(frame)), y=y)
    model = kme.MCEClassifier(steps=0).fit(kme.ingest(numbers, tmp_path / "d.zarr", label="y", missing="mean"))
    hole, mean = pd.DataFrame({"size": [np.nan], "other": [3.0]}), frame["size"].mean()
    with pytest.warns(UserWarning, match="filled in with the mean.*: 1 row of column 'size'"):
        found = model.predict_proba(hole)
    np.testing.assert_allclose(found, model.predict_proba(hole.fillna(mean)))


def test_missing_columns_are_named_and_arrays_go_by_position():
    frame, y = table()
    model = WAYS["mce"]().fit(frame, y)
    with pytest.raises(DataError, match="the columns 'level', 'old' are missing; found 'colour', 'size'"):
        model.predict(frame.drop(columns=["level", "old"]))
    with pytest.raises(DataError, match=r"fitted to a table with the columns 'colour', 'level'"):
        model.predict(np.zeros((3, 4)))
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        by_position = model.predict_proba(frame.to_numpy(dtype=object))
    np.testing.assert_array_equal(by_position, model.predict_proba(frame))


def test_the_labels_may_be_a_column_of_the_table():
    frame, y = table()
    whole = frame.assign(kind=y)
    wanted = WAYS["mce"]().fit(frame, y).predict_proba(frame)
    for given in (whole, pa.Table.from_pandas(whole)):
        model = WAYS["mce"]().fit(given, "kind")
        assert model.feature_names_in_.tolist() == frame.columns.tolist()
        np.testing.assert_array_equal(model.predict_proba(given), wanted)
        assert model.score(given, "kind") == model.score(frame, y)
    for use in (WAYS["mce"]().fit, model.score):
        with pytest.raises(DataError, match="y='kinds' is not a column of X"):
            use(whole, "kinds")


@pytest.mark.parametrize("way", [kme.CMERegressor, kme.ASKLRegressor])
def test_the_targets_may_be_a_column_of_the_table(way):
    frame, _ = table()
    whole = frame.drop(columns="size").assign(price=np.linspace(0, 1, len(frame)))
    model = way(random_state=0).fit(whole, "price")
    assert model.score(whole, "price") == model.score(whole.drop(columns="price"), whole["price"])


def test_warnings_point_at_the_line_of_the_user():
    frame, y = table()
    model = WAYS["mce"]().fit(frame, y)
    for use in (model.predict, model.predict_proba, lambda rows: kme.predict(model, rows)):
        with pytest.warns(UserWarning, match="purple") as found:
            use(frame.assign(colour="purple"))
        assert {warning.filename for warning in found} == {__file__}


def test_numbers_without_holes_are_used_as_they_are():
    frame, y = table()
    plain = frame[["size", "old"]].fillna(0.0)
    model = WAYS["mce"]().fit(plain, y)
    assert model.encoding_ is None
    with pytest.raises(DataError, match=r"X\[model.feature_names_in_\]"):  # scikit-learn's rule for such tables
        model.predict(plain[["old", "size"]])
    array = plain.to_numpy(dtype=float)
    array[3, 0] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        WAYS["mce"]().fit(array, y)
    refitted = model.fit(frame, y).fit(plain, y)
    assert refitted.encoding_ is None


def test_relevance_of_a_column_is_that_of_all_its_features():
    frame, y = table(300)
    model = kme.MCEClassifier(objective="median").fit(frame, y)
    groups = model.feature_groups_
    assert list(groups) == frame.columns.tolist()
    assert groups["colour"] == [0, 1, 2]
    shares = dict(zip(groups, model.feature_importances("columns"), strict=True))
    assert shares["colour"] + shares["size"] > 0.7
    np.testing.assert_array_equal(model.feature_importances_, list(shares.values()), "one for each column of the table")
    assert len(model.feature_importances_) == len(model.feature_names_in_) < model.feature_importances().size


def test_values_missing_where_the_fit_had_none_are_told_by_column():
    frame, y = table()
    model, new = WAYS["mce"]().fit(frame, y), frame.head(5).copy()
    new["colour"] = new["colour"].astype(object)
    new.loc[[0, 1], "colour"], new.loc[2, "shop"], new.loc[3, "size"] = None, "west", np.nan
    said = (
        r"as none of the known ones: 1 row of column 'shop' \(first: 'west'\); "
        r"missing values, filled in with the mean or as no category: 2 rows of column 'colour'$"
    )
    with pytest.warns(UserWarning, match=said):
        model.predict(new)


def test_free_text_is_refused_with_the_way_out():
    frame, y = table(300)
    with pytest.raises(DataError, match=r"'note' has more than 256 .*X\.drop\(columns="):
        kme.MCEClassifier().fit(frame.assign(note=[f"note {i}" for i in range(300)]), y)


def test_tables_in_tables_out():
    frame, y = table()
    model = WAYS["mce"]().fit(frame, y)
    named = frame.set_axis([f"r{i}" for i in range(len(frame))])
    found = kme.predict(model, named, outputs=("label", "probability", "entropy"))
    assert found.index.tolist() == named.index.tolist()
    assert found.columns.tolist() == ["label", "probability_no", "probability_yes", "entropy"]
    np.testing.assert_allclose(found[["probability_no", "probability_yes"]], model.predict_proba(frame), atol=1e-6)
    assert (found["label"].to_numpy() == model.predict(frame)).all()
    arrow = kme.predict(model, pa.Table.from_pandas(frame))
    assert isinstance(arrow, pa.Table)
    assert arrow["label"].to_pylist() == found["label"].tolist()
    assert len(kme.predict(model, frame.head(0))) == 0
    plain = WAYS["mce"]().fit(frame[["size"]].fillna(0.0).to_numpy(), y)
    assert kme.predict(plain, np.zeros((3, 1)), top_k=1)["top_label_1"].to_pylist() == [plain.predict([[0.0]])[0]] * 3


def test_dates_as_text_are_dates_as_they_are_in_a_file(tmp_path):
    rng = np.random.default_rng(3)
    days = pd.date_range("2024-01-01", periods=300, freq="D")
    frame = pd.DataFrame({"day": days.strftime("%Y-%m-%d"), "x": rng.normal(size=300), "code": ["1-2", "b"] * 150})
    y = np.where(frame.x > 0, "up", "down")
    model = kme.MCEClassifier(steps=2).fit(frame, y)
    frame.assign(y=y).to_csv(tmp_path / "d.csv", index=False)
    stored = kme.ingest(tmp_path / "d.csv", tmp_path / "d.zarr", label="y")
    assert list(model.encoded_feature_names_) == list(stored.feature_names)
    as_dates = kme.MCEClassifier(steps=2).fit(frame.assign(day=days), y)
    np.testing.assert_array_equal(model.predict_proba(frame), as_dates.predict_proba(frame.assign(day=days)))


class Stream:
    """A table of another library (polars and others): its rows are an Arrow stream."""

    def __init__(self, table):
        self.table, self.columns, self.shape = table, table.column_names, table.shape

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("way", ["pandas", "arrow", "batch", "stream", "views"])
def test_texts_that_a_file_reads_as_dates_are_dates_in_every_table(way, tmp_path):
    """With a time zone, times of the day; codes such as 07, and columns declared as categories, stay categories."""
    hours = [f"{hour:02d}" for hour in range(12)] * 5
    frame = pd.DataFrame({"zone": [f"2024-{m:02d}-03T10:00:00Z" for m in range(1, 13)] * 5})
    frame["shifted"] = [text.replace("Z", "+02:00") for text in frame["zone"]]
    frame["clock"], frame["code"], frame["x"] = [f"{hour}:30" for hour in hours], hours, np.arange(60.0)
    frame.loc[3, "zone"] = None
    table = pa.Table.from_pandas(frame, preserve_index=False)
    views = pa.schema([(f.name, pa.string_view() if f.type == pa.string() else f.type) for f in table.schema])
    X = {
        "pandas": lambda: frame.assign(declared=frame["clock"].astype("category")),
        "arrow": lambda: table,
        "batch": lambda: pa.RecordBatch.from_pandas(frame, preserve_index=False),
        "stream": lambda: Stream(table),
        "views": lambda: Stream(table.cast(views)),
    }[way]()
    with pytest.warns(AssumptionWarning, match="'zone'"):
        schema = table_schema(X)
    kinds = {column.name: column.kind for column in schema.columns}
    assert kinds.pop("declared", "one_hot") == "one_hot"
    assert kinds == {"zone": "date", "shifted": "date", "clock": "date", "code": "one_hot", "x": "number"}
    frame.to_csv(tmp_path / "rows.csv", index=False)
    wanted = read_table(tmp_path / "rows.csv", categories=["code"], missing="indicator")
    rows, unseen = encode_table(X, schema)
    at = [schema.feature_names.index(name) for name in wanted.feature_names if not name.startswith("code")]
    np.testing.assert_allclose(rows[:, at], wanted.X[:, [not n.startswith("code") for n in wanted.feature_names]])
    assert not unseen


def test_a_number_among_dates_is_no_time_of_the_day():
    frame = pd.DataFrame({"clock": ["10:00", "11:30", "12:00"] * 4})
    schema = table_schema(frame)
    assert encode_table(frame, schema)[0][0, 0] == pytest.approx(10 / 24)
    with pytest.raises(DataError, match="row 1, column 'clock': '12' is not a date or time"):
        encode_table(pd.DataFrame({"clock": ["10:00", "12"]}), schema)


def test_a_regressor_keeps_the_encoding_of_a_data_set(tmp_path, capsys):
    rng = np.random.default_rng(4)
    frame = pd.DataFrame({"city": rng.choice(["A", "B"], 80), "x": rng.normal(size=80)})
    frame.assign(y=frame.x + (frame.city == "A")).to_csv(tmp_path / "d.csv", index=False)
    stored = kme.ingest(tmp_path / "d.csv", tmp_path / "d.zarr", label="y", task="regression")
    kme.CMERegressor(steps=2).fit(stored).save(tmp_path / "model.zarr")
    model, new = kme.load(tmp_path / "model.zarr"), frame[["x", "city"]].head(5)
    np.testing.assert_allclose(kme.predict(model, new)["mean"], model.predict(new), rtol=1e-9)
    kme.predict(model, new, tmp_path / "scores.zarr")
    assert cli.execute(["inspect", str(tmp_path / "scores.zarr")]) == 0
    shown = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert (shown["rows"], shown["status"]) == (["5"], ["complete"]), "predictions, not the card of their model"


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_durations_are_seconds_in_every_table_and_in_files(unit, tmp_path):
    seconds = np.arange(60) * 36_000 / 3
    frame = pd.DataFrame({"z": (seconds * 1e9).astype("timedelta64[ns]"), "b": np.sin(seconds)})
    frame["z"] = frame["z"].astype(f"timedelta64[{unit}]")
    frame.loc[7, "z"] = pd.NaT
    arrow = pa.Table.from_pandas(frame, preserve_index=False)
    assert pa.types.is_duration(arrow.schema.field("z").type)
    wanted = np.where(np.arange(60) == 7, np.delete(seconds, 7).mean(), seconds)
    for given in (frame, arrow):
        schema = table_schema(given)
        assert schema.feature_names == ["z", "z:missing", "b"]
        np.testing.assert_allclose(encode_table(given, schema)[0][:, 0], wanted, rtol=1e-15)
    pq.write_table(arrow, tmp_path / "rows.parquet")
    data = kme.ingest(tmp_path / "rows.parquet", tmp_path / "rows.zarr")
    assert data.feature_names == ["z", "z:missing", "b"]
    np.testing.assert_allclose(data.read()[0][:, 0], wanted, rtol=1e-15)
    model = kme.CMERegressor(steps=0).fit(frame, "b")
    np.testing.assert_array_equal(model.predict(frame.drop(columns="b")), model.predict(arrow.drop_columns(["b"])))


def test_a_schema_of_durations_in_days_reads_them_as_before():
    """Models of earlier versions have them as dates."""
    arrow = pa.table({"z": pa.array([0, 43_200, 86_400], pa.duration("s"))})
    schema = table_schema(arrow)
    old = dataclasses.replace(schema, columns=(dataclasses.replace(schema.columns[0], kind="date"),))
    np.testing.assert_array_equal(encode_table(arrow, old)[0][:, 0], [0.0, 0.5, 1.0])


def test_a_duration_as_a_target_is_a_number_of_seconds(tmp_path):
    arrow = pa.table({"b": np.arange(9.0), "z": pa.array(np.arange(9) * 60, pa.duration("s"))})
    data = kme.ingest(arrow, tmp_path / "rows.zarr", label="z")
    assert data.classes is None
    np.testing.assert_array_equal(data.read()[1], np.arange(9) * 60.0)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_dictionaries_of_any_texts_are_categories(kind, tmp_path):
    """polars hands out Categorical columns as dictionaries of string_view."""
    codes, rng = np.arange(60) % 3, np.random.default_rng(0)
    words = pa.DictionaryArray.from_arrays(pa.array(codes, pa.uint32()), pa.array(["u", "v", "w"], kind))
    given = pa.table({"a": words, "b": rng.normal(size=60)})
    plain = given.set_column(0, "a", pa.array(np.array(["u", "v", "w"])[codes]))
    y = np.where(codes == 1, "yes", "no")
    model = WAYS["mce"]().fit(given, y)
    assert model.encoded_feature_names_ == ["a=u", "a=v", "a=w", "b"]
    wanted = WAYS["mce"]().fit(plain, y).predict_proba(plain)
    np.testing.assert_array_equal(model.predict_proba(given), wanted)
    assert kme.predict(model, given).equals(kme.predict(model, plain))
    assert kme.ingest(given, tmp_path / "rows.zarr", label="a").classes == ["u", "v", "w"]


class LazyFrame:
    """Of polars: a query, whose columns are not known before it was run."""

    @property
    def columns(self):
        raise AssertionError("asked for columns of a query")


@pytest.mark.parametrize(
    "call",
    [
        lambda lazy, X, y: kme.MCEClassifier().fit(lazy, y),
        lambda lazy, X, y: kme.MCEClassifier().fit(lazy, "kind"),
        lambda lazy, X, y: kme.CMERegressor().fit(X, lazy),
        lambda lazy, X, y: kme.KernelMean().fit(lazy),
        lambda lazy, X, y: kme.ConditionalMeanEmbedding().fit(lazy, y),
        lambda lazy, X, y: kme.mmd_test(lazy, lazy),
        lambda lazy, X, y: kme.hsic_test(lazy, X),
        lambda lazy, X, y: kme.ingest(lazy, "unused.zarr"),
        lambda lazy, X, y: WAYS["mce"]().fit(X, y).predict(lazy),
        lambda lazy, X, y: kme.predict(WAYS["mce"]().fit(X, y), lazy),
    ],
)
def test_a_lazy_frame_is_told_to_be_run(call):
    X = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(DataError, match=r"got a LazyFrame, .* run it: \.collect\(\)"):
        call(LazyFrame(), X, np.arange(20) % 2)
