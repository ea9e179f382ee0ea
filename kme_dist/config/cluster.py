"""The section `cluster` of the configuration, and what all sections have in common; see `kme_dist.config`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

NULL_KEYS = frozenset({"scaling", "threads"})  # keys for which null differs from absent
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """Strict: no silent conversion of types, no unknown key, no change after loading."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    def given(self) -> set[str]:
        """The keys that are set: null means the same as an absent key, except for those in NULL_KEYS."""
        return {key for key in self.model_fields_set if key in NULL_KEYS or getattr(self, key) is not None}


class TlsConfig(Section):
    """Files for an encrypted connection to the scheduler."""

    authority: str = Field(min_length=1, description="certificates of the authority (PEM)")
    certificate: str = Field(min_length=1, description="certificate of this client (PEM)")
    key: str = Field(min_length=1, description="private key of this client (PEM)")


class ClusterConfig(Section):
    """Which workers to use. They affect speed, never results."""

    kind: Literal["serial", "local", "local-cuda", "address", "slurm", "kubernetes", "gateway"] = Field(
        default="local",
        description="serial (this process), local (worker processes on this machine), local-cuda (a worker for each "
        "GPU of this machine), address (a running scheduler), slurm, kubernetes or gateway (started there, closed "
        "after the command)",
    )
    workers: Annotated[int, Field(gt=0)] | None = Field(
        default=None, description="number of worker processes; null: one per core or GPU on this machine, 1 elsewhere"
    )
    memory: str | None = Field(
        default=None,
        min_length=1,
        description="memory limit of one worker, e.g. 2GiB; null: an equal share of the machine's memory",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        description="address of the scheduler, e.g. tls://host:8786, or of the gateway, e.g. https://host",
    )
    tls: TlsConfig | None = Field(default=None, description="files for an encrypted connection")
    insecure: bool = Field(
        default=False,
        description="whether to allow a scheduler on another machine without encryption: anyone who can reach its "
        "port can run code",
    )
    gpus: Annotated[int, Field(ge=0)] = Field(
        default=0, description="GPUs per worker of slurm or kubernetes; with them tasks run on the GPU"
    )
    device_memory: str | Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="device memory of a worker with a GPU, e.g. 12GiB or 0.8 of the device; local-cuda moves results "
        "above it to the host",
    )
    memory_pool: str | None = Field(
        default=None, min_length=1, description="local-cuda: size of the device memory pool, e.g. 10GiB"
    )
    queue: str | None = Field(default=None, min_length=1, description="slurm: partition of the jobs")
    account: str | None = Field(default=None, min_length=1, description="slurm: account of the jobs")
    walltime: Annotated[str, Field(pattern=r"^(\d+-)?\d{1,3}:\d{2}(:\d{2})?$")] = Field(
        default="01:00:00", description="slurm: time limit of a job, e.g. 02:00:00"
    )
    directives: list[str] = Field(default=[], description="slurm: additional #SBATCH lines, e.g. [--constraint=a100]")
    prologue: list[str] = Field(
        default=[], description="slurm: shell lines before the worker, e.g. [source /opt/kme/bin/activate]"
    )
    image: str | None = Field(default=None, min_length=1, description="kubernetes: container image with kme-dist")
    namespace: str | None = Field(default=None, min_length=1, description="kubernetes: namespace of the cluster")
    options: dict[str, str | int | float | bool] = Field(
        default={}, description="gateway: options of the cluster, as the gateway names them"
    )
    dashboard: bool = Field(default=True, description="whether a local cluster serves the Dask dashboard")
    patience_s: Positive = Field(
        default=60.0,
        description="seconds without progress, and ten times what such tasks took before, after which a worker is "
        "considered hung",
    )
