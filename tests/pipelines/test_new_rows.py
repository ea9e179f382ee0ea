"""From `run` to new rows: a CSV file with text, dates and holes, and every way to predict rows like its own."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import kme_dist as kme
from kme_dist.cli.app import execute
from kme_dist.config import parse_config
from kme_dist.errors import AssumptionWarning, ConfigError, DataError
from kme_dist.pipelines import score
from kme_dist.pipelines.run import run

CONFIG = """
data: {source: train.csv, label: kind, missing: indicator, exclude: [note, price]}
model: {objective: rcb}
learn: {steps: 3}
cluster: {kind: serial}
output: {folder: run}
"""
COLUMNS = ["probability_no", "probability_yes"]
TASKS = {  # the label, the columns of the predictions, the sections on learning
    "classification": ("kind", COLUMNS, "model: {objective: rcb}\nlearn: {steps: 3}\n"),
    "regression": ("price", ["mean", "std", "interval_low", "interval_high"], "learn: {steps: 3}\n"),
}


def people(n, seed):
    rng = np.random.default_rng(seed)
    city, age = rng.choice(["Rome", "Paris", "Oslo"], n).astype(object), rng.normal(40, 10, n).round(1)
    day = pd.Timestamp("2020-01-01") + pd.to_timedelta(rng.integers(0, 1500, n), "D")
    frame = pd.DataFrame({"city": city, "age": age, "since": day.strftime("%Y-%m-%d")})
    frame["member"] = np.where(rng.random(n) > 0.5, "true", "false")
    frame["kind"] = np.where((city == "Rome") ^ (age > 42), "yes", "no")
    frame["price"] = (10 * (city == "Rome") + age / 4 + rng.normal(size=n)).round(3)
    frame["note"] = [f"note {i}" for i in range(n)]
    for name, share in (("age", 0.1), ("city", 0.1), ("since", 0.05)):
        frame.loc[rng.random(n) < share, name] = None
    return frame


def new_people(n=25):
    """Shuffled columns, one unknown city, a name for every row."""
    frame = people(n, 9)
    frame.loc[3, "city"] = "Berlin"
    frame.insert(0, "who", [f"p{i}" for i in range(n)])
    return frame[["since", "who", "age", "member", "city", "kind"]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("people")
    people(160, 1).to_csv(folder / "train.csv", index=False)
    new_people().to_csv(folder / "new.csv", index=False)
    text = CONFIG.replace("train.csv", str(folder / "train.csv")).replace("run}", f"{folder}/run}}")
    (folder / "people.yaml").write_text(text)
    import yaml

    run(parse_config(yaml.safe_load(text)), name="people")
    return folder


def as_typed(frame):
    """The rows as pandas holds them, with dates and booleans."""
    return frame.assign(since=pd.to_datetime(frame["since"]), member=frame["member"] == "true")


def unwarned(call, *arguments, **settings):
    with pytest.warns(UserWarning, match="unknown categories"):
        return call(*arguments, **settings)


def command(folder, *words, **streams):
    found = [sys.executable, "-m", "kme_dist", *words]
    return subprocess.run(found, cwd=folder, capture_output=True, timeout=120, check=False, **streams)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_csv_file_with_text_dates_and_holes_from_run_to_scores_of_new_rows(tmp_path, task, capsys):
    """Without a word on text, dates and missing values in the config: what was assumed is said, new rows may have other
    columns, another order and an unknown category, and every way gives the same numbers."""
    label, columns, learned = TASKS[task]
    people(160, 1).to_csv(tmp_path / "train.csv", index=False)
    new_people().to_csv(tmp_path / "new.csv", index=False)
    others = ", ".join({"kind", "price", "note"} - {label})
    settings = f"data: {{source: train.csv, label: {label}, exclude: [{others}]}}\n"
    (tmp_path / "people.yaml").write_text(settings + learned + "cluster: {kind: serial}\noutput: {folder: run}\n")
    ran = command(tmp_path, "run", "people.yaml")
    assert ran.returncode == 0, ran.stderr
    [note] = [line for line in ran.stderr.decode().splitlines() if line.startswith("note: ")]
    assert re.fullmatch(
        r"note: \S*train.csv: missing values in 'city' \(\d+ rows\), 'age' \(\d+ rows\), 'since' \(\d+ rows\) are the "
        r"mean or no category, and marked by a feature NAME:missing \(`missing` is indicator by default; .*\)",
        note,
    )
    predicted = command(tmp_path, "predict", "--model", "run", "--data", "new.csv", "--out", "scores.csv")
    assert predicted.returncode == 0, predicted.stderr
    said = predicted.stderr.decode()
    assert "ignored columns that the model does not use: 'who', 'kind'" in said
    assert "1 row of column 'city' (first: 'Berlin')" in said
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert set(columns) <= set(scores.columns)
    streamed = command(tmp_path, "score", "--model", "run", input=(tmp_path / "new.csv").read_bytes())
    assert streamed.returncode == 0, streamed.stderr
    np.testing.assert_allclose(pd.read_csv(io.BytesIO(streamed.stdout))[columns], scores[columns], rtol=1e-6, atol=1e-6)

    model = kme.load(tmp_path / "run")
    frame = pd.read_csv(tmp_path / "new.csv", parse_dates=["since"])
    table = unwarned(kme.predict, model, frame)
    np.testing.assert_allclose(table[columns], scores[columns], rtol=1e-6, atol=1e-6)
    if task == "classification":
        assert table["label"].tolist() == scores["label"].tolist()
        np.testing.assert_allclose(unwarned(model.predict_proba, frame), scores[columns], atol=1e-6)
    else:
        mean, deviation = unwarned(model.predict, frame, return_std=True)
        low, high = unwarned(model.predict_interval, frame)
        np.testing.assert_allclose(scores[columns].to_numpy().T, [mean, deviation, low, high], rtol=1e-6)
    known = sorted(path.name for path in tmp_path.iterdir())
    assert known == ["new.csv", "people.yaml", "run", "scores.csv", "train.csv"]

    strict = command(
        tmp_path, "predict", *["--model", "run", "--data", "new.csv", "--out", "none.csv", "--unseen", "error"]
    )
    assert strict.returncode == 2
    assert b"row 3 (line 5), column 'city': the category 'Berlin' is unknown" in strict.stderr

    def refused(rows):
        rows.to_csv(tmp_path / "bad.csv", index=False)
        paths = [str(tmp_path / name) for name in ("run", "bad.csv", "none.csv")]
        assert execute(["predict", "--model", paths[0], "--data", paths[1], "--out", paths[2]]) == 2
        assert not (tmp_path / "none.csv").exists()
        return capsys.readouterr().err

    assert "'city', 'age' are missing" in refused(frame.drop(columns=["age", "city"]))
    worded = frame.assign(age=["old" if i == 7 else "30" for i in range(len(frame))])
    assert "row 7 (line 9), column 'age': 'old' is not a number" in refused(worded)
    assert "row 2 (line 4), column 'since': 'soon' is not a date" in refused(
        new_people().assign(since=lambda rows: ["soon" if i == 2 else day for i, day in enumerate(rows["since"])])
    )


def test_what_features_mean(finished):
    """Numbers and days are filled with means, holes have a feature of their own, an unknown city is no known one."""
    model, train = kme.load(finished / "run"), people(160, 1)
    held = kme.open_dataset(finished / "run" / "data.zarr")
    names = model.encoded_feature_names_
    assert names == held.feature_names
    assert [name for name in names if name.startswith("city")] == [
        "city=Oslo", "city=Paris", "city=Rome", "city:missing",
    ]  # fmt: skip
    assert "since:sin(year)" in names
    assert "since:cos(week)" in names
    assert "since:sin(day)" not in names  # all dates are at midnight
    columns = {column.name: column for column in model.encoding_.columns}
    assert columns["age"].fill == pytest.approx(train["age"].mean())
    days = (pd.to_datetime(train["since"]) - pd.Timestamp(0)).dt.total_seconds() / 86_400
    assert columns["since"].fill == pytest.approx(days.mean())
    rows = pd.DataFrame(
        {"city": ["Berlin", None], "age": [30.0, None], "since": ["2021-05-01"] * 2, "member": [True] * 2}
    )
    from kme_dist.data.frames import encode_table

    X, unseen = encode_table(rows, model.encoding_)
    at = {name: i for i, name in enumerate(names)}
    assert unseen == {"city": (1, "Berlin")}
    assert X[:, [at[f"city={c}"] for c in ("Oslo", "Paris", "Rome")]].sum() == 0
    assert X[:, at["city:missing"]].tolist() == [0, 1]
    assert X[:, at["age:missing"]].tolist() == [0, 1]
    assert X[1, at["age"]] == columns["age"].fill
    assert X[0, at["since"]] == (pd.Timestamp("2021-05-01") - pd.Timestamp(0)).days
    assert X[0, at["since:sin(week)"]] == pytest.approx(np.sin(2 * np.pi * X[0, at["since"]] / 7))


@pytest.mark.parametrize("name", ["scores.csv", "scores.parquet", "scores.zarr"])
@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet", "npy", "zarr", "frame", "arrow"])
def test_every_input_and_output_gives_the_same_probabilities(finished, tmp_path, kind, name):
    model, frame = kme.load(finished / "run"), as_typed(new_people())
    wanted = unwarned(model.predict_proba, frame)
    source = str(tmp_path / f"rows.{kind}")
    if kind.startswith("csv"):
        new_people().to_csv(source, index=False)
    elif kind == "parquet":
        frame.to_parquet(source)
    elif kind in ("npy", "zarr"):
        from kme_dist.data.frames import encode_table

        X = encode_table(frame, model.encoding_)[0]
        if kind == "npy":
            np.save(source, X)
        else:
            kme.ingest(frame, source, like=finished / "run" / "data.zarr", unseen="zeros")
    else:
        source = frame if kind == "frame" else pa.Table.from_pandas(frame)
    outcome = kme.predict(finished / "run", source, tmp_path / name)
    assert outcome.rows == 25
    counted = kind not in ("npy", "zarr")
    assert outcome.unseen == ({"city": (1, "Berlin")} if counted else {})
    if name.endswith("csv"):
        found = pd.read_csv(tmp_path / name)[COLUMNS].to_numpy()
    else:
        found = kme.open_predictions(tmp_path / name).read("probability")
    np.testing.assert_allclose(found, wanted, atol=1e-3 if kind == "zarr" else 1e-6)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("name", ["scores.csv", "scores.parquet"])
def test_a_column_of_ids_travels_along(finished, tmp_path, name):
    kme.predict(finished / "run", finished / "new.csv", tmp_path / name, id_column="who")
    table = pd.read_csv(tmp_path / name) if name.endswith("csv") else pq.read_table(tmp_path / name).to_pandas()
    assert table["id"].tolist() == [f"p{i}" for i in range(25)]
    with pytest.raises(ConfigError, match="'who' is text, which Zarr arrays cannot hold"):
        kme.predict(finished / "run", finished / "new.csv", tmp_path / "scores.zarr", id_column="who")
    with pytest.raises(ConfigError, match="has no column 'nobody'"):
        kme.predict(finished / "run", finished / "new.csv", tmp_path / "other.csv", id_column="nobody")
    assert unwarned(kme.predict, finished / "run", finished / "new.csv", id_column="who")["id"][1].as_py() == "p1"


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame", "arrow"])
def test_without_a_destination_unknown_categories_are_counted_too(finished, tmp_path, kind):
    frame = as_typed(new_people())
    source = frame if kind == "frame" else pa.Table.from_pandas(frame) if kind == "arrow" else tmp_path / f"rows.{kind}"
    if kind in ("csv", "parquet"):
        getattr(frame, f"to_{kind}")(source)
    with pytest.warns(UserWarning, match=r"1 row of column 'city' \(first: 'Berlin'\)"):
        found = kme.predict(finished / "run", source)
    stored = kme.predict(finished / "run", source, tmp_path / "scores.parquet", overwrite=True)
    assert stored.unseen == {"city": (1, "Berlin")}
    wanted = kme.open_predictions(tmp_path / "scores.parquet").read("probability")
    np.testing.assert_allclose(np.column_stack([found[name] for name in COLUMNS]), wanted, atol=1e-6)


@pytest.mark.parametrize("plain", [True, False])
def test_delimiter_and_encoding_of_a_file_are_kept_for_new_rows(tmp_path, plain, capsys):
    """Those of the config hold for files of new rows, wherever they are read; also of a table of numbers only."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"größe": rng.normal(size=60).round(3), "y": rng.normal(size=60).round(3)})
    if not plain:
        frame["ort"] = rng.choice(["Köln", "Łódź", "Rom"], 60)
    frame["kind"] = np.where(frame["größe"] > 0, "ja", "nö")
    written = {"sep": "!", "encoding": "iso8859-2", "index": False}
    frame.to_csv(tmp_path / "train.csv", **written)
    frame.drop(columns="kind").iloc[::-2].to_csv(tmp_path / "new.csv", **written)
    config = {
        "data": {"source": str(tmp_path / "train.csv"), "label": "kind", "delimiter": "!", "encoding": "iso8859-2"},
        "learn": {"steps": 1},
        "cluster": {"kind": "serial"},
        "output": {"folder": str(tmp_path / "run")},
    }
    run(parse_config(config), name="rows")
    model = kme.load(tmp_path / "run")
    wanted = model.predict_proba(frame.drop(columns="kind").iloc[::-2])
    files = [f"--data={tmp_path / 'new.csv'}", f"--out={tmp_path / 'scores.csv'}"]
    assert execute(["predict", f"--model={tmp_path / 'run'}", *files]) == 0
    assert "unknown" not in capsys.readouterr().err
    sink = io.BytesIO()
    score.run(str(tmp_path / "run"), io.BytesIO((tmp_path / "new.csv").read_bytes()), sink)
    table = kme.predict(model, tmp_path / "new.csv")
    tables = [pd.read_csv(tmp_path / "scores.csv"), pd.read_csv(io.BytesIO(sink.getvalue())), table.to_pandas()]
    for found in tables:
        np.testing.assert_allclose(found[["probability_ja", "probability_nö"]], wanted, atol=1e-6)
    held = tmp_path / "run" / "data.zarr"
    assert kme.ingest(tmp_path / "new.csv", tmp_path / "new.zarr", like=held).rows == 30
    whole = kme.ingest(
        tmp_path / "train.csv", tmp_path / "train.zarr", label="kind", delimiter="!", encoding="iso8859-2"
    )
    assert whole.append(tmp_path / "train.csv").rows == 120
    frame.drop(columns="kind").to_csv(tmp_path / "plain.csv", index=False, encoding="utf-8")
    other = kme.ingest(tmp_path / "plain.csv", tmp_path / "p.zarr", like=held, delimiter=",", encoding="UTF-8")
    assert other.rows == 60, "what is given goes before what is kept"


def test_an_existing_file_is_replaced_only_on_request(finished, tmp_path):
    out = tmp_path / "scores.csv"
    out.write_text("precious")
    with pytest.raises(ConfigError, match="--overwrite"):
        kme.predict(finished / "run", finished / "new.csv", out)
    assert out.read_text() == "precious"
    kme.predict(finished / "run", finished / "new.csv", out, overwrite=True)
    assert len(pd.read_csv(out)) == 25


def test_a_job_killed_before_its_file_is_complete_is_resumed(finished, tmp_path, monkeypatch):
    """No half-written file is left under the name of the output; what it leaves begins with a dot."""
    from kme_dist.models import predict as module

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, "join_as_csv", kill)
        with pytest.raises(Killed):
            kme.predict(finished / "run", finished / "new.csv", tmp_path / "scores.csv")
    assert all(path.name.startswith(".scores.csv") for path in tmp_path.iterdir())
    again = kme.predict(finished / "run", finished / "new.csv", tmp_path / "scores.csv")
    assert (again.computed, again.skipped) == (0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["scores.csv"]


def test_a_hole_that_training_rows_did_not_have(tmp_path):
    """Without a rule for missing values it costs that row, like any value that is not finite."""
    frame = people(60, 2)[["age", "kind"]].dropna()
    frame.to_csv(tmp_path / "train.csv", index=False)
    data = kme.ingest(tmp_path / "train.csv", tmp_path / "train.zarr", label="kind")
    model = kme.MCEClassifier(steps=0).fit(data)
    assert model.encoding_ is None
    (tmp_path / "new.csv").write_text("age\n30\n\nNA\n")
    outcome = kme.predict(model, tmp_path / "new.csv", tmp_path / "scores.csv")
    assert outcome.first_skipped == [{"row": 1, "error": "feature 0: the value is nan, must be finite"}]
    assert (tmp_path / "scores.csv").read_text().splitlines()[2] == "1,,,"


def test_rows_from_stdin_as_csv_or_json_lines(finished):
    text = (finished / "new.csv").read_bytes()
    rows = [{k: v for k, v in row.items() if v == v} for row in new_people().to_dict("records")]
    found = []
    for given in (text, "\n".join(map(json.dumps, rows)).encode()):
        sink = io.BytesIO()
        notes, _ = score.run(str(finished / "run"), io.BytesIO(given), sink, format="jsonl", id_column="who")
        assert [note.split(":")[0] for note in notes] == [
            "ignored columns that the model does not use",
            "unknown categories, encoded as none of the known ones",
        ]
        found.append([json.loads(line) for line in sink.getvalue().splitlines()])
    assert len(found[0]) == 25
    assert found[0] == found[1]
    sink = io.BytesIO()
    score.run(str(finished / "run"), io.BytesIO(text.splitlines(keepends=True)[0]), sink)
    assert sink.getvalue() == b'"label","probability_no","probability_yes"\n'
    with pytest.raises(DataError, match="stdin is empty"):
        score.run(str(finished / "run"), io.BytesIO(b" \n"), io.BytesIO())
    lines = text.splitlines(keepends=True)
    with pytest.raises(DataError, match=r"^stdin") as refused:
        score.run(str(finished / "run"), io.BytesIO(lines[0] + b"1,2,3,4,5,6,7,8,9,10,11,12\n"), io.BytesIO())
    assert "kme-score-" not in str(refused.value)


def test_rows_from_stdin_without_a_prediction_are_counted_and_the_exit_code_says_so(finished):
    frame = new_people()
    frame.loc[2, "age"] = 1e300
    for rows, code in ((frame, 65), (frame.drop(index=2), 0)):
        done = command(finished, "score", "--model", "run", input=rows.to_csv(index=False).encode())
        found = pd.read_csv(io.BytesIO(done.stdout))
        assert (done.returncode, len(found), int(found["label"].isna().sum())) == (code, len(rows), int(code == 65))
        assert (b"no prediction for 1 row; the first is row 2" in done.stderr) == (code == 65)


@pytest.mark.parametrize("name", ["scores.xlsx", "scores.csv.gz", "scores.json"])
def test_a_kind_of_file_that_is_not_written_is_refused(finished, tmp_path, name):
    with pytest.raises(ConfigError, match=r"choose a name in .csv, .parquet or .zarr, or give the format"):
        kme.predict(finished / "run", finished / "new.csv", tmp_path / name)
    assert not list(tmp_path.iterdir())
    kme.predict(finished / "run", finished / "new.csv", tmp_path / name, format="zarr")
    kme.predict(finished / "run", finished / "new.csv", tmp_path / "plain")
    for written in (name, "plain"):
        assert (tmp_path / written / "zarr.json").exists()


def test_the_run_of_a_config_predicts_new_rows_too(finished, capsys):
    config, out = str(finished / "people.yaml"), finished / "by-config.csv"
    assert (
        execute(["predict", config, "--data", str(finished / "new.csv"), "--out", str(out), "--json", "--quiet"]) == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert (result["rows"], result["unseen"]) == (25, {"city": [1, "Berlin"]})
    assert len(pd.read_csv(out)) == 25
    like = ["--like", str(finished / "run" / "data.zarr"), "--quiet"]
    model = ["--model", str(finished / "run"), "--data", str(finished / "new.csv")]
    assert execute(["predict", *model, "--out", str(finished / "like.csv"), *like]) == 0
    pd.testing.assert_frame_equal(pd.read_csv(finished / "like.csv"), pd.read_csv(out))


def test_excluded_columns_are_not_features(finished):
    assert not [n for n in kme.load(finished / "run").encoded_feature_names_ if n.startswith("note")]
    settings = parse_config(
        {"data": {"source": str(finished / "run" / "data.zarr"), "exclude": ["member"], "stored_split": False}}
    ).data
    from kme_dist.pipelines import tables

    found = tables.load(settings)
    assert "member" not in found.feature_names
    with pytest.raises(ConfigError, match=r"data.exclude: .* has no column 'membr'; did you mean 'member'"):
        tables.load(settings.model_copy(update={"exclude": ["membr"]}))


KINDS = {
    "duration": pa.array(np.arange(40), pa.duration("s")),
    "binary": pa.array([b"1"] * 40),
    "date": pa.array(np.arange(40), pa.timestamp("s")),
    "time": pa.array(list(range(40)), pa.time32("s")),
    "list": pa.array([[1.0]] * 40),
    "struct": pa.array([{"u": 1.0}] * 40),
    "null": pa.nulls(40),
}


@pytest.mark.chaos(13)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["parquet", "table"])
def test_a_column_whose_type_cannot_be_numbers_is_refused_before_anything_is_computed(tmp_path, kind, where):
    """By the types in the footer of Parquet, and of tables in memory, as in a CSV file by its values."""
    X = np.random.default_rng(0).normal(size=(40, 2))
    frame = pd.DataFrame(X, columns=["a", "b"])
    kme.MCEClassifier(steps=0).fit(frame, X[:, 0] > 0).save(tmp_path / "model.zarr")
    table = pa.table({"a": KINDS[kind], "b": X[:, 1]})
    pq.write_table(table, tmp_path / "new.parquet")
    stored = str(pq.read_schema(tmp_path / "new.parquet").field("a").type if where == "parquet" else KINDS[kind].type)
    source = tmp_path / "new.parquet" if where == "parquet" else table
    wanted = rf"column 'a' holds values of type {re.escape(stored)}, the model was fitted to numbers there; convert"
    for out in (tmp_path / "out.zarr", None):
        with pytest.raises(DataError, match=wanted):
            kme.predict(tmp_path / "model.zarr", source, out)
    assert not (tmp_path / "out.zarr").exists()
    if where == "parquet":
        words = ["--model", str(tmp_path / "model.zarr"), "--data", str(source), "--out", str(tmp_path / "out.zarr")]
        assert execute(["predict", *words]) == 2


def test_numbers_booleans_and_texts_of_numbers_may_stand_for_numbers(tmp_path):
    X = np.random.default_rng(0).integers(0, 2, size=(40, 2)).astype(float)
    model = kme.MCEClassifier(steps=0).fit(pd.DataFrame(X, columns=["a", "b"]), np.arange(40) % 2)
    expected = kme.predict(model, pd.DataFrame(X, columns=["a", "b"]))["probability_1"]
    kinds = [pa.int8(), pa.float32(), pa.bool_(), pa.decimal128(21, 1), pa.string(), pa.large_string()]
    for kind in kinds:
        values = pa.array(X[:, 0].astype(int).tolist()).cast(kind)
        pq.write_table(pa.table({"a": values, "b": X[:, 1]}), tmp_path / "new.parquet")
        found = kme.predict(model, tmp_path / "new.parquet").to_pandas()["probability_1"]
        np.testing.assert_array_equal(found, expected, err_msg=str(kind))


def test_durations_and_dates_are_taken_where_the_model_knows_them(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"a": pa.array(np.arange(40) * 7, pa.duration("s")), "b": pa.array(np.arange(40), pa.timestamp("s"))}
    given = pa.table({**columns, "c": rng.choice(["u", "v"], 40), "y": rng.choice(["p", "q"], 40)})
    data = kme.ingest(given, tmp_path / "rows.zarr", label="y")
    kme.MCEClassifier(steps=0).fit(data).save(tmp_path / "model.zarr")
    pq.write_table(given, tmp_path / "new.parquet")
    assert kme.predict(tmp_path / "model.zarr", tmp_path / "new.parquet", tmp_path / "out.zarr").complete
    only = pa.table({"a": columns["a"], "y": given["y"]})
    kme.MCEClassifier(steps=0).fit(kme.ingest(only, tmp_path / "only.zarr", label="y")).save(tmp_path / "other.zarr")
    assert kme.predict(tmp_path / "other.zarr", tmp_path / "new.parquet", tmp_path / "only_out.zarr").complete
    for wrong in ({"b": np.arange(40)}, {"b": [True] * 40}, {"c": [["u"]] * 40}):
        name = next(iter(wrong))
        pq.write_table(
            given.set_column(given.column_names.index(name), name, pa.array(wrong[name])), tmp_path / "w.parquet"
        )
        kind = {"b": "dates or times", "c": "categories"}[name]
        with pytest.raises(DataError, match=f"column '{name}' holds values of type .*, the model was fitted to {kind}"):
            kme.predict(tmp_path / "model.zarr", tmp_path / "w.parquet", tmp_path / "none.zarr")


def test_a_column_without_values_is_missing_ones_where_there_is_a_rule_for_them_and_no_rows_need_none(tmp_path):
    X = np.random.default_rng(0).normal(size=(40, 2))
    frame = pd.DataFrame(X, columns=["a", "b"])
    plain = kme.MCEClassifier(steps=0).fit(frame, X[:, 0] > 0)
    with pytest.warns(AssumptionWarning):
        filled = kme.MCEClassifier(steps=0).fit(frame.assign(a=frame["a"].where(X[:, 0] > -1)), X[:, 0] > 0)
    pq.write_table(pa.table({"a": pa.nulls(3), "b": [1.0, 2.0, 3.0]}), tmp_path / "new.parquet")
    assert kme.predict(filled, tmp_path / "new.parquet", tmp_path / "out.zarr").skipped_rows == 0
    pq.write_table(pa.table({"a": pa.nulls(0), "b": pa.nulls(0)}), tmp_path / "none.parquet")
    assert kme.predict(plain, tmp_path / "none.parquet", tmp_path / "no.zarr").rows == 0


def test_files_of_durations_and_of_numbers_are_not_read_as_one_table(tmp_path):
    pq.write_table(pa.table({"a": pa.nulls(3)}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": pa.array([1, 2], pa.duration("s"))}), tmp_path / "1.parquet")
    kme.ingest(tmp_path, tmp_path.parent / f"{tmp_path.name}.zarr", missing="mean")
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "2.parquet")
    with pytest.raises(DataError, match=r"2\.parquet: the column 'a' holds int64, in .*0\.parquet duration\[s\]"):
        kme.ingest(tmp_path, tmp_path.parent / "other.zarr", missing="mean")
