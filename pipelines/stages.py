"""What the stages of a run share: a config, a run folder, workers, and the listeners of progress.

    with Run.open(config, name="digits") as run:
        for stage in (ingest.STAGE, learn.STAGE, fit.STAGE):
            run.do(stage)

A stage is a function of the run that returns plain data, with its inputs and outputs. It is skipped if an earlier call
has done it with the same inputs. Workers are started when the first stage needs them and are used by all stages.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from kme_dist.backend import blas_threads
from kme_dist.config import ClusterConfig, Config, parse_yaml
from kme_dist.data.dataset import Dataset, open_dataset
from kme_dist.errors import KMEError
from kme_dist.models.classifier import with_class_weight
from kme_dist.ops.cluster import in_words, open_executor
from kme_dist.ops.jobs import new_id
from kme_dist.ops.telemetry import Telemetry, performance_report, telemetry
from kme_dist.pipelines import recipes, tables
from kme_dist.pipelines.folder import CONFIG, Listener, RunFolder, digest, to_yaml
from kme_dist.run.executors import Executor

PREVIOUS = "previous"  # in a run folder: the model that the last one has replaced
ROWS_TO_DRAW = 20_000  # of either split, for plots and for curves over test rows


@dataclass(frozen=True)
class Stage:
    """One stage of a run. `inputs` are what it depends on, `outputs` what it writes to the run folder."""

    name: str
    work: Callable[[Run], dict[str, Any]]
    inputs: Callable[[Run], Mapping[str, Any]]
    outputs: Callable[[Run], Sequence[str]]
    over_workers: bool = True


class Workers:
    """The cluster of a run: started when the first stage needs it, closed when the run ends."""

    def __init__(self, settings: ClusterConfig, listener: Listener, performance: Path | None) -> None:
        self.settings, self.performance = settings, performance
        self._listener, self._stack = listener, contextlib.ExitStack()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @cached_property
    def executor(self) -> Executor:
        executor = self._stack.enter_context(open_executor(self.settings))
        self._stack.enter_context(performance_report(executor, self.performance))
        self._listener.say(in_words(executor))
        return executor

    @property
    def started(self) -> bool:
        return "executor" in self.__dict__


@dataclass
class Run:
    """The context of every stage.

    `source` is the result of `tables.checked`, from before the rows are stored; `fresh` names stages to run even if
    they are up to date; `outdated` are results of later stages, removed when something new is learned or fitted.
    """

    config: Config
    name: str
    resolved: dict[str, Any]  # the config with all defaults
    source: Dataset | tables.Tables | tables.Large
    folder: RunFolder
    listener: Listener
    workers: Workers
    fresh: Collection[str] = ()
    outdated: Sequence[str] = ()
    telemetry: Telemetry = field(init=False)  # of the current stage

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        config: Config,
        *,
        name: str,
        test_rows: bool = False,
        fresh: Collection[str] = (),
        outdated: Sequence[str] = (),
        listener: Listener | None = None,
        command: str = "",
        performance: Path | None = None,
    ) -> Iterator[Run]:
        """Check settings and data, then hold the lease of the run folder inside the block.

        Errors in either are raised before anything is written. With `test_rows` a data set without the splits `train`
        and `test` is split; otherwise it is learned from as a whole.
        """
        listener = listener or Listener()
        config = recipes.settled(config)
        recipes.check(config)
        source = tables.checked(config.data, test_rows=test_rows)
        numeric = source.classes is None if isinstance(source, Dataset) else source.numeric
        config, assumed = recipes.settled_for(config, numeric, str(source.label or "target"))
        if assumed:
            listener.say(assumed)
        resolved = recipes.resolved(config)
        if not isinstance(source, tables.Large):
            recipes.starts_of(config, len(source.feature_names))
            recipes.feature_map_of(config, len(source.feature_names))
        opened = RunFolder.open(config, name=name, command=command, fresh=False, listener=listener)
        with blas_threads(config.model.threads), opened as folder:
            folder.facts |= {
                "id": _run_id(folder, listener, config_digest(resolved)),
                "seeds": {"split": resolved["data"]["split_seed"], "learn": resolved["learn"]["seed"]},
                "digests": {"config": config_digest(resolved)},
            }
            with Workers(config.cluster, listener, performance) as workers:
                yield cls(config, name, resolved, source, folder, listener, workers, fresh, outdated)

    def do(self, stage: Stage) -> dict[str, Any]:
        """Run a stage, or return its stored result if it was done before."""
        self.folder.fresh = stage.name in self.fresh
        inputs, outputs = stage.inputs(self), stage.outputs(self)
        return self.folder.stage(stage.name, inputs=inputs, outputs=outputs, work=lambda: self._work(stage))

    def is_current(self, *stages: Stage) -> bool:
        """Whether these stages, in order, were done before with the same inputs."""
        for stage in stages:
            self.folder.fresh = stage.name in self.fresh
            if not self.folder.reuse(stage.name, stage.inputs(self), stage.outputs(self)):
                return False
        return True

    def keep_previous(self, outputs: Sequence[str], *stages: Stage) -> None:
        """Before these stages replace the results of other settings or data: move those to `previous/`, and say so."""
        if not self.folder.replace or self.is_current(*stages) or not (self.folder.path / outputs[0]).exists():
            return
        if self._has_inputs(*stages):  # what is missing or damaged is computed again, and is the same
            return
        path, earlier = self.folder.path, self.folder.known.get("id", "an earlier run")
        changes = changed_keys(path / CONFIG, self.resolved) or ["the data, or the version of kme-dist"]
        self.folder.keep(PREVIOUS, outputs)
        self.listener.say(
            f"{path} has the model of {earlier}, which is replaced; changed: {', '.join(changes)}; "
            f"the earlier model is kept in {path / PREVIOUS}"
        )

    def _has_inputs(self, *stages: Stage) -> bool:
        """Whether the first of these stages that is not current was done before with the same inputs."""
        stage = next(stage for stage in stages if not self.is_current(stage))
        return self.folder.has_inputs(stage.name, stage.inputs(self))

    def _work(self, stage: Stage) -> dict[str, Any]:
        """The work of a stage, reported to the dashboard and to log.jsonl."""
        cluster = self.executor if stage.over_workers else None
        self.listener.begin(stage.name)
        with self.reporting(cluster, stage.name) as self.telemetry:
            result = stage.work(self)
        self.listener.end(stage.name)
        return result

    def reporting(self, cluster: Any, stage: str) -> contextlib.AbstractContextManager[Telemetry]:
        """Reports of a stage of this run to the scheduler and to log.jsonl."""
        return telemetry(
            cluster,
            run=self.id,
            stage=stage,
            pipeline=self.name,
            scheduled=self.listener.scheduled,
            log=self.folder.path / "log.jsonl",
        )

    def confirm(self, stages: Sequence[Stage]) -> None:
        """Tell the cluster of a schedule that the stages that were up to date have succeeded too: an alert waits for
        that. A cluster that does not answer makes nothing fail."""
        known = [stage.name for stage in stages if stage.over_workers and stage.name not in self.folder.done_now]
        if not known or not self.listener.scheduled or self.config.cluster.kind != "address":
            return
        with contextlib.suppress(KMEError):
            executor = self.executor
            for name in known:
                with self.reporting(executor, name):
                    pass

    @property
    def id(self) -> str:
        """Names this run on the dashboard, in metrics, logs and spans, with the name of the config as its label."""
        return str(self.folder.facts["id"])

    def result(self, stage: str) -> dict[str, Any]:
        found: dict[str, Any] = self.folder.stages[stage]["result"]
        return found

    def inputs_digest(self, stage: str) -> str:
        """Identifies the result of a stage, as an input of the next one."""
        return str(self.folder.stages[stage]["inputs"])

    def say(self, line: str) -> None:
        """Print a line, here and on the dashboard."""
        self.listener.say(line)
        self.telemetry.say(line)

    @property
    def executor(self) -> Executor:
        return self.workers.executor

    @cached_property
    def data(self) -> Dataset:
        """The rows, after the stage `ingest`."""
        own = self.folder.path / "data.zarr"  # also where the folder was copied or moved since
        return open_dataset(own if own.exists() else self.result("ingest")["path"])

    @cached_property
    def training_data(self) -> Dataset:
        """The rows with the weights of their classes, for learning and fitting a kernel."""
        return with_class_weight(self.data, self.config.model.class_weight)

    @cached_property
    def starts(self) -> list[recipes.StartingPoint]:
        return recipes.starts_of(self.config, self.data.features)

    @cached_property
    def sample(self) -> tables.Tables:
        """Rows to draw, and to watch during learning."""
        return tables.sample(self.data, ROWS_TO_DRAW)

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """Shape of a row that is an image: from the data set, else from the config."""
        return self.data.sample_shape if len(self.data.sample_shape) > 1 else self.config.data.image_shape


def _run_id(folder: RunFolder, listener: Listener, config: str) -> str:
    """That of the job; without one a new id, or that of an earlier call which this one resumes."""
    known = folder.known
    if listener.run_id:
        return listener.run_id
    if "id" in known and known.get("status") != "succeeded" and known.get("digests", {}).get("config") == config:
        return str(known["id"])
    return new_id(folder.facts["name"])


def changed_keys(file: Path, resolved: Mapping[str, Any], most: int = 3) -> list[str]:
    """Keys that results depend on and that the config.yaml of an earlier run has with other values, for people."""
    try:
        before, now = (parse_yaml(text, file.name) for text in (file.read_text(encoding="utf-8"), to_yaml(resolved)))
    except (OSError, ValueError):
        return []
    if not isinstance(before, dict):
        return []
    found = [
        f"{section}.{key} (was {before[section].get(key)}, is {value})"
        for section, keys in now.items()
        if section not in ("output", "cluster") and isinstance(before.get(section), dict)
        for key, value in keys.items()
        if before[section].get(key) != value
    ]
    return [*found[:most], *([f"{len(found) - most} more"] if len(found) > most else [])]


def config_digest(resolved: Mapping[str, Any]) -> str:
    """Digest of everything that results depend on."""
    return digest({**resolved, "output": None, "cluster": None})
