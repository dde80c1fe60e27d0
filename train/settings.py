"""The sections of the config `train` and `gate`, and what changing a setting means for an existing training.

A field of section `train` without a kind identifies the training: changing it starts a new one.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from shardmill.registry import OneOf
from shardmill.section import Section, SettingKind

EXECUTION = SettingKind("execution setting: it may differ between two attempts at one training, and starts no new run")
DURATION = SettingKind("duration setting: a longer training continues a shorter one")
DEFAULTED = SettingKind("changing it starts a new run; at its default it is not part of a training's identity")
RESUMABLE = SettingKind("resumable setting: checkpoints do not depend on it, so `--allow-change` may change it")


def _step_range(text: str) -> str:
    match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text)
    if text and not (match and int(match[1]) < int(match[2])):
        raise ValueError("FIRST:STOP with FIRST < STOP, such as 10:15 for the steps 10 to 14")
    return text


# Schemes of MLflow's client that name no host: databases, whose driver may follow a `+`, and Databricks.
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_DATABRICKS = ("databricks", "databricks-uc")


def _server_uri(text: str) -> str:
    parts = urlsplit(text)
    is_database = parts.scheme.partition("+")[0] in _DATABASES and (parts.hostname or parts.path.strip("/"))
    is_server = parts.scheme in ("http", "https") and parts.hostname
    if text and not (is_server or is_database or text.partition("://")[0] in _DATABRICKS):
        raise ValueError("an address that MLflow takes, such as http://HOST:5000 or sqlite:////FOLDER/mlflow.db")
    if parts.username or parts.password:
        variables = "MLFLOW_TRACKING_URI" if is_database else "MLFLOW_TRACKING_USERNAME and _PASSWORD, or _TOKEN"
        raise ValueError(f"no user in it: set {variables} in the environment")
    return text


def _host(text: str) -> str:
    if ":" in text or "/" in text:
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            raise ValueError("a host's name or address alone; the port has its own key") from None
    return text


def _model_name(text: str) -> str:
    if text and not re.fullmatch(r"[^/:'\"\s][^/:'\"]*", text):
        raise ValueError("a name without '/', ':' and quotes, such as photos")
    return text


def _model_alias(text: str) -> str:
    # Letters, digits, `_` and `-`; MLflow has other meanings for two forms.
    if not re.fullmatch(r"[\w-]+", text) or re.fullmatch(r"latest|v\d+", text, re.IGNORECASE):
        raise ValueError("letters, digits, '_' and '-', such as champion; not latest, not v1")
    return text


StepRange = Annotated[str, AfterValidator(_step_range)]
"""`FIRST:STOP`, counted from 0; STOP is not among them. Empty for none."""
ServerUri = Annotated[str, AfterValidator(_server_uri)]
"""Where MLflow's runs and models are: a server, a database or Databricks; empty for none."""
ModelName = Annotated[str, AfterValidator(_model_name)]
"""A registered model of MLflow, or empty for none."""
ModelAlias = Annotated[str, AfterValidator(_model_alias)]
"""An alias of MLflow's model registry."""

Host = Annotated[str, AfterValidator(_host)]
"""A host's name or address, or empty for none."""


def steps_of(text: str) -> range:
    """Return the steps of a `StepRange`."""
    first, _, stop = text.partition(":")
    return range(int(first), int(stop)) if text else range(0)


class CacheConfig(Section):
    """Where ranks keep chunks of a remote dataset."""

    dir: Annotated[str, EXECUTION] = ""
    """Folder on a local disk of each host, shared by all ranks there; empty: no cache. Not used for a local dataset."""
    limit_bytes: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Bytes that the folder may take on each host, at least one shuffle window; 0: half of what its disk has free."""


class CheckpointConfig(Section):
    """Which checkpoints are kept; `checkpoint_every_steps` sets when they are written."""

    keep: Annotated[int, EXECUTION] = Field(default=2, ge=2)
    """Number of newest checkpoints to keep."""


class RegistryConfig(Section):
    """The model registry in which a promotion registers the current model."""

    name: ModelName = ""
    """Name of the registered model in MLflow's registry; empty: nothing is registered."""
    alias: ModelAlias = "champion"
    """Alias that names the current model: `models:/NAME@ALIAS`."""
    uri: ServerUri = ""
    """The MLflow server, for example `http://HOST:5000`, or a database, `sqlite:////FOLDER/mlflow.db`; empty:
    MLFLOW_TRACKING_URI."""


class GateConfig(Section):
    """Conditions under which a new model becomes the current one."""

    min_accuracy: float = Field(default=0.0, ge=0, le=1)
    """Minimum top-1 accuracy on the evaluation split, for labels of one class per image."""
    metric_limit: float = Field(default=0.0, ge=0)
    """Limit for the metric of the kind of labels: minimum accuracy, minimum mean average precision (several classes per
    image), or maximum mean absolute error (numbers). 0: no limit."""
    max_regression: float = Field(default=0.01, ge=0, le=1)
    """How much worse that metric may be than the current model's on the same split; for an error, relative to it."""
    registry: RegistryConfig = RegistryConfig()
    """Registration of the current model (docs/promotion.md)."""


class LogConfig(Section):
    """Where losses and metrics are sent, and which steps are profiled."""

    tensorboard: Annotated[bool, EXECUTION] = True
    """Write scalars for TensorBoard (`tensorboard --logdir WORKDIR/runs`)."""
    mlflow_uri: Annotated[ServerUri, EXECUTION] = ""
    """Send the same scalars to this MLflow server, for example `http://HOST:5000`; if it is unreachable, a warning is
    logged."""
    trackers: Annotated[tuple[Annotated[str, OneOf("train.reporting.trackers:TRACKERS")], ...], EXECUTION] = ()
    """Additional trackers for the same scalars: names, or your own classes as `package.module:Class`."""
    profile_steps: Annotated[StepRange, EXECUTION] = ""
    """Profile every rank in the steps FIRST:STOP, for example `10:15` (without STOP; counted from 0 over all epochs),
    and write to `profiles` in the training's folder. These steps are slower. Empty: none."""


class MemoryConfig(Section):
    """How much memory a rank may use for a step, and how it may save memory; see also `accumulation_steps`."""

    budget_bytes: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Memory of the GPU, or of the host, that a rank may use; 0: all of it, shared equally by the host's ranks."""
    activation_checkpointing: Annotated[Literal["off", "on", "auto"], EXECUTION] = "auto"
    """Keep only the inputs of blocks of layers for the backward pass and recompute the rest, which takes less memory
    and more time. `auto`: only if a step does not fit into memory otherwise."""


class MeshConfig(Section):
    """Numbers of ranks along the axes of the mesh; their product is `train.num_workers`."""

    data: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Copies of the model, which exchange gradients; 0: as many as the other axes leave."""
    fsdp: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Ranks that share the weights of a copy, each with rows of its own; 0: chosen by the strategy."""
    tensor: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Ranks that share each layer; 0: chosen by the strategy."""
    pipeline: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Ranks that compute one stage of the model each; 0: chosen by the strategy."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size as it was set; 0 if it is left open."""
        return {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor, "pipeline": self.pipeline}


class NonFiniteConfig(Section):
    """What happens to a batch whose loss or gradient is not finite."""

    action: Annotated[Literal["stop", "skip"], EXECUTION] = "stop"
    """`stop`: end the training before the update; `skip`: skip the update and count it."""
    max_skipped_in_a_row: Annotated[int, EXECUTION] = Field(default=3, ge=1)
    """With `action = "skip"`: stop the training after more than this many skipped batches in a row."""


class ReadingConfig(Section):
    """Threads and memory of each rank for its input."""

    threads: Annotated[int, EXECUTION] = Field(default=2, ge=1)
    """Threads in each rank that read, verify, decode and augment."""
    prefetch_bytes: Annotated[int, EXECUTION] = Field(default=64_000_000, ge=1)
    """Maximum size of the queue of decoded batches in each rank."""
    window_budget_bytes: int = Field(default=256_000_000, ge=1)
    """Memory for the shuffle windows of one rank, which decides `window_chunks`. The memory that each rank needs is
    checked before anything starts."""
    window_chunks: int = Field(default=0, ge=0)
    """Chunks in the shuffle window of a stream. 0: as many as fit `window_budget_bytes`, at least one; decided when a
    training begins (up to 8 ranks as for one rank with all streams, so that it is the same) and kept when it is resumed
    with another number of ranks."""


class WatchConfig(Section):
    """Time limits for ranks: to start, in a step, and to stop."""

    silent_seconds: Annotated[float, EXECUTION] = Field(default=55.0, gt=0)
    """A rank counts as lost, and the job ends, after this time without heartbeats. The same applies to this time
    without progress in a repeated activity (a step, reading a batch), if it is also 10 times the longest so far;
    otherwise a warning names the rank."""
    progress_timeout_seconds: Annotated[float, EXECUTION] = Field(default=600.0, gt=0)
    """The limit for other activities; before its first step a rank gets `start_timeout_seconds` more. If this limit is
    lower than `silent_seconds`, or than the time that a store may take for a batch, it applies to these, too."""
    start_timeout_seconds: Annotated[float, EXECUTION] = Field(default=300.0, gt=0)
    """All ranks must have started within this time."""
    stop_timeout_seconds: Annotated[float, EXECUTION] = Field(default=25.0, gt=0)
    """After SIGTERM, ranks are killed if they have not finished their step and written a checkpoint within this time.
    Keep it below the scheduler's own limit (30 s on Kubernetes)."""
