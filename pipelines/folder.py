"""The run folder: its lease, run.json, and the stages that are done.

    with RunFolder.open(config, name="digits", command="kme-dist run ...") as folder:
        data = folder.stage("ingest", inputs={...}, outputs=["data.zarr"], work=make_the_data_set)
        learned = folder.stage("learn", inputs={"data": data["digest"], ...}, outputs=["learned.zarr"], work=learn)

`stage` calls `work` and stores its result (plain data) in run.json, with the digest of `inputs`. If an earlier call has
finished the same stage with the same inputs and its outputs still exist and are whole, the stored result is returned.
So a second run, or a run after a kill, does only what is missing or damaged.

One process at a time writes a folder. The status in `run.json` is "succeeded" only after everything else is stored.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from kme_dist.config import Config, dump_yaml
from kme_dist.data.leases import writer_lease
from kme_dist.data.places import Place
from kme_dist.data.seals import read_sealed, seal, unseal
from kme_dist.errors import ConfigError, CorruptError, DataError, KMEError
from kme_dist.pipelines.whole import check_stored, file_digest, verify_run

RUN_FORMAT = "kme-dist run 1"
CONFIG = "config.yaml"  # of a run folder: all settings, also those that have their defaults
_MARKS = (b'"kme-dist run', b'"versions"', b'"kme-dist"', b'"stages"', b'"stages_seconds"')  # a bit damages one of them
PACKAGES = ("kme-dist", "numpy", "scipy", "scikit-learn", "dask", "distributed", "zarr", "matplotlib")


@dataclass(frozen=True)
class Listener:
    """Callbacks for the progress of a run: name of a starting point, learning step, units done, text line, and the
    beginning and the end of a stage. `run_id` is the id of the job that runs it, empty without one; `scheduled`: a
    schedule has started that job."""

    start: Callable[[str], None] = lambda name: None
    step: Callable[[dict[str, Any]], None] = lambda record: None
    progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None
    say: Callable[[str], None] = lambda line: None
    begin: Callable[[str], None] = lambda stage: None
    end: Callable[[str], None] = lambda stage: None
    run_id: str = ""
    scheduled: bool = False


@dataclass
class RunFolder:
    """A run folder whose lease this process holds."""

    path: Path
    facts: dict[str, Any]
    known: dict[str, Any]  # run.json before this call
    earlier: dict[str, Any]  # the stages that earlier calls have finished
    fresh: bool = False
    replace: bool = True
    listener: Listener = field(default_factory=Listener)
    done_now: list[str] = field(default_factory=list)  # stages executed by this call
    begun: bool = False  # whether this call has written anything
    _whole: set[str] = field(default_factory=set)  # outputs of earlier calls that were read and are not damaged

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        config: Config,
        *,
        name: str,
        command: str = "",
        fresh: bool = False,
        listener: Listener | None = None,
    ) -> Iterator[RunFolder]:
        """Open the folder of `config` with its lease; on exit run.json records how the block ended."""
        path = folder_of(config, name)
        place = Place.of(_made(path))
        with writer_lease(place):
            known = _known(path, fresh)
            stages = known.get("stages", {}) if known.get("versions", {}).get("kme-dist") == _version() else {}
            facts = {
                "format": RUN_FORMAT,
                "name": name,
                "status": "running",
                "command": command,
                "started": now(),
                "host": platform.node(),
                "versions": {"python": platform.python_version()} | {p: metadata.version(p) for p in PACKAGES},
                "stages": {},
                "files": dict(known.get("files", {})),
            }
            folder = cls(path, facts, known, stages, fresh, config.output.overwrite, listener or Listener())
            began = time.monotonic()
            try:
                yield folder
            except BaseException as error:
                with contextlib.suppress(KMEError, OSError):  # the first error is the one to report
                    if folder.begun:
                        folder.write(
                            status="failed" if isinstance(error, Exception) else "interrupted",
                            error=f"{type(error).__name__}: {error}",
                            ended=now(),
                        )
                raise
            if folder.begun or known.get("status", "succeeded") != "succeeded":
                folder.write(status="succeeded", stage=None, ended=now(), seconds=round(time.monotonic() - began, 3))

    @property
    def place(self) -> Place:
        return Place.of(self.path)

    @property
    def stages(self) -> dict[str, Any]:
        found: dict[str, Any] = self.facts["stages"]
        return found

    def write(self, **facts: Any) -> None:
        self.begun = True
        self.facts |= facts
        # Stages that this call has not reached stay on record, so that a kill does not lose finished work.
        stages = {**self.earlier, **self.stages}
        seconds = {name: stage["seconds"] for name, stage in self.stages.items()}
        record = json.loads(to_json({**self.facts, "stages_seconds": seconds, "stages": stages}))
        self.place.write("run.json", to_json(seal(record)))

    def is_current(self, name: str, inputs: Mapping[str, Any], outputs: Sequence[str]) -> bool:
        """Whether an earlier call has done this stage with the same inputs, and its outputs still exist and are
        whole. Those that are not are removed, with the first output, so that the stage is done again also by a later
        call."""
        if not self.has_inputs(name, inputs):
            return False
        damaged = [output for output in outputs if self._is_damaged(output)]
        if damaged:
            self.remove(outputs[0], *damaged)
        return all((self.path / output).exists() for output in outputs)

    def has_inputs(self, name: str, inputs: Mapping[str, Any]) -> bool:
        """Whether an earlier call has done this stage with the same inputs."""
        before = None if self.fresh else self.earlier.get(name)
        return before is not None and bool(before["inputs"] == digest(inputs))

    def _is_damaged(self, output: str) -> bool:
        if output in self._whole or not (self.path / output).exists():
            return False
        try:
            check_stored(self.path / output, self.files.get(output), rows=False)
        except CorruptError as error:
            self.listener.say(f"{output} is damaged and is computed again: {error}")
            return True
        self._whole.add(output)
        return False

    def store(self, name: str, content: bytes) -> None:
        """Write a file of the run folder, with its digest on record."""
        if self.files.pop(name, None) is not None:
            self.write()  # a kill after the next line must not leave the digest of the older file
        self.place.write(name, content)
        self.files[name] = file_digest(content)

    def read(self, name: str) -> Any:
        """The content of a JSON file, which must match the digest on record."""
        try:
            check_stored(self.path / name, self.files.get(name))
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (CorruptError, ValueError) as error:
            raise CorruptError(f"{self.path / name} is damaged ({error}); start again with --fresh") from None

    @property
    def files(self) -> dict[str, str]:
        """The digests of files; folders have theirs inside."""
        found: dict[str, str] = self.facts["files"]
        return found

    def reuse(self, name: str, inputs: Mapping[str, Any], outputs: Sequence[str]) -> bool:
        """Keep the result of an earlier call if it is up to date."""
        if not self.is_current(name, inputs, outputs):
            return False
        self.stages[name] = self.earlier[name]
        return True

    def stage(
        self,
        name: str,
        *,
        inputs: Mapping[str, Any],
        outputs: Sequence[str],
        work: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """The result of `work`, from this call or from an earlier one with the same inputs."""
        result: dict[str, Any]
        if self.reuse(name, inputs, outputs):
            result = self.stages[name]["result"]
            return result
        before = self.earlier.get(name)
        other = before is not None and before["inputs"] != digest(inputs)
        if other and not self.replace and not self.fresh:
            raise ConfigError(
                f"{self.path} has results of other settings or data and output.overwrite is false; "
                f"choose another output.folder, or use --fresh to replace them"
            )
        self.earlier.pop(name, None)
        self.write(stage=name, status="running")
        began = time.monotonic()
        result = json.loads(to_json(work()))
        seconds = round(time.monotonic() - began, 3)
        self.stages[name] = {"inputs": digest(inputs), "seconds": seconds, "outputs": [*outputs], "result": result}
        self.done_now.append(name)
        self.write()
        return result

    def keep(self, folder: str, outputs: Sequence[str]) -> None:
        """Move outputs of an earlier call to a folder inside this one, in place of what is there."""
        self.remove(folder)
        (self.path / folder).mkdir()
        for output in outputs:
            if (self.path / output).exists():
                os.replace(self.path / output, self.path / folder / output)
            self._forget(output)

    def remove(self, *outputs: str) -> None:
        """Remove the outputs of an earlier call with these names."""
        for output in outputs:
            path = self.path / output
            self._forget(output)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def _forget(self, output: str) -> None:
        for name in [name for name in self.files if f"{name}/".startswith(f"{output}/")]:
            del self.files[name]


class MetricsFile:
    """metrics.jsonl: one line per step; a resumed run first removes the lines of steps that it repeats."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._resumed: set[tuple[Any, Any]] = set()
        self.written = 0

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, record: Mapping[str, Any]) -> None:
        if _curve(record) not in self._resumed:
            self._resumed.add(_curve(record))
            self._drop_repeated(record)
        if self._file is None:
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._file.write(_line(record))
        self.written += 1

    def read(self) -> list[dict[str, Any]]:
        """All complete lines; a kill may leave an incomplete last line, a disk a damaged one."""
        if not self._path.exists():
            return []
        found = []
        for line in self._path.read_bytes().split(b"\n"):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = unseal(json.loads(line.decode()))
                if record is not None:
                    found.append({**record, "step": int(record["step"])})
        return found

    @property
    def steps(self) -> int:
        """The total number of steps of all starting points and objectives."""
        last: dict[tuple[Any, Any], int] = {}
        for line in self.read():
            last[_curve(line)] = max(line["step"], last.get(_curve(line), 0))
        return sum(last.values())

    def _drop_repeated(self, record: Mapping[str, Any]) -> None:
        self._close()
        kept = [line for line in self.read() if _curve(line) != _curve(record) or line["step"] < record["step"]]
        aside = self._path.with_suffix(".partial")
        aside.write_text("".join(map(_line, kept)), encoding="utf-8")
        os.replace(aside, self._path)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(seal(json.loads(json.dumps(record, default=_plain)))) + "\n"


def _curve(record: Mapping[str, Any]) -> tuple[Any, Any]:
    """The learning curve of a step: its starting point and its objective."""
    return record.get("start"), record.get("phase")


def folder_of(config: Config, name: str) -> Path:
    if "://" in str(config.output.folder):
        raise ConfigError(f"output.folder {config.output.folder} is not local; a run folder must be on a local disk")
    return Path(config.output.folder or f"runs/{name}")


def recorded_stages(folder: Path) -> dict[str, Any]:
    """The finished stages of a run folder; empty where there is no run, or a record that is damaged."""
    return dict((recorded_run(folder) or {}).get("stages", {}))


def recorded_run(folder: Path) -> dict[str, Any] | None:
    """run.json; None where there is none that is whole."""
    try:
        return read_sealed(folder / "run.json", "run it again")
    except CorruptError:
        return None


def describe_run(folder: Path, *, verify: bool = False) -> dict[str, Any]:
    """The description of a run folder for `kme-dist inspect`; with `verify` every stored byte is read and checked."""
    facts = read_sealed(folder / "run.json", "compute the results again with --fresh")
    if facts is None or facts.get("format") != RUN_FORMAT:
        raise DataError(f"{folder / 'run.json'} was not written by kme-dist")
    if verify:
        verify_run(folder, facts)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {"path": str(folder), "bytes": sum(path.stat().st_size for path in files), **facts}


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(f"output.folder {folder} cannot be created ({error.strerror}); choose another") from None
    return folder


def _known(folder: Path, fresh: bool) -> dict[str, Any]:
    """run.json of an earlier call, empty if there is none, or if it is damaged and everything is computed again; an
    error for a folder with other content."""
    content, known = b"", None
    try:
        content = (folder / "run.json").read_bytes()
        known = json.loads(content.decode())
    except FileNotFoundError:
        if any(folder.iterdir()):
            raise ConfigError(
                f"{folder} is not empty and has no run.json, so it is not a run folder; "
                f"choose another output.folder, or move its content away"
            ) from None
        return {}
    except ValueError:
        pass
    whole = unseal(known)
    if whole is None and sum(mark in content for mark in _MARKS) > 1:
        if fresh:
            return {}
        raise CorruptError(
            f"{folder / 'run.json'} does not match its digest, so it was damaged or edited; compute the results again "
            "with --fresh, or choose another output.folder"
        )
    if whole is None or whole.get("format") != RUN_FORMAT:
        raise ConfigError(f"{folder / 'run.json'} was not written by this kind of run; choose another output.folder")
    return whole


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, default=_plain) + "\n").encode()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def to_yaml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """One key per line, lists and mappings in one line each."""
    lines = []
    for section, keys in sections.items():
        lines.append(f"{section}:")
        for key, value in keys.items():
            text = dump_yaml(value, default_flow_style=True, width=10**9)
            lines.append(f"  {key}: {text.splitlines()[0]}")
    return "\n".join(lines) + "\n"


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=_plain).encode()).hexdigest()


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _version() -> str:
    return metadata.version("kme-dist")
