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
