"""Tells Airflow, by the entry point `apache_airflow_provider`, what this package has for it; imports nothing, since
every command of Airflow calls it.
"""

from __future__ import annotations

from typing import Any

_NAME = "shardmill"


def get_provider_info() -> dict[str, Any]:
    """The provider, after `airflow/provider_info.schema.json`; Airflow lists it by the distribution's name."""
    modules = {"operators": ("operators", "predictions"), "hooks": ("spark_hook",), "triggers": ("triggers",)}
    return {
        "package-name": _NAME,
        "name": _NAME,
        "description": "Images to committed training shards, and exact, resumable training on them.",
        "integrations": [{"integration-name": _NAME, "tags": ["software"]}],
        **{
            kind: [{"integration-name": _NAME, "python-modules": [f"airflow_dags.{each}" for each in names]}]
            for kind, names in modules.items()
        },
        "extra-links": [f"airflow_dags.operators.{link}" for link in ("ReportLink", "MlflowLink")],
    }
