"""Schedules: each time once, however often it is started; what is new is done, and nothing else."""

from __future__ import annotations

import datetime
import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kme_dist.cli import app as cli
from kme_dist.data.ingest import ingest
from kme_dist.errors import ConfigError
from kme_dist.ops import jobs, schedule
from kme_dist.ops.schedule import fire_times, keep_schedule, parse_time, scheduled_times, should_retry, stamp

UTC = datetime.UTC


class Clock:
    """A clock that a test sets."""

    def __init__(self, text):
        self.now = parse_time(text)

    def __call__(self):
        return self.now


class Waits(threading.Event):
    """An event whose `wait` moves a clock instead of waiting."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.asked = clock, []

    def wait(self, timeout=None):
        if not self.is_set():
            self.asked.append(timeout)
            self.clock.now += datetime.timedelta(seconds=timeout)
        return self.is_set()


def test_times_come_in_order_and_in_their_zone():
    clock = Clock("2026-03-28T12:00:00Z")
    times = scheduled_times(fire_times("30 2 * * *", "Europe/Berlin"), Waits(clock), clock)
    # The night in between is the one in which 2:30 does not exist there.
    assert [stamp(next(times)) for _ in range(2)] == ["2026-03-29T01:30:00Z", "2026-03-30T00:30:00Z"]
    assert clock.now >= parse_time("2026-03-30T00:30:00Z")


def test_of_the_times_that_pass_during_a_run_the_last_is_made_up_for():
    clock = Clock("2026-01-01T00:30:00Z")
    times = scheduled_times(fire_times("0 * * * *"), Waits(clock), clock)
    assert stamp(next(times)) == "2026-01-01T01:00:00Z"
    clock.now = parse_time("2026-01-01T04:20:00Z")  # a long run
    assert stamp(next(times)) == "2026-01-01T04:00:00Z"
    assert stamp(next(times)) == "2026-01-01T05:00:00Z"


@pytest.mark.parametrize(("code", "attempts"), [(0, 1), (2, 1), (3, 1), (65, 1), (1, 1), (75, 3), (-signal.SIGKILL, 3)])
def test_only_what_may_pass_is_tried_again(code, attempts, monkeypatch):
    """The same table as in the files for cron, systemd and Kubernetes: 75 and deaths by a signal, nothing else."""
    clock, started = Clock("2026-01-01T00:59:59Z"), []
    stop = Waits(clock)

    def run(command, event):
        started.append(command)
        if len(started) == attempts:
            event.set()
        return code

    monkeypatch.setattr(schedule, "_run", run)
    keep_schedule(
        fire_times("0 * * * *"), start=lambda when: [stamp(when)], stop=stop, say=lambda line: None, clock=clock
    )
    assert started == [["2026-01-01T01:00:00Z"]] * attempts
    assert should_retry(code, schedule.ATTEMPTS) is False


def test_a_run_is_stopped_with_the_schedule(tmp_path):
    note = tmp_path / "note"
    script = (
        "import signal, sys, time\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (open({str(note)!r}, 'w').write('saved'), sys.exit(143)))\n"
        f"open({str(note)!r}, 'w').write('begun')\n"
        "time.sleep(600)\n"
    )
    stop, codes = threading.Event(), []
    thread = threading.Thread(target=lambda: codes.append(schedule._run([sys.executable, "-c", script], stop)))
    thread.start()
    while not note.exists() or note.read_text() != "begun":
        time.sleep(0.02)
    stop.set()
    thread.join()
    assert codes == [143]
    assert note.read_text() == "saved"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fire_times("every night"), "is not a cron expression"),
        (lambda: fire_times("61 * * * *"), "is not a cron expression"),
        (lambda: fire_times("0 2 30 2 *"), "names no day that exists"),
        (lambda: fire_times("0 2 * * *", "Mars/Olympus"), "is unknown"),
        (lambda: parse_time("yesterday"), "is not a time"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_the_name_of_a_run_is_its_time_wherever_it_was_written():
    times = ("2026-03-01T02:00:00Z", "2026-03-01T02:00:00", "2026-03-01T03:00:00+01:00")
    assert {jobs.scheduled_id("nightly", parse_time(text)) for text in times} == {"nightly-20260301T020000Z"}


def test_a_schedule_without_times_is_a_mistake(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("data: {source: t.zarr}")
    for options in ([], ["--cron", "0 2 * * *", "--at", "2026-01-01"], ["--cron", "nonsense"]):
        assert cli.execute(["schedule", str(tmp_path / "c.yaml"), *options, "--root", str(tmp_path)]) == 2
        assert "--cron" in capsys.readouterr().err


def test_a_run_starts_when_its_time_comes():
    """By the clock of this machine, and with real processes."""
    start = [sys.executable, "-c", "import sys; sys.exit(2)"]
    told, stop = [], threading.Event()

    class SoonEnough:
        """Every second, where cron has minutes."""

        def get_next_fire_time(self, last, now):
            return (last or now).replace(microsecond=0) + datetime.timedelta(seconds=1)

    def say(line):
        told.append(line)
        if "ended" in line:
            stop.set()

    keep_schedule(SoonEnough(), start=lambda when: start, stop=stop, say=say)
    assert told[-1].endswith("ended with exit code 2")


# --- batch inference that grows --------------------------------------------------------------------


@pytest.fixture(scope="module")
def nightly(tmp_path_factory):
    """A root with a model, a data set that grows, and the config of the nightly job."""
    import kme_dist as kme

    root = tmp_path_factory.mktemp("nightly")
    rng = np.random.default_rng(1)
    X = rng.normal(size=(5000, 3)).astype(np.float32)
    y = (X[:, 0] > 0).astype(int)
    kme.MCEClassifier(steps=0).fit(X[:200], y[:200]).save(root / "model.zarr")
    np.savez(root / "first.npz", X=X[:3000], y=y[:3000])
    np.savez(root / "more.npz", X=X[3000:], y=y[3000:])
    ingest(root / "first.npz", root / "table.zarr", label="y", chunk_bytes=12 * 1024, shard_bytes=12 * 1024)
    (root / "nightly.yaml").write_text(
        "data: {source: table.zarr}\n"
        "predict: {model: model.zarr, data: table.zarr, out: predictions.zarr, outputs: [label, probability]}\n"
        "cluster: {kind: serial}\n"
    )
    return root


def test_every_night_does_what_is_new_and_a_second_start_nothing(nightly, capsys):
    first = ["schedule", str(nightly / "nightly.yaml"), "--once", "--root", str(nightly), "--json", "--quiet"]

    def night(at):
        assert cli.execute([*first, "--at", at]) == 0
        return json.loads(capsys.readouterr().out)

    one = night("2026-03-01T02:00Z")
    assert one["id"] == "nightly-20260301T020000Z"
    written = {path: path.stat().st_mtime_ns for path in (nightly / "predictions.zarr").rglob("*") if path.is_file()}
    again = night("2026-03-01T03:00+01:00")
    assert again == one, "the same time is the same run"
    after = {path: path.stat().st_mtime_ns for path in (nightly / "predictions.zarr").rglob("*") if path.is_file()}
    assert after == written, "and touches nothing"
    arguments = ["ingest", str(nightly / "more.npz"), str(nightly / "table.zarr"), "--label", "y"]
    assert cli.execute([*arguments, "--append", "--quiet"]) == 0
    capsys.readouterr()
    two = night("2026-03-02T02:00Z")
    assert two["id"] == "nightly-20260302T020000Z"
    # Of 1024 rows each: two chunks were full the night before, the third has grown since.
    assert {key: two["result"][key] for key in ("rows", "chunks", "computed", "skipped")} == {
        "rows": 5000,
        "chunks": 5,
        "computed": 3,
        "skipped": 2,
    }


# One process that has everything imported and makes children of itself: for each place where a run may be killed, one
# child that is killed there, and one that runs the same command again. Both note the objects that they have stored.
KILLER = """
import json, os, re, signal, sys
from kme_dist.cli import app as cli
from kme_dist.data.places import Place
from kme_dist.pipelines import predict

root, points = sys.argv[1], json.loads(sys.argv[2])
write, move = Place.write, Place.move

def child(number, note, kill=None):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def watched(name, call, *arguments, **options):
        when, pattern = kill or (None, "$^")
        hit = re.search(pattern, name)
        if hit and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = call(*arguments, **options)
        with open(note, "a") as file:
            file.write(f"{name}\\n")
        if hit and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    Place.write = lambda place, key, *rest, **options: watched(
        f"{place.name}/{key}", write, place, key, *rest, **options
    )
    Place.move = lambda place, key, target: watched(f"move {target}", move, place, key, target)
    arguments = ["schedule", f"{root}/nightly.yaml", "--once", "--at", f"2026-04-{number:02d}", "--root", root]
    os._exit(cli.execute([*arguments, "--set", f"predict.out=killed-{number}.zarr", "--quiet"]))

for number, point in enumerate(points, start=1):
    codes = [child(number, f"{root}/first-{number}", point), child(number, f"{root}/second-{number}")]
    print(json.dumps(codes), flush=True)
"""

POINTS = [
    ("before", r"/00000001-\w+\.0$"),
    ("after", r"/00000001-\w+\.0$"),
    ("after", r"/00000001-\w+\.1$"),
    ("before", r"receipts/\w+/00000001\.json"),
    ("after", r"receipts/\w+/00000001\.json"),
    ("before", r"move label/c/1"),
    ("after", r"move label/c/1"),
    ("after", r"move probability/c/1"),
    ("before", r"manifest"),
    ("after", r"manifest"),
    ("before", r"done\.json"),
    ("after", r"done\.json"),
]


def stored(path):
    return {
        str(file.relative_to(path)): file.read_bytes()
        for name in ("label", "probability")
        for file in (path / name).rglob("*")
        if file.is_file()
    }


@pytest.mark.chaos(4, 7)
def test_a_run_killed_at_any_point_ends_with_the_same_bytes_and_nothing_twice(nightly):
    command = [sys.executable, "-c", KILLER, str(nightly), json.dumps([*POINTS, ("never", "$^")])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    codes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert codes == [[-signal.SIGKILL, 0]] * len(POINTS) + [[0, 0]], done.stderr
    undisturbed = stored(nightly / f"killed-{len(codes)}.zarr")
    assert len(undisturbed) > 5
    for number in range(1, len(codes)):
        assert stored(nightly / f"killed-{number}.zarr") == undisturbed, POINTS[number - 1]
        first = (nightly / f"first-{number}").read_text().splitlines()
        second = (nightly / f"second-{number}").read_text().splitlines()
        finished = {int(line.split("/")[-1][:8]) for line in first if "/_receipts/" in line}
        again = {int(line.split("/")[3][:8]) for line in second if "/_chunks/" in line}
        assert not finished & again, f"done twice after a kill {POINTS[number - 1]}"
        (job,) = (nightly / "runs").glob(f"nightly-202604{number:02d}T000000Z")
        assert json.loads((job / "done.json").read_text())["state"] == "succeeded"


@pytest.mark.chaos(15)
@pytest.mark.slow
def test_eight_simultaneous_starts_of_a_night_give_one_result(nightly):
    """The commands as eight machines with the same clock would start them."""
    command = [
        sys.executable,
        "-m",
        "kme_dist",
        "schedule",
        str(nightly / "nightly.yaml"),
        "--once",
        "--json",
        "--quiet",
    ]
    options = [
        "--at",
        "2026-05-01T02:00Z",
        "--root",
        str(nightly),
        "--set",
        "predict.out=eight.zarr",
        "--patience",
        "300",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, *options], **pipes) for _ in range(8)]
    outputs = [process.communicate(timeout=280) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, outputs
    (result,) = {json.dumps(json.loads(out)["result"]) for out, _ in outputs}
    job = jobs.job_at(nightly, "nightly-20260501T020000Z")
    assert [event["state"] for event in job.events()] == ["running", "succeeded"]
    assert json.loads(result)["computed"] == json.loads(result)["chunks"]
