"""A driver host: as many jobs at a time as it has slots, none on a worker, and none lost when something dies."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster

from kme_dist.cli import app as cli
from kme_dist.config import ClusterConfig, parse_config
from kme_dist.data.leases import EpochLease
from kme_dist.errors import ConfigError, RetryError
from kme_dist.ops import drivers, jobs, jobs_page, queue, submit
from kme_dist.ops.drivers import Drivers

# A driver whose pipeline lasts until a file `go` is in the root, and fails if there is a text in it.
DRIVER = """
import sys, time
from pathlib import Path
from kme_dist.errors import NumericalError
from kme_dist.config import ClusterConfig
from kme_dist.data.leases import LeaseLost
from kme_dist.ops import driver, jobs, submit

root, name, address = sys.argv[1:]
driver.CHECK_EVERY_S = 0.0

def run(pipeline, config, *, name, command, listener):
    while not (Path(root) / "go").exists():
        listener.progress("waiting", 0, 1)
        time.sleep(0.02)
    if text := (Path(root) / "go").read_text():
        raise NumericalError(text)
    return {}

job = jobs.job_at(Path(root), name)
try:
    submit.drive_for_host(job, ClusterConfig(kind="address", address=address), run)
except LeaseLost:
    sys.exit(75)
except NumericalError:
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def scheduler():
    """The address of a scheduler with one worker, and the scheduler itself."""
    with LocalCluster(
        n_workers=1, processes=False, threads_per_worker=1, dashboard_address="127.0.0.1:0", protocol="tcp://"
    ) as cluster:
        yield cluster.scheduler


@pytest.fixture
def at(scheduler):
    yield ClusterConfig(kind="address", address=scheduler.address)
    scheduler.extensions.pop(queue.NAME, None)
    scheduler.plugins.pop(queue.NAME, None)


def serving(at, **settings):
    """A driver host in a thread of this process, and how to stop it."""
    stop, lines = threading.Event(), []

    def command(job):
        return [sys.executable, "-c", DRIVER, str(job.root), job.id, at.address]

    host = Drivers(at, command, say=lines.append, **settings)
    thread = threading.Thread(target=host.serve, args=(stop,))
    thread.start()

    def end():
        stop.set()
        thread.join()

    return host, lines, end


@pytest.fixture
def host(at):
    host, lines, end = serving(at, slots=2, max_per_user=None)
    host.lines = lines
    yield host
    end()


def submitted(root, at, name, **settings):
    config = parse_config({"data": {"source": "table.zarr"}})
    job = jobs.create_job(root, pipeline="evaluate", config=config, name=name, job_id=name, **settings)
    submit.submit(job, at)
    return job


def until(true, seconds=240):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def states(*found):
    return [job.status()["state"] for job in found]


def test_jobs_run_side_by_side_in_the_slots_of_a_host_and_leave_the_workers_alone(tmp_path, at, host, scheduler):
    found = [submitted(tmp_path, at, f"j{number}") for number in range(3)]
    until(lambda: states(*found[:2]) == ["running", "running"])
    assert states(found[2]) == ["waiting"]
    places = [there.get("place") for there in submit.on_scheduler(found, at)]
    assert places == [None, None, 1]
    assert not any(worker.processing for worker in scheduler.workers.values())
    with Client(scheduler.address, set_as_default=False) as client:
        assert client.submit(sum, [1, 2]).result(timeout=60) == 3, "the only worker is free"
    urgent = submitted(tmp_path, at, "urgent", priority=9)
    assert [there.get("place") for there in submit.on_scheduler([urgent, found[2]], at)] == [1, 2]
    (tmp_path / "go").touch()
    until(lambda: states(*found, urgent) == ["succeeded"] * 4)
    until(lambda: not scheduler.extensions[queue.NAME].entries)
    begun = [line.partition(":")[0] for line in host.lines if ": started" in line]
    assert host.lines[0] == f"2 slots for drivers of jobs at {at.address}"
    assert begun == ["j0", "j1", "urgent", "j2"]


@pytest.mark.chaos(7)
def test_a_killed_driver_is_started_again_and_a_failure_is_not(tmp_path, at, host):
    job = submitted(tmp_path, at, "killed")
    until(lambda: states(job) == ["running"])
    os.kill(jobs.latest_epoch(job.place)[1]["process"], signal.SIGKILL)
    until(lambda: job.status()["drivers"] == 2)
    assert [event["state"] for event in job.events()][:3] == ["waiting", "running", "waiting"]
    (tmp_path / "go").write_text("not positive definite")
    until(lambda: states(job) == ["failed"])
    assert job.status()["exit_code"] == 3
    time.sleep(2 * drivers.POLL_S)
    assert job.status()["drivers"] == 2


def test_a_host_that_is_stopped_gives_its_jobs_to_another(tmp_path, at):
    _, _, end_first = serving(at, slots=1)
    job = submitted(tmp_path, at, "moved")
    until(lambda: states(job) == ["running"])
    _, _, end_second = serving(at, slots=1)
    end_first()
    try:
        assert states(job) in (["waiting"], ["running"])
        until(lambda: job.status()["drivers"] == 2)
        (tmp_path / "go").touch()
        until(lambda: states(job) == ["succeeded"])
    finally:
        end_second()


def test_a_cancelled_job_ends_at_once_also_where_it_waits(tmp_path, at, host):
    found = [submitted(tmp_path, at, f"c{number}") for number in range(3)]
    until(lambda: states(*found[:2]) == ["running", "running"])
    process = jobs.latest_epoch(found[0].place)[1]["process"]
    assert submit.cancel(found[2], at, grace_s=0.0)["state"] == "cancelled"
    assert submit.cancel(found[0], at, grace_s=0.0)["state"] == "cancelled"
    until(lambda: not Path(f"/proc/{process}").exists())
    assert submit.cancel(found[1], at, grace_s=60.0)["state"] == "cancelled", "its driver stops by itself"
    until(lambda: not submit.on_scheduler([found[1]], at)[0]["state"])
    assert states(*found) == ["cancelled"] * 3


@pytest.mark.chaos(6)
def test_a_scheduler_that_lost_its_queue_gets_it_back(tmp_path, at, host, scheduler):
    found = [submitted(tmp_path, at, f"r{number}") for number in range(3)]
    until(lambda: states(*found[:2]) == ["running", "running"])
    until(lambda: len(host._known) == 3)
    del scheduler.extensions[queue.NAME]  # as a scheduler that was restarted
    scheduler.plugins.pop(queue.NAME)
    until(lambda: [there["state"] for there in submit.on_scheduler(found, at)] == ["running", "running", "waiting"])
    (tmp_path / "go").touch()
    until(lambda: states(*found) == ["succeeded"] * 3)
    assert [job.status()["drivers"] for job in found] == [1, 1, 1], "those that ran went on"


@pytest.mark.chaos(6)
def test_a_connection_lost_while_a_queue_is_restored_costs_no_driver(tmp_path, at, host, scheduler, monkeypatch):
    job = submitted(tmp_path, at, "restored")
    until(lambda: states(job) == ["running"] and host._known and host._known[0].host == host.id)
    real, lost = Drivers._exchange, []

    def exchange(self, client, **more):
        if more.get("restored") and not lost:
            lost.append(more["restored"])
            raise RetryError("the scheduler was lost")
        return real(self, client, **more)

    monkeypatch.setattr(Drivers, "_exchange", exchange)
    del scheduler.extensions[queue.NAME]
    scheduler.plugins.pop(queue.NAME)
    until(lambda: lost and submit.on_scheduler([job], at)[0]["state"] == "running")
    (tmp_path / "go").touch()
    until(lambda: states(job) == ["succeeded"])
    assert job.status()["drivers"] == 1


# A driver host in a process of its own, which runs until it is interrupted.
HOST = """
import sys, threading
from kme_dist.cli.drivers import _signals_set
from kme_dist.config import ClusterConfig
from kme_dist.ops.drivers import Drivers

address, code = sys.argv[1:]
stop = threading.Event()
with _signals_set(stop):
    at = ClusterConfig(kind="address", address=address)
    Drivers(at, lambda job: [sys.executable, "-c", code, str(job.root), job.id, address]).serve(stop)
"""


def test_an_interrupt_in_the_terminal_of_a_host_fails_no_job(tmp_path, at, scheduler):
    """Ctrl-C goes to all processes of the terminal: the host, and the drivers that it has started."""
    command = [sys.executable, "-c", HOST, at.address, DRIVER]
    process = subprocess.Popen(command, start_new_session=True)
    job = submitted(tmp_path, at, "interrupted")
    until(lambda: states(job) == ["running"])
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 0
    assert [event["state"] for event in job.events()] == ["waiting", "running", "waiting"]
    assert "error" not in job.status()


def test_a_cancelled_job_stays_so_when_its_workers_cannot_be_restarted(tmp_path, at, host):
    job = submitted(tmp_path, at, "busy")
    until(lambda: states(job) == ["running"])
    release = tmp_path / "release"

    def hold(path):
        while not Path(path).exists():
            time.sleep(0.02)

    with (
        dask.config.set({"client-name": queue.driver_name(queue.job_key(job))}),
        Client(at.address, set_as_default=False) as client,
    ):
        task = client.submit(hold, str(release), pure=False)
        try:
            until(lambda: submit.on_scheduler([job], at)[0]["busy"])
            for _ in range(2):  # the same command tries again
                with pytest.raises(RetryError, match="is cancelled, but the workers that compute for it could not be"):
                    submit.cancel(job, at, grace_s=0.0)
                assert states(job) == ["cancelled"]
        finally:
            release.touch()
        task.result(timeout=60)
    assert submit.wait(job, 1.0)["state"] == "cancelled"


@pytest.mark.parametrize("options", [[], ["--id", "chosen"]])
def test_without_a_host_a_submission_says_so_and_leaves_nothing(tmp_path, at, capsys, monkeypatch, options):
    monkeypatch.setattr(submit, "ACCEPT_S", 0.2)
    (tmp_path / "c.yaml").write_text("data: {source: t.zarr}")
    arguments = ["submit", str(tmp_path / "c.yaml"), "--scheduler", at.address, "--root", str(tmp_path), *options]
    assert cli.execute(arguments) == 75
    assert f"start one with `kme-dist drivers --scheduler {at.address}`" in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_empty_id_is_refused(tmp_path, at, capsys):
    """As of a variable of the shell that is not set: a generated one would not be found again."""
    (tmp_path / "c.yaml").write_text("data: {source: t.zarr}")
    command = ["submit", str(tmp_path / "c.yaml"), "--scheduler", at.address, "--root", str(tmp_path), "--id", ""]
    assert cli.execute(command) == 2
    assert "invalid job id ''" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="invalid job id ''"):
        jobs.create_job(tmp_path, pipeline="run", config=parse_config({"data": {"source": "t"}}), name="n", job_id="")
    assert jobs.list_jobs(tmp_path) == []


def test_a_refused_submission_leaves_a_job_that_was_there(tmp_path, at, capsys, monkeypatch):
    monkeypatch.setattr(submit, "ACCEPT_S", 0.2)
    (tmp_path / "c.yaml").write_text("data: {source: t.zarr}")
    config = parse_config({"data": {"source": "t.zarr"}})
    job = jobs.create_job(tmp_path, pipeline="run", config=config, name="c", job_id="chosen")
    arguments = [
        "submit",
        str(tmp_path / "c.yaml"),
        "--scheduler",
        at.address,
        "--root",
        str(tmp_path),
        "--id",
        "chosen",
    ]
    assert cli.execute(arguments) == 75
    assert job.status()["state"] == "waiting"
    capsys.readouterr()


def test_a_job_that_somebody_has_taken_up_is_not_withdrawn(tmp_path, monkeypatch):
    config = parse_config({"data": {"source": "t.zarr"}})

    def create(name):
        return jobs.create_job(tmp_path, pipeline="run", config=config, name=name, job_id=name)

    accepted, driven, late, left = map(create, ("accepted", "driven", "late", "left"))
    accepted.event("waiting", scheduler="tcp://127.0.0.1:1")
    with EpochLease.take(driven.place):
        pass
    assert not submit.withdraw(accepted)
    assert not submit.withdraw(driven)
    looks = []
    real = submit._untouched

    def accepted_meanwhile(folder):
        looks.append(folder)
        if len(looks) == 2:
            (folder / "events.jsonl").touch()  # by a submission that had opened it
        return real(folder)

    monkeypatch.setattr(submit, "_untouched", accepted_meanwhile)
    assert not submit.withdraw(late)
    monkeypatch.undo()
    assert submit.withdraw(left, dry_run=True)
    assert submit.withdraw(left)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["accepted", "driven", "late"]


def test_only_jobs_in_the_queue_have_a_place(tmp_path, at, host, capsys):
    """Not those that nobody has submitted, nor those that the host has given back."""
    config = parse_config({"data": {"source": "t.zarr"}})
    never = jobs.create_job(tmp_path, pipeline="run", config=config, name="never", job_id="never")
    back = jobs.create_job(tmp_path, pipeline="run", config=config, name="back", job_id="back")
    back.event("waiting", scheduler=at.address)
    back.event("waiting", left_queue=True)
    host.slots = 0
    queued = submitted(tmp_path, at, "queued")
    for options in ([], ["--scheduler", at.address]):
        assert cli.execute(["jobs", "list", "--root", str(tmp_path), "--json", *options]) == 0
        rows = {row["id"]: row.get("place") for row in json.loads(capsys.readouterr().out)["jobs"]}
        assert rows == {"never": None, "back": None, "queued": 1}
    assert cli.execute(["jobs", "list", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("in no queue") == 2
    entries = [queue.Entry.of(queued)]
    shown = {row["id"]: row.get("place") for row in jobs_page.JobIndex().read([str(tmp_path)], entries).rows}
    assert shown == {"never": None, "back": None, "queued": 1}
    assert never.status()["state"] == "waiting"


def test_a_root_that_no_host_can_read_is_refused(tmp_path, at, host, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("KME_ROOT", str(tmp_path / "elsewhere"))  # that of the host
    with pytest.raises(ConfigError, match=r"no driver host can read the job's folder .* set KME_ROOT"):
        submitted(tmp_path, at, "unreadable")


def test_a_job_of_another_root_that_has_the_same_id_is_not_run_in_its_place(tmp_path, at, host, monkeypatch):
    (tmp_path / "go").touch()
    mine, other = tmp_path / "of-the-host", tmp_path / "of-the-submitter"
    mine.mkdir()
    other.mkdir()
    config = parse_config({"data": {"source": "table.zarr"}})
    waits = jobs.create_job(mine, pipeline="run", config=config, name="night", job_id="night-1")
    monkeypatch.setenv("KME_ROOT", str(mine))
    with pytest.raises(ConfigError, match=r"no driver host can read the job's folder .*another job with the same id"):
        submitted(other, at, "night-1")
    time.sleep(2 * drivers.POLL_S)
    assert waits.events() == []
    assert not any(": started" in line for line in host.lines)


def test_a_host_with_a_root_of_its_own_reads_the_jobs_there(tmp_path, monkeypatch):
    for name in ("option", "variable", "submitter"):
        (tmp_path / name).mkdir()
    config = parse_config({"data": {"source": "table.zarr"}})
    job = jobs.create_job(tmp_path / "submitter", pipeline="run", config=config, name="n", job_id="n")
    entry = queue.Entry.of(job)
    for name in ("option", "variable"):  # the same disk under other paths
        shutil.copytree(job.folder, tmp_path / name / "runs" / "n")

    def found(root):
        return Drivers(ClusterConfig(), lambda job: [], root=root)._job(entry).root.name

    monkeypatch.delenv("KME_ROOT", raising=False)
    assert found(str(tmp_path / "option")) == "submitter", "jobs of all roots are run"
    monkeypatch.setenv("KME_ROOT", str(tmp_path / "variable"))
    assert found("") == "variable"
    assert found(str(tmp_path / "option")) == "option", "as everywhere, --root takes precedence over KME_ROOT"


def test_a_host_without_a_scheduler_waits_for_one_and_says_so_once(monkeypatch):
    monkeypatch.setattr(drivers, "POLL_S", 0.01)
    calls = []

    def away(cluster, timeout_s):
        calls.append(timeout_s)
        raise RetryError("no scheduler answers")

    monkeypatch.setattr(drivers, "open_unchecked", away)
    _, lines, end = serving(ClusterConfig(kind="address", address="tcp://127.0.0.1:1"))
    until(lambda: len(calls) > 3)
    end()
    assert lines == ["no scheduler answers; waiting for it"]


def test_a_second_submission_of_a_job_that_runs_changes_nothing(tmp_path, at, host):
    job = submitted(tmp_path, at, "twice")
    until(lambda: states(job) == ["running"])
    events = job.events()
    submit.submit(job, at)
    assert states(job) == ["running"]
    assert job.events() == events
    process = jobs.latest_epoch(job.place)[1]["process"]
    os.kill(process, signal.SIGSTOP)  # or it might have stopped by then
    job.request_stop("an operator")
    submit.submit(job, at)
    assert job.stop_requested, "the cancellation stands"
    os.kill(process, signal.SIGCONT)
    until(lambda: states(job) == ["cancelled"])
    submit.submit(job, at)
    until(lambda: states(job) == ["running"])
    submit.submit(job, at)
    (tmp_path / "go").write_text("not positive definite")
    until(lambda: states(job) == ["failed"])
    until(lambda: submit.on_scheduler([job], at)[0]["state"] is None)
    assert job.status()["drivers"] == 2, "a failure is not run once more"


def test_a_job_whose_driver_has_just_died_gets_another_by_a_submission(tmp_path, at, host):
    job = submitted(tmp_path, at, "died")
    until(lambda: states(job) == ["running"])
    with submit.open_unchecked(at) as client:
        submit._ask(client, queue.forget, queue.job_key(job))  # its scheduler and its host were lost
    until(lambda: not host._children)
    assert states(job) == ["running"], "nobody has noticed yet"
    submit.submit(job, at)
    until(lambda: job.status()["drivers"] == 2)


def test_a_submission_beside_a_driver_that_begins_does_not_hide_it(tmp_path, at, host, monkeypatch):
    job = submitted(tmp_path, at, "beside")
    real = jobs.Job.event

    def event(job, state, **facts):
        until(lambda: job.status()["state"] == "running")  # between the look at the job and the line
        real(job, state, **facts)

    assert states(job) == ["waiting"]
    monkeypatch.setattr(jobs.Job, "event", event)
    submit.submit(job, at)
    assert [event["state"] for event in job.events()] == ["waiting", "running", "waiting"]
    assert states(job) == ["running"]


@pytest.mark.parametrize("how", ["patience", "the first start"])
def test_a_second_start_of_a_night_waits_as_long_as_its_patience(tmp_path, at, host, capsys, how):
    (tmp_path / "night.yaml").write_text("data: {source: table.zarr}\n")
    command = ["schedule", str(tmp_path / "night.yaml"), "--once", "--at", "2026-03-01T02:00Z", "--quiet"]
    command += ["--scheduler", at.address, "--root", str(tmp_path), "--patience", "0.5", "--pipeline", "evaluate"]
    codes = []
    first = threading.Thread(target=lambda: codes.append(cli.execute(command)))
    first.start()
    job = jobs.job_at(tmp_path, "night-20260301T020000Z")
    until(lambda: job.folder.exists() and job.events() and states(job) == ["running"])
    if how == "patience":
        assert cli.execute(command) == 75
        assert "is running after 0.5 s" in capsys.readouterr().err
    time.sleep(0.6)
    assert codes == [], "the first one waits for the result"
    (tmp_path / "go").touch()
    first.join()
    assert codes == [0]
    assert job.status()["drivers"] == 1
    capsys.readouterr()


@pytest.mark.parametrize("why", ["no process to spare", "its root is gone"])
def test_a_job_that_cannot_be_started_costs_the_host_no_other(tmp_path, at, scheduler, monkeypatch, why):
    real, lines, stop = drivers.subprocess.Popen, [], threading.Event()

    def popen(command, **rest):
        if "bad" in command:
            raise BlockingIOError(errno.EAGAIN, why)
        return real(command, **rest)

    def gone(host, entry):
        if entry.id == "bad" and "bad" in checked:
            raise ConfigError(why)
        checked.add(entry.id)
        return jobs.job_at(Path(entry.root), entry.id)

    checked = set()
    if why == "its root is gone":
        monkeypatch.setattr(Drivers, "_job", gone)
    monkeypatch.setattr(drivers.subprocess, "Popen", popen)
    host = Drivers(at, lambda job: [sys.executable, "-c", DRIVER, str(job.root), job.id, at.address], say=lines.append)
    thread = threading.Thread(target=host.serve, args=(stop,))
    thread.start()
    try:
        good = submitted(tmp_path, at, "good")
        until(lambda: states(good) == ["running"])
        bad = submitted(tmp_path, at, "bad")
        until(lambda: submit.on_scheduler([bad], at)[0]["state"] is None)
        assert sum(why in line for line in lines) == queue.DEATHS + 1
        (tmp_path / "go").touch()
        until(lambda: states(good) == ["succeeded"])
        assert good.status()["drivers"] == 1
    finally:
        stop.set()
        thread.join()


def test_drivers_that_cannot_start_do_not_stand_in_the_way_of_others(tmp_path, at, scheduler):
    stop = threading.Event()
    host = Drivers(at, lambda job: [sys.executable, "-c", "import sys; sys.exit(1)"], slots=2)
    thread = threading.Thread(target=host.serve, args=(stop,))
    thread.start()
    found = [submitted(tmp_path, at, f"x{number}") for number in range(3)]
    until(lambda: not scheduler.extensions[queue.NAME].entries)
    stop.set()
    thread.join()
    assert states(*found) == ["waiting"] * 3, "a supervisor resubmits them, with pauses and a limit"
