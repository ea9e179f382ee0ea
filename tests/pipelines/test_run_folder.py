"""The run folder: one writer, stages done once, and a run.json that never says more than is true."""

import json
from pathlib import Path

import pytest

from kme_dist.config import parse_config
from kme_dist.errors import ConfigError, CorruptError, RetryError
from kme_dist.pipelines.folder import Listener, MetricsFile, RunFolder, describe_run, recorded_stages


@pytest.fixture
def config(tmp_path):
    return parse_config({"data": {"source": "sklearn:iris"}, "output": {"folder": str(tmp_path / "run")}})


def path_of(config):
    return Path(config.output.folder)


class Work:
    """Writes an output, and counts how often it was asked to."""

    def __init__(self):
        self.calls = 0

    def into(self, folder, name, value):
        def work():
            self.calls += 1
            (folder.path / name).write_text(str(value))
            return {"value": value}

        return work


def do(config, work, *, value=1, **options):
    with RunFolder.open(config, name="test", **options) as folder:
        inputs = {"value": value}
        result = folder.stage("learn", inputs=inputs, outputs=["out.txt"], work=work.into(folder, "out.txt", value))
        return result, folder.done_now


def test_a_stage_is_done_once_and_again_when_its_inputs_change(config):
    work = Work()
    assert do(config, work) == ({"value": 1}, ["learn"])
    assert do(config, work) == ({"value": 1}, []), "nothing changed, nothing done"
    assert do(config, work, value=2) == ({"value": 2}, ["learn"])
    assert do(config, work, value=2, fresh=True)[1] == ["learn"]
    assert work.calls == 3


def test_a_stage_whose_output_was_removed_is_done_again(config):
    work = Work()
    do(config, work)
    (path_of(config) / "out.txt").unlink()
    assert do(config, work)[1] == ["learn"]


def test_a_stage_whose_file_was_damaged_is_done_again_and_says_so(config):
    said, calls = [], []

    def do():
        with RunFolder.open(config, name="test", listener=Listener(say=said.append)) as folder:

            def work():
                calls.append(1)
                folder.store("metrics.json", b'{"accuracy": 0.5}')
                return {}

            folder.stage("evaluate", inputs={}, outputs=["metrics.json"], work=work)

    do()
    do()
    assert (len(calls), said) == (1, [])
    path = path_of(config) / "metrics.json"
    path.write_bytes(b'{"accuracy": 0.9}')
    with pytest.raises(CorruptError, match=r"metrics\.json does not match its digest.*computes it again"):
        describe_run(path_of(config), verify=True)
    do()
    assert len(calls) == 2
    assert "metrics.json is damaged and is computed again" in said[0]
    assert path.read_bytes() == b'{"accuracy": 0.5}'
    assert describe_run(path_of(config), verify=True)["status"] == "succeeded"
    path.unlink()
    with pytest.raises(CorruptError, match=r"metrics\.json is missing"):
        describe_run(path_of(config), verify=True)


def test_a_stage_with_a_damaged_output_stays_to_be_done(config):
    """Also for a later call, whose list of outputs may be without those that were removed."""
    with RunFolder.open(config, name="test") as folder:
        for name in ("model", "sums"):
            folder.store(name, b"1")
        folder.stage("fit", inputs={}, outputs=["model", "sums"], work=dict)
    (path_of(config) / "sums").write_bytes(b"2")
    with RunFolder.open(config, name="test") as folder:
        assert not folder.is_current("fit", {}, ["model", "sums"])
    with RunFolder.open(config, name="test") as folder:
        assert not folder.is_current("fit", {}, ["model"])


def test_a_file_that_a_kill_left_newer_than_the_record_is_no_damage(config, monkeypatch):
    with RunFolder.open(config, name="test") as folder:
        folder.store("config.yaml", b"a: 1")
        folder.write()
    with RunFolder.open(config, name="test") as folder:
        folder.store("config.yaml", b"a: 2")
        monkeypatch.setattr(RunFolder, "write", lambda folder, **facts: None)  # killed before it writes its record
    monkeypatch.undo()
    assert describe_run(path_of(config), verify=True)["files"] == {}


def test_a_record_with_a_damaged_name_of_its_format_is_damage(config):
    do(config, Work())
    path = path_of(config) / "run.json"
    content = path.read_bytes()
    for damaged in (content.replace(b"kme-dist run 1", b"kme-dist sun 1"), content.replace(b'"stages"', b'"stagez"'),
                    content[:-5], content[:30] + b"\xff" + content[31:]):  # fmt: skip
        path.write_bytes(damaged)
        with pytest.raises(CorruptError, match="with --fresh"):
            do(config, Work())
    assert do(config, Work(), fresh=True)[1] == ["learn"]


def test_what_failed_is_on_record_and_what_was_finished_stays_finished(config):
    work = Work()

    def two_stages():
        with RunFolder.open(config, name="test") as folder:
            folder.stage("learn", inputs={}, outputs=["out.txt"], work=work.into(folder, "out.txt", 1))
            folder.stage("fit", inputs={}, outputs=["model"], work=lambda: {"ratio": 1 // 0})

    with pytest.raises(ZeroDivisionError):
        two_stages()
    facts = describe_run(path_of(config))
    assert facts["status"] == "failed"
    assert "ZeroDivisionError" in facts["error"]
    assert facts["stage"] == "fit"
    with RunFolder.open(config, name="test") as folder:
        folder.stage("learn", inputs={}, outputs=["out.txt"], work=work.into(folder, "out.txt", 1))
    assert work.calls == 1
    assert describe_run(path_of(config))["status"] == "succeeded"


def test_stages_that_another_call_does_not_come_to_stay_on_record(config):
    work = Work()
    do(config, work)
    with RunFolder.open(config, name="test") as folder:
        folder.stage("fit", inputs={}, outputs=[], work=lambda: {})
    assert set(json.loads((path_of(config) / "run.json").read_text())["stages"]) == {"learn", "fit"}
    assert do(config, work)[1] == []


def test_results_of_other_settings_are_kept_where_replacing_is_forbidden(config):
    work = Work()
    do(config, work)
    kept = config.model_copy(update={"output": config.output.model_copy(update={"overwrite": False})})
    assert do(kept, work)[1] == []
    with pytest.raises(ConfigError, match=r"output\.overwrite is false"):
        do(kept, work, value=2)
    assert (path_of(config) / "out.txt").read_text() == "1"
    assert do(kept, work, value=2, fresh=True)[1] == ["learn"]


def test_a_folder_has_one_writer_at_a_time(config):
    with RunFolder.open(config, name="test"), pytest.raises(RetryError), RunFolder.open(config, name="test"):
        pass


@pytest.mark.parametrize(("name", "text"), [("notes.txt", "mine"), ("run.json", "{}"), ("run.json", "no json")])
def test_a_folder_of_somebody_else_is_left_alone(config, name, text):
    path = path_of(config)
    path.mkdir()
    (path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"choose another output\.folder"), RunFolder.open(config, name="test"):
        pass
    assert [file.name for file in path.iterdir()] == [name]


def test_a_damaged_record_is_noticed_and_can_be_replaced(config):
    work = Work()
    do(config, work)
    path = path_of(config) / "run.json"
    content = path.read_bytes()
    record = json.loads(content)["stages"]
    noticed = 0
    for bit in range(0, 8 * len(content), 7):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found = recorded_stages(path_of(config))
        noticed += found == {}
        assert found in ({}, record)
    assert noticed > 0.9 * len(range(0, 8 * len(content), 7))
    path.write_bytes(content.replace(b'"seconds"', b'"sekonds"'))
    with pytest.raises(CorruptError, match="with --fresh"):
        do(config, work)
    assert do(config, work, fresh=True)[1] == ["learn"]
    assert do(config, work)[1] == []


def test_a_damaged_line_of_metrics_counts_as_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as lines:
        for step in (1, 2, 3):
            lines.write({"step": step, "objective": 0.5 / step})
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.75"))
    assert [(line["step"], line["objective"]) for line in MetricsFile(path).read()] == [(1, 0.5), (3, 0.5 / 3)]
