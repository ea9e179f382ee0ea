"""The queue of jobs: by priority and age, fair to every person, and nothing is lost when a host goes away."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kme_dist.config import parse_config
from kme_dist.errors import RetryError
from kme_dist.ops import jobs, queue, submit
from kme_dist.ops.queue import DEATHS, Entry, JobQueue, Turn


def entry(name, priority=0, owner="ann", minute=0):
    return Entry(name, "/root", name, owner, priority, f"2026-03-01T02:{minute:02d}:00.000+00:00")


class Host:
    """A host that checks what it is asked to, and remembers what it runs."""

    def __init__(self, queue, name="h", slots=1, cannot=(), **settings):
        self.queue, self.name, self.slots, self.cannot, self.settings = queue, name, slots, cannot, settings
        self.running, self.seen = [], ("", 0)

    def turn(self, **news):
        told = {"host": self.name, "client": f"client of {self.name}", "label": f"host {self.name}", **self.settings}
        answer = None
        for _ in range(3):  # restore, check, start
            checked = {e.key: "no disk" if e.key in self.cannot else None for e in answer.check} if answer else {}
            free, running = self.slots - len(self.running), tuple(self.running)
            answer = self.queue.turn(Turn(**told, free=free, running=running, seen=self.seen, checked=checked, **news))
            self.seen, news = answer.seen, {}
            self.running = [key for key in self.running if key not in answer.stop]
            self.running += [e.key for e in answer.start]
        return answer

    def end(self, key, how="ended"):
        self.running.remove(key)
        self.turn(**{how: (key,)})


def test_the_highest_priority_starts_first_then_the_oldest():
    found = JobQueue()
    found.add([entry("new", minute=9), entry("old", minute=1), entry("urgent", 5, minute=12), entry("later", -1)])
    host, started = Host(found), []
    host.turn()
    while host.running:
        started += host.running
        host.end(host.running[0])
    assert started == ["urgent", "old", "new", "later"]


def test_a_job_never_waits_while_a_host_has_a_free_slot():
    found = JobQueue()
    busy, free = Host(found, "busy"), Host(found, "free", slots=2)
    found.add([entry("one")])
    busy.turn()
    found.add([entry("two"), entry("three"), entry("four")])
    busy.turn()
    free.turn()
    assert (len(busy.running), len(free.running)) == (1, 2)
    assert [waiting.key for waiting in found.waiting()] == ["two"], "by age, then by id: four, three, two"


def test_one_person_does_not_fill_all_slots():
    found = JobQueue()
    found.add([*(entry(f"a{i}", minute=i) for i in range(4)), entry("b0", owner="bob", minute=9)])
    first, second = (Host(found, name, slots=2, max_per_user=2) for name in "xy")
    first.turn()
    second.turn()
    assert first.running == ["a0", "a1"]
    assert second.running == ["b0"], "two of ann run already, on the other host"
    first.end("a0")
    assert len(first.running) + len(second.running) == 3


def test_the_jobs_of_a_host_that_went_away_wait_for_another():
    found = JobQueue()
    found.add([entry("one")])
    gone, other = Host(found, "gone"), Host(found, "other")
    gone.turn()
    queue.QueuePlugin(found).remove_client(None, "client of gone")
    other.turn()
    assert other.running == ["one"]
    gone.turn()
    assert gone.running == [], "a host that returns stops what another has taken up"


def test_a_host_whose_connection_was_lost_for_a_moment_keeps_its_jobs():
    found = JobQueue()
    found.add([entry("one")])
    host = Host(found)
    host.turn()
    found.client_left("client of h")
    host.turn()
    assert host.running == ["one"]
    assert found.entries["one"].host == "h"


def test_a_job_whose_start_never_reached_the_host_is_started_again():
    found = JobQueue()
    found.add([entry("one")])
    host = Host(found)
    host.turn()
    host.running.clear()  # the answer was lost on its way
    host.turn()
    assert host.running == ["one"]


def test_a_driver_that_dies_too_often_leaves_the_queue():
    found = JobQueue()
    found.add([entry("deadly")])
    host = Host(found)
    for _ in range(DEATHS + 1):
        host.turn()
        assert host.running == ["deadly"]
        host.running.clear()
        found.turn(Turn("h", "client of h", "h", seen=host.seen, died=("deadly",)))
    assert found.entries == {}
    assert found.describe(["deadly"]) == [{"state": None, "driver": None}]


def test_a_cancelled_job_is_stopped_on_its_host():
    found = JobQueue()
    found.add([entry("one")])
    host = Host(found)
    host.turn()
    found.forget("one")
    assert host.turn() is not None
    assert host.running == []


def test_a_new_scheduler_gets_the_queue_back_from_its_hosts():
    before, after = JobQueue(), JobQueue()
    before.add([entry("runs"), entry("waits", minute=3)])
    host = Host(before)
    host.turn()
    host.queue = after
    answer = after.turn(Turn("h", "c", "h", running=("runs",), seen=host.seen))
    assert (answer.stop, answer.start) == ((), ()), "first it may restore what it knows"
    host.turn(restored=(before.entries["runs"], before.entries["waits"]))
    assert host.running == ["runs"]
    assert [waiting.key for waiting in after.waiting()] == ["waits"]


def test_a_job_submitted_again_before_its_end_was_known_runs_again():
    found = JobQueue()
    found.add([entry("one")])
    host = Host(found)
    host.turn()
    found.add([entry("one")])
    host.end("one")
    assert host.running == ["one"], "a second time"
    host.end("one")
    assert (host.running, found.entries) == ([], {})


def test_a_job_submitted_again_whose_driver_dies_runs_once_more_and_not_twice():
    found = JobQueue()
    found.add([entry("one")])
    host = Host(found)
    host.turn()
    found.add([entry("one")])
    host.end("one", "died")
    assert host.running == ["one"]
    host.end("one")
    assert (host.running, found.entries) == ([], {})


def test_what_a_second_host_restores_is_no_submission():
    before, after = JobQueue(), JobQueue()
    before.add([entry("waits")])
    first, second = Host(after, "first"), Host(after, "second")
    first.turn(restored=(before.entries["waits"],))
    assert first.running == ["waits"]
    second.turn(restored=(before.entries["waits"],))
    first.end("waits")
    assert (first.running, second.running, after.entries) == ([], [], {})


def test_hosts_are_asked_whether_they_can_read_the_folder():
    found = JobQueue()
    asked = entry("one")
    assert found.hosts_for(asked).count == 0
    blind, able = Host(found, "blind", cannot=["one"]), Host(found, "able")
    blind.turn()
    assert found.hosts_for(asked) == queue.Hosts(1, False, ("host blind: no disk",))
    able.turn()
    assert found.hosts_for(asked).able
    assert found.entries == {}, "nothing is submitted yet"
    found.add([asked])
    blind.turn()
    assert blind.running == []
    able.turn()
    assert able.running == ["one"]
    assert found.asked == {}


def test_the_place_in_the_queue_is_told():
    found = JobQueue()
    found.add([entry("a", minute=1), entry("b", minute=2), entry("c", 9, minute=3)])
    host = Host(found)
    host.turn()
    assert found.describe(["a", "b", "c", "d"]) == [
        {"state": "waiting", "driver": None, "place": 1},
        {"state": "waiting", "driver": None, "place": 2},
        {"state": "running", "driver": "host h"},
        {"state": None, "driver": None},
    ]


def test_the_workers_that_are_busy_for_a_job_are_found():
    def task(worker):
        return SimpleNamespace(processing_on=worker and SimpleNamespace(address=worker))

    class Client(SimpleNamespace):
        __hash__ = object.__hash__

    class Hashable(SimpleNamespace):
        __hash__ = object.__hash__

    tasks = [Hashable(**vars(task(worker))) for worker in ("tcp://b", "tcp://a", None)]
    others = [Hashable(**vars(task("tcp://c")))]
    scheduler = SimpleNamespace(
        extensions={queue.NAME: JobQueue()},
        clients={
            "kme-driver-x-1-0123456789ab-Client-1": Client(wants_what=tasks),
            "kme-driver-x-10-ba9876543210-Client-2": Client(wants_what=others),
        },
    )
    (found,) = queue.find_jobs(["x-1-0123456789ab"], dask_scheduler=scheduler)
    assert found == {"state": None, "driver": None, "connected": True, "busy": ["tcp://a", "tcp://b"]}


def test_jobs_of_two_roots_with_one_id_are_two_jobs(tmp_path):
    config = parse_config({"data": {"source": "t.zarr"}})
    keys = set()
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        job = jobs.create_job(tmp_path / name, pipeline="run", config=config, name=name, job_id="night", priority=3)
        keys.add(queue.job_key(job))
        assert queue.job_key(job) == queue.job_key(job)
        assert (Entry.of(job).priority, Entry.of(job).owner) == (3, jobs.this_user())
    assert len(keys) == 2


@pytest.mark.parametrize("given", ["kim", ""])
def test_a_job_belongs_to_whoever_submits_it(tmp_path, monkeypatch, given):
    monkeypatch.setenv("KME_USER", given)
    job = jobs.create_job(tmp_path, pipeline="run", config=parse_config({"data": {"source": "t"}}), name="n")
    assert job.status()["owner"] == (given or jobs.this_user())
    monkeypatch.delenv("KME_USER")
    monkeypatch.setattr(jobs.getpass, "getuser", lambda: {}["nobody"])
    assert jobs.this_user().startswith("user ")


def test_a_scheduler_that_is_lost_while_it_is_asked_is_no_bug():
    def lost(function, *arguments):
        raise OSError("Stream is closed")

    with pytest.raises(RetryError, match="the scheduler was lost"):
        submit._ask(SimpleNamespace(run_on_scheduler=lost), queue.find_jobs, [])
