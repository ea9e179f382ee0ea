"""A supervisor resubmits jobs that have no driver any more, with a limit, and tells once how jobs end."""

from __future__ import annotations

import contextlib
import errno
import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from distributed import LocalCluster
from ports import free_port

from kme_dist.cli import app as cli
from kme_dist.cli.drivers import kept_jobs
from kme_dist.config import ClusterConfig, parse_config
from kme_dist.data.leases import EpochLease, begin_epoch
from kme_dist.errors import ConfigError, RetryError
from kme_dist.ops import jobs, submit, supervisor
from kme_dist.ops.supervisor import Notices, Supervisor

AT = ClusterConfig(kind="address", address="tcp://127.0.0.1:1")


@pytest.fixture
def job(tmp_path):
    config = parse_config({"data": {"source": "table.zarr"}})
    return jobs.create_job(tmp_path, pipeline="evaluate", config=config, name="nightly", job_id="nightly-1")


@pytest.fixture
def scheduler(monkeypatch):
    """What the scheduler says of every job (`state`), and the resubmissions it got (`sent`)."""

    class Scheduler:
        state = None
        sent = []

    told = Scheduler()
    told.sent = []

    def accept(job, cluster, resubmission):
        job.event("waiting", scheduler=cluster.address, resubmission=resubmission)
        told.sent.append((job.id, resubmission))

    monkeypatch.setattr(supervisor, "on_scheduler", lambda found, cluster: [{"state": told.state} for _ in found])
    monkeypatch.setattr(supervisor, "submit", accept)
    monkeypatch.setattr(supervisor, "belongs_elsewhere", lambda address, cluster: None)
    return told


def watched(job, **settings):
    return Supervisor(job.root, AT, pause_s=0.0, **settings)


def test_a_job_that_the_scheduler_does_not_know_is_resubmitted_at_the_second_look(job, scheduler):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    keeper = watched(job)
    assert keeper.look() == [], "one look alone proves nothing"
    assert keeper.look() == [job.id]
    assert scheduler.sent == [(job.id, 1)]


def test_a_driver_that_shows_that_it_lives_is_left_alone(job, scheduler):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    keeper = watched(job)
    with EpochLease.take(job.place, beat_s=0.01):
        job.event("running", epoch=1)
        for _ in range(3):
            assert keeper.look() == []
            time.sleep(0.1)


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_job_that_the_scheduler_knows_is_left_alone(job, scheduler, state):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    scheduler.state = state
    keeper = watched(job)
    assert [keeper.look() for _ in range(3)] == [[], [], []]


@pytest.mark.parametrize(
    ("code", "resubmitted"), [(75, True), (1, False), (2, False), (3, False), (65, False), (130, False)]
)
def test_only_failures_of_the_infrastructure_are_resubmitted(job, scheduler, code, resubmitted):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    job.event("failed", exit_code=code, error="?")
    assert watched(job).look() == [job.id] * resubmitted


def test_jobs_of_no_scheduler_and_jobs_that_were_asked_to_stop_are_left_alone(job, scheduler):
    job.event("running")
    keeper = watched(job)
    assert [keeper.look(), keeper.look()] == [[], []], "a job of this machine"
    job.event("waiting", scheduler="tcp://elsewhere:1")
    job.request_stop("enough")
    assert [keeper.look(), keeper.look()] == [[], []]


def test_after_the_limit_a_job_is_marked_as_failed_and_stays_so(job, scheduler):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    for _ in range(2):
        keeper = watched(job, limit=2)  # killed and started again: the count is in the job's folder
        keeper.look()
        assert keeper.look() == [job.id]
    keeper = watched(job, limit=2)
    assert [keeper.look() for _ in range(4)] == [[]] * 4
    status = job.status()
    assert (status["state"], status["exit_code"]) == ("failed", 75)
    assert status["error"].startswith("given up after 2 resubmissions")
    job.event("waiting", scheduler="tcp://elsewhere:1")  # a person submits it again: the count starts anew
    assert supervisor.resubmissions(job) == 0


def test_resubmissions_get_further_apart(job, scheduler, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    job.event("waiting", scheduler="tcp://elsewhere:1")
    keeper, when = Supervisor(job.root, AT, pause_s=10.0, limit=4), []
    for second in range(200):
        clock[0] = 100.0 + second
        if keeper.look():
            when.append(second)
    assert np.diff(when).tolist() == [10, 20, 40]


def test_a_scheduler_that_is_away_is_said_once_and_waited_for(job, monkeypatch):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    lines, looks, stop = [], [], threading.Event()

    def away(found, cluster):
        looks.append(found)
        if len(looks) == 3:
            stop.set()
        raise RetryError("no scheduler answers")

    monkeypatch.setattr(supervisor, "on_scheduler", away)
    watched(job, say=lines.append).keep(stop, every_s=0.0)
    assert lines == ["no scheduler answers"]
    assert len(looks) == 3


def test_a_schedule_and_a_driver_host_keep_the_jobs_of_their_root(job, scheduler, monkeypatch):
    monkeypatch.setattr(supervisor, "EVERY_S", 0.01)
    job.event("waiting", scheduler="tcp://elsewhere:1")
    with kept_jobs(job.root, None, print):
        time.sleep(0.05)
    assert scheduler.sent == [], "without a scheduler there is nothing to keep"
    with kept_jobs(job.root, AT, lambda line: None):
        _until(lambda: scheduler.sent)
    assert scheduler.sent[0] == (job.id, 1)


# --- several supervisors, several clusters -----------------------------------------------------------


@pytest.mark.parametrize("state", ["failed", "waiting"])
def test_what_another_supervisor_resubmitted_during_a_look_is_not_resubmitted(job, scheduler, monkeypatch, state):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    if state == "failed":
        job.event("failed", exit_code=75, error="?")
    first, second, asked = watched(job), watched(job), []
    if state == "waiting":
        assert (first.look(), second.look()) == ([], [])

    def ask(found, cluster):
        asked.append(found)
        if len(asked) == 1:  # the second one is between its look at the folder and its resubmission
            assert first.look() == [job.id]
        return [{"state": None} for _ in found]

    monkeypatch.setattr(supervisor, "on_scheduler", ask)
    assert second.look() == []
    assert scheduler.sent == [(job.id, 1)]
    assert supervisor.resubmissions(job) == 1


def test_of_two_supervisors_one_resubmits(job, scheduler, monkeypatch):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    job.event("failed", exit_code=75, error="?")
    real, others = supervisor.submit, []

    def slow(job, cluster, resubmission):
        if not others:
            others.append(watched(job).look())  # before the first one has written anything
        real(job, cluster, resubmission)

    monkeypatch.setattr(supervisor, "submit", slow)
    assert watched(job).look() == [job.id]
    assert others == [[]]
    assert scheduler.sent == [(job.id, 1)]


def test_a_supervisor_whose_submission_fails_leaves_it_to_the_next_look(job, scheduler, monkeypatch):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    job.event("failed", exit_code=75, error="?")
    with monkeypatch.context() as patch:
        patch.setattr(supervisor, "submit", lambda *_, **__: (_ for _ in ()).throw(RetryError("no driver host")))
        with pytest.raises(RetryError):
            watched(job).look()
    assert watched(job).look() == [job.id]


def test_the_resubmissions_of_several_supervisors_get_further_apart_too(job, scheduler, monkeypatch):
    clock, when = [100.0], []
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    job.event("waiting", scheduler="tcp://elsewhere:1")
    keepers = [Supervisor(job.root, AT, pause_s=10.0, limit=4) for _ in range(2)]
    for second in range(200):
        clock[0] = 100.0 + second
        when += [second for keeper in keepers if keeper.look()]
    assert np.diff(when) == pytest.approx([10, 20, 40], abs=1)


@pytest.fixture
def clusters():
    with contextlib.ExitStack() as stack:
        settings = {"n_workers": 0, "processes": False, "dashboard_address": "127.0.0.1:0", "protocol": "tcp://"}
        yield [stack.enter_context(LocalCluster(**settings)) for _ in range(2)]


@pytest.mark.parametrize("state", ["failed", "waiting"])
def test_a_job_of_another_cluster_is_left_to_it_until_that_is_gone(job, clusters, monkeypatch, state):
    ours, theirs = clusters
    at = ClusterConfig(kind="address", address=ours.scheduler_address)
    sent, lines = [], []
    monkeypatch.setattr(supervisor, "submit", lambda job, cluster, resubmission: sent.append(resubmission))
    job.event("waiting", scheduler=theirs.scheduler_address)
    if state == "failed":
        job.event("failed", exit_code=75, error="?")
    keeper = Supervisor(job.root, at, pause_s=0.0, say=lines.append)
    assert [keeper.look() for _ in range(3)] == [[]] * 3
    assert lines == [
        f"{job.id}: left alone: it was submitted to the scheduler at {theirs.scheduler_address}, which is another one "
        "and answers"
    ]
    theirs.close()  # and comes back under another address
    assert keeper.look() == [job.id]
    assert sent == [1]


def test_a_scheduler_is_known_by_all_its_names_and_a_stranger_is_not_taken_for_one(clusters, monkeypatch):
    monkeypatch.setattr(submit, "ANSWER_S", 1.0)
    address = clusters[0].scheduler_address
    at = ClusterConfig(kind="address", address=address)
    assert submit.belongs_elsewhere(address, at) is None
    assert submit.belongs_elsewhere(address.replace("127.0.0.1", "localhost"), at) is None
    assert submit.belongs_elsewhere(f"tcp://127.0.0.1:{free_port()}", at) is None
    assert submit.belongs_elsewhere("not an address", at) is None
    other = clusters[1].scheduler_address
    assert "another one and answers" in submit.belongs_elsewhere(other, at)
    assert "cannot be asked" in submit.belongs_elsewhere(other.replace("tcp", "tls"), at), "without certificates"
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "cannot be asked" in submit.belongs_elsewhere(f"tcp://127.0.0.1:{server.getsockname()[1]}", at)


# --- what goes wrong with one job, or at one look ----------------------------------------------------


def beside(job, name):
    """Another job of the same root, which is to be resubmitted."""
    found = jobs.create_job(job.root, pipeline="run", config=job.config(), name=name, job_id=name)
    found.event("waiting", scheduler="tcp://elsewhere:1")
    found.event("failed", exit_code=75, error="?")
    return found


def refusing(monkeypatch, path, module=os, name="stat", error=errno.EACCES):
    """A function of a module fails for that path, as for a folder of another user or a disk that is full."""
    real = getattr(module, name)

    def fail(given, *arguments, **rest):
        if str(given).startswith(str(path)):
            raise OSError(error, os.strerror(error), str(given))
        return real(given, *arguments, **rest)

    monkeypatch.setattr(module, name, fail)


def test_a_folder_of_another_user_hides_no_job(job, scheduler, monkeypatch, capsys):
    other = beside(job, "other")
    refusing(monkeypatch, job.folder)
    assert watched(other).look() == [other.id]
    assert cli.execute(["jobs", "list", "--root", str(job.root)]) == 0
    out = capsys.readouterr().out
    assert other.id in out
    assert job.id not in out


def test_a_file_that_cannot_be_read_is_said_once_and_no_obstacle(job, scheduler, monkeypatch, capsys):
    other = beside(job, "other")
    refusing(monkeypatch, job.folder / "job.json", Path, "read_text")
    lines = []
    keeper = watched(other, say=lines.append)
    assert keeper.look() == [other.id]
    keeper.look()
    assert [line for line in lines if line.startswith(f"{job.id}: ")] == [
        f"{job.id}: [Errno 13] Permission denied: '{job.folder / 'job.json'}'"
    ]
    assert cli.execute(["jobs", "list", "--root", str(job.root)]) == 0
    out = capsys.readouterr().out
    assert "damaged" in out
    assert other.id in out


def test_a_notice_that_cannot_be_noted_does_not_keep_a_job_from_its_resubmission(job, scheduler, monkeypatch):
    monkeypatch.setattr(supervisor, "UNRECOVERED_S", 0.0)
    job.event("waiting", scheduler="tcp://elsewhere:1")
    job.event("failed", exit_code=75, error="?")
    (job.folder / "notices").touch()  # in the way
    lines = []
    assert watched(job, say=lines.append, notices=Notices(["true"])).look() == [job.id]
    assert "a file or folder is in the way" in lines[-1]


def test_a_job_that_is_deleted_during_a_look_is_no_obstacle(job, monkeypatch, scheduler):
    other, sent = beside(job, "other"), []
    beside(job, "gone")
    monkeypatch.setattr(submit, "open_unchecked", lambda *_, **__: contextlib.nullcontext())

    def answer(client, function, keys):
        sent.extend(keys)
        return [{"state": None} for _ in keys]

    def ask(found, cluster):
        if (job.root / "runs" / "gone").exists():
            shutil.rmtree(job.root / "runs" / "gone")
        return submit.on_scheduler(found, cluster)

    monkeypatch.setattr(submit, "_ask", answer)
    monkeypatch.setattr(supervisor, "on_scheduler", ask)
    assert watched(other).look() == [other.id]
    assert "gone-deleted" in sent


@pytest.mark.chaos(11)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EAGAIN, None])
def test_no_error_ends_a_supervisor(job, scheduler, monkeypatch, error):
    """A full disk, an error of the system, a bug: it is said once, and the next look is as good as ever."""
    job.event("waiting", scheduler="tcp://elsewhere:1")
    job.event("failed", exit_code=75, error="?")
    stop, lines, looks, good = threading.Event(), [], [], supervisor.submit

    def bad(job, cluster, resubmission):
        looks.append(job.id)
        if len(looks) == 3:
            stop.set()
            good(job, cluster, resubmission)
        elif error is None:
            raise ZeroDivisionError("a bug")
        else:
            with monkeypatch.context() as patch:
                refusing(patch, job.folder, os, "open", error)
                good(job, cluster, resubmission)

    monkeypatch.setattr(supervisor, "submit", bad)
    watched(job, say=lines.append).keep(stop, every_s=0.0)
    assert len(looks) == 3
    assert scheduler.sent == [(job.id, 1)]
    assert len(lines) == 2, lines
    assert lines[1] == f"{job.id}: was failed without a driver; resubmitted (1 of 5)"
    if error == errno.ENOSPC:
        assert "no space left while writing" in lines[0]


# --- notices ---------------------------------------------------------------------------------------


@pytest.fixture
def receiver():
    """A server on this machine, and the bodies that were posted to it."""
    bodies = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/jobs", bodies
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_end_of_a_job_is_told_once_by_a_command_and_to_a_url(job, scheduler, receiver, tmp_path):
    url, bodies = receiver
    file = tmp_path / "notices.txt"
    command = [sys.executable, "-c", f"import sys; open({str(file)!r}, 'a').write(sys.stdin.read() + chr(10))"]
    job.event("failed", exit_code=3, error="not positive definite")
    for _ in range(2):  # also by a supervisor that was started again
        watched(job, notices=Notices(command, url)).look()
    (body,) = bodies
    assert (body["id"], body["state"], body["exit_code"]) == (job.id, "failed", 3)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [body]


def test_a_lost_job_is_told_too(job, scheduler, receiver):
    url, bodies = receiver
    lose(job)
    watched(job, notices=Notices(url=url)).look()
    assert [body["state"] for body in bodies] == ["lost"]


def test_a_failure_that_is_followed_by_a_resubmission_is_not_told(job, scheduler, receiver):
    url, bodies = receiver
    job.event("waiting", scheduler="tcp://elsewhere:1")
    job.event("failed", exit_code=75, error="the scheduler was lost")
    keeper = watched(job, notices=Notices(url=url), limit=1)
    assert keeper.look() == [job.id]
    assert bodies == []
    job.event("failed", exit_code=75, error="the scheduler was lost")  # by the same driver
    keeper.look()
    (body,) = bodies
    assert body["error"].startswith("given up after 1 resubmissions")
    keeper.look()
    assert len(bodies) == 1


def test_a_failure_that_nobody_follows_by_a_resubmission_is_told_in_the_end(job, receiver, monkeypatch):
    url, bodies = receiver
    job.event("waiting", scheduler="tcp://elsewhere:1")
    job.event("failed", exit_code=75, error="the scheduler was lost")

    def away(found, cluster):
        raise RetryError("no scheduler answers")

    monkeypatch.setattr(supervisor, "on_scheduler", away)
    keeper = watched(job, notices=Notices(url=url), limit=0)
    for told in (0, 1, 1):
        with pytest.raises(RetryError):
            keeper.look()
        assert len(bodies) == told
        monkeypatch.setattr(supervisor, "UNRECOVERED_S", 0.0)
    monkeypatch.setattr(supervisor, "on_scheduler", lambda found, cluster: [{"state": None} for _ in found])
    keeper.look()
    assert [body["error"] for body in bodies] == [
        "the scheduler was lost",
        "given up after 0 resubmissions: the scheduler was lost",
    ]


def test_a_notice_that_was_not_delivered_is_tried_again_and_each_recipient_told_once(job, scheduler, tmp_path):
    """Also by another supervisor: what was not sent is not noted as sent."""
    file, up = tmp_path / "notices.txt", tmp_path / "up"
    code = f"import os, sys; open({str(file)!r}, 'a').write('told '); sys.exit(not os.path.exists({str(up)!r}))"
    command = [sys.executable, "-c", code]
    job.event("failed", exit_code=3, error="?")
    lines = []
    keeper = watched(job, say=lines.append, notices=Notices(command))
    for _ in range(3):
        keeper.look()
    assert file.read_text().split() == ["told"] * 3
    (line,) = lines
    assert "ended with exit code 1; it is tried again" in line
    up.touch()
    for keeper_ in (watched(job, notices=Notices(command)), keeper, watched(job, notices=Notices(command))):
        keeper_.look()
    assert file.read_text().split() == ["told"] * 4


def test_notices_that_are_not_delivered_get_further_apart_and_come_one_in_a_look(job, scheduler, monkeypatch):
    clock, sent = [1000.0], []
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: clock[0])
    job.event("failed", exit_code=3, error="?")
    other = jobs.create_job(job.root, pipeline="run", config=job.config(), name="other", job_id="other")
    other.event("failed", exit_code=3, error="?")

    class Silent(Notices):
        def send(self, status, told):
            sent.append((status["id"], clock[0] - 1000.0))
            return ["no answer"]

    keeper = Supervisor(job.root, AT, notices=Silent(["x"]))
    for second in range(0, 100, 5):
        clock[0] = 1000.0 + second
        keeper.look()
    assert [when for name, when in sent if name == job.id] == [0, 10, 30, 70]
    assert [when for name, when in sent if name == "other"] == [5, 15, 35, 75]


def test_a_notice_that_was_sent_and_cannot_be_noted_is_not_sent_in_every_look(job, scheduler, receiver):
    url, bodies = receiver
    job.event("failed", exit_code=3, error="?")
    (job.folder / "notices").touch()  # in the way
    keeper = watched(job, notices=Notices(url=url))
    for _ in range(3):
        keeper.look()
    assert len(bodies) == 1


def test_a_notice_that_cannot_be_sent_is_a_line_and_no_obstacle(job, scheduler):
    job.event("failed", exit_code=2, error="?")
    lines = []
    with socket.create_server(("127.0.0.1", 0)) as server:  # whose answer is not HTTP

        def answer():
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"what?\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        watched(job, say=lines.append, notices=Notices(["absent-command"], url)).look()
        thread.join()
    assert len(lines) == 2
    assert all(line.startswith(f"{job.id}: the notice was not sent: ") for line in lines)
    with pytest.raises(ConfigError, match="must be an http"):
        Notices(url="file:///etc/passwd")


# --- lost jobs -------------------------------------------------------------------------------------


def lose(job):
    """A driver that died a minute ago on another machine."""
    with EpochLease.take(job.place):
        job.event("running", epoch=1, driver="worker tcp://gone:1")
    begin_epoch(job.place, "worker tcp://gone:1")
    job.event("running", epoch=2)
    then = time.time() - 60
    os.utime(job.folder / "lease" / "000002.json", (then, then))


def test_a_job_whose_driver_does_not_report_is_lost_and_ends_waits_with_75(job, capsys):
    lose(job)
    status = job.status()
    assert status["state"] == "lost"
    assert status["seconds_since_beat"] >= 59
    assert cli.execute(["jobs", "wait", job.id, "--root", str(job.root)]) == 75
    assert f"the job {job.id} is lost" in (error := capsys.readouterr().err)
    assert f"kme-dist jobs resume {job.id}" in error
    assert cli.execute(["jobs", "list", "--root", str(job.root), "--state", "lost"]) == 0
    assert job.id in capsys.readouterr().out


def test_a_job_that_nobody_has_taken_up_ends_waits_with_75(job, capsys, monkeypatch):
    monkeypatch.setattr(submit, "UNCLAIMED_S", 0.0)
    monkeypatch.setattr(submit, "POLL_S", 0.01)
    assert cli.execute(["jobs", "wait", job.id, "--root", str(job.root), "--timeout", "20"]) == 75
    assert "never accepted by a scheduler" in capsys.readouterr().err


@pytest.mark.chaos(16)
def test_the_clock_of_this_host_alone_makes_no_job_lost(job, monkeypatch):
    with EpochLease.take(job.place):
        job.event("running", epoch=1)
        ahead = time.time() + 3600
        monkeypatch.setattr("kme_dist.data.leases.time.time", lambda: ahead)
        assert job.status()["state"] == "running", "the disk's own clock decides"


def test_a_scheduler_that_does_not_answer_does_not_hide_the_states(job, capsys, monkeypatch):
    monkeypatch.setattr(submit, "ANSWER_S", 0.5)
    job.event("waiting", scheduler="tcp://127.0.0.1:1")
    for command in (["list"], ["status", job.id]):
        address = f"tcp://127.0.0.1:{free_port()}"
        began = time.monotonic()
        assert cli.execute(["jobs", *command, "--root", str(job.root), "--scheduler", address]) == 75
        out, err = capsys.readouterr()
        assert "waiting" in out
        assert err.startswith("error: no scheduler answers")
        assert time.monotonic() - began < 60


def test_jobs_are_listed_by_state_age_and_number(job, capsys):
    for number, state in enumerate(["failed", "cancelled", "failed"], 2):
        other = jobs.create_job(job.root, pipeline="run", config=job.config(), name="other", job_id=f"other-{number}")
        other.event(state)

    def listed(*options):
        assert cli.execute(["jobs", "list", "--root", str(job.root), "--json", *options]) == 0
        return [status["id"] for status in json.loads(capsys.readouterr().out)["jobs"]]

    assert listed("--state", "failed") == ["other-2", "other-4"]
    assert listed("--state", "failed", "--limit", "1") == ["other-4"]
    assert len(listed("--since", "1h")) == 4
    assert listed("--since", "2100-01-01T00:00Z") == []
    for wrong in (["--state", "lots"], ["--since", "yesterday"]):
        assert cli.execute(["jobs", "list", "--root", str(job.root), *wrong]) == 2
    capsys.readouterr()


def test_old_jobs_that_no_scheduler_has_accepted_are_deleted(job, capsys):
    prune = ["jobs", "prune", "--root", str(job.root), "--older-than"]
    assert cli.execute([*prune, "1h"]) == 0
    assert cli.execute([*prune, "0s", "--dry-run"]) == 0
    assert job.folder.exists()
    assert capsys.readouterr().out.split() == [job.id]
    assert cli.execute([*prune, "0s"]) == 0
    assert not job.folder.exists()
    capsys.readouterr()


def test_old_jobs_are_deleted_when_they_have_ended(job, capsys):
    job.event("waiting", scheduler="tcp://elsewhere:1")
    ended = jobs.create_job(job.root, pipeline="run", config=job.config(), name="b", job_id="ended")
    ended.event("failed", exit_code=2)
    prune = ["jobs", "prune", "--root", str(job.root), "--older-than"]
    assert cli.execute([*prune, "1h"]) == 0
    assert cli.execute([*prune, "0s", "--dry-run"]) == 0
    assert ended.folder.exists()
    assert cli.execute([*prune, "0s"]) == 0
    assert not ended.folder.exists()
    assert job.folder.exists(), "it has not ended"
    capsys.readouterr()


# --- for real --------------------------------------------------------------------------------------


def test_a_job_survives_the_death_of_its_whole_cluster_without_a_hand(tmp_path):
    """Its cluster is killed and started again at the same address; the supervisor does the rest."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(400, 3))
    np.savez(tmp_path / "table.npz", X=X, y=(X[:, 0] > 0).astype(int))
    (tmp_path / "small.yaml").write_text(
        "data: {source: table.npz, label: y}\n"
        "model: {objective: rcb}\n"
        "learn: {steps: 400, batch_size: 50, checkpoint_steps: 5}\n"
    )
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "KME_ROOT": str(tmp_path)}

    def kme(*arguments):
        command = [sys.executable, "-m", "kme_dist", *arguments]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def cluster():
        process = kme("cluster", "--workers", "1", "--listen", address, "--allow-insecure", "--quiet")
        assert process.stdout.readline()
        return process

    def end(process, how=signal.SIGKILL):
        os.killpg(process.pid, how)
        process.communicate()

    running = cluster()
    submitted = kme("submit", str(tmp_path / "small.yaml"), "--pipeline", "learn", "--quiet",
                    "--scheduler", f"tcp://{address}")  # fmt: skip
    job = jobs.job_at(tmp_path, submitted.communicate()[0].strip())
    keeper = kme("jobs", "keep", "--scheduler", f"tcp://{address}", "--every", "0.5")
    try:
        _until(lambda: (job.status().get("progress") or {}).get("done", 0) >= 20)
        end(running)
        running = cluster()
        _until(lambda: job.status()["state"] == "succeeded")
        assert job.status()["drivers"] == 2
        assert supervisor.resubmissions(job) == 1
    finally:
        end(keeper)
        end(running)


def _until(true, seconds=240):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
