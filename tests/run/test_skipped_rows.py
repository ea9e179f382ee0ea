"""Rows that cannot be predicted are skipped one by one, on record; no row has an output that is not a number."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kme_dist as kme
from kme_dist.core.kernels import Gaussian, Polynomial
from kme_dist.data.arrays import ArrayRows
from kme_dist.data.ingest import ingest
from kme_dist.errors import AssumptionWarning
from kme_dist.models.outputs import OUTPUTS

D = 3


def rows(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, D)).astype(np.float32)


def fitted(kernel):
    X = rows(120, seed=5)
    y = np.array(["ash", "birch", "cedar"])[(X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)]
    return kme.MCEClassifier(kernel=kernel, steps=0, regularization=1e-3).fit(X, y)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    found = fitted(Gaussian(length_scale=np.ones(D)))
    found.path = str(tmp_path_factory.mktemp("model") / "model.zarr")
    found.save(found.path)
    return found


@pytest.mark.chaos(12)
@pytest.mark.parametrize("value", [1e30, 9.96921e36, -1e20, 3e38])
def test_finite_rows_that_overflow_in_single_precision_are_computed_in_double(model, tmp_path, value):
    X = rows(500)
    X[17, 1] = value
    kme.predict(model.path, rows(500), tmp_path / "without.zarr", dtype="float32")
    outcome = kme.predict(model.path, X, tmp_path / "out.zarr", dtype="float32", outputs=OUTPUTS)
    assert (outcome.skipped_rows, outcome.complete) == (0, True)
    found = kme.open_predictions(tmp_path / "out.zarr")
    assert found.status == "complete"
    for name in found.names:
        assert np.isfinite(found.read(name)).all(), name
    np.testing.assert_allclose(found.read("probability")[17], model.predict_proba(X[17:18])[0], rtol=1e-5)
    assert found.labels()[17] == model.predict(X[17:18])[0]
    others = np.arange(500) != 17
    before = kme.open_predictions(tmp_path / "without.zarr").read("probability")
    np.testing.assert_array_equal(found.read("probability")[others], before[others])


def test_a_small_value_that_is_large_after_scaling_is_computed_in_double(tmp_path):
    X = rows(100, seed=1).astype(np.float64)
    X[:, 2] *= 1e-25  # scaled to a unit range, 1.0 is 1e25: its square does not fit single precision
    model = kme.MCEClassifier(kernel=Gaussian(length_scale=np.ones(D)), steps=0, scaling="unit").fit(X, X[:, 0] > 0)
    new = X[:20].copy()
    new[3, 2] = 1.0
    assert kme.predict(model, new, tmp_path / "out.zarr", dtype="float32").complete
    found = kme.open_predictions(tmp_path / "out.zarr").read("probability")
    np.testing.assert_allclose(found[3], model.predict_proba(new[3:4])[0], rtol=1e-5)


@pytest.mark.parametrize("outputs", [("label",), ("label", "probability"), OUTPUTS])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_without_a_finite_output_are_skipped_by_row(tmp_path, outputs, dtype):
    """A cubic kernel overflows in double precision as well."""
    X = rows(300).astype(np.float64)
    X[200, 2] = 1e200
    outcome = kme.predict(fitted(Polynomial(degree=3)), X, tmp_path / "out.zarr", dtype=dtype, outputs=outputs)
    assert (outcome.skipped_rows, outcome.complete, outcome.quarantined) == (1, False, [])
    (entry,) = outcome.first_skipped
    assert entry == {"row": 200, "error": "the output is not finite; the largest feature is 1e+200"}
    found = kme.open_predictions(tmp_path / "out.zarr")
    assert (found.status, found.skipped_rows) == ("incomplete", 1)
    assert found.read("label")[200] == -1
    assert (found.read("label")[np.arange(300) != 200] >= 0).all()


@pytest.mark.chaos(12)
@pytest.mark.parametrize("format", ["zarr", "parquet", "csv"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_costs_that_row_only(model, tmp_path, format, bad):
    X = rows(400)
    X[[0, 250, 399], [1, 2, 0]] = bad
    out = tmp_path / f"out.{format}"
    outcome = kme.predict(model.path, X, out, format=format)
    assert (outcome.skipped_rows, outcome.quarantined, outcome.retried) == (3, [], 0)
    assert [entry["row"] for entry in outcome.first_skipped] == [0, 250, 399]
    assert outcome.first_skipped[1]["error"] == f"feature 2: the value is {bad}, must be finite"
    clean = ~np.isin(np.arange(400), [0, 250, 399])
    if format == "csv":
        lines = out.read_text().splitlines()
        assert lines[251] == "250,,,,"
        assert len(lines) == 401
        return
    found = kme.open_predictions(out)
    found.verify()
    assert found.labels()[250] is None
    assert np.isnan(found.read("probability")[~clean]).all()
    kme.predict(model.path, X[clean], tmp_path / "clean.zarr")
    expected = kme.open_predictions(tmp_path / "clean.zarr").read("probability")
    np.testing.assert_allclose(found.read("probability")[clean], expected, rtol=1e-6, atol=1e-7)


def test_a_missing_value_in_parquet_costs_that_row_only(model, tmp_path):
    X = rows(50)
    columns = {f"x{j}": X[:, j].tolist() for j in range(D)}
    columns["x1"][7], columns["x2"][9] = None, float("inf")
    pq.write_table(pa.table(columns), tmp_path / "in.parquet")
    outcome = kme.predict(model.path, tmp_path / "in.parquet", tmp_path / "out", format="parquet")
    assert [entry["row"] for entry in outcome.first_skipped] == [7, 9]
    assert outcome.quarantined == []
    assert pq.read_table(tmp_path / "out")["label"].null_count == 2


def test_many_bad_rows_are_counted_and_the_first_are_named(model, tmp_path):
    X = rows(300)
    X[100:] = np.nan
    outcome = kme.predict(model.path, X, tmp_path / "out.zarr")
    assert outcome.skipped_rows == 200
    assert [entry["row"] for entry in outcome.first_skipped] == list(range(100, 120))
    assert kme.open_predictions(tmp_path / "out.zarr").skipped_rows == 200


def test_a_second_run_keeps_skipped_rows_and_a_repaired_input_is_computed(model, tmp_path, monkeypatch):
    monkeypatch.setattr(ArrayRows, "output_rows", 100)
    X, good = rows(300), rows(300)
    X[150, 0] = np.nan
    out = tmp_path / "out.zarr"
    kme.predict(model.path, X, out)
    again = kme.predict(model.path, X, out)
    assert (again.computed, again.skipped, again.skipped_rows, again.complete) == (0, 3, 1, False)
    repaired = kme.predict(model.path, good, out)
    assert (repaired.computed, repaired.skipped, repaired.complete) == (1, 2, True)
    assert kme.open_predictions(out).status == "complete"


def test_tables_say_which_rows_have_no_prediction():
    import pandas as pd

    frame = pd.DataFrame(rows(20).astype(np.float64), columns=["a", "b", "c"])
    model = kme.MCEClassifier(kernel=Polynomial(degree=3), steps=0).fit(frame, frame["a"] > 0)
    frame.loc[4, "b"] = 1e200
    with pytest.warns(UserWarning, match="no prediction for 1 row; the first is row 4: the output is not finite"):
        table = kme.predict(model, frame)
    assert table["label"].isna().tolist() == [row == 4 for row in range(20)]


def test_the_command_line_lists_skipped_rows_and_evaluation_says_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    from kme_dist.cli.app import execute

    monkeypatch.chdir(tmp_path)
    X = rows(200).astype(np.float64)
    y = np.array(["ash", "birch"])[(X[:, 0] > 0).astype(int)]
    kme.MCEClassifier(kernel=Polynomial(degree=3), steps=0).fit(X, y).save("model.zarr")
    X[11, 1] = 1e120  # its square can be stored, its cube cannot
    ingest((X, y), "rows.zarr", dtype="float64")
    assert execute(["predict", "--model", "model.zarr", "--data", "rows.zarr", "--out", "out.zarr"]) == 65
    seen = capsys.readouterr()
    assert "skipped row 11: the output is not finite; the largest feature is 1e+120" in seen.err
    assert execute(["evaluate", "--predictions", "out.zarr", "--data", "rows.zarr"]) == 0
    seen = capsys.readouterr()
    assert "(199 rows)" in seen.out
    assert "left out 1 row without a prediction (skipped or quarantined)" in seen.err
    assert json.loads((tmp_path / "out-evaluation" / "metrics.json").read_text())["rows_without_answer"] == 1
    assert execute(["inspect", "out.zarr", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["status"], facts["skipped_rows"]) == ("incomplete", 1)
    assert facts["first_skipped"] == ["row 11: the output is not finite; the largest feature is 1e+120"]


NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """The path of a model of the columns a, b, c."""
    import pandas as pd

    frame = pd.DataFrame(rows(120, seed=5).astype(np.float64), columns=NAMES)
    path = tmp_path_factory.mktemp("named") / "model.zarr"
    kme.MCEClassifier(steps=0).fit(frame, frame["a"] > 0).save(path)
    return str(path)


def without_prediction(path):
    """Of Zarr, Parquet or CSV."""
    if path.suffix == ".csv":
        lines = path.read_text().splitlines()[1:]
        return [row for row, line in enumerate(lines) if line == f"{row},,,"]
    return np.flatnonzero(np.isnan(kme.open_predictions(path).read("probability")[:, 0])).tolist()


@pytest.mark.chaos(12)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e200])
@pytest.mark.parametrize("kind", ["csv", "npy", "parquet", "frame", "arrow", "array"])
def test_such_a_row_costs_no_other_in_any_source(named, tmp_path, kind, bad):
    import pandas as pd

    X = rows(60).astype(np.float64)
    X[[7, 30], [1, 2]] = bad
    frame = pd.DataFrame(X, columns=NAMES)
    frame.to_csv(tmp_path / "new.csv", index=False)
    frame.to_parquet(tmp_path / "new.parquet")
    np.save(tmp_path / "new.npy", X)
    others = {"frame": frame, "arrow": pa.Table.from_pandas(frame, preserve_index=False), "array": X}
    source, out = others.get(kind, tmp_path / f"new.{kind}"), tmp_path / "out.zarr"
    why = f"feature 1: the value is {bad}, must be finite"
    why = "the output is not finite; the largest feature is 1e+200" if bad == 1e200 else why
    outcome = kme.predict(named, source, out)
    assert (outcome.skipped_rows, outcome.quarantined, outcome.retried) == (2, [], 0)
    assert outcome.first_skipped[0] == {"row": 7, "error": why}
    assert without_prediction(out) == [7, 30]
    again = kme.predict(named, source, out)
    assert (again.computed, again.skipped, again.skipped_rows) == (0, 1, 2)
    with pytest.warns(UserWarning, match="no prediction for 2 rows; the first is row 7: "):
        table = kme.predict(named, source)
    found = table if kind == "frame" else table.to_pandas()
    assert np.flatnonzero(found["label"].isna()).tolist() == [7, 30]


def test_a_file_that_was_repaired_is_computed_again_whatever_its_rows_are_now(named, tmp_path):
    """Also a row of zeros, which is what is stored in the place of rows that cannot be used."""
    X = rows(60).astype(np.float64)
    X[7] = np.inf
    for row, skipped in (([np.inf] * D, 1), ([0.0] * D, 0)):
        X[7] = row
        np.savetxt(tmp_path / "new.csv", X, delimiter=",", header="a,b,c", comments="")
        outcome = kme.predict(named, tmp_path / "new.csv", tmp_path / "out.zarr")
        assert (outcome.skipped_rows, outcome.computed) == (skipped, 1)


def test_score_skips_rows_that_are_not_finite(named):
    import io

    from kme_dist.pipelines import score

    sink = io.BytesIO()
    found = score.run(named, io.BytesIO(b"a,b,c\n1,2,3\n1,inf,3\n1,,3\n3,2,1\n"), sink)
    assert found.skipped == 2
    assert [line == ",," for line in sink.getvalue().decode().splitlines()[1:]] == [False, True, True, False]


@pytest.mark.chaos(12)
@pytest.mark.parametrize("format", ["zarr", "parquet", "csv"])
def test_a_text_among_the_numbers_of_parquet_costs_that_row_only(named, tmp_path, format, monkeypatch):
    """Over two files and several chunks, and for every notation that is not a number."""
    from kme_dist.data import lazy

    monkeypatch.setattr(lazy, "OUTPUT_ROWS", 100)
    X, folder = rows(260).astype(np.float64), tmp_path / "in"
    texts = [repr(value) for value in X[:, 1].tolist()]
    bad = {20: "0x10", 150: "", 199: "x", 200: "1,5", 259: "12 kg"}
    for row, text in bad.items():
        texts[row] = text
    texts[21] = "+1"  # which is a number
    folder.mkdir()
    for i, part in enumerate((slice(0, 170), slice(170, 260))):
        columns = {"a": X[part, 0], "b": texts[part], "c": X[part, 2]}
        pq.write_table(pa.table(columns), folder / f"{i}.parquet")
    out = tmp_path / f"out.{format}"
    outcome = kme.predict(named, folder, out)
    assert (outcome.skipped_rows, outcome.quarantined, outcome.computed, outcome.retried) == (5, [], 3, 0)
    wanted = [{"row": row, "error": f"column 'b': {text!r} is not a number"} for row, text in bad.items()]
    assert outcome.first_skipped == wanted
    assert without_prediction(out) == sorted(bad)
    if format != "csv":
        assert kme.predict(named, folder, out).skipped == 3
        X[21, 1] = 1.0
        kme.predict(named, X, tmp_path / "expected.zarr")
        expected = kme.open_predictions(tmp_path / "expected.zarr").read("probability")
        expected[sorted(bad)] = np.nan
        np.testing.assert_array_equal(kme.open_predictions(out).read("probability"), expected)


@pytest.mark.parametrize("what", ["number", "flag", "date"])
def test_a_bad_text_is_no_missing_value_that_is_filled_in(tmp_path, what):
    import pandas as pd

    n, good = 80, {"number": "1.5", "flag": "true", "date": "2026-01-31"}[what]
    values = {
        "number": np.arange(n) * 0.5,
        "flag": np.arange(n) % 2 == 0,
        "date": pd.date_range("2025-01-01", periods=n),
    }
    given = pd.DataFrame({"u": values[what], "v": np.sin(np.arange(n))})
    given.loc[3, "v"] = np.nan
    given["u"] = given["u"].astype(object).where(np.arange(n) != 4, None) if what != "flag" else given["u"]
    given = given.infer_objects()
    with pytest.warns(AssumptionWarning):
        kme.MCEClassifier(steps=0).fit(given, np.arange(n) % 3 == 0).save(tmp_path / "model.zarr")
    table = pa.table({"u": [good, "soon", None if what != "flag" else good, good], "v": [0.1, 0.2, 0.3, None]})
    pq.write_table(table, tmp_path / "new.parquet")
    outcome = kme.predict(tmp_path / "model.zarr", tmp_path / "new.parquet", tmp_path / "out.zarr")
    kind = "a date or time" if what == "date" else "a number"
    assert outcome.first_skipped == [{"row": 1, "error": f"column 'u': 'soon' is not {kind}"}]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_value_that_is_no_byte_is_skipped_where_the_model_knows_bytes(tmp_path, kind):
    from pyarrow import csv

    number = np.arange(60) * 4
    given = pa.table({"u": number, "v": np.array(["x", "y"])[number % 8 // 4], "kind": np.where(number > 99, "p", "q")})
    data = ingest(given, tmp_path / "rows.zarr", label="kind", dtype="uint8")
    assert data.dtype == np.uint8
    kme.MCEClassifier(steps=0).fit(data).save(tmp_path / "model.zarr")
    new = pa.table({"u": [4.0, 300.0, 8.0, np.inf, None, 2.5], "v": ["x", "y", "x", "x", "y", "x"]})
    {"csv": csv.write_csv, "parquet": pq.write_table}[kind](new, tmp_path / f"new.{kind}")
    outcome = kme.predict(tmp_path / "model.zarr", tmp_path / f"new.{kind}", tmp_path / "out.zarr")
    assert [entry["row"] for entry in outcome.first_skipped] == [1, 3, 4, 5]
    assert outcome.first_skipped[0]["error"] == "300 is not an integer from 0 to 255"
