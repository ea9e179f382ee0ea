"""The pages `/kme` and `/kme/jobs` of the Dask dashboard and `kme_*` metrics, on schedulers and workers.

    install(client)                                        on a running cluster; a second call changes nothing
    dask scheduler --preload kme_dist.dashboard            or from the start
    dask worker ADDRESS --preload kme_dist.dashboard

The commands install it by themselves. `BoardPlugin` collects what runs report through `kme_dist.ops.telemetry` in a
`RunBoard`; `TileMeter` counts on each worker. No run depends on any of this: its results are in the run folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin
from tornado.web import RequestHandler

from kme_dist import meter
from kme_dist.errors import KMEError
from kme_dist.ops import jobs_page, metrics
from kme_dist.ops.board import NAME, RunBoard
from kme_dist.ops.certs import expires_at
from kme_dist.ops.queue import queue_of
from kme_dist.ops.telemetry import TOPIC


class BoardPlugin(SchedulerPlugin):  # type: ignore[misc]
    """Keeps the board of a scheduler, with its page and its metrics."""

    name = NAME
    idempotent = True

    def __init__(self) -> None:
        self.board = RunBoard()

    def __reduce__(self) -> tuple[Any, ...]:
        return (BoardPlugin, ())  # sent without its state

    async def start(self, scheduler: Any) -> None:
        """Also called by Dask when a client registers the plugin on a running scheduler."""
        scheduler.extensions[NAME] = self.board
        # Once: the scheduler keeps the certificate it was started with, even if the file changes later.
        certificate = getattr(scheduler.security, "tls_scheduler_cert", None)
        if certificate and scheduler.address.startswith("tls"):
            with contextlib.suppress(KMEError, ValueError):
                self.board.certificate_expires = expires_at(certificate)
        for _, message in scheduler.get_events(TOPIC):  # reported before the plugin was there
            self.log_event(TOPIC, message)
        metrics.show_board(self.board)
        _add_page(scheduler)

    def log_event(self, topic: str, msg: Any) -> None:
        if topic == TOPIC and isinstance(msg, Mapping):
            self.board.receive(msg)

    def remove_client(self, scheduler: Any, client: str) -> None:
        self.board.client_left(client)


class TileMeter(WorkerPlugin):  # type: ignore[misc]
    """Counts calls, rows and seconds on a worker, for its /metrics and for the table of workers."""

    name = NAME
    idempotent = True

    def __reduce__(self) -> tuple[Any, ...]:
        return (TileMeter, ())

    def setup(self, worker: Any) -> None:
        self.meters = metrics.worker_meters()
        self.counts = {"rows": 0, "calls": 0, "failed": 0, "seconds": 0.0}
        self._lock = threading.Lock()
        worker.metrics[NAME] = self._report  # sent with every heartbeat
        meter.register(self)

    def teardown(self, worker: Any) -> None:
        meter.unregister(self)
        worker.metrics.pop(NAME, None)

    async def _report(self, worker: Any) -> dict[str, float]:
        return dict(self.counts)

    def call(self, name: str, seconds: float, result: Any, *, failed: bool) -> None:
        """A call has ended; `rows` and `bytes` are counted if its result has them."""
        rows, written = _count(result, "rows"), _count(result, "bytes")
        self.meters.tile(name, seconds, rows, written, failed=failed)
        with self._lock:
            self.counts["calls"] += 1
            self.counts["failed"] += failed
            self.counts["rows"] += rows
            self.counts["seconds"] += seconds

    def stage(self, name: str, seconds: float) -> None:
        self.meters.stage(name, seconds)


class QuietEnd(WorkerPlugin):  # type: ignore[misc]
    """A worker that is closing does not log that a heartbeat failed because its connections are closed."""

    name = f"{NAME}-quiet-end"
    idempotent = True
    loggers = ("distributed.worker", "tornado.application")  # both log the same exception

    def __reduce__(self) -> tuple[Any, ...]:
        return (QuietEnd, ())

    def setup(self, worker: Any) -> None:
        for logger in self.loggers:
            logging.getLogger(logger).addFilter(self.keeps)

    @staticmethod
    def keeps(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, RuntimeError) and str(error) == "ConnectionPool is closed")


def _count(result: Any, name: str) -> int:
    result = getattr(result, "record", result)  # some results contain their record beside other things
    found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0


class JobsHandler(RequestHandler):
    """Answers for the page of jobs, which is made in another thread: it reads many small files."""

    def initialize(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    async def get(self) -> None:
        queue = queue_of(self.scheduler)
        index = self.scheduler.extensions.setdefault("kme-job-index", jobs_page.JobIndex())
        roots, entries = tuple(queue.roots), tuple(queue.entries.values())
        wanted = jobs_page.Wanted.of(self.request.arguments)
        text = await asyncio.to_thread(lambda: jobs_page.page(index.read(roots, entries), wanted))
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.finish(text)


# --- installation ----------------------------------------------------------------------------------


def install(client: Any) -> str | None:
    """Install board, page and meters on the cluster of `client`, unless they are there.

    Returns None, or why it failed: a cluster without the page can still run everything.
    """
    try:
        client.register_plugin(BoardPlugin())
        client.register_plugin(TileMeter())
        client.register_plugin(QuietEnd())
    except Exception as error:  # any error of the scheduler, as raised there
        return f"no /kme page on this cluster: {type(error).__name__}: {error}"
    return None


async def dask_setup(server: Any) -> None:
    """Called by `--preload kme_dist.dashboard`, on a scheduler or a worker."""
    if hasattr(server, "add_plugin"):
        plugin = BoardPlugin()
        server.add_plugin(plugin, name=NAME, idempotent=True)
        await plugin.start(server)
    elif hasattr(server, "plugin_add"):
        await server.plugin_add(plugin=TileMeter(), name=NAME)
        await server.plugin_add(plugin=QuietEnd(), name=QuietEnd.name)


def has_page(dask_scheduler: Any) -> bool:
    """On the scheduler: whether its dashboard has the page."""
    from distributed.dashboard import scheduler as dask_pages

    from kme_dist.ops.dashboard_page import PATH

    if not hasattr(dask_scheduler, "http_application"):
        return False
    return PATH.strip("/") in dask_pages.template_variables(dask_scheduler)["pages"]


def _add_page(scheduler: Any) -> None:
    """Add the page beside Dask's own, with a tab in the navigation; no effect without a dashboard."""
    from distributed.dashboard import scheduler as dask_pages
    from distributed.dashboard.core import BokehApplication, BokehTornado
    from tornado.ioloop import IOLoop

    from kme_dist.ops.dashboard_page import PATH, document

    applications = getattr(scheduler.http_application, "applications", [])
    there = next((app for app in applications if isinstance(app, BokehTornado)), None)
    if there is None:
        return
    variables = dask_pages.template_variables(scheduler)
    if PATH.strip("/") in variables["pages"]:
        return
    variables["pages"] += [PATH.strip("/"), jobs_page.PATH.strip("/")]
    scheduler.http_application.add_handlers(
        ".*$", [(f"{there.prefix.rstrip('/')}{jobs_page.PATH}", JobsHandler, {"scheduler": scheduler})]
    )
    page = BokehApplication({PATH: document}, scheduler, prefix=there.prefix, template_variables=variables)
    scheduler.http_application.add_application(page)
    page.initialize(IOLoop.current())
    page.start()
