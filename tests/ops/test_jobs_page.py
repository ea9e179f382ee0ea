"""The page /kme/jobs: every job, by state, owner and words, quickly also with a thousand of them, and read-only."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request

import pytest
from distributed import Client, LocalCluster

from kme_dist.config import parse_config
from kme_dist.data.leases import EpochLease
from kme_dist.ops import jobs, jobs_page, queue
from kme_dist.ops.dashboard import install
from kme_dist.ops.jobs_page import ROWS, JobIndex, Listing, Wanted, last_lines, page

EVIL = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def no_root(monkeypatch):
    monkeypatch.delenv("KME_ROOT", raising=False)


def create(root, name, *, priority=0):
    config = parse_config({"data": {"source": "table.zarr"}})
    return jobs.create_job(root, pipeline="learn", config=config, name=name, job_id=name, priority=priority)


def write_many(root, count):
    """Jobs as they are on the disk, without the time that it takes to write them safely."""
    for number in range(count):
        folder = root / "runs" / f"job-{number:04d}"
        folder.mkdir(parents=True)
        state = ("succeeded", "failed", "cancelled")[number % 3]
        when = f"2026-03-{1 + number // 60 // 24:02d}T{number // 60 % 24:02d}:{number % 60:02d}:00.000+00:00"
        request = {"format": jobs.JOB_FORMAT, "id": folder.name, "name": "many", "pipeline": "run", "submitted": when}
        request |= {"owner": ("ann", "bob")[number % 2], "priority": 0}
        (folder / "job.json").write_text(json.dumps(request))
        (folder / "events.jsonl").write_text(json.dumps({"time": when, "state": state}) + "\n")


def shown(text):
    return re.findall(r"<tr><td><a href='[^']*'>([^<]*)</a>", text)


def test_a_list_says_what_each_job_does(tmp_path):
    at_work = create(tmp_path, "at-work")
    with EpochLease.take(at_work.place) as lease:
        at_work.event("running", epoch=1)
        lease.progress = {"stage": "learn", "done": 125, "total": 500}
        lease._renew()
        for name, priority in (("later", 0), ("sooner", 7)):
            create(tmp_path, name, priority=priority)
        broken = create(tmp_path, "broken")
        broken.event("failed", exit_code=3, error="not positive definite")
        (tmp_path / "runs" / "a-run-folder").mkdir()
        entries = [queue.Entry.of(jobs.Job(tmp_path, name)) for name in ("later", "sooner")]
        text = page(JobIndex().read([str(tmp_path)], entries), Wanted())
    assert sorted(shown(text)) == ["at-work", "broken", "later", "sooner"]
    for words in (
        "learn 125 of 500",
        "width:25%",
        "number 1 in the queue, priority 7",
        "number 2 in the queue",
        "not positive definite",
        "all 4",
        "waiting 2",
        "failed 1",
        jobs.this_user(),
    ):
        assert words in text


def test_a_thousand_jobs_are_read_once_and_shown_in_pages(tmp_path, monkeypatch):
    write_many(tmp_path, 1000)
    index = JobIndex()
    listing = index.read([str(tmp_path)])
    text = page(listing, Wanted())
    assert shown(text) == [f"job-{number:04d}" for number in range(999, 999 - ROWS, -1)], "the newest first"
    assert f"1 to {ROWS} of 1000" in text
    last = page(listing, Wanted(page=20))
    assert shown(last)[-1] == "job-0000"
    assert shown(page(listing, Wanted(page=99))) == shown(last)
    failed = page(listing, Wanted(state="failed", owner="ann", words="JOB-00"))
    assert "1 to 16 of 16" in failed, "every sixth of a hundred"
    assert len(text) < 100_000

    monkeypatch.setattr(jobs_page, "FRESH_S", 0.0)
    index._last = (0.0, None, Listing())
    real, read = jobs_page._status, []
    monkeypatch.setattr(jobs_page, "_status", lambda job: read.append(job.id) or real(job))
    jobs.Job(tmp_path, "job-0007").event("running")
    listing = index.read([str(tmp_path)])
    assert read == ["job-0007"], "of the others nothing has changed"
    assert shown(page(listing, Wanted(state="running"))) == ["job-0007"]


def test_addresses_of_the_page_keep_what_was_asked_for():
    wanted = Wanted.of({"state": [b"failed"], "words": [b"a b&c"], "page": [b"3"], "owner": [b"'><b>"]})
    assert (wanted.state, wanted.words, wanted.page) == ("failed", "a b&c", 3)
    query = urllib.parse.parse_qs(jobs_page.html.unescape(wanted.address(page=4)).partition("?")[2])
    assert query == {"state": ["failed"], "words": ["a b&c"], "owner": ["'><b>"], "page": ["4"]}
    assert Wanted.of({"page": [b"-1"]}).page == 1
    assert Wanted().address() == "jobs"


def test_one_job_is_shown_with_the_end_of_its_log_and_a_link_to_its_run(tmp_path):
    job = create(tmp_path, "one")
    for number in range(200):
        job.log(f"learn: {number} of 200", traceback="x" * 500)
    job.commit({"result": {"steps": 200, "kernel": {"a": 1}}})
    job.event("succeeded")
    text = page(JobIndex().read([str(tmp_path)]), Wanted(job="one"))
    assert "learn: 199 of 200" in text
    assert "learn: 3 of 200" not in text
    assert "href='../kme?run=one'" in text
    assert "<th>steps</th><td>200</td>" in text
    assert len(last_lines(str(job.folder), 40)) == 40
    assert "No job two" in page(JobIndex().read([str(tmp_path)]), Wanted(job="two"))


def test_a_root_that_cannot_be_read_leaves_the_queue(tmp_path):
    entries = [
        queue.Entry("k1", "/elsewhere", "night-1", "ann", 0, "2026-03-01T02:00:00.000+00:00"),
        queue.Entry("k2", "/elsewhere", "night-2", "ann", 0, "2026-03-01T03:00:00.000+00:00", host="h"),
    ]
    text = page(JobIndex().read([str(tmp_path / "absent")], entries), Wanted())
    assert "The scheduler cannot read the jobs under" in text
    assert shown(text) == ["night-2", "night-1"]
    assert "number 1 in the queue" in text


def test_the_root_of_the_scheduler_takes_precedence(tmp_path, monkeypatch):
    create(tmp_path, "here")
    monkeypatch.setenv("KME_ROOT", str(tmp_path))
    assert [row["id"] for row in JobIndex().read(["/mounted/elsewhere"]).rows] == ["here"]


def test_damaged_jobs_do_not_hide_the_others_and_no_text_is_html(tmp_path):
    job = create(tmp_path, "good")
    job.log(EVIL)
    job.event("failed", error=EVIL)
    (create(tmp_path, "bad").folder / "job.json").write_text("{")
    listing = JobIndex().read([str(tmp_path)])
    assert {row["id"]: row["state"] for row in listing.rows} == {"good": "failed", "bad": "damaged"}
    for wanted in (Wanted(), Wanted(job="good"), Wanted(job=EVIL), Wanted(words=EVIL, owner=EVIL, state=EVIL)):
        assert EVIL not in page(listing, wanted)


def test_what_is_written_to_the_folder_of_a_job_is_never_html(tmp_path):
    create(tmp_path, "state").event(EVIL)
    work = create(tmp_path, "progress")
    first = create(tmp_path, "priority")
    request = json.loads((first.folder / "job.json").read_text())
    request.pop("digest")
    (first.folder / "job.json").write_text(json.dumps({**request, "priority": EVIL}))
    with EpochLease.take(work.place) as lease:
        work.event("running", epoch=1)
        lease.progress = {"stage": EVIL, "done": 1, "total": EVIL}
        lease._renew()
        listing = JobIndex().read([str(tmp_path)])
        for wanted in (Wanted(), *(Wanted(job=row["id"]) for row in listing.rows)):
            assert EVIL not in page(listing, wanted)
    states = {row["id"]: row["state"] for row in listing.rows}
    assert states == {"state": "damaged", "priority": "damaged", "progress": "running"}
    assert "damaged 2" in page(listing, Wanted())
    evil = Listing(tuple({**row, "state": EVIL} for row in listing.rows))
    assert EVIL not in page(evil, Wanted()) + page(evil, Wanted(job="state"))


def test_every_state_has_one_colour_in_the_list_and_above_it():
    assert ".chip.waiting { color: var(--soft); }" in page(Listing(), Wanted()), "as a link it would be blue"


def test_without_jobs_the_page_says_how_to_submit_one(tmp_path):
    assert "No jobs yet" in page(JobIndex().read([str(tmp_path)]), Wanted())
    assert "No jobs yet" in page(JobIndex().read([]), Wanted())


def test_the_page_answers_beside_that_of_runs_and_takes_no_orders(tmp_path):
    create(tmp_path, "seen")
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0", protocol="tcp://") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        assert install(client) is None
        assert install(client) is None
        queue.queue_of(cluster.scheduler).roots[str(tmp_path)] = None
        address = client.dashboard_link.replace("/status", "/kme")
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert 'href="kme/jobs"' in answer.read().decode()
        with urllib.request.urlopen(f"{address}/jobs?words=see", timeout=60) as answer:
            assert shown(answer.read().decode()) == ["seen"]
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        before = sorted(os.listdir(tmp_path / "runs" / "seen"))
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(f"{address}/jobs", data=b"cancel=seen", timeout=60)
        assert sorted(os.listdir(tmp_path / "runs" / "seen")) == before
