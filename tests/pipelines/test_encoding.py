"""One encoding, kept with the data set of a run: new rows with text columns are read as the training rows were."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

import kme_dist as kme
from kme_dist.cli.app import execute
from kme_dist.config import DataConfig, parse_config
from kme_dist.data.ingest import ingest
from kme_dist.data.reading import read_table
from kme_dist.errors import ConfigError, DataError
from kme_dist.pipelines import ingest as ingest_pipeline
from kme_dist.pipelines import tables
from kme_dist.pipelines.run import run


def rows(n, seed):
    rng = np.random.default_rng(seed)
    colour = rng.choice(["blue", "green", "red"], n)
    height = rng.random(n).round(3)
    kind = np.where((colour == "red") | (height > 0.6), "tall", "small")
    return pd.DataFrame({"height": height, "colour": colour, "kind": kind})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on a table with a text column."""
    folder = tmp_path_factory.mktemp("encoding")
    rows(120, 1).to_csv(folder / "train.csv", index=False)
    config = {
        "data": {"source": str(folder / "train.csv"), "label": "kind"},
        "model": {"objective": "rcb"},
        "learn": {"steps": 5},
        "cluster": {"kind": "serial"},
        "output": {"folder": str(folder / "run")},
    }
    run(parse_config(config), name="colours")
    return folder


def test_the_data_set_of_a_run_has_the_encoding_of_its_source(finished):
    ours = kme.open_dataset(finished / "run" / "data.zarr")
    theirs = ingest(finished / "train.csv", finished / "plain.zarr", label="kind", dtype="float64")
    assert ours.schema == theirs.schema
    assert ours.attributes["schema"] == theirs.attributes["schema"]
    assert [column.kind for column in ours.schema.columns] == ["number", "one_hot"]
    assert ours.feature_names == ["height", "colour=blue", "colour=green", "colour=red"]


def test_new_rows_are_predicted_as_they_come(finished, capsys):
    """Parquet by `--like`, and a CSV file that was ingested like the data of the run: in two ways the same answers."""
    new = rows(40, 2).drop(columns="kind")
    new = new[new["colour"] != "green"]  # not every category needs to be there
    new.to_parquet(finished / "new.parquet")
    new.to_csv(finished / "new.csv", index=False)
    model, like = str(finished / "run" / "model.zarr"), str(finished / "run" / "data.zarr")
    command = ["predict", "--model", model, "--like", like, "--quiet"]
    assert execute([*command, "--data", str(finished / "new.parquet"), "--out", str(finished / "a.zarr")]) == 0
    assert execute(["ingest", str(finished / "new.csv"), str(finished / "new.zarr"), "--like", like, "--quiet"]) == 0
    assert execute([*command, "--data", str(finished / "new.zarr"), "--out", str(finished / "b.zarr")]) == 0
    capsys.readouterr()
    first, second = (kme.open_predictions(finished / name).read("probability") for name in ("a.zarr", "b.zarr"))
    np.testing.assert_array_equal(first, second)
    fitted = kme.load(model)
    names = ["height", "colour=blue", "colour=green", "colour=red"]
    assert fitted.feature_names_in_.tolist() == names
    hot = {f"colour={c}": (new["colour"] == c).astype(float) for c in ("blue", "green", "red")}
    by_hand = fitted.predict_proba(pd.DataFrame({"height": new["height"], **hot})[names])
    np.testing.assert_allclose(first, by_hand, atol=1e-3)


def test_a_category_that_training_rows_did_not_have_is_named(finished):
    strange = pd.DataFrame({"height": [0.1, 0.2], "colour": ["red", "pink"]})
    strange.to_csv(finished / "strange.csv", index=False)
    with pytest.raises(DataError, match=r"row 1 \(line 3\), column 'colour': the category 'pink' is unknown"):
        ingest_pipeline.run(
            finished / "strange.csv", finished / "s.zarr", like=str(finished / "run" / "data.zarr"), quiet=True
        )


def test_a_category_that_training_rows_did_not_have_can_be_let_in_by_the_command(finished, capsys):
    """Rows with labels, to evaluate predictions: unknown categories are none of the known ones, and counted."""
    strange = rows(30, 12)
    strange.loc[4, "colour"] = "pink"
    strange.to_csv(finished / "let-in.csv", index=False)
    paths, like = [str(finished / "let-in.csv"), str(finished / "let-in.zarr")], str(finished / "run" / "data.zarr")
    assert execute(["ingest", *paths, "--like", like]) == 2
    assert execute(["ingest", *paths, "--like", like, "--unseen", "zeros"]) == 0
    assert "1 row of column 'colour' (first: 'pink')" in capsys.readouterr().err
    model, scores = str(finished / "run"), str(finished / "let-in-scores.zarr")
    assert execute(["predict", "--model", model, "--data", paths[0], "--out", scores, "--quiet"]) == 0
    capsys.readouterr()
    assert execute(["evaluate", "--predictions", scores, "--data", paths[0]]) == 2
    remedy = f"kme-dist ingest let-in.csv rows.zarr --like {like} --unseen zeros"
    error = capsys.readouterr().err
    assert "let-in.csv is a file, not a data set" in error
    assert error.rstrip().endswith(remedy)
    own = str(finished / "own-encoding.zarr")  # of these rows alone: other features
    assert execute(["ingest", paths[0], own, "--label", "kind", "--quiet"]) == 0
    assert execute(["evaluate", "--predictions", scores, "--data", own]) == 2
    error = capsys.readouterr().err
    assert "row 0 differs" in error
    assert f"has the predictions of {paths[0]}: store those rows and their labels in the encoding of the fit" in error
    assert error.rstrip().endswith(f"--like {like} --unseen zeros")
    assert execute(["evaluate", "--predictions", scores, "--data", paths[1], "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 30
    assert execute(["ingest", *paths, "--unseen", "zeros", "--overwrite"]) == 2
    assert "--unseen requires --like" in capsys.readouterr().err


def test_labels_come_along_where_the_new_rows_have_them(finished):
    rows(30, 3).to_csv(finished / "labelled.csv", index=False)
    like = kme.open_dataset(finished / "run" / "data.zarr")
    data = ingest(finished / "labelled.csv", finished / "labelled.zarr", like=like)
    assert (data.classes, data.label, data.dtype) == (["small", "tall"], "kind", np.float64)
    with pytest.raises(ConfigError, match="label, weight and features are those of"):
        ingest(finished / "labelled.csv", finished / "other.zarr", like=like, label="kind")


@pytest.fixture(scope="module")
def with_holes(tmp_path_factory):
    """A model of a table with missing heights, and the function that makes new rows with them."""
    folder = tmp_path_factory.mktemp("holes")

    def table(name, n, seed, shift=0.0):
        frame = rows(n, seed).drop(columns="colour")
        frame["height"] += shift
        frame.loc[::5, "height"] = None
        frame.to_csv(folder / name, index=False)
        return folder / name

    data = ingest(table("train.csv", 120, 1), folder / "train.zarr", label="kind", missing="indicator")
    kme.MCEClassifier(steps=0).fit(data).save(folder / "model.zarr")
    return folder, table


def test_a_data_set_with_its_own_fill_values_is_refused(with_holes):
    """Its means are those of the new rows, which the model would take for heights."""
    folder, table = with_holes
    new = table("shifted.csv", 40, 2, shift=3.0)
    own = ingest(new, folder / "own.zarr", exclude=("kind",), missing="indicator")
    with pytest.raises(DataError, match=r"'height' were filled with 3\..*, the model fills them with 0\..*`like`"):
        kme.predict(folder / "model.zarr", own, folder / "own-scores.zarr")
    alike = ingest(new, folder / "alike.zarr", like=folder / "train.zarr")
    expected = kme.predict(folder / "model.zarr", pd.read_csv(new))
    found = kme.predict(folder / "model.zarr", alike, dtype="float64")
    pd.testing.assert_frame_equal(found.to_pandas(), expected)


def test_fill_values_that_no_row_has_are_no_obstacle(with_holes):
    folder, table = with_holes
    table("whole.csv", 40, 3)
    frame = pd.read_csv(folder / "whole.csv")
    frame.loc[0, "height"] = 0.25
    own = ingest(frame, folder / "holes.zarr", exclude=("kind",), missing="indicator")
    none = ingest(frame.dropna(), folder / "none.zarr", like=own)
    assert none.schema.columns[0].fill != kme.open_dataset(folder / "train.zarr").schema.columns[0].fill
    assert kme.predict(folder / "model.zarr", none).num_rows == len(frame.dropna())


def test_ordinals_with_other_codes_are_refused(tmp_path):
    table = rows(60, 7)
    data = ingest(table, tmp_path / "train.zarr", label="kind", ordinal=("colour",))
    model = kme.MCEClassifier(steps=0).fit(data)
    few = table[table["colour"] != "blue"]
    other = ingest(few, tmp_path / "few.zarr", exclude=("kind",), ordinal=("colour",))
    with pytest.raises(DataError, match=r"'colour' is encoded in another way than by the model; .*`like`"):
        kme.predict(model, other)
    assert kme.predict(model, ingest(few, tmp_path / "alike.zarr", like=data)).num_rows == len(few)


def test_rows_can_be_appended_to_the_data_of_a_run(finished):
    rows(30, 4).to_csv(finished / "more.csv", index=False)
    place = finished / "grown.zarr"
    ingest(finished / "train.csv", place, like=finished / "run" / "data.zarr", split="train=0:100,test=100:120")
    grown = kme.open_dataset(place).append(finished / "more.csv", split="train")
    assert (grown.rows, grown.split_rows("train")) == (150, 130)


def test_a_second_table_is_encoded_like_the_first(tmp_path):
    """It may lack a category, and its missing values are filled from the training rows."""
    first, second = rows(60, 5), rows(20, 6)
    second = second[second["colour"] != "green"].reset_index(drop=True)
    second.loc[0, "height"] = None
    first.to_csv(tmp_path / "first.csv", index=False)
    second.to_csv(tmp_path / "second.csv", index=False)
    settings = {"source": str(tmp_path / "first.csv"), "test_source": str(tmp_path / "second.csv"), "label": "kind"}
    found = tables.load(DataConfig(**settings, missing="mean"))
    assert found.feature_names == ["height", "colour=blue", "colour=green", "colour=red"]
    assert found.X_test[0, 0] == pytest.approx(first["height"].mean())
    assert not found.X_test[:, 2].any()


def test_a_data_set_that_is_divided_anew_keeps_its_encoding(tmp_path):
    rows(60, 7).to_csv(tmp_path / "t.csv", index=False)
    whole = ingest(tmp_path / "t.csv", tmp_path / "whole.zarr", label="kind")
    settings = DataConfig(source=whole.path)
    divided = tables.stored(settings, tmp_path / "divided.zarr", tables.checked(settings))
    assert set(divided.splits) == {"train", "test"}
    assert json.loads(json.dumps(divided.attributes["schema"])) == whole.attributes["schema"]
    chosen = DataConfig(source=whole.path, features=["height", "colour=red"])
    some = tables.stored(chosen, tmp_path / "some.zarr", tables.checked(chosen))
    assert (some.feature_names, some.label) == (["height", "colour=red"], "kind")
    assert [column.kind for column in some.schema.columns] == ["number", "number"]


def test_a_table_in_memory_is_stored_as_it_is(tmp_path):
    table = read_table(rows(50, 8), label="kind", dtype="float64")
    data = ingest(table, tmp_path / "t.zarr", split="train=0:40,test=40:50")
    np.testing.assert_array_equal(data.read_rows(0, 50)[0], table.X)
    np.testing.assert_array_equal(data.read_rows(0, 50)[1], table.y)
    assert data.schema.columns == table.schema.columns
    assert data.classes == ["small", "tall"]
