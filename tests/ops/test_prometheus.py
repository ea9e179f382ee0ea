"""kme_* metrics: named as Prometheus wants them, on every /metrics, and known to panels and alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from distributed import Client, LocalCluster
from ports import free_port

from kme_dist.config import ClusterConfig
from kme_dist.meter import STAGES, metered
from kme_dist.ops.certs import make_certificates, tls_files
from kme_dist.ops.cluster import _listen
from kme_dist.ops.dashboard import install
from kme_dist.ops.telemetry import Telemetry, telemetry
from kme_dist.run.executors import DaskExecutor

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana" / "kme-dist.json"
# Served by Prometheus itself, or by the process on machines where its client can tell.
NOT_SCRAPED_FROM_DASK = {"up"}


def work(number):
    for stage in STAGES:
        with metered(stage):
            time.sleep(0.002)
    return {"rows": 250, "bytes": 4000}


def fail(number):
    raise ValueError(number)


def get(address):
    with urllib.request.urlopen(address, timeout=20) as answer:
        return answer.read().decode()


def wait_until(condition, wait_s=20.0):
    deadline = time.monotonic() + wait_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder, days=100)
    return folder


@pytest.fixture(scope="module")
def cluster(certificates):
    """A cluster on which a run has learned, another predicts, and a third has failed; addresses of its /metrics."""
    settings = ClusterConfig(workers=1, tls=tls_files(certificates, "cluster"))
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0", **_listen(settings)) as local,
        Client(local) as client,
    ):
        install(client)
        executor = DaskExecutor(client)
        learned = {"objective": 2.0, "risk": 1.5, "complexity": 0.5, "regularization": 0.1, "gradient_norm": 0.3}
        learned |= {"accuracy": 0.9, "validation_accuracy": 0.8, "rows": 500, "batches": 2, "waiting_share": 0.2}
        learned |= {"jitter": 0.0, "rows_per_second": 1e4, "steps": 4}
        with telemetry(executor, run="digits", stage="learn", pipeline="daily"):
            executor.map(work, [(i,) for i in range(8)], name="rcb-gradient")
        told = Telemetry(executor, run="covtype", stage="learn", pipeline="daily")
        for step in range(1, 4):
            told.step({**learned, "step": step, "seconds": step})
            time.sleep(0.35)  # one message each: the pace needs several
        told.event("checkpoint", step=3)
        with pytest.raises(ValueError, match="0"):
            executor.map(fail, [(0,)], name="predict-chunk")
        predicting = Telemetry(executor, run="night", stage="predict", pipeline="night")
        predicting.chunks(3, 1, 8, 6000, rejected=60, retried=2)
        scheduler = f"http://127.0.0.1:{client.scheduler_info()['services']['dashboard']}/metrics"
        (worker,) = client.scheduler_info()["workers"].values()
        workers = f"http://127.0.0.1:{worker['services']['dashboard']}/metrics"
        last_words = ("kme_tiles{", "kme_checkpoint_age_seconds{")  # of both runs: messages leave a little later
        assert wait_until(lambda: all(name in get(scheduler) for name in last_words))
        yield scheduler, workers


def sample(text, name, **labels):
    """The value of one time series of a scrape."""
    for line in text.splitlines():
        found = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
        if found and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', found[1] or "")).items():
            return float(found[2])
    raise AssertionError(f"no {name} with {labels}")


def test_the_scheduler_tells_how_runs_stand(cluster):
    text = get(cluster[0])
    assert sample(text, "kme_run_status", run_id="digits", phase="learn", status="succeeded") == 1
    assert sample(text, "kme_run_status", run_id="covtype", phase="learn", status="running") == 1
    assert sample(text, "kme_run_status", run_id="covtype", phase="learn", status="failed") == 0
    assert sample(text, "kme_run_info", run_id="digits", version="0.1.0") == 1
    assert sample(text, "kme_train_loss", run_id="covtype") == 2.0
    assert sample(text, "kme_train_step", run_id="covtype", pipeline="daily") == 3
    assert sample(text, "kme_run_progress_ratio", run_id="covtype") == 0.75
    assert sample(text, "kme_run_rows_total", run_id="covtype") == 3 * 500 * 2
    assert sample(text, "kme_run_rows_total", run_id="night") == 6000
    assert sample(text, "kme_tiles", run_id="night", state="waiting") == 4
    assert sample(text, "kme_rows_rejected_total", run_id="night") == 60
    assert sample(text, "kme_tile_retries_total", run_id="night") == 2
    now = time.time()
    assert sample(text, "kme_run_last_success_timestamp_seconds", pipeline="daily", phase="learn") == pytest.approx(
        now, abs=300
    )
    assert sample(text, "kme_checkpoint_age_seconds", run_id="covtype") < 300


def test_the_scheduler_tells_when_its_certificate_expires(cluster, certificates):
    """The one it was started with: that of a file which was renewed since helps nobody before a new start."""
    ends = sample(get(cluster[0]), "kme_certificate_expiry_timestamp_seconds")
    assert ends == pytest.approx(time.time() + 100 * 86400, abs=3600)
    make_certificates(certificates, days=200, renew=True)
    assert sample(get(cluster[0]), "kme_certificate_expiry_timestamp_seconds") == ends


def test_without_a_certificate_none_is_told_of():
    from kme_dist.ops import metrics
    from kme_dist.ops.board import RunBoard

    assert list(metrics._certificate(RunBoard())) == []


def test_workers_count_tasks_rows_and_seconds(cluster):
    text = get(cluster[1])
    assert sample(text, "kme_rows_total", phase="work") == 8 * 250
    assert sample(text, "kme_bytes_written_total", phase="work") == 8 * 4000
    assert sample(text, "kme_tiles_computed_total", phase="work", outcome="done") == 8
    assert sample(text, "kme_tiles_computed_total", phase="fail", outcome="failed") == 1
    assert sample(text, "kme_rows_total", phase="fail") == 0
    assert sample(text, "kme_tile_duration_seconds_count", phase="work") == 8
    assert sample(text, "kme_tile_duration_seconds_sum", phase="work") >= 8 * 5 * 0.002
    assert all(sample(text, "kme_stage_seconds_total", stage=stage) >= 8 * 0.002 for stage in STAGES)


def names_in(expression):
    """The metrics that a PromQL expression speaks of."""
    bare = re.sub(r'"[^"]*"', "", re.sub(r"\b(by|on|without|ignoring)\s*\([^)]*\)", "", expression))
    bare = re.sub(r"{[^}]*}|\[[^]]*\]", "", bare)
    return {name for name in re.findall(r"\b(?:kme|dask|process)_\w+\b|\bup\b", bare)}


def panels():
    board = json.loads(GRAFANA.read_text(encoding="utf-8"))
    return [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel.get("targets", [])]


def alert_rules():
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


@pytest.mark.parametrize(("title", "expression"), [*panels(), *alert_rules()])
def test_every_panel_and_alert_speaks_of_metrics_that_exist(cluster, title, expression):
    scraped = "".join(get(address) for address in cluster)
    there = set(re.findall(r"^(\w+)(?:{| )", scraped, flags=re.MULTILINE)) | NOT_SCRAPED_FROM_DASK
    wanted = names_in(expression)
    assert wanted, expression
    assert wanted <= there, f"{title}: nothing is called {', '.join(sorted(wanted - there))}"


def test_the_grafana_board_is_whole():
    board = json.loads(GRAFANA.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "run"}
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}", "no board works with somebody else's identifier"


def test_every_alert_has_a_unit_test_and_an_explanation():
    tested = yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    fired = {rule["alertname"] for test in tested for rule in test["alert_rule_test"] if rule["exp_alerts"]}
    explained = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")
    for name, _ in alert_rules():
        assert name in fired, f"no test makes {name} fire"
        assert name in explained, f"docs/observing.md does not say what {name} means"


# --- by Prometheus' own tools -----------------------------------------------------------------------


@pytest.fixture
def promtool():
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("promtool is not installed; on Debian: apt install prometheus")

    def run(*arguments, text=None):
        done = subprocess.run([path, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


def test_alert_rules_do_what_their_unit_tests_say(promtool):
    assert promtool("test", "rules", str(PROMETHEUS / "alerts_test.yml"))[0] == 0
    code, said = promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    assert code == 0, said


def test_the_unit_tests_would_notice_a_broken_rule(promtool, tmp_path):
    rules = (PROMETHEUS / "alerts.yml").read_text(encoding="utf-8")
    shutil.copy(PROMETHEUS / "alerts_test.yml", tmp_path)
    for right, wrong in (
        ("> 900", "> 90000"),
        ('status="lost"', 'status="gone"'),
        ("> 0.01", "> 0.9"),
        ("for: 5m", "for: 5h"),
        ("14 * 86400", "2 * 86400"),
        ('{scheduled="true"}', ""),
    ):
        assert right in rules
        (tmp_path / "alerts.yml").write_text(rules.replace(right, wrong), encoding="utf-8")
        assert promtool("test", "rules", str(tmp_path / "alerts_test.yml"))[0] != 0, f"{right} became {wrong}"


def test_every_panel_is_valid_promql(promtool, tmp_path):
    rules = [{"record": f"panel:{i}", "expr": expr.replace("$run", ".*")} for i, (_, expr) in enumerate(panels())]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    code, said = promtool("check", "rules", str(file))
    assert code == 0, said


def test_metrics_are_named_as_prometheus_wants_them(promtool, cluster):
    for address in cluster:
        ours = [line for line in get(address).splitlines() if re.match(r"(# (HELP|TYPE) )?kme_", line)]
        code, said = promtool("check", "metrics", text="\n".join(ours) + "\n")
        assert code == 0, said


@pytest.mark.slow
def test_a_real_prometheus_answers_every_panel(cluster, tmp_path):
    path = shutil.which("prometheus")
    if path is None:
        pytest.skip("prometheus is not installed; on Debian: apt install prometheus")
    scheduler, worker = (urllib.parse.urlsplit(address).netloc for address in cluster)
    settings = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    settings["rule_files"] = [str(PROMETHEUS / "alerts.yml")]
    for job, target in zip(settings["scrape_configs"], (scheduler, worker), strict=True):
        job.pop("file_sd_configs", None)
        job["static_configs"] = [{"targets": [target]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    port = free_port()
    arguments = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path / 'series'}"]
    server = subprocess.Popen(
        [path, f"--config.file={tmp_path / 'prometheus.yml'}", *arguments], stderr=subprocess.DEVNULL
    )

    def ask(expression):
        query = urllib.parse.urlencode({"query": expression.replace("$run", ".*")})
        try:
            return json.loads(get(f"http://127.0.0.1:{port}/api/v1/query?{query}"))["data"]["result"]
        except urllib.error.URLError:
            return []

    try:
        assert wait_until(lambda: len(ask("up == 1")) == 2, 60)
        assert wait_until(lambda: ask("rate(kme_rows_total[1m])"), 60)
        empty = [title for title, expression in panels() if not wait_until(lambda e=expression: ask(e), 5)]
        assert empty == []
        assert wait_until(lambda: ask('ALERTS{alertname="KmeRowsRejected"}') == [], 1), "60 of 6000 is one in a hundred"
        assert wait_until(lambda: ask('ALERTS{alertname="KmeChunksFailed"}'), 30)
    finally:
        server.terminate()
        server.wait(20)
