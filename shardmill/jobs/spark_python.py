"""Avoids work that Spark's Python workers repeat for each task."""

from __future__ import annotations

import re
import sys
from zipimport import zipimporter

_OWN_ARCHIVE = re.compile(r"/(pyspark\.zip|py4j-[^/]*\.zip|spark-core_[^/]*\.jar)$")


def keep_zip_directories() -> None:
    """Let the next task of this process start without reading the directories of Spark's own archives again.

    For each task pyspark/worker_util.py calls `importlib.invalidate_caches`, and each cached importer of a ZIP then
    reads the archive's whole directory, in Python. `pyspark.zip` has 1,200 files and an importer for each of its
    packages, and Spark's JAR, which is on the path too, has 5,000 files: 0.15 s of CPU for each task. An importer that
    is not cached is made anew, from a directory that was read before. Archives of users (`--py-files`) are read again:
    those may change.
    """
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimporter) and _OWN_ARCHIVE.search(finder.archive):
            sys.path_importer_cache.pop(path, None)
