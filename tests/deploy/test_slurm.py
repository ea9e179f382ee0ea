"""Slurm: the scripts put a job back into the queue for "try again" and the end of its time, and for nothing else. Where
Slurm is installed, a cluster of one node runs them for real."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deploy_tools import DEPLOY, FINAL, TRY_AGAIN, call, tool
from ports import free_port

SLURM = DEPLOY / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
INTERRUPTED = 128 + signal.SIGTERM


def directives(path):
    found = dict(re.findall(r"(?m)^#SBATCH --([a-z-]+)(?:=(.*))?$", path.read_text()))
    assert len(found) == path.read_text().count("#SBATCH")
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_jobs_may_be_requeued_and_are_told_before_their_time_is_up(path):
    found = directives(path)
    assert "requeue" in found
    assert found["open-mode"] == "append", "the log of the attempt before stays"
    assert found["signal"].startswith("B:TERM@"), "the script, not the steps, so that the command saves its state first"
    assert int(found["signal"].split("@")[1]) >= 60
    assert "time" in found


def test_a_gpu_worker_has_a_gpu_and_says_so():
    text = (SLURM / "gpu.sbatch").read_text()
    assert directives(SLURM / "gpu.sbatch")["gpus-per-task"] == "1"
    assert "dask cuda worker" in text
    assert "--resources GPU=1" in text


# --- the script with stand-ins for Slurm, Dask and the command ---------------------------------------

STAND_INS = {
    "dask": """
        for word in "$@"; do [ "$before" = --scheduler-file ] && file=$word; before=$word; done
        case "$*" in scheduler*)
            echo "$*" > scheduler; echo '{"address": "tls://10.0.0.1:8786"}' > "$file" ;;
        esac
        trap 'exit 0' TERM
        while :; do sleep 0.02; done""",
    "srun": 'echo "$*" > workers; trap "exit 0" TERM; while :; do sleep 0.02; done',
    "scontrol": 'echo "$*" >> requeued',
    "kme-dist": """
        if [ "$1" = certs ]; then mkdir -p "$2"; echo "$*" > certs; exit 0; fi
        echo "$*" > command; echo "$KME_TLS" > tls
        trap 'echo saved > state; exit 143' TERM
        until [ -s workers ]; do sleep 0.02; done  # as the command waits for its workers
        [ -z "$HOLD" ] || { touch ready; while :; do sleep 0.02; done; }
        exit "$CODE\"""",
}


@pytest.fixture
def allocation(tmp_path):
    """A function that runs the script in a folder of stand-ins; they write down what they were asked."""
    for name, text in STAND_INS.items():
        script = tmp_path / name
        script.write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
        script.chmod(0o755)

    def start(*words, code=0, restarts=0, **more):
        environment = {
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "SLURM_JOB_ID": "17",
            "SLURM_SUBMIT_DIR": str(tmp_path),
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_MEM_PER_CPU": "2048",
            "CODE": str(code),
            **more,
        }
        return subprocess.Popen(
            [SLURM / "allocation", "dask worker", *words], env=environment, stderr=subprocess.PIPE, text=True
        )

    return start


def ended(process):
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("code", [0, *FINAL])
def test_final_exit_codes_end_the_job(allocation, tmp_path, code):
    assert ended(allocation("learn", "x.yaml", code=code)) == code
    assert not (tmp_path / "requeued").exists()
    assert (tmp_path / ".kme-dist-17").exists() == (code != 0), "keys of a job that is done are removed"


def test_try_again_goes_back_into_the_queue_a_few_times(allocation, tmp_path):
    assert ended(allocation("learn", "x.yaml", code=TRY_AGAIN, restarts=2)) == TRY_AGAIN
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    (tmp_path / "requeued").unlink()
    assert ended(allocation("learn", "x.yaml", code=TRY_AGAIN, restarts=3)) == TRY_AGAIN
    assert not (tmp_path / "requeued").exists()


def test_no_scheduler_goes_back_into_the_queue_too(allocation, tmp_path):
    (tmp_path / "dask").write_text("#!/bin/bash\necho 'no port is free' >&2; exit 1\n")
    process = allocation("learn", "x.yaml")
    _, said = process.communicate(timeout=100)
    assert process.returncode == TRY_AGAIN
    assert "allocation: no scheduler within a minute" in said
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"
    (tmp_path / "requeued").unlink()
    assert ended(allocation("learn", "x.yaml", restarts=3)) == TRY_AGAIN
    assert not (tmp_path / "requeued").exists()


def test_the_end_of_the_time_limit_saves_the_state_and_requeues(allocation, tmp_path):
    process = allocation("learn", "x.yaml", HOLD="yes")
    for _ in range(400):
        if (tmp_path / "ready").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert ended(process) == INTERRUPTED
    assert (tmp_path / "state").read_text() == "saved\n"
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_the_command_gets_the_cluster_of_the_job(allocation, tmp_path):
    assert ended(allocation("learn", "x.yaml")) == 0
    command = (tmp_path / "command").read_text()
    assert command == "learn x.yaml --scheduler tls://10.0.0.1:8786\n"
    assert (tmp_path / "tls").read_text() == f"{tmp_path}/.kme-dist-17/tls\n"
    assert "--protocol tls" in (tmp_path / "scheduler").read_text()
    workers = (tmp_path / "workers").read_text()
    assert "--memory-limit 2048MiB" in workers
    assert "cluster-key.pem" in workers


def test_without_a_command_it_ends_in_a_smoke_test(allocation, tmp_path):
    assert ended(allocation(code=3)) == 3
    folder = tmp_path / ".kme-dist-17" / "smoke"
    assert (tmp_path / "command").read_text() == f"smoke --folder {folder} --scheduler tls://10.0.0.1:8786\n"


# --- Slurm itself -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster of one node on this machine: munge, controller and node daemon, ended with the tests."""
    for name in ("sbatch", "slurmctld", "slurmd", "munged"):
        tool(name)
    if os.geteuid() != 0:
        pytest.skip("the daemons of Slurm need root")
    home = tmp_path_factory.mktemp("slurm")
    home.chmod(0o755)
    host, cores = socket.gethostname().split(".")[0], os.cpu_count()
    for folder in ("state", "spool", "munge"):
        (home / folder).mkdir(mode=0o755)
    key = home / "munge" / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = [free_port(), free_port()]
    (home / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={home}/munge/socket
CredType=cred/munge
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=2000 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""
    )
    environment = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={home}/munge/socket",
         f"--pid-file={home}/munge/pid", f"--log-file={home}/munge/log", f"--seed-file={home}/munge/seed"],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    ]  # fmt: skip
    started = []
    try:
        for daemon in daemons:
            started.append(
                subprocess.Popen(
                    [tool(daemon[0]), *daemon[1:]],
                    env=environment,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            time.sleep(1.0)
        for _ in range(60):
            if "idle" in call("sinfo", "--noheader", "--format=%t", env=environment).stdout:
                break
            time.sleep(0.5)
        else:
            pytest.fail((home / "slurmctld.log").read_text()[-2000:])
        yield environment
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.wait(timeout=20)


def submit(environment, folder, script, *words, **more):
    """Send a job from `folder` and wait for its end; returns its state and exit code, and what it printed."""
    environment = {
        **environment,
        "PATH": f"{Path(sys.executable).parent}:{environment['PATH']}",
        "KME_SLURM": str(SLURM),
        **more,
    }
    options = ["--parsable", "--nodes=1", "--ntasks-per-node=1", "--mem-per-cpu=1000M", "--time=10"]
    sent = call("sbatch", *options, SLURM / script, *words, cwd=folder, env=environment)
    assert sent.returncode == 0, sent.stderr
    job = sent.stdout.strip()
    for _ in range(480):
        facts = call("scontrol", "--oneliner", "show", "job", job, env=environment).stdout
        state = re.search(r"JobState=(\w+)", facts).group(1)
        if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            break
        time.sleep(0.5)
    log = folder / f"kme-dist-{job}.log"
    return state, int(re.search(r"ExitCode=(\d+):", facts).group(1)), log.read_text() if log.exists() else facts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurm_runs_the_smoke_test_over_tls(slurm, tmp_path):
    state, code, log = submit(slurm, tmp_path, "cpu.sbatch")
    assert (state, code) == ("COMPLETED", 0), log
    assert "passed: 1 worker," in log
    assert not list(tmp_path.glob(".kme-dist-*")), "keys are removed at the end"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurm_runs_a_table_through_all_stages(slurm, tmp_path):
    """From the rows to the report, on a worker of the allocation; what it stores is there for the next job."""
    from sklearn.datasets import load_wine

    load_wine(as_frame=True).frame.to_csv(tmp_path / "wine.csv", index=False)
    (tmp_path / "model.yaml").write_text(
        "data: {source: wine.csv, label: target}\nlearn: {steps: 10, batch_size: 60}\noutput: {folder: runs/wine}\n"
    )
    state, code, log = submit(slurm, tmp_path, "cpu.sbatch", "run", "model.yaml")
    assert (state, code) == ("COMPLETED", 0), log
    assert (tmp_path / "runs" / "wine" / "report.html").is_file()
    assert (tmp_path / "runs" / "wine" / "model.zarr").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_slurm_hands_the_exit_code_on(slurm, tmp_path):
    (tmp_path / "wrong.yaml").write_text("data: {sources: x}\n")
    state, code, log = submit(slurm, tmp_path, "cpu.sbatch", "learn", "wrong.yaml")
    assert (state, code) == ("FAILED", 2), log
    assert "did you mean `data.source`?" in log


@pytest.mark.slow
def test_slurm_takes_the_directives(slurm, tmp_path):
    check = ["sbatch", "--test-only", "--nodes=1", "--ntasks-per-node=1", "--mem-per-cpu=1000M"]
    done = call(*check, SLURM / "cpu.sbatch", env=slurm, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    broken = tmp_path / "broken.sbatch"
    broken.write_text((SLURM / "cpu.sbatch").read_text().replace("--requeue", "--requeu-it"))
    assert call(*check, broken, env=slurm, cwd=tmp_path).returncode != 0
