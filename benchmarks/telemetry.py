"""The cost of telemetry per learning step, and its latency on the dashboard.

    python -m benchmarks.telemetry [--rows 1000] [--steps 60] [--turns 4]

The same steps on one local cluster, alternately: without telemetry; with it; with it and the page open (over a
websocket, like a browser). Three numbers: the time that the loop spends on telemetry, as a fraction of a step; the
median step relative to one without telemetry; the time from a step to the page that shows it. The first is stable on a
busy machine too, the second is not: see the printed load.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid

import numpy as np
from bokeh.client import pull_session
from bokeh.models.widgets import Div

from benchmarks.machine import load_average
from benchmarks.rounds import made_up
from kme_dist.config import ClusterConfig
from kme_dist.core.kernels import Gaussian
from kme_dist.ops.cluster import open_executor
from kme_dist.ops.dashboard import install
from kme_dist.ops.telemetry import telemetry
from kme_dist.run.learn import learn_on_dataset
from kme_dist.run.learners import LearnSettings


class Watch:
    """A callback that records the time of every step and of its telemetry."""

    def __init__(self, tell=None):
        self.tell, self.steps, self.telling = tell, [], []
        self._last = time.perf_counter()

    def __call__(self, record):
        began = time.perf_counter()
        if self.tell is not None:
            self.tell(record)
        now = time.perf_counter()
        self.telling.append(now - began)
        self.steps.append(now - self._last)
        self._last = now


def learned(data, executor, batch, steps, watch):
    kernel = Gaussian(length_scale=np.full(data.features, 1.0))
    settings = LearnSettings(steps=steps, batch_size=batch)
    learn_on_dataset(data, kernel, 1.0, settings, batches_per_step=2, executor=executor, callback=watch)
    return watch.steps[5:], watch.telling[5:]


def with_telemetry(data, executor, batch, steps):
    with telemetry(executor, run=uuid.uuid4().hex[:8], stage="learn") as teller:

        def tell(record):
            teller.step(record)
            teller.scales(np.ones(data.features))

        return learned(data, executor, batch, steps, Watch(tell))


def opened(client):
    address = client.dashboard_link.rsplit("/", 1)[0]
    return pull_session(url=f"{address}/kme")


def shows(client, text):
    """Whether the scheduler's web server has sent this text to an open page."""
    applications = client.cluster.scheduler.http_application.applications
    ours = next(each for each in applications if "/kme" in getattr(each, "app_paths", ()))
    documents = [session.document for session in ours.get_sessions("/kme") if not session.destroyed]
    return any(text in model.text for doc in documents for model in doc.models if isinstance(model, Div))


def latency(client, turns):
    """Seconds from a step to its number on an open page."""
    found = []
    session = opened(client)
    for turn in range(turns):
        with telemetry(client, run=uuid.uuid4().hex[:8], stage="learn") as teller:
            time.sleep(1.5 + 0.13 * turn)  # the page shows the start already; wait for the steps
            number = 0.1111 + 0.0101 * turn
            teller.step({"step": 1, "steps": 2, "objective": number, "rows": 1})
            began = time.perf_counter()
            while not shows(client, f"{number:.4g}") and time.perf_counter() - began < 30:
                time.sleep(0.02)
            found.append(time.perf_counter() - began)
    session.close()
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000, help="of a batch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=4)
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, open_executor(ClusterConfig(workers=2)) as executor:
        data = made_up(folder, rows=20_000)
        client = executor.client
        assert install(client) is None
        steps = {"without telemetry": [], "telemetry": [], "telemetry, page open": []}
        telling = []
        learned(data, executor, chosen.rows, 10, Watch())
        for _ in range(chosen.turns):
            steps["without telemetry"] += learned(data, executor, chosen.rows, chosen.steps, Watch())[0]
            took, spent = with_telemetry(data, executor, chosen.rows, chosen.steps)
            steps["telemetry"] += took
            telling += spent
            session = opened(client)
            steps["telemetry, page open"] += with_telemetry(data, executor, chosen.rows, chosen.steps)[0]
            session.close()
        silent = statistics.median(steps["without telemetry"])
        share = sum(telling) / sum(steps["telemetry"])
        print(f"telemetry: {1e6 * statistics.mean(telling):.0f} µs a step, {share:.3%} of it (load {load_average()})")
        for name, took in steps.items():
            median = statistics.median(took)
            print(f"{name}: {1e3 * median:.1f} ms a step, {median / silent:.3f} of the first (load {load_average()})")
        seen = latency(client, chosen.turns)
        print(f"on the page after {statistics.median(seen):.2f} s, at most {max(seen):.2f} s (load {load_average()})")


if __name__ == "__main__":
    main()
