"""Renamed settings: old configs are rejected with the new name, and stored records keep the old one.

A training is identified by the names and values of its settings. Renaming a setting must not rename the trainings
that exist, so checkpoints and ids of trainings use the names that a setting had first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOVED: Mapping[str, str] = {
    "local_steps": "local_sgd.local_steps",
    "silos": "local_sgd.silos",
    "silo_timeout_seconds": "local_sgd.silo_timeout_seconds",
    "local_devices": "mirrored.num_devices",
    "parameter_servers": "parameter_server.num_servers",
    "powersgd_rank": "torch_ddp.powersgd_rank",
    "attach_host": "attach.host",
    "attach_port": "attach.port",
    "schedule_step_epochs": "schedule_step.every_epochs",
    "schedule_step_factor": "schedule_step.factor",
    "silent_seconds": "watch.silent_seconds",
    "progress_timeout_seconds": "watch.progress_timeout_seconds",
    "start_timeout_seconds": "watch.start_timeout_seconds",
    "stop_timeout_seconds": "watch.stop_timeout_seconds",
    "memory_budget_bytes": "memory.budget_bytes",
    "activation_checkpointing": "memory.activation_checkpointing",
    "window_budget_bytes": "reading.window_budget_bytes",
    "prefetch_bytes": "reading.prefetch_bytes",
    "reader_threads": "reading.threads",
    "on_non_finite": "non_finite.action",
    "max_skipped_in_a_row": "non_finite.max_skipped_in_a_row",
    "keep_checkpoints": "checkpoint.keep",
    "tensorboard": "log.tensorboard",
    "mlflow_uri": "log.mlflow_uri",
    "trackers": "log.trackers",
    "profile_steps": "log.profile_steps",
}
"""Former key of section `train` -> where the setting is now, below it."""

_FORMER = {key: former for former, key in MOVED.items()}
_IN_EVERY_FORMER_RECORD = (
    "augment", "early_stop_epochs", "keep_checkpoints", "momentum", "prefetch_bytes", "weight_decay",
    "window_budget_bytes",
)  # fmt: skip
"""Three are refused today, and a handwritten config file does not name all seven; that of a run does."""


def stored_name(key: str) -> str:
    """Return the stored name of the setting `key`, such as `local_sgd.local_steps`, in checkpoints and training ids."""
    return _FORMER.get(key, key)


def key_of(stored: str) -> str:
    """The setting that they call so."""
    return MOVED.get(stored, stored)


def is_former_record(given: Mapping[str, Any]) -> bool:
    """Whether this is section `train` of the `config.toml` of a run from before settings moved."""
    return given.keys() >= {*_IN_EVERY_FORMER_RECORD}


def read_former_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read such a section with today's keys. Before recipes existed, a section names none: it is the first one."""
    values = {"recipe_version": 1, **{name: value for name, value in record.items() if name not in MOVED}}
    for former in MOVED.keys() & record.keys():
        section, _, name = MOVED[former].partition(".")
        values[section] = {name: record[former], **values.get(section, {})}
    return values
