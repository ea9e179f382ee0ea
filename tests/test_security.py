"""Nothing that is read runs: hostile models, data sets and configs end in one line, and the canary stays alive.

Who may talk to a cluster is in test_certs.py; where the paths of a job may lead, and what of the environment gets into
its folder, is in test_jobs.py.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

import kme_dist as kme
from kme_dist.cli import app as cli
from kme_dist.data.chunks import attributes_json
from kme_dist.data.places import Place
from kme_dist.data.store import attributes_digest
from kme_dist.errors import ConfigError, CorruptError, KMEError

SECRET = "wJalrXUtnFEMI+K7MDENG/bPxRfiCYEXAMPLEKEY"


class Bomb:
    """What a pickle of it does when somebody loads it."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return (os.system, (f"rm -f {self.canary}",))


@pytest.fixture
def canary(tmp_path):
    """A file that hostile content removes as soon as any of it is run."""
    path = tmp_path / "canary"
    path.write_text("alive")
    yield path
    assert path.exists(), "something that was only to be read has run"


def test_the_canary_would_die(tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("alive")
    pickle.loads(pickle.dumps(Bomb(canary)))
    assert not canary.exists()


@pytest.fixture
def model(tmp_path):
    X = np.random.default_rng(0).normal(size=(40, 3))
    path = tmp_path / "model.zarr"
    kme.MCEClassifier(steps=0).fit(X, X[:, 0] > 0).save(path)
    kme.load(path)
    return path


@pytest.fixture
def data(tmp_path, capsys):
    X = np.random.default_rng(0).normal(size=(40, 3))
    np.savez(tmp_path / "t.npz", X=X, y=(X[:, 0] > 0).astype(int))
    path = tmp_path / "t.zarr"
    assert cli.execute(["ingest", str(tmp_path / "t.npz"), str(path), "--label", "y", "--quiet"]) == 0
    capsys.readouterr()
    return path


def refused(capsys, *arguments):
    """The exit code and the only line of a command that fails."""
    code = cli.execute(list(arguments))
    err = capsys.readouterr().err
    assert "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return code, line


def arrays_of(path):
    """The metadata files of the arrays in a group, with their content."""
    found = {file: json.loads(file.read_text()) for file in sorted(path.rglob("zarr.json"))}
    return {file: metadata for file, metadata in found.items() if metadata["node_type"] == "array"}


def put_bomb_in_chunks(path, canary):
    for file in arrays_of(path):
        for chunk in (file.parent / "c").rglob("*"):
            if chunk.is_file():
                chunk.write_bytes(pickle.dumps(Bomb(canary)))


PICKLE_CODECS = [
    [{"name": "numcodecs.pickle", "configuration": {}}],
    [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "pickle", "configuration": {}}],
    [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [40],
                "codecs": [{"name": "numcodecs.pickle"}],
                "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}],
            },
        }
    ],
    [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [40],
                "codecs": [{"name": "bytes"}],
                "index_codecs": [{"name": "numcodecs.pickle"}],
            },
        }
    ],
]
OBJECT_TYPES = ["object", "|O", {"name": "numcodecs.object", "configuration": {}}, "variable_length_bytes", "r128"]


@pytest.mark.parametrize("kind", ["model", "data"])
@pytest.mark.parametrize("codecs", PICKLE_CODECS, ids=lambda codecs: codecs[-1]["name"])
def test_a_codec_that_unpickles_is_refused_before_a_chunk_is_read(request, kind, codecs, canary, capsys):
    path = request.getfixturevalue(kind)
    for file, metadata in arrays_of(path).items():
        file.write_text(json.dumps({**metadata, "codecs": codecs}))
    put_bomb_in_chunks(path, canary)
    code, line = refused(capsys, "inspect", str(path), "--verify")
    assert code == 65
    assert "codec" in line


@pytest.mark.parametrize("kind", ["model", "data"])
@pytest.mark.parametrize("data_type", OBJECT_TYPES, ids=str)
def test_arrays_of_objects_are_refused(request, kind, data_type, canary, capsys):
    path = request.getfixturevalue(kind)
    for file, metadata in arrays_of(path).items():
        file.write_text(json.dumps({**metadata, "data_type": data_type}))
    put_bomb_in_chunks(path, canary)
    code, line = refused(capsys, "inspect", str(path), "--verify")
    assert code == 65
    assert "numbers and booleans" in line


def reseal(path, change):
    """Edit the attributes of a group like a forger who knows about the digest."""
    metadata = json.loads((path / "zarr.json").read_text())
    attributes = metadata["attributes"]
    attributes.pop("attributes_digest")
    change(attributes)
    attributes["attributes_digest"] = attributes_digest(Place.of(path), attributes)
    (path / "zarr.json").write_text(attributes_json(Place.of(path), metadata))


@pytest.mark.parametrize("name", ["../../etc", "..", "/etc/passwd", "a/../../b", "a\\..\\b", "a/b/c", "."])
def test_names_that_lead_out_of_a_model_are_refused(model, name, capsys):
    reseal(model, lambda a: a["digests"].update({name: next(iter(a["digests"].values()))}))
    code, line = refused(capsys, "inspect", str(model), "--verify")
    assert code == 65
    assert "invalid array name" in line


@pytest.mark.parametrize("kind", ["model", "data"])
def test_a_header_that_promises_more_than_is_there_asks_for_no_memory(request, kind, capsys):
    path = request.getfixturevalue(kind)
    for file, metadata in arrays_of(path).items():
        shape = [10**9, *metadata["shape"][1:]]
        file.write_text(json.dumps({**metadata, "shape": shape}))
    if kind == "data":
        reseal(path, lambda a: a.update(rows=10**9))
    code, line = refused(capsys, "inspect", str(path), "--verify")
    assert code == 65
    assert "missing" in line or "declare" in line


def test_a_group_of_the_old_format_with_a_pickle_filter_is_refused(tmp_path, canary, capsys):
    old = tmp_path / "old.zarr"
    (old / "weights").mkdir(parents=True)
    (old / ".zgroup").write_text('{"zarr_format": 2}')
    array = {
        "zarr_format": 2,
        "shape": [1],
        "chunks": [1],
        "dtype": "|O",
        "compressor": None,
        "fill_value": None,
        "order": "C",
        "filters": [{"id": "pickle", "protocol": 5}],
    }
    (old / "weights" / ".zarray").write_text(json.dumps(array))
    (old / "weights" / "0").write_bytes(pickle.dumps(Bomb(canary)))
    for path in (old, old / "weights"):
        code, _ = refused(capsys, "inspect", str(path))
        assert code == 2
        code, _ = refused(capsys, "ingest", str(path), str(tmp_path / "out.zarr"), "--quiet")
        assert code == 2
        with pytest.raises(KMEError):
            kme.load(path)


def test_pickles_in_tables_are_refused(tmp_path, canary, capsys):
    bomb = np.array([Bomb(canary)], dtype=object)
    np.save(tmp_path / "bomb.npy", bomb, allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w") as archive:
        archive.write(tmp_path / "bomb.npy", "X.npy")
    for name in ("bomb.npy", "bomb.npz"):
        code, _ = refused(capsys, "ingest", str(tmp_path / name), str(tmp_path / "out.zarr"), "--quiet")
        assert code == 2
        assert not (tmp_path / "out.zarr").exists()


@pytest.mark.parametrize(
    "kernel", [{"name": "os.system"}, {"name": "__import__('os').remove"}, {"name": "kme_dist.cli.main"}]
)
def test_a_model_names_no_code(model, kernel, canary):
    def change(attributes):
        for key, value in attributes.items():
            if key == "kernel" or (isinstance(value, dict) and "kernel" in value):
                (attributes if key == "kernel" else value)["kernel"] = kernel

    reseal(model, change)
    with pytest.raises(KMEError):
        kme.load(model)


@pytest.mark.parametrize(
    "text",
    [
        "data: !!python/object/apply:os.system ['rm -f CANARY']",
        "data: !!python/object/new:os.system ['rm -f CANARY']",
        "data: {source: !!python/name:os.system ''}",
        "!!python/module:os",
        "data: {source: !!python/object/apply:subprocess.check_output [['rm', '-f', 'CANARY']]}",
    ],
)
def test_a_config_builds_plain_values_only(tmp_path, text, canary, capsys):
    path = tmp_path / "hostile.yaml"
    path.write_text(text.replace("CANARY", str(canary)))
    for command in (["run"], ["learn"], ["submit", "--scheduler", "tcp://127.0.0.1:1"], ["schedule", "--once"]):
        code, line = refused(capsys, command[0], str(path), *command[1:])
        assert code == 2
        assert "the tag" in line
    code, line = refused(capsys, "run", str(tmp_path / "hostile.yaml"), "--set", "data=!!python/name:os.system ''")
    assert code == 2


def test_a_stored_job_builds_plain_values_only(tmp_path, canary, capsys):
    from kme_dist.config import parse_config
    from kme_dist.ops import jobs

    config = parse_config({"data": {"source": "t.zarr"}})
    job = jobs.create_job(tmp_path, pipeline="run", config=config, name="x", job_id="x")
    (job.folder / "config.yaml").write_text(f"data: !!python/object/apply:os.system ['rm -f {canary}']\n")
    resume = ("jobs", "resume", "x", "--root", str(tmp_path), "--quiet")
    code, line = refused(capsys, *resume)
    assert code == 65
    assert "edited" in line
    request = json.loads((job.folder / "job.json").read_text())
    del request["digest"], request["config"]  # as of a version without digests
    (job.folder / "job.json").write_text(json.dumps(request))
    code, line = refused(capsys, *resume)
    assert code == 2
    assert "the tag" in line


@pytest.mark.parametrize("command", ["run", "learn", "submit"])
def test_a_scheduler_elsewhere_is_not_reached_in_the_clear(tmp_path, data, command, capsys):
    path = tmp_path / "c.yaml"
    address = "cluster: {kind: address, address: 'tcp://192.0.2.1:8786'}"
    path.write_text(f"data: {{source: {data}}}\nlearn: {{steps: 1}}\noutput: {{folder: {tmp_path}/out}}\n{address}\n")
    more = ["--root", str(tmp_path)] if command == "submit" else []
    code, line = refused(capsys, command, str(path), *more, "--quiet")
    assert code == 2
    assert "not encrypted" in line


def test_a_place_that_takes_no_files_is_one_line(data, capsys):
    for target in ("/proc/t.zarr", "/proc/self/nowhere/t.zarr", "/dev/null/t.zarr"):
        code, _ = refused(capsys, "ingest", str(data), target, "--quiet")
        assert code == 2


def test_secrets_get_into_no_file_of_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"session-{SECRET}")
    monkeypatch.chdir(tmp_path)
    text = "data: {source: 'sklearn:iris'}\nlearn: {steps: 2}\ncluster: {kind: serial}\noutput: {folder: out}\n"
    Path("c.yaml").write_text(text)
    assert cli.execute(["schedule", "c.yaml", "--once", "--pipeline", "run"]) == 0
    told = capsys.readouterr()
    assert SECRET not in told.out + told.err
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "job.json", "log.jsonl"} <= {path.name for path in written}
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]


def test_credentials_in_an_address_are_refused_and_not_repeated():
    for address in (f"s3://AKIAEXAMPLE:{SECRET.replace('/', '_')}@bucket/t.zarr", "s3://user@bucket/t.zarr"):
        with pytest.raises(ConfigError, match="must not contain credentials") as caught:
            Place.of(address)
        assert "MDENG" not in str(caught.value)


def test_what_travels_to_workers_holds_no_credentials(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    place = Place.of("s3://bucket/data/t.zarr")
    place.client()
    assert pickle.loads(pickle.dumps(place)).address == place.address
    assert b"AKIAEXAMPLE" not in pickle.dumps(place)
    assert SECRET.encode() not in pickle.dumps(place)
    assert issubclass(CorruptError, KMEError)
