"""Settings that are text in a certain form, and their parsers."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator


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
