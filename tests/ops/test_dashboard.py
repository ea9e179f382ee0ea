"""The page /kme: there from the start, true to what runs tell, bounded, and legible in a real browser."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
from distributed import Client, LocalCluster

from kme_dist.ops import board as boards
from kme_dist.ops.board import POINTS_KEPT, RUNS_KEPT, Curve, RunBoard
from kme_dist.ops.cluster import dashboard_of
from kme_dist.ops.dashboard import BoardPlugin, install
from kme_dist.ops.dashboard_page import COLOURS, Page, cards, tone
from kme_dist.ops.telemetry import TOPIC, Telemetry, pack_scales, telemetry
from kme_dist.run.executors import DaskExecutor


def message(run="digits", stage="learn", **news):
    return {
        "run": run,
        "stage": stage,
        "pipeline": stage,
        "client": "c",
        "version": "1",
        "began": 100.0,
        "at": 101.0,
    } | news


def step(number, **fields):
    losses = {"objective": 3.0 / number, "risk": 2.0 / number, "complexity": 1.0 / number}
    pace = {"seconds": float(number), "rows_per_second": 5e4, "waiting_share": 0.1, "rows": 100.0, "batches": 2.0}
    others = {"regularization": 0.5, "gradient_norm": 0.1, "accuracy": 0.9, "steps": 50.0, "phase": "rcb"}
    return {"step": float(number), **losses, **pace, **others, **fields}


def board_of(*messages):
    board = RunBoard()
    for each in messages:
        board.receive(each)
    return board


# --- what the scheduler keeps -----------------------------------------------------------------------


def test_the_board_follows_messages():
    board = board_of(
        message(status="running"),
        message(steps=[step(1), step(2)], at=102.0),
        message(steps=[step(3)], events=[{"name": "checkpoint", "at": 103.0, "facts": {}}], at=103.0),
    )
    run = board.runs["digits", "learn"]
    assert run.steps.columns["objective"] == [3.0, 1.5, 1.0]
    assert (run.done, run.total, run.status) == (3, 50, "running")
    assert run.rows == 600
    assert run.checkpoint_at == 103.0
    board.receive(message(status="failed", facts={"error": "ValueError"}, at=110.0))
    assert (run.status, run.seconds, run.facts["error"]) == ("failed", 10.0, "ValueError")


def test_steps_that_were_left_out_of_a_message_count_all_the_same():
    board = board_of(message(steps=[step(1), step(5)]), message(steps=[step(9)]))
    assert board.runs["digits", "learn"].rows == 9 * 200


def test_messages_of_others_are_not_ours():
    board = board_of()
    plugin = BoardPlugin()
    plugin.board = board
    plugin.log_event("other", message())
    plugin.log_event(TOPIC, "words")
    assert not board.runs


def test_a_run_started_anew_replaces_the_old_one_and_late_news_of_that_are_ignored():
    board = board_of(message(steps=[step(1), step(2)]), message(began=200.0, at=201.0, steps=[step(1)]))
    board.receive(message(steps=[step(9)], at=202.0))
    assert board.runs["digits", "learn"].steps.columns["step"] == [1.0]


def test_stages_of_one_run_stand_side_by_side():
    board = board_of(
        message(stage="learn"), message(stage="predict", chunks={"done": 1, "failed": 0, "total": 4, "rows": 9})
    )
    assert [run.stage for run in board.latest(6)] == ["learn", "predict"]
    assert board.runs["digits", "predict"].share == 0.25
    assert not board.latest(6, "another")


def test_a_run_whose_client_went_away_is_lost():
    board = board_of(message(run="gone"), message(run="done", status="succeeded"), message(run="other", client="d"))
    board.client_left("c")
    assert {run.run: run.status for run in board.runs.values()} == {
        "gone": "lost",
        "done": "succeeded",
        "other": "running",
    }


def test_memory_is_bounded_and_curves_keep_their_shape():
    curve = Curve(("step", "objective"))
    for number in range(100_000):
        curve.add({"step": number, "objective": number**0.5})
    assert POINTS_KEPT / 2 <= len(curve) <= POINTS_KEPT
    steps = np.array(curve.columns["step"])
    assert len(np.unique(np.diff(steps))) == 1, "evenly spaced"
    assert steps[0] == 0
    assert steps[-1] > 99_000
    board = board_of(*(message(run=f"run {i}", at=100.0 + i, status="succeeded") for i in range(3 * RUNS_KEPT)))
    assert len(board.runs) == RUNS_KEPT
    assert ("run 71", "learn") in board.runs


def test_runs_that_go_on_are_kept_when_old_ones_are_forgotten():
    board = board_of(message(run="long", status="running"))
    for i in range(2 * RUNS_KEPT):
        board.receive(message(run=f"short {i}", at=200.0 + i, status="succeeded"))
    assert ("long", "learn") in board.runs


def test_time_left_follows_the_recent_pace(monkeypatch):
    now = 1000.0
    board = board_of(message(began=now, at=now))
    for number in range(1, 21):
        board.receive(message(began=now, at=now + 2.0 * number, steps=[step(number)]))
    monkeypatch.setattr(boards, "time", SimpleNamespace(time=lambda: now + 40.0))
    assert board.runs["digits", "learn"].seconds_left == pytest.approx(60.0)  # 30 steps of 2 seconds


def test_another_start_of_the_same_run_is_a_curve_of_its_own():
    board = board_of(message(steps=[step(1), step(2), step(1), step(2, phase="loo")]))
    run = board.runs["digits", "learn"]
    assert run.steps.columns["step"] == [1.0, 2.0, 1.0, 1.0, 2.0, 2.0]
    assert np.isnan(run.steps.columns["risk"]).tolist() == [False, False, True, False, True, False]
    assert run.rows == 4 * 200


def test_rows_a_second_of_a_pass_over_chunks():
    board = board_of(
        *(message(at=100.0 + i, chunks={"done": i, "failed": 0, "total": 9, "rows": 500 * i}) for i in range(5))
    )
    assert board.runs["digits", "learn"].rows_per_second == pytest.approx(500.0)


def test_a_pass_that_counts_rows_has_progress_too():
    board = board_of(*(message(at=100.0 + i, rows={"done": 100 * i, "total": 1000}) for i in range(5)))
    run = board.runs["digits", "learn"]
    assert (run.share, run.rows_per_second) == (0.4, pytest.approx(100.0))
    assert "rows 400 of 1,000" in cards([run])
    board.receive(message(at=105.0, chunks={"done": 9, "failed": 1, "total": 10, "rows": 900}))
    assert run.share == 1.0, "chunks, once they are known, say more"


# --- what a browser is sent -------------------------------------------------------------------------


def page_of(board, workers=()):
    return Page(SimpleNamespace(extensions={"kme": board}, workers=dict(workers)))


def test_only_new_points_travel(monkeypatch):
    board = board_of(message(steps=[step(1), step(2)]))
    page = page_of(board)
    page.update()
    source = page.learning[0].source
    assert list(source.data["objective"]) == [3.0, 1.5]
    sent = []
    monkeypatch.setattr(type(source), "stream", lambda self, new: sent.append(new) if self is source else None)
    board.receive(message(steps=[step(3)]))
    page.update()
    page.update()
    assert [new["step"] for new in sent] == [[3.0]]


def test_a_page_that_is_opened_again_shows_the_whole_curve():
    board = board_of(message(steps=[step(i) for i in range(1, 40)]))
    first, second = page_of(board), page_of(board)
    first.update()
    second.update()
    assert list(first.learning[0].source.data["risk"]) == list(second.learning[0].source.data["risk"])
    assert first.cards.text == second.cards.text


def test_a_page_without_runs_is_empty_but_whole():
    page = page_of(board_of())
    page.update()
    assert "No runs yet" in page.cards.text
    assert not page.learning_part.visible
    assert not page.scales_part.visible
    assert "Workers: 0" in page.workers.text


def test_curves_go_when_their_run_is_forgotten():
    board = board_of(message(steps=[step(1)]))
    page = page_of(board)
    page.update()
    board.runs.clear()
    page.update()
    assert len(page.learning[0].source.data["step"]) == 0
    assert not any(line.visible for line in page.learning[0].lines)


def test_cards_say_what_matters():
    runs = board_of(
        message(steps=[step(10, validation_accuracy=0.913)]),
        message(run="night", stage="predict", chunks={"done": 3, "failed": 1, "total": 8, "rows": 12_000_000}),
        message(run="bad", status="failed", facts={"message": "model.steps is 0"}),
    ).latest(6)
    text = cards(runs)
    for words in ("step 10 of 50 rcb", "91.3%", "chunks 3 of 8", "1 failed", "12 M", "model.steps is 0", "10%"):
        assert words in text


def test_a_card_tells_the_last_event_or_that_nothing_was_heard():
    now = time.time()
    news = {"began": now - 90, "events": [{"name": "checkpoint", "at": now - 4.0, "facts": {}}]}
    (run,) = board_of(message(at=now, **news)).latest(1)
    assert "checkpoint 4 s ago" in cards([run])
    (run,) = board_of(message(at=now - 80.0, **news)).latest(1)
    assert "no message for 1:20 min" in cards([run])


def test_a_stage_that_says_what_it_does_shows_its_progress():
    now = time.time()
    said = [{"name": "said", "at": now, "facts": {"line": "fit: column 2 of 16"}}]
    (run,) = board_of(message(began=now - 2000, at=now - 2000), message(began=now - 2000, at=now, events=said)).latest(
        1
    )
    assert "fit: column 2 of 16 0 s ago" in cards([run])
    assert run.progressed == now


def test_two_runs_of_one_config_have_a_card_each():
    board = board_of(
        message(run="digits-1", pipeline="digits", steps=[step(1)]),
        message(run="digits-2", pipeline="digits", began=101.0, steps=[step(7)]),
        message(run="wine-1", pipeline="wine"),
    )
    text = cards(board.latest(6))
    assert all(f"<div class=id>{run}</div>" in text for run in ("digits-1", "digits-2", "wine-1"))
    assert text.count("<b>digits</b>") == 2, "the name of the config is their label"
    assert "step 1 of 50" in text
    assert "step 7 of 50" in text
    assert [run.run for run in board.latest(6, "digits-2")] == ["digits-2"]
    assert [run.run for run in board.latest(6, "digits")] == ["digits-1", "digits-2"]


def widths(text):
    return [float(width) for width in re.findall(r"<i style='width:([\d.]+)%'>", text)]


def test_a_run_that_stopped_early_says_so_with_a_full_bar():
    (run,) = board_of(message(steps=[step(11)]), message(status="succeeded")).latest(1)
    assert "stopped early at step 11 of 50" in cards([run])
    assert widths(cards([run])) == [100.0]
    (run,) = board_of(message(steps=[step(50)]), message(status="succeeded")).latest(1)
    assert "stopped early" not in cards([run])
    (run,) = board_of(message(steps=[step(11)]), message(status="failed")).latest(1)
    assert ("stopped early" in cards([run]), widths(cards([run]))) == (False, [22.0])


def test_a_stage_without_a_count_is_in_progress_and_then_done():
    (run,) = board_of(message(stage="evaluate", status="running")).latest(1)
    assert "class='bar unknown'" in cards([run])
    assert "in progress" in cards([run])
    board = board_of(message(stage="evaluate", status="succeeded"))
    text = cards(board.latest(1))
    assert (widths(text), "unknown" in text, "done" in text) == ([100.0], False, True)


def test_a_fit_that_says_how_far_it_is_moves_its_bar():
    board = board_of(message(stage="fit", units={"done": 1, "total": 4}))
    board.receive(message(stage="fit", at=110.0, units={"done": 2, "total": 4}))
    (run,) = board.latest(1)
    assert widths(cards([run])) == [50.0]
    assert "50%" in cards([run])
    assert run.progressed == 110.0
    board.receive(message(stage="fit", at=111.0, units={"done": 0, "total": 9}))
    assert run.share == 0.0, "another part of the fit"


def test_colours_of_the_runs_that_are_shown_differ_and_none_is_the_red_of_a_failure():
    board = board_of(*(message(run=f"r{i}", at=100.0 + i, status="running") for i in range(6)))
    for again in range(3):  # restarts must not use up colours
        board.receive(message(run="r0", began=200.0 + again, at=201.0 + again, status="running"))
    for i in range(6, 20):  # and runs that come and go must not repeat one
        board.receive(message(run=f"r{i}", at=300.0 + i, status="running" if i % 2 else "succeeded"))
        shown = board.latest(6)
        assert len({tone(run) for run in shown}) == len(shown) == 6
    assert len(set(COLOURS)) == boards.TONES
    for colour in COLOURS:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert not (red > 200 and max(green, blue) < 120), "that of a failure"


def test_runs_that_ended_long_ago_are_forgotten():
    board = board_of(message(run="old", status="failed"), message(run="at work", status="running"))
    board.receive(message(run="new", began=102.0 + boards.KEPT_S, at=102.0 + boards.KEPT_S))
    assert {run for run, _ in board.runs} == {"at work", "new"}


def test_names_are_never_taken_for_html():
    evil, now = "<script>alert(1)</script>", time.time()
    runs = board_of(
        message(run="c", began=now, at=now, events=[{"name": evil, "at": now, "facts": {}}]),
        message(
            run=evil,
            stage=evil,
            pipeline=evil,
            steps=[step(1, phase=evil)],
            events=[{"name": evil, "at": 100.0, "facts": {}}],
        ),
        message(run="b", status="failed", facts={"message": evil}),
    ).latest(6)
    assert "<script" not in cards(runs)
    assert "<script" not in cards([], evil)


@pytest.mark.parametrize(
    "news",
    [
        {"steps": [{"objective": "<b>"}]},
        {"scales": {"shape": [9, 9], "levels": b"12", "low": 0, "high": 1, "image": True, "features": 2}},
        {"events": [{"name": "x", "at": "soon"}]},
        {"chunks": {"done": "many"}},
    ],
)
def test_a_message_that_makes_no_sense_spoils_no_page(news):
    board = board_of(message(steps=[step(1)]))
    with pytest.raises((ValueError, KeyError)):  # noted in the scheduler's log, by Dask
        board.receive(message(**news))
    page = page_of(board)
    page.update()
    assert "step 1 of 50" in page.cards.text


def test_scales_are_an_image_for_pixels_and_a_line_for_columns():
    grid = np.exp(np.arange(64.0).reshape(8, 8) / 10)
    page = page_of(
        board_of(
            message(run="pixels", scales=pack_scales(grid, (8, 8))), message(run="columns", scales=pack_scales(grid[0]))
        )
    )
    page.update()
    image, line = page.scales[:2]
    drawn = image.pixels.data["image"][0]
    assert drawn.shape == (8, 8)
    assert np.argmin(drawn[-1]) == 0, "the first pixel is at the top left"
    assert np.abs(drawn[::-1] - np.log10(grid)).max() < 0.02
    assert (image.image.visible, image.stems.visible) == (True, False)
    assert (line.image.visible, line.stems.visible) == (False, True)
    assert len(line.line.data["feature"]) == 8


# --- on a real cluster ------------------------------------------------------------------------------


def get(address):
    with urllib.request.urlopen(address, timeout=20) as answer:
        return answer.status, answer.read().decode()


def wait_until(condition, wait_s=20.0):
    deadline = time.monotonic() + wait_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def client():
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster,
        Client(cluster) as client,
    ):
        yield client


def rows_of(number):
    time.sleep(0.02)
    return {"rows": 100, "number": number}


def address_of(client):
    return client.dashboard_link.rsplit("/", 1)[0]


@pytest.fixture
def untouched():
    """A client of a scheduler that nobody has installed the page on."""
    with (
        LocalCluster(n_workers=0, processes=False, dashboard_address="127.0.0.1:0", protocol="tcp://") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def test_the_page_answers_on_the_schedulers_own_dashboard(untouched):
    client = untouched
    with (
        Client(client.scheduler.address, set_as_default=False) as early,
        telemetry(early, run="early", stage="learn") as told,
    ):
        told.step(step(1))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(address_of(client) + "/kme")
    assert dashboard_of(client) == client.dashboard_link, "Dask's own page, as long as ours is not there"
    assert install(client) is None
    assert install(client) is None, "a second time changes nothing"
    assert dashboard_of(client) == address_of(client) + "/kme"
    status, text = get(dashboard_of(client))
    assert status == 200
    assert 'href="kme"' in text, "a tab beside Dask's own"
    assert get(address_of(client) + "/status")[1].count('href="kme"') == 1
    board = client.cluster.scheduler.extensions["kme"]
    assert board.runs["early", "learn"].status == "succeeded", "what was told before anybody listened"


def _told(text):
    """On a worker: which loggers tell of this error."""
    error = (RuntimeError, RuntimeError(text), None)
    record = logging.LogRecord("any", logging.ERROR, "file", 1, "Exception in callback", None, error)
    return [name for name in ("distributed.worker", "tornado.application") if logging.getLogger(name).filter(record)]


def test_closing_workers_do_not_complain_that_they_are_closed(client):
    install(client)
    assert list(client.run(_told, "ConnectionPool is closed").values()) == [[]]
    assert list(client.run(_told, "something else").values()) == [["distributed.worker", "tornado.application"]]


def test_a_run_is_followed_from_its_first_step_to_its_last(client):
    install(client)
    board = client.cluster.scheduler.extensions["kme"]
    executor = DaskExecutor(client)
    with telemetry(executor, run="whole", stage="learn") as told:
        for number in range(1, 6):
            executor.map(rows_of, [(0,), (1,)], name="rcb-gradient")
            told.step(step(number, steps=5.0))
        assert wait_until(lambda: ("whole", "learn") in board.runs and board.runs["whole", "learn"].done == 5)
        assert board.runs["whole", "learn"].status == "running"
    assert board.runs["whole", "learn"].status == "succeeded"
    worker = next(iter(client.cluster.scheduler.workers.values()))
    counts = wait_until(lambda: (worker.metrics.get("kme") or {}).get("rows", 0) >= 1000 and worker.metrics["kme"])
    assert counts["calls"] >= 10
    assert counts["failed"] == 0
    page = Page(client.cluster.scheduler)
    page.update()
    assert worker.address in page.workers.text


def test_a_client_that_dies_is_noticed(client):
    install(client)
    board = client.cluster.scheduler.extensions["kme"]
    other = Client(client.scheduler.address, set_as_default=False)
    Telemetry(other, run="dying", stage="fit")
    assert wait_until(lambda: ("dying", "fit") in board.runs)
    other.close()
    assert wait_until(lambda: board.runs["dying", "fit"].status == "lost")


def test_a_cluster_that_refuses_the_page_can_still_work(client):
    def refuse(plugin):
        raise ModuleNotFoundError("No module named 'kme_dist'")

    assert "no /kme page on this cluster: ModuleNotFoundError" in install(SimpleNamespace(register_plugin=refuse))


def test_a_scheduler_without_a_dashboard_is_no_trouble():
    with (
        LocalCluster(
            n_workers=0, processes=False, dashboard_address=":0", scheduler_kwargs={"dashboard": False}
        ) as cluster,
        Client(cluster) as client,
    ):
        assert install(client) is None
        assert dashboard_of(client) == client.dashboard_link


def test_a_scheduler_that_does_not_know_us_is_watched_on_its_own_page():
    def unknown(function):
        raise ModuleNotFoundError("No module named 'kme_dist'")

    for link in ("http://host:8787/status", "https://hub/user/me/proxy/9", None):
        assert dashboard_of(SimpleNamespace(dashboard_link=link, run_on_scheduler=unknown)) == link


SCHEDULER = ("scheduler", "--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0")


@pytest.mark.slow
def test_one_line_adds_the_page_to_any_scheduler(tmp_path):
    file = tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "dask", *SCHEDULER, "--scheduler-file", str(file), "--dashboard-prefix", "/proxy"]
    process = subprocess.Popen([*command, "--preload", "kme_dist.dashboard"], stderr=subprocess.DEVNULL)
    try:
        assert wait_until(file.exists, 60)
        with Client(scheduler_file=str(file)) as client:
            port = client.scheduler_info()["services"]["dashboard"]
            assert get(f"http://127.0.0.1:{port}/proxy/kme")[0] == 200
            assert "kme_run_status" in get(f"http://127.0.0.1:{port}/proxy/metrics")[1]
            assert install(client) is None
    finally:
        process.terminate()
        process.wait(20)


# --- in a real browser ------------------------------------------------------------------------------


@pytest.fixture
def browser():
    """A headless Chromium: the one on the path, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on the path; on Debian: apt install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, address, scheme):
    page = browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme=scheme)
    page.set_default_timeout(120_000)
    page.problems = []
    page.on("console", lambda said: page.problems.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.goto(address)
    return page


def points_in(page):
    """How many points of the objective the browser has, and what its first card says."""
    return page.evaluate(
        """() => { const sources = [...Bokeh.documents[0]._all_models.values()].filter(
                       model => model.type == "ColumnDataSource" && model.data.objective !== undefined);
                   return Math.max(0, ...sources.map(source => source.data.objective.length)); }"""
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_sees_a_real_run_live(client, browser, tmp_path, scheme):
    """Also leaves a picture, in KME_SCREENSHOTS where that is set, for somebody to look at."""
    from kme_dist import kernels
    from kme_dist.data.dataset import open_dataset
    from kme_dist.data.ingest import ingest
    from kme_dist.run.learn import learn_on_dataset
    from kme_dist.run.learners import LearnSettings

    install(client)
    page = opened(browser, address_of(client) + f"/kme?run=live-{scheme}", scheme)
    page.get_by_text("No run live").wait_for()
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 64)).astype("float32")
    np.savez(tmp_path / "rows.npz", X=X, y=(X[:, 27] + X[:, 28] > 0).astype("int64"))
    ingest(str(tmp_path / "rows.npz"), str(tmp_path / "rows.zarr"))
    executor, seen = DaskExecutor(client), []

    def follow(record):
        told.step(record)
        told.scales(np.exp(0.02 * record["step"] * np.hypot(*(np.mgrid[:8, :8] - 3.5))), (8, 8))
        page.wait_for_timeout(100)  # lets the browser draw: this thread drives it too
        seen.append((points_in(page), page.get_by_text("step ").first.text_content() if seen else ""))

    with telemetry(executor, run=f"live-{scheme}", stage="learn") as told:
        learn_on_dataset(
            open_dataset(str(tmp_path / "rows.zarr")),
            kernels.Gaussian(length_scale=np.full(64, 8.0)),
            1.0,
            LearnSettings(steps=40, batch_size=200),
            batches_per_step=2,
            executor=executor,
            callback=follow,
        )
        picture = os.path.join(os.environ.get("KME_SCREENSHOTS", tmp_path), f"kme-{scheme}.png")
        page.get_by_text("step 40 of 40").wait_for()
        page.screenshot(path=picture, full_page=True)
    counts = [count for count, _ in seen]
    assert counts == sorted(counts)
    assert len(set(counts)) >= 3, "the curves grew while the run went on"
    assert len({text for _, text in seen}) >= 3, "and the numbers changed"
    page.reload()
    page.get_by_text("succeeded").wait_for()
    page.wait_for_function("Bokeh.documents.length == 1")
    assert points_in(page) == 40, "nothing is lost when the page is loaded again"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background.strip("rgb()").split(",")) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60
    assert page.problems == []
