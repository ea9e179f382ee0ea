"""Promises of the command line: one line per mistake, the right exit code, JSON for programs."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import typer
from rich.text import Text

from kme_dist.cli import app as cli
from kme_dist.errors import CorruptError, NumericalError, RetryError, counted, plural
from kme_dist.run.checkpoints import Checkpoints, Snapshot

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "kme_dist"]
QUICK = """
data: {source: 'sklearn:iris', features: [1, 2, 3]}
model: {objective: rcb}
learn: {steps: 3}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.yaml").write_text(QUICK)
    return "quick.yaml"


def failure(capsys, *arguments):
    """The exit code and the only line on stderr."""
    code = cli.execute(list(arguments))
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return code, line


def table(path, lines):
    path.write_text("\n".join(["height,width,kind", *lines]) + "\n")


GOOD = [f"{i % 7}.5,{i},{'ab'[i % 2]}" for i in range(20)]


def test_the_first_run_trains_evaluates_and_reports(tmp_path):
    """What `make run` does, as a user would start it."""
    folder = tmp_path / "digits"
    arguments = [*COMMAND, "run", "configs/digits.yaml", "--set", f"output.folder={folder}"]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"test accuracy ([\d.]+) %", done.stdout).group(1))
    assert accuracy > 98
    assert f"report: {folder}/report.html" in done.stdout
    assert "1,437 training rows, 360 test rows, 64 features, 10 classes" in done.stderr
    assert re.search(r"step \d+/100 .* steps/s  q .* risk .* r .* ETA", done.stderr)
    page = (folder / "report.html").read_text()
    for title in ("Learning curves", "Confusion matrix", "Reliability", "Pixel relevance"):
        assert f"<h2>{title}</h2>" in page


def test_json_is_one_object_on_stdout_and_reuse_is_told(config, capsys):
    assert cli.execute(["run", config, "--json"]) == 0
    out, err = capsys.readouterr()
    first = json.loads(out)
    assert first["reused"] is False
    assert first["folder"] == "runs/quick"
    assert "training rows" in err
    assert cli.execute(["run", config, "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {**first, "reused": True}
    assert err == ""
    assert cli.execute(["run", config]) == 0
    out, err = capsys.readouterr()
    assert "nothing has changed" in err
    assert "test accuracy" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["Missing command", "kme-dist --help"]),
        (["rnu"], ["rnu", "run"]),
        (["run"], ["Missing argument", "kme-dist run --help"]),
        (["run", "quick.yaml", "--fast"], ["--fast"]),
        (["run", "absent.yaml"], ["absent.yaml does not exist"]),
        (["run", "quik.yaml"], ["did you mean quick.yaml"]),
        (["run", "quick.yaml", "--set", "learn.setps=1"], ["`learn.setps`", "`learn.steps`"]),
        (["run", "quick.yaml", "--set", "learn.steps=many"], ["`learn.steps`", "'many'"]),
        (["run", "quick.yaml", "--set", "model.kernel=gausian"], ["gausian", "gaussian"]),
        (["run", "quick.yaml", "--set", "data.source=absent.csv"], ["absent.csv"]),
        (["run", "quick.yaml", "--set", "data.image_shape=[2, 2]"], ["data.image_shape"]),
        (["run", "quick.yaml", "--set", "output.folder=quick.yaml"], ["output.folder"]),
        (["run", "inf.yaml"], ["inf.csv", "row 20 (line 22)", "'height'"]),
        (["run", "text.yaml"], ["text.csv", "'height'", "'tall'"]),
        (["run", "ragged.yaml"], ["ragged.csv", "row 20 (line 22)"]),
        (["run", "oneclass.yaml"], ["oneclass.csv", "one class"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_of_the_user_is_one_line_and_exit_code_2(config, tmp_path, capsys, arguments, words):
    tables = {
        "inf": [*GOOD, "inf,3,a"],
        "text": [*GOOD, "tall,3,a"],
        "ragged": [*GOOD, "1,3"],
        "oneclass": ["1,2,a", "2,3,a", "3,4,a"],
    }
    for name, lines in tables.items():
        table(tmp_path / f"{name}.csv", lines)
        (tmp_path / f"{name}.yaml").write_text(f"data: {{source: {name}.csv, label: kind}}\n")
    code, line = failure(capsys, *arguments, "--quiet") if arguments[:1] == ["run"] else failure(capsys, *arguments)
    assert code == 2
    for word in words:
        assert word in line


def test_errors_reach_programs_as_json_too(config, capsys):
    assert cli.execute(["run", "absent.yaml", "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["exit_code"] == 2
    assert err == f"error: {told['error']}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NumericalError("not positive definite"), 3),
        (CorruptError("chunk 3 is damaged"), 65),
        (RetryError("store unreachable"), 75),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/x"), 75),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_each_kind_of_failure_has_its_exit_code(config, capsys, monkeypatch, error, code):
    def fail(*arguments, **settings):
        raise error

    monkeypatch.setattr("kme_dist.pipelines.run.run", fail)
    seen, line = failure(capsys, "run", config)
    assert seen == code
    if code == 130:
        assert "kme-dist run quick.yaml" in line


def test_a_bug_of_ours_shows_its_traceback_and_exit_code_1(config, capsys, monkeypatch):
    def fail(*arguments, **settings):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("kme_dist.pipelines.run.run", fail)
    assert cli.execute(["run", config]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_have_their_exit_codes(config, capsys, monkeypatch, number, code):
    monkeypatch.setattr("kme_dist.pipelines.run.run", lambda *arguments, **settings: signal.raise_signal(number))
    before = signal.getsignal(signal.SIGTERM)
    seen, line = failure(capsys, "run", config)
    assert seen == code
    assert line.endswith("kme-dist run quick.yaml")
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_ends_a_run_in_order_and_tells_how_to_resume(config, tmp_path):
    arguments = [*COMMAND, "run", config, "--set", "learn.steps=1000000"]
    log = tmp_path / "runs" / "quick" / "metrics.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(arguments, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while not log.exists() or log.stat().st_size == 0:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        err = process.communicate()[1]
    assert process.returncode == 143
    assert "Traceback" not in err
    assert err.splitlines()[-1].endswith("kme-dist run quick.yaml --set learn.steps=1000000")
    assert json.loads((log.parent / "run.json").read_text())["status"] == "interrupted"


def test_ingest_makes_a_data_set_and_inspect_describes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "good.csv", GOOD)
    options = ["--label", "kind", "--split", "train=0.8,test=0.2", "--shuffle", "0", "--exclude", "width"]
    assert cli.execute(["ingest", "good.csv", "good.zarr", *options, "--quiet", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows"] == 20
    assert facts["classes"] == {"a": 10, "b": 10}
    assert [column["name"] for column in facts["columns"]] == ["height"]
    assert facts["splits"]["test"]["rows"] == 4
    code, line = failure(capsys, "ingest", "good.csv", "good.zarr", "--label", "kind", "--quiet")
    assert code == 2
    assert "already exists" in line
    assert cli.execute(["ingest", "good.csv", "good.zarr", "--append", "--quiet"]) == 0
    assert "40 rows" in capsys.readouterr().out
    assert cli.execute(["ingest", "good.csv", "good.zarr", "--append"]) == 0  # as after a kill
    out, err = capsys.readouterr()
    assert "40 rows" in out
    assert "its 20 rows were already appended to" in err
    assert cli.execute(["ingest", "good.csv", "good.zarr", "--append", "--again", "--quiet"]) == 0
    assert "60 rows" in capsys.readouterr().out
    assert failure(capsys, "ingest", "good.csv", "good.zarr", "--again")[0] == 2
    assert cli.execute(["inspect", "good.zarr", "--verify"]) == 0
    assert "height" in capsys.readouterr().out


def test_inspect_finds_damage_and_gives_it_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "good.csv", GOOD)
    assert cli.execute(["ingest", "good.csv", "good.zarr", "--label", "kind", "--quiet", "--compression", "none"]) == 0
    capsys.readouterr()
    victim = max((tmp_path / "good.zarr" / "X").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(victim.read_bytes())
    content[10] ^= 1
    victim.write_bytes(bytes(content))
    code, line = failure(capsys, "inspect", "good.zarr", "--verify")
    assert code == 65
    assert "good.zarr" in line


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_json_to_a_full_disk_is_one_line_and_may_be_tried_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "good.csv", GOOD)
    assert cli.execute(["ingest", "good.csv", "good.zarr", "--label", "kind", "--quiet"]) == 0
    for command in (["inspect", "good.zarr", "--json"], ["config-schema", "--json"]):  # less and more than a buffer
        with open("/dev/full", "w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "kme_dist", *command],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert ended.returncode == 75
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert "free some space" in ended.stderr


def test_inspect_describes_a_run_and_refuses_what_is_not_ours(config, tmp_path, capsys):
    assert cli.execute(["run", config, "--quiet"]) == 0
    capsys.readouterr()
    assert cli.execute(["inspect", "runs/quick", "--json", "--verify"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["status"] == "succeeded"
    assert facts["summary"]["test_rows"] == 30
    assert cli.execute(["inspect", "runs/quick"]) == 0
    assert "succeeded" in capsys.readouterr().out
    accuracy = facts["summary"]["accuracy"]
    assert cli.execute(["inspect", "runs/quick/model.zarr"]) == 0
    card = capsys.readouterr().out
    sections = re.findall(r"^(\w+)$", card, re.MULTILINE)
    assert sections == ["data", "figures", "learned", "settings", "versions", "digests"]
    assert re.search(rf"^  test accuracy +{accuracy:.6g}$", card, re.MULTILINE)
    assert re.search(r"^  rows +120$", card, re.MULTILINE)
    assert cli.execute(["inspect", "runs/quick/model.zarr", "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert stored["versions"]["kme-dist"] == version("kme-dist")
    assert stored["trained_on"]["rows"] == 120
    assert set(stored["array_digests"]) == set(stored["arrays"])
    assert failure(capsys, "inspect", "nothing")[0] == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text("{}")
    assert failure(capsys, "inspect", "other")[0] == 2
    (tmp_path / "other" / "run.json").write_text("{")
    assert failure(capsys, "inspect", "other")[0] == 65


def test_inspect_of_another_path_says_what_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert failure(capsys, "inspect", "nothere") == (2, f"error: {tmp_path}/nothere does not exist.")
    table(tmp_path / "good.csv", GOOD)
    assert "good.csv is a file" in failure(capsys, "inspect", "good.csv")[1]
    run = tmp_path / "runs" / "j2" / "output"
    run.mkdir(parents=True)
    assert "not a kme-dist data set, model or run (looked" in failure(capsys, "inspect", "runs")[1]
    (run.parent / "job.json").write_text("{}")
    assert "jobs status j2" in failure(capsys, "inspect", "runs/j2")[1]
    (run / "run.json").write_text("{}")
    advice = f"see `kme-dist jobs status j2 --root {tmp_path}`, or inspect {run}."
    assert failure(capsys, "inspect", "runs/j2") == (2, f"error: {run.parent} is the folder of a job; {advice}")


def test_inspect_shows_a_checkpoint_in_plain_numbers(tmp_path, capsys):
    folder = tmp_path / "checkpoints" / "a1" / "0-rcb"
    watch = {"mean": 0.1, "least": math.inf, "since": 0}
    for step in (50, 60):
        Checkpoints(folder).save(Snapshot(step, {"scale": np.ones(1)}, {}, watch), {})
    newest = folder / "step-0000000060.zarr"
    line = failure(capsys, "inspect", str(tmp_path / "checkpoints"))[1]
    assert f"a folder with some; inspect {newest}, " in line
    assert cli.execute(["inspect", str(newest)]) == 0
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert (facts["step"], facts["mean"], facts["least"], facts["since"]) == ("60", "0.1", "inf", "0")
    assert "steps" not in facts
    assert cli.execute(["inspect", str(newest), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["watch"] == {"mean": 0.1, "least": "inf", "since": 0}


def test_doctor_finds_versions_blas_memory_and_write_access(config, capsys):
    assert cli.execute(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for package in ("python", "kme-dist", "numpy", "scipy", "dask", "distributed", "zarr", "scikit-learn"):
        assert re.match(r"\d+\.", report["versions"][package])
    assert report["cores"] >= 1
    assert report["memory_bytes"] > 2**28
    assert report["folder"]["writable"] is True
    assert "self_test" in report["gpu"]
    assert cli.execute(["doctor"]) == 0
    assert "scikit-learn" in capsys.readouterr().out


def test_doctor_reports_a_folder_that_cannot_be_written(config, capsys, monkeypatch):
    def refuse(*arguments, **settings):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    assert cli.execute(["doctor", "--quiet"]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_the_schema_is_printed_as_json(capsys):
    assert cli.execute(["config-schema"]) == 0
    assert "data" in json.loads(capsys.readouterr().out)["properties"]


def test_version_and_help(capsys):
    assert cli.execute(["--version"]) == 0
    assert re.fullmatch(r"kme-dist \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert cli.execute(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("run", "ingest", "inspect", "doctor", "config-schema"):
        assert command in out
    assert cli.execute(["run", "--help"]) == 0


def test_help_loads_no_numerics():
    script = (
        "import sys\n"
        "from kme_dist.cli import app\n"
        "assert app.execute(['--help']) == 0\n"
        "assert app.execute(['jobs', '--help']) == 0\n"
        "assert app.execute(['predict', '--help']) == 0\n"
        "heavy = {'numpy', 'scipy', 'dask', 'distributed', 'zarr', 'sklearn', 'matplotlib', 'pyarrow'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def all_commands():
    """(name, command) of every command, those of `jobs` included."""
    for name, command in typer.main.get_command(cli.app).commands.items():
        below = getattr(command, "commands", None)
        yield from [(name, command)] if below is None else ((f"{name} {n}", c) for n, c in below.items())


@pytest.mark.parametrize(
    ("name", "command"), list(all_commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_command_takes_json_and_quiet_and_shared_options_are_the_same(name, command):
    options = {option: parameter.help for parameter in command.params for option in parameter.opts}
    assert {"--json", "--quiet"} <= set(options)
    shared = {"--json": "one JSON object", "--set": "Override one key", "--scheduler": "running Dask scheduler"}
    for option, text in shared.items():
        assert text in options.get(option, text)
    for parameter in command.params:
        assert parameter.help or parameter.name == "help", f"{name}: {parameter.name} has no help"


def test_lines_agree_with_their_counts(config, capsys, monkeypatch):
    counts = ("steps", "steps_now", "rows", "iterations", "computed", "computed_rows", "skipped", "test_rows")
    numbers = dict.fromkeys(counts, 1)
    measures = dict.fromkeys(
        ("seconds", "regularization", "residual", "accuracy", "log_loss", "calibration_error"), 1.0
    )
    texts = dict.fromkeys(("learned", "solver", "reason", "model", "predictions", "report"), "x")
    other = {"loss": None, "rows_per_second": 50.0, "quarantined": [], "reused": False, "starts": []}
    other |= {"status": "succeeded", "skipped_rows": 0, "first_skipped": []}
    one = {**numbers, **measures, **texts, **other}
    for stage in ("run", "learn", "fit"):
        monkeypatch.setattr(f"kme_dist.pipelines.{stage}.run", lambda *_, **__: one)
    monkeypatch.setattr("kme_dist.pipelines.predict.request_of", lambda *_: None)
    monkeypatch.setattr("kme_dist.pipelines.predict.run_request", lambda *_, **__: one)
    for command in ("run", "learn", "fit", "predict"):
        assert cli.execute([command, config, "--quiet"]) == 0
    out = capsys.readouterr().out
    for words in (
        "1 test row, 1 step,",
        "1 step, 1 of them",
        "on 1 row in",
        "1 iteration\n",
        "1 row (1 computed), 1 chunk computed",
    ):
        assert words in out
    assert not re.search(r"\b1 (\w+ )?(rows|steps|iterations|chunks)\b", out)
    assert [plural(n, noun) for noun in ("class", "worker") for n in (0, 1, 2)] == [
        *("classes", "class", "classes"),
        *("workers", "worker", "workers"),
    ]
    assert [counted(1, "row"), counted(2000, "class", ",")] == ["1 row", "2,000 classes"]


def test_quiet_keeps_the_result_as_its_help_says(config, capsys):
    """A script wants the result line and nothing else."""
    assert cli.execute(["run", config, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "test accuracy" in out
    assert err == ""
    for name, command in all_commands():
        (quiet,) = [parameter.help for parameter in command.params if "--quiet" in parameter.opts]
        assert quiet == "Print no progress and no messages, only results and errors.", name


@pytest.mark.parametrize("name", ["learn", "fit"])
def test_stages_that_take_tables_say_so(name):
    command = dict(all_commands())[name]
    assert [p.help for p in command.params if p.name == "config"] == [
        "YAML file whose data.source is a data set or a table (CSV, Parquet, npz, ...)."
    ]


@pytest.mark.parametrize(
    ("name", "command"), list(all_commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_no_help_loses_text_in_brackets(name, command):
    """Helps are shown by rich, which reads `[word]` as markup; a bracket that is text is written `\\[`."""
    for text in [command.help, *(parameter.help for parameter in command.params)]:
        assert Text.from_markup(text or "").plain == (text or "").replace("\\[", "["), name


def test_helps_name_the_options_of_their_own_command(capsys):
    assert cli.execute(["predict", "--help"]) == 0
    assert "E[g(Y)" in capsys.readouterr().out
    for name, command in all_commands():
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        named = set(re.findall(r"--[a-z][a-z-]*", " ".join(p.help or "" for p in command.params)))
        assert named <= options, f"{name}: {named - options}"


@pytest.mark.parametrize("command", ["run", "learn", "fit", "plan", "predict", "evaluate", "submit", "smoke", "doctor"])
def test_whatever_computes_takes_a_scheduler(command):
    found = dict(all_commands())[command]
    assert "--scheduler" in {option for parameter in found.params for option in parameter.opts}


def test_run_uses_the_scheduler_it_is_given(config, capsys, monkeypatch):
    seen = []

    def run(settings, **_):
        seen.append(settings.cluster)
        raise RetryError("enough")

    monkeypatch.setattr("kme_dist.pipelines.run.run", run)
    assert cli.execute(["run", config, "--scheduler", "tls://host:8786"]) == 75
    assert (seen[0].kind, seen[0].address) == ("address", "tls://host:8786")


def test_a_misuse_points_to_the_help_of_its_command(capsys):
    assert failure(capsys, "smoke", "--folders", "x")[1].endswith("See `kme-dist smoke --help`.")
    assert failure(capsys, "--folders")[1].endswith("See `kme-dist --help`.")


def test_main_always_leaves_with_the_exit_code(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "absent.yaml"])
    assert caught.value.code == 2


def test_a_pipeline_runs_as_a_file_too(tmp_path):
    arguments = [sys.executable, str(ROOT / "pipelines" / "run.py"), "absent.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.stderr == "error: config file absent.yaml does not exist\n"
    assert done.returncode == 2
