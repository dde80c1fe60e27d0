"""Connects to an MLflow server with MLflow's own client, for a training's curves and for promoted models."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.registry import install_hint
from train.settings import RegistryConfig

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
    # What it does to its database is between our lines.
    "MLFLOW_LOGGING_LEVEL": "WARNING",
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


def check_address(needed_by: str, uri: str = "", *, reads: bool = False) -> None:
    """Raises UsageError if nothing says where MLflow's models are, or, to read them, if there is no such file.

    MLflow's client would make a database in the working directory, and a missing one that it is named.
    """
    given = uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not given:
        raise UsageError(
            f"{needed_by} is in MLflow's model registry, and MLFLOW_TRACKING_URI is not set",
            "expected the address of the registry",
            "export MLFLOW_TRACKING_URI=http://HOST:5000 (a promotion takes gate.registry.uri, too)",
        )
    path = re.sub(r"^(sqlite:///|file://)", "", given).partition("?")[0]
    if reads and "://" not in path and not path.startswith("databricks") and not os.path.exists(path):
        raise UsageError(
            f"MLFLOW_TRACKING_URI={given} names a file that does not exist",
            "expected the address of a registry",
            f"check it: {needed_by} is searched for there",
        )


def experiment_id(client: MlflowClient) -> str:
    """The experiment of all our runs, created if it does not exist."""
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    found = client.get_experiment_by_name(name)
    return client.create_experiment(name) if found is None else found.experiment_id


def check_registry(registry: RegistryConfig) -> str:
    """Where a promotion will register the model. Raises UsageError if MLflow's client or the address is missing."""
    if not registry.name:
        return "none"
    check_installed(f"gate.registry.name = {registry.name!r}")
    check_address(f"models:/{registry.name}", registry.uri)
    return f"models:/{registry.name}@{registry.alias} at {registry.uri or 'MLFLOW_TRACKING_URI'}"
