"""Loads the model of an export: fetched and verified byte by byte."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmill.checksummed import check_relative_path, read_checksummed
from shardmill.errors import UsageError
from shardmill.registry import load_object
from shardmill.stores import open_store
from train.backends import BACKENDS
from train.backends.backend import LayerOutput, PredictWithLayer
from train.published.current import read_history, unknown_current
from train.published.exported import Export, ExportedModel, read_export, require_exports


def current_export(models_uri: str) -> Export:
    """The current export. Raises UsageError if there is none, IntegrityError if that is unknown."""
    history = read_history(open_store(models_uri))
    if history.damage:
        raise unknown_current(models_uri, history)
    if history.current is None:
        require_exports(models_uri)
        raise UsageError(
            f"{models_uri} has no current model",
            "expected a promoted export",
            "run `shardmill promote`, or name an export: URI@1",
        )
    return read_export(models_uri, history.current.export)


def load_exported(models_uri: str, number: int) -> ExportedModel:
    """Fetch an export's served form, verify every byte of it, load it. Raises IntegrityError that names the file."""
    export = read_export(models_uri, number)
    backend = BACKENDS[export.record.backend]
    with _fetched(models_uri, export, backend.served) as folder:
        return ExportedModel(export, backend.load_served(folder))


def load_with_layer(models_uri: str, number: int, layer: str) -> PredictWithLayer:
    """Like `load_exported`, with the output of a layer. Raises UsageError if the export has none of that name."""
    export = read_export(models_uri, number)
    output: LayerOutput = load_object(BACKENDS[export.record.backend].layer_output)
    with _fetched(models_uri, export, output.file) as folder:
        if not (folder / output.file).exists():
            raise UsageError(
                f"{models_uri}@{number} has no {output.file}: {export.record.keras_note}",
                "expected one, from which a layer can be taken",
                "predict without --layer",
            )
        return output.load(folder / output.file, layer)


@contextmanager
def _fetched(models_uri: str, export: Export, name: str) -> Iterator[Path]:
    """A temporary folder with one file or folder of an export, every byte verified."""
    store, root = open_store(models_uri), f"{export.record.artifact_dir}/"
    with tempfile.TemporaryDirectory(prefix="shardmill-model-") as scratch:
        for file in export.record.files:
            if file.path == root + name or file.path.startswith(f"{root}{name}/"):
                target = Path(scratch, check_relative_path(file.path)[len(root) :])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(read_checksummed(store, file))
        yield Path(scratch)
