"""The ingest and describe pipelines: plain values in, one line out, exit codes as promised."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from kme_dist.data.store import save_arrays
from kme_dist.errors import CorruptError, DataError
from kme_dist.pipelines import describe as describe_module
from kme_dist.pipelines import ingest as ingest_module


@pytest.fixture
def table(tmp_path):
    rows = "".join(f"{i},{i % 7},{'yes' if i % 3 else 'no'}\n" for i in range(300))
    (tmp_path / "t.csv").write_text("a,b,answer\n" + rows)
    return tmp_path / "t.csv"


def test_run_takes_plain_values(table, tmp_path):
    data = ingest_module.run(
        str(table), str(tmp_path / "d.zarr"), label="answer", features=["b"], missing="-1", shuffle=3,
        split="train=0.5,test=0.5", stratify=True, memory="64MiB", quiet=True,
    )  # fmt: skip
    assert data.feature_names == ["b"]
    assert data.splits == {"train": ((0, 150),), "test": ((150, 300),)}
    assert ingest_module.run(str(table), data.path, add=True, quiet=True).rows == 600


def test_the_script_prints_one_line_and_returns_the_exit_code(table, tmp_path, capsys):
    dest = str(tmp_path / "d.zarr")
    assert ingest_module.main([str(table), dest, "--label", "answer", "--quiet"]) == 0
    assert "300 rows, 2 features float64, 2 classes" in capsys.readouterr().out
    assert ingest_module.main([str(table), dest, "--label", "answer", "--quiet"]) == 2
    assert ingest_module.main([str(table), str(tmp_path / "e.zarr"), "--label", "nothing"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 2
    assert "has no column 'nothing'" in error


def test_describe_is_json_and_renders(table, tmp_path, capsys):
    data = ingest_module.run(table, tmp_path / "d.zarr", label="answer", split="train=0.5,test=0.5", quiet=True)
    facts = describe_module.describe(data.path, verify=True)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["rows"] == 300
    assert facts["classes"] == {"no": 100, "yes": 200}
    assert facts["verified"] is True
    column = dict(facts["columns"][0])
    assert column.pop("name") == "a"
    assert column == pytest.approx({"minimum": 0, "maximum": 299, "mean": 149.5, "deviation": 86.6}, rel=1e-3)
    text = io.StringIO()
    describe_module.render(facts, Console(file=text, width=120))
    for word in ("yes", "66.67%", "train", "299", "kme-dist/dataset"):
        assert word in text.getvalue()
    assert describe_module.main([data.path, "--verify"]) == 0


def test_describe_knows_saved_arrays_and_finds_damage(tmp_path, capsys):
    save_arrays(tmp_path / "m.zarr", {"weights": np.zeros((3, 2))}, {"format": "kme-dist/model", "score": 1.5})
    facts = describe_module.describe(tmp_path / "m.zarr", verify=True)
    assert facts["arrays"] == {"weights": "3 x 2 float64"}
    assert facts["score"] == 1.5
    chunk = tmp_path / "m.zarr" / "weights" / "c" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"!")
    with pytest.raises(CorruptError, match="chunk 0 of weights"):
        describe_module.describe(tmp_path / "m.zarr", verify=True)
    assert describe_module.main([str(tmp_path / "m.zarr"), "--verify"]) == 65
    with pytest.raises(DataError, match="does not exist"):
        describe_module.describe(tmp_path / "none")
    assert describe_module.main([]) == 2
