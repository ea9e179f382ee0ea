"""Commands for clusters: cluster, certs, drivers.

kme-dist certs certs
kme-dist cluster --tls certs --listen 10.0.0.5:8786
kme-dist drivers --scheduler tls://10.0.0.5:8786 --tls certs --slots 4
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from kme_dist.cli.options import Connection, Insecure, Output, Root, expand_options, load, print_json, print_tree
from kme_dist.config import ClusterConfig
from kme_dist.errors import ConfigError
from kme_dist.ops.certs import make_certificates, tls_files
from kme_dist.ops.jobs import Job, job_root

SLOTS = 4
JOIN_S = 10.0  # a supervisor may be waiting for the scheduler when the command ends
RESTART_S = 1.0  # until a driver host that died is started again
MaxPerUser = Annotated[
    int | None, typer.Option(min=1, help="Jobs of one person that run at a time; default: no limit.")
]


def add_commands(app: typer.Typer) -> None:
    for command in (cluster, certs, drivers):
        app.command()(expand_options(command))


def drivers(
    connection: Connection,
    output: Output,
    slots: Annotated[int, typer.Option(min=1, help="Jobs that run here at a time.")] = SLOTS,
    max_per_user: MaxPerUser = None,
    root: Root = None,
) -> None:
    """Run the drivers of submitted jobs on this host until interrupted (then exit code 0), by priority, and resubmit
    those under the root that have lost their driver. They start no tasks here: workers compute."""
    at = connection.cluster()
    if at is None:
        raise ConfigError("no scheduler address: use --scheduler ADDRESS")
    options = ["--scheduler", str(at.address), "--quiet", *(["--tls", connection.tls] if connection.tls else [])]
    options += ["--allow-insecure"] if connection.insecure else []

    def command(job: Job) -> list[str]:
        return [sys.executable, "-m", "kme_dist", "jobs", "drive", job.id, "--root", str(job.root), *options]

    logging.getLogger("distributed.client").setLevel(logging.CRITICAL)  # the host says itself that a scheduler is lost
    stop = threading.Event()
    hosts = load("ops.drivers")
    home = job_root(root)
    host = hosts.Drivers(at, command, slots=slots, max_per_user=max_per_user, root=str(home), say=output.say)
    with _signals_set(stop), kept_jobs(home, at, output.say):
        host.serve(stop)


@contextlib.contextmanager
def kept_jobs(root: Path, at: ClusterConfig | None, say: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, jobs of the root that have lost their driver or their scheduler are resubmitted."""
    if at is None:
        yield
        return
    stop = threading.Event()
    supervisor = load("ops.supervisor").Supervisor(root, at, say=say)
    thread = threading.Thread(target=supervisor.keep, args=(stop,), name="kme-supervisor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(JOIN_S)


@contextlib.contextmanager
def _signals_set(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop` instead of interrupting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def receive(signum: int, frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _driver_host(
    scheduler: str, tls: str | None, slots: int, max_per_user: int | None, root: str | None
) -> Iterator[None]:
    """A driver host beside a cluster of this machine, started again when it dies."""
    if not slots:
        yield
        return
    command = [sys.executable, "-m", "kme_dist", "drivers", "--scheduler", scheduler, "--slots", str(slots), "--quiet"]
    command += ["--tls", tls] if tls is not None else ["--allow-insecure"]
    command += [] if max_per_user is None else ["--max-per-user", str(max_per_user)]
    command += ["--root", str(job_root(root))]
    stop, running = threading.Event(), [subprocess.Popen(command, stdin=subprocess.DEVNULL)]

    def keep() -> None:
        while not stop.is_set():
            running[0].wait()
            if not stop.wait(RESTART_S):
                running[0] = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    thread = threading.Thread(target=keep, name="kme-driver-host", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        running[0].terminate()
        thread.join()


def cluster(
    output: Output,
    workers: Annotated[int | None, typer.Option(help="Number of worker processes; default: one per core.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit of a worker, e.g. 2GiB.")] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Accept connections from other machines; needs --tls.")
    ] = None,
    tls: Annotated[
        str | None, typer.Option(metavar="DIR", help="Encrypt with the certificates in DIR; created if missing.")
    ] = None,
    insecure: Insecure = False,
    drivers: Annotated[
        int, typer.Option(min=0, help="Submitted jobs that run at a time, in processes apart from the workers.")
    ] = SLOTS,
    max_per_user: MaxPerUser = None,
    root: Root = None,
) -> None:
    """Start a cluster on this machine and keep it running until interrupted (then exit code 0)."""
    if workers is not None and workers < 1:
        raise typer.BadParameter(f"--workers is {workers}; must be an integer >= 1.")
    if tls is not None:
        make_certificates(tls)
    settings = ClusterConfig(
        workers=workers,
        memory=memory,
        address=None if listen is None else f"{'tls' if tls else 'tcp'}://{listen}",
        tls=None if tls is None else tls_files(tls, "cluster"),
        insecure=insecure,
    )
    clusters = load("ops.cluster")
    with _deferred_signals() as wait_for_signal, clusters.open_client(settings) as client:
        facts = {"scheduler": client.scheduler.address, "dashboard": clusters.dashboard_of(client)}
        with _driver_host(facts["scheduler"], tls, drivers, max_per_user, root):
            output.result(facts, f"scheduler {facts['scheduler']}  dashboard {facts['dashboard']}")
            sys.stdout.flush()
            output.say("stop it with Ctrl-C")
            wait_for_signal()


@contextlib.contextmanager
def _deferred_signals() -> Iterator[Callable[[], None]]:
    """A function that waits for SIGINT or SIGTERM. Inside the block these signals do nothing else, however many
    arrive and whenever: a cluster that is starting or closing is never interrupted halfway."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received = threading.Event()

    def receive(signum: int, frame: FrameType | None) -> None:
        received.set()

    def wait() -> None:
        while not received.is_set() and signal.sigtimedwait({signal.SIGINT}, 0.5) is None:
            pass

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    # Workers inherit the blocked signal: Ctrl-C in a terminal is sent to them too, and they must shut down in order.
    # Python's own helper for child processes unblocks it when it starts, so it is started first.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield wait
    except BaseException:  # without an error the process is about to end, and keeps ignoring signals until it has
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)
        raise


def certs(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder for the certificates.")],
    output: Output,
    days: Annotated[int, typer.Option(help="Days until the certificates expire.")] = 365,
    renew: Annotated[bool, typer.Option("--renew", help="Issue new certificates from the existing authority.")] = False,
) -> None:
    """Create a private certificate authority and certificates for one cluster; existing files are kept."""
    facts = make_certificates(folder, days=days, renew=renew)
    if output.as_json:
        print_json(facts)
    else:
        print_tree({key: value for key, value in facts.items() if value is not None}, width=400)
