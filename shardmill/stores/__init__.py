"""Storage by URI scheme: a new one is a module with a class that is a `Store`, and an entry here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from shardmill.errors import UsageError
from shardmill.registry import Entry, ExtensionPoint, Registry
from shardmill.storage import Store

STORES: Registry[Callable[[str], Store]] = Registry(
    "storage scheme",
    {
        "file": Entry("shardmill.stores.local:LocalStore", "a local or mounted folder"),
        "s3": Entry(
            "shardmill.stores.s3:S3Store", "a prefix of an S3 bucket", extra="s3", packages=("botocore", "tenacity")
        ),
        "gs": Entry(
            "shardmill.stores.object_stores:GcsStore",
            "a prefix of a Google Cloud Storage bucket",
            extra="gcs",
            packages=("obstore", "tenacity"),
        ),
        "az": Entry(
            "shardmill.stores.object_stores:AzureStore",
            "a prefix of an Azure Blob Storage container (also abfs://)",
            extra="azure",
            packages=("obstore", "tenacity"),
        ),
        "hdfs": Entry(
            "shardmill.stores.hdfs:HdfsStore", "a folder of an HDFS", extra="hdfs", packages=("hdfs_native",)
        ),
        "http": Entry(
            "shardmill.stores.http:HttpStore",
            "a folder of a web server (also https://), read-only",
            extra="http",
            packages=("urllib3", "tenacity"),
        ),
        "fsspec": Entry(
            "shardmill.stores.any_fsspec:FsspecStore",
            "any other scheme that fsspec supports, read-only",
            extra="fsspec",
            packages=("fsspec",),
        ),
    },
    point=ExtensionPoint("where files are", "shardmill.storage:Store"),
)

ANY_OTHER = "fsspec"
"""The entry for schemes that have none of their own."""
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
"""Names that other tools have for a scheme -> its name here. A location has one spelling in every record."""
_SHARED = {"https": "http"}
"""Schemes that are places of their own and have the entry of another."""


def open_store(uri: str | Path) -> Store:
    """The store rooted at a local path or a URI. Raises UsageError for an unknown scheme or one that is not installed.

    A scheme without an entry is fsspec's to know: such a store can be read.

    Nothing is read or created yet.
    """
    text = checked_uri(uri)
    return STORES[scheme_of(text)](text)


def checked_uri(uri: str | Path) -> str:
    """A path or URI in the spelling that records have of it. Raises UsageError for an unknown scheme."""
    text = str(uri)
    scheme, _, path = text.partition(":/")
    if scheme in _ALIASES:
        scheme = _ALIASES[scheme]
        text = f"{scheme}:/{path}"
    if scheme in STORES and scheme != "file" and not path.startswith("/"):
        # Hadoop's tools print it so; it would be a local folder of that name. Without a host it is the default HDFS.
        meant = f"/{path}" if scheme == "hdfs" else path
        raise UsageError(f"no storage for {text!r}", "expected two slashes", f"did you mean {scheme}://{meant}?")
    scheme = scheme_of(text)
    if problem := STORES.problem_with(scheme):
        raise UsageError(f"no storage for {scheme}:// (given {text!r})", f"{problem}; a local path needs no scheme")
    return text


def scheme_of(uri: str) -> str:
    """The name in `STORES` that a URI asks for; a plain path is `file`."""
    scheme = uri.split("://", 1)[0] if "://" in uri else "file"
    scheme = (_ALIASES | _SHARED).get(scheme, scheme)
    if scheme in STORES:
        return scheme
    return ANY_OTHER if _is_fsspecs(scheme) else scheme


def _is_fsspecs(scheme: str) -> bool:
    """Whether fsspec is installed and has heard of the scheme; the package for it may be missing all the same."""
    if importlib.util.find_spec("fsspec") is None:
        return False
    from fsspec.registry import known_implementations, registry

    return scheme in known_implementations or scheme in registry
