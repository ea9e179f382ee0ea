"""A small job as real processes that fail on request, and the bytes that it leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np

from kme_dist.data.ingest import ingest
from kme_dist.failpoints import VARIABLE

# One process for each stage: several steps with checkpoints, centres, several chunks of predictions.
CONFIG = """
data: {source: rows.zarr}
model: {objective: rcb, regularization: 0.1, kernel: {name: gaussian, ard: true}}
learn: {steps: 6, batch_size: 100, checkpoint_steps: 1}
fit: {solver: nystrom, centres: 20}
cluster: {kind: serial}
output: {folder: model}
"""
NIGHT = """
data: {source: rows.zarr}
predict: {model: model, data: rows.zarr, out: scores.zarr, outputs: [label, probability]}
cluster: {kind: serial}
"""
ROWS = 1200
INGEST = ("ingest", "rows.csv", "new.zarr", "--label", "label", "--quiet")
LEARN = ("learn", "job.yaml", "--quiet")
FIT = ("fit", "job.yaml", "--quiet")
NIGHTLY = ("schedule", "night.yaml", "--once", "--at", "2026-03-01", "--root", ".", "--quiet")
# A process that has imported everything and forks for each command, since importing takes longer than the job.
SERVER = """
import json, os, sys
from kme_dist import failpoints
from kme_dist.cli.app import execute
import kme_dist, kme_dist.models.mce, kme_dist.ops.schedule
from kme_dist.pipelines import fit, ingest, job, learn, predict

for line in sys.stdin:
    folder, command, setting = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        for number in (1, 2):
            os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
        os.close(0)
        failpoints._SETTING = setting
        os._exit(execute(command))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Folder:
    """A folder with a table and two configs, and commands that run in it."""

    def __init__(self, path, server=None):
        self.path, self.server = path, server
        path.mkdir(parents=True, exist_ok=True)
        X = np.random.default_rng(3).normal(size=(ROWS, 4)).round(4)
        lines = [f"{','.join(map(str, row))},{'ab'[int(row[0] > row[1])]}" for row in X]
        (path / "rows.csv").write_text("\n".join(["x0,x1,x2,x3,label", *lines]) + "\n")
        labels = np.array([line[-1] for line in lines])
        ingest((X, labels), path / "rows.zarr", chunk_bytes="4KiB", shard_bytes="8KiB", overwrite=True)
        (path / "job.yaml").write_text(CONFIG)
        (path / "night.yaml").write_text(NIGHT)
        (path / "markers").mkdir(exist_ok=True)

    def start(self, *command, faults="", once=True, prefix=(), **environment):
        setting = f"once={self.path / 'markers'},{faults}" if faults and once else faults
        with open(self.path / "output.txt", "a") as output:
            return subprocess.Popen(
                [*prefix, sys.executable, "-m", "kme_dist", *command],
                cwd=self.path,
                env={**os.environ, "OMP_NUM_THREADS": "1", VARIABLE: setting, **environment},
                stdout=output,
                stderr=output,
            )

    def run(self, *command, faults=""):
        """The exit code of a command in a process of its own; what it printed is in output.txt."""
        setting = f"once={self.path / 'markers'},{faults}" if faults else ""
        self.server.stdin.write(json.dumps([str(self.path), command, setting]) + "\n")
        self.server.stdin.flush()
        return int(self.server.stdout.readline())

    @property
    def output(self):
        return (self.path / "output.txt").read_text()

    def take_over(self, other, *names):
        """Copy what another folder has."""
        for name in names:
            shutil.copytree(other.path / name, self.path / name, dirs_exist_ok=True)

    def happened(self, place):
        return (self.path / "markers" / place.partition("@")[0]).exists()

    def bytes_below(self, *names):
        """Stored arrays by name: what a reader gets, without records of times."""
        files = [file for name in names for file in sorted((self.path / name).rglob("c/**/*")) if file.is_file()]
        assert files, names
        return {str(file.relative_to(self.path)): file.read_bytes() for file in files}
