"""Connects to an MLflow server with MLflow's own client, for a training's curves and for promoted models."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.registry import install_hint
from train.settings.gate import RegistryConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient

EXPERIMENT = "shardmill"
"""Default experiment, unless MLFLOW_EXPERIMENT_NAME is set."""
# The client is configured by variables alone; the user's own go before these.
CLIENT_DEFAULTS = {
    # The client would retry for minutes without reporting the reason.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    # It tells MLflow's makers how it is used.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # With `--json`, stdout is for machines.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def connect(uri: str) -> MlflowClient:
    """`uri`: of the server; empty: what MLFLOW_TRACKING_URI says."""
    for name, value in CLIENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    return MlflowClient(uri or None)


def check_installed(needed_by: str) -> None:
    """Raises UsageError if the extra `mlflow` is not installed."""
    if importlib.util.find_spec("mlflow") is None:
        raise UsageError(f"{needed_by} needs mlflow", "not installed here", install_hint("mlflow"))


def experiment_id(client: MlflowClient) -> str:
    """The experiment of all our runs, created if it does not exist."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    return client.create_experiment(name) if found is None else found.experiment_id


def check_registry(registry: RegistryConfig) -> str:
    """Where a promotion will register the model. Raises UsageError if MLflow's client is missing."""
    if not registry.name:
        return "none"
    check_installed(f"gate.registry.name = {registry.name!r}")
    return f"models:/{registry.name}@{registry.alias} at {registry.uri or 'MLFLOW_TRACKING_URI'}"
