"""Loads the whole config tree, from a TOML file or from nothing but a folder of images, a dataset or models."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import NoDataset, UsageError
from shardmill.jobs.config import load_tree
from shardmill.jobs.redact import redacted

if TYPE_CHECKING:
    from pipeline.tree import PipelineTree


def load_pipeline(
    source_or_config: str | None, overrides: tuple[str, ...], workdir: str, *, is_no_dataset: bool = False
) -> PipelineTree:
    """The tree of a TOML file, or of a source of images (a folder, table or archive) and the sections' defaults.

    A committed dataset is refused; `is_no_dataset`: the caller has looked (`is_dataset`).
    Local URIs come back absolute: Spark's executors and the ranks need not share this process's working directory.
    """
    if source_or_config is None or source_or_config.endswith(".toml"):
        tree = _load(source_or_config, overrides)
    else:
        from etl.sources.names import is_pattern
        from etl.sources.recognise import recognise

        kind = recognise(source_or_config)
        if not is_pattern(source_or_config):
            existing_path(source_or_config, "a folder of images, an archive, a table or a .toml file")
        if kind == "folders" and not is_no_dataset and is_dataset(source_or_config):
            raise UsageError(
                f"{source_or_config} is a committed dataset",
                "expected the images that one is built from, or a .toml file",
                f"`shardmill train {source_or_config}` trains on it; `shardmill inspect {source_or_config}` shows it",
            )
        if kind == "folders" and "://" not in source_or_config and not Path(source_or_config).is_dir():
            raise UsageError(
                f"{source_or_config} is neither a source of images nor a .toml file",
                "expected a folder, a table or an archive (docs/sources.md)",
            )
        source = {"uri": source_or_config, "kind": kind}
        below = {"source": source, "dataset": {"uri": f"{workdir}/dataset"}}
        tree = _load(None, overrides, below)
    return _with_absolute_uris(tree, workdir)


def is_dataset(source: str) -> bool:
    """Whether a source is a committed `DATASET` or `DATASET@N`. One file is an archive, a table or an image."""
    from etl.sources.names import is_pattern
    from etl.sources.recognise import is_in_catalog
    from shardmill.dataset.dataset import has_version

    is_other = is_pattern(source) or is_in_catalog(source) or os.path.isfile(source)
    return not is_other and has_version(source)


def load_for_dataset(dataset_or_config: str, overrides: tuple[str, ...], workdir: str) -> PipelineTree:
    """The tree of a TOML file, or of a committed `DATASET` or `DATASET@N` and the sections' defaults."""
    from shardmill.dataset.versions import latest_version, split_version
    from shardmill.stores import open_store

    if dataset_or_config.endswith(".toml"):
        return load_pipeline(dataset_or_config, overrides, workdir)
    if not latest_version(open_store(split_version(dataset_or_config)[0])):
        raise UsageError(
            f"{dataset_or_config} is not a committed dataset",
            "expected DATASET, DATASET@N or a .toml file",
            f"build one from a folder of images with `shardmill etl FOLDER`, then give {workdir}/dataset here",
        )
    below = {"dataset": {"uri": dataset_or_config}}
    return _with_absolute_uris(_load(None, overrides, below), workdir)


def _load(file: str | None, overrides: tuple[str, ...], below: dict[str, dict[str, str]] | None = None) -> PipelineTree:
    # The tree has all sections of all applications: a command's help needs none of them.
    from pipeline.tree import PipelineTree

    return load_tree(PipelineTree, file, overrides, below)


@contextmanager
def after_etl(dataset_or_config: str) -> Iterator[None]:
    """Run code that needs the dataset of a config file, with a hint at `shardmill etl` if there is none."""
    try:
        yield
    except NoDataset as error:
        if not dataset_or_config.endswith(".toml"):
            raise
        fix = f"run `shardmill etl {dataset_or_config}` first, or {error.fix}"
        raise NoDataset(error.what, error.expected, fix) from None


def load_for_models(models_or_config: str, overrides: tuple[str, ...], workdir: str) -> PipelineTree:
    """The tree of a TOML file, or of a models folder or URI (`@N` is ignored) with defaults for everything else."""
    from shardmill.dataset.versions import split_version

    uri, _ = split_version(models_or_config)
    if uri.endswith(".toml"):
        return load_pipeline(uri, overrides, workdir)
    existing_models(uri)
    return _with_absolute_uris(_load(None, overrides, {"models": {"uri": uri}}), workdir)


def _with_absolute_uris(tree: PipelineTree, workdir: str) -> PipelineTree:
    uris = {"dataset": tree.dataset.uri, "models": tree.models.uri or f"{workdir}/models"}
    sections = {name: getattr(tree, name).model_copy(update={"uri": absolute_uri(uri)}) for name, uri in uris.items()}
    source = tree.source.at({key: absolute_uri(uri) for key, uri in tree.source.uris().items()})
    train = tree.train.model_copy(update={"init_from": absolute_uri(tree.train.init_from)})
    etl = tree.etl.model_copy(update={"corrections": absolute_uri(tree.etl.corrections)})
    return tree.model_copy(update={"source": source, "train": train, "etl": etl, **sections})


def existing_path(uri: str, expected: str = "a dataset's folder or URI, or a .toml file") -> str:
    """`uri` itself; a local path that does not exist raises UsageError with the nearest name in its folder."""
    from shardmill.dataset.versions import split_version

    path = Path(split_version(uri.removeprefix("file://"))[0]).expanduser()
    if "://" in uri.removeprefix("file://") or path.exists():
        return uri
    beside = [each.name for each in path.parent.iterdir()] if os.access(path.parent, os.R_OK) else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    raise UsageError(
        f"{uri} does not exist",
        f"expected {expected}",
        f"did you mean {path.parent / near[0]}?" if near else "check the path",
    )


def existing_models(models: str) -> str:
    """`models` itself; a local path that does not exist raises UsageError with the nearest name in its folder."""
    is_registered = models.startswith("models:/")
    return models if is_registered else existing_path(models, "a models folder or URI, or MODELS@N for one export")


def absolute_uri(uri: str) -> str:
    """`uri` itself if it has a scheme (`models:/` of a registered model, too) or is empty; a local path absolute."""
    return uri if "://" in uri or uri.startswith("models:/") or not uri else os.path.abspath(os.path.expanduser(uri))


def require(tree: PipelineTree, *sections: str) -> None:
    """Raise UsageError if one of the named sections has no `uri`."""
    for section in sections:
        keys = tree.source.uris() if section == "source" else {f"{section}.uri": getattr(tree, section).uri}
        for key, uri in keys.items():
            if not uri:
                raise UsageError(
                    f"config key {key} is not set",
                    "expected a local path, or a URI (s3://bucket/prefix, gs://, az://, hdfs://)",
                    f"add it under [{key.removesuffix('.uri')}], or give --set {key}=...",
                )


def without_secrets(tree: PipelineTree) -> PipelineTree:
    """The tree as records may show it. Secrets belong in the environment; one in the config is redacted."""
    return type(tree).model_validate(redacted(tree.model_dump()))
