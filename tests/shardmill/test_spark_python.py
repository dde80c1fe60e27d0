"""Spark's own archives are read once by a Python worker, however many tasks it runs; those of users again."""

from __future__ import annotations

import importlib
import sys
import zipfile
import zipimport

import pytest

from shardmill.jobs.spark_python import keep_zip_directories


@pytest.mark.parametrize(
    ("name", "num_reads"),
    [("pyspark.zip", 0), ("py4j-0.10.9-src.zip", 0), ("spark-core_2.13-4.0.5.jar", 0), ("my-pyspark.zip", 2)],
)
def test_the_next_task_reads_the_directories_of_users_archives_alone(tmp_path, monkeypatch, name, num_reads):
    archive, package = tmp_path / name, f"zipped_{name.partition('.')[0].replace('-', '_')}"
    with zipfile.ZipFile(archive, "w") as file:
        for module in ("__init__", "first", "second"):
            file.writestr(f"{package}/{module}.py", f"NAME = {module!r}")
    monkeypatch.syspath_prepend(str(archive))
    assert importlib.import_module(f"{package}.first").NAME == "first"

    read, directory_of = [], zipimport._read_directory

    def count(path: str):
        read.append(path)
        return directory_of(path)

    monkeypatch.setattr(zipimport, "_read_directory", count)
    keep_zip_directories()
    importlib.invalidate_caches()
    assert read.count(str(archive)) == num_reads
    assert importlib.import_module(f"{package}.second").NAME == "second", "what was not imported before still can be"
    for each in ("", ".first", ".second"):
        sys.modules.pop(package + each)
