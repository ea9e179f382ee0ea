"""What the driver of a job runs: the pipeline that the job names, with the driver as its listener.

drive(job, run_pipeline)        # kme_dist.ops.driver, in this process
submit(job, cluster, run_pipeline)  # kme_dist.ops.submit, on a worker of a cluster
"""

from __future__ import annotations

import importlib
from typing import Any

from kme_dist.config import Config
from kme_dist.ops.driver import JobListener
from kme_dist.pipelines.folder import Listener


def run_pipeline(pipeline: str, config: Config, *, name: str, command: str, listener: JobListener) -> dict[str, Any]:
    """Run the pipeline of that name (one of kme_dist.ops.jobs.PIPELINES); returns its result."""
    # Loaded by name: submitting a job does not load the numerics, nor a prediction job the plots.
    module = importlib.import_module(f"kme_dist.pipelines.{pipeline}")
    adapted = Listener(
        start=listener.start,
        step=listener.step,
        progress=listener.progress,
        say=listener.say,
        begin=listener.begin,
        run_id=listener.job.id,
        scheduled=listener.scheduled,
    )
    result: dict[str, Any] = module.run(config, name=name, listener=adapted, command=command)
    return result
