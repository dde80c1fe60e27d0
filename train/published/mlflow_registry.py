"""MLflow's model registry: registers the current export as a version that an alias names, and finds it again.

The registry says where a model is and what it was made of; the model stays in the models folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardmill.dataset.card import CARD
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.storage import join_uri
from train.published.exported import Export, current_export, read_export
from train.reporting.mlflow_client import check_address, check_installed, connect, experiment_id
from train.settings import RegistryConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

SCHEME = "models:/"
MODELS, NUMBER, WEIGHTS = "shardmill.models", "shardmill.export", "shardmill.weights_sha256"
"""Tags that identify an export. A models folder that was deleted and made anew counts from 1 again."""
_ABSENT, _EXISTS = "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"
_IDENTITY = (MODELS, NUMBER, WEIGHTS)
_MAX_RACES = 8
# Of a server that copies what is registered; most are ready at once.
_READY_SECONDS = 30
# A digest of MLflow's has at most 36 characters.
_DIGEST_CHARS = 36
# The column of a description in MLflow's database; SQLite alone takes more.
_MAX_DESCRIPTION_CHARS = 5_000


def register_current(models_uri: str, registry: RegistryConfig, card_of: Callable[[Export], str]) -> str:
    """Let the alias name the version of the current export, which is created if there is none; its card describes it.
    Returns `models:/NAME/VERSION`.

    Raises whatever MLflow's client raises. Doing it again changes nothing, and completes what an earlier call did not.
    """
    named = f"{SCHEME}{registry.name}"
    check_installed(named)
    check_address(named, registry.uri)
    client = connect(registry.uri)
    for _ in range(_MAX_RACES):
        export = current_export(models_uri)
        version = _find(client, registry.name, models_uri, export)
        if version is None:
            version = _create(client, registry.name, models_uri, export, card_of(export))
        if _version_of_alias(client, registry) != str(version.version):
            client.set_registered_model_alias(registry.name, registry.alias, str(version.version))
        # Another run may have promoted another one meanwhile, and set the alias before this one did.
        if current_export(models_uri).number == export.number:
            break
    return f"{named}/{version.version}"


def resolve_registered(model: str) -> str:
    """`MODELS@N` for `models:/NAME@ALIAS` or `models:/NAME/VERSION`, at the server of MLFLOW_TRACKING_URI.

    Raises UsageError if no server is named, or there is no such version, or it is no export; IntegrityError if the
    export has other weights.
    """
    check_installed(model)
    check_address(model, reads=True)
    tags = _tags_of_version(model)
    if MODELS not in tags or not tags.get(NUMBER, "").isdecimal():
        raise UsageError(
            f"{model} is no export of shardmill: it has no tags {MODELS} and {NUMBER}",
            "expected a version that `shardmill promote` registered",
            "name the models folder or URI",
        )
    exact = f"{tags[MODELS]}@{tags[NUMBER]}"
    export = read_export(tags[MODELS], int(tags[NUMBER]))
    if export.record.weights_sha256 != tags.get(WEIGHTS):
        raise IntegrityError(
            f"{model} names {exact} with weights {tags.get(WEIGHTS)}",
            f"that export has {export.record.weights_sha256}: its models folder was made anew",
            f"promote again to register it, or name {exact}",
        )
    return exact


def tags_of(models_uri: str, export: Export) -> dict[str, str]:
    """Where an export is, and what it was made of."""
    record = export.record
    return {
        MODELS: models_uri,
        NUMBER: str(export.number),
        WEIGHTS: record.weights_sha256,
        "shardmill.artifacts": join_uri(models_uri, record.artifact_dir),
        "shardmill.training": join_uri(models_uri, record.training_dir),
        "shardmill.dataset": f"{record.dataset.uri}@{record.dataset.version}",
        "shardmill.dataset.manifest_sha256": record.dataset.manifest_sha256,
        "shardmill.dataset.content_digest": record.content_digest,
        "shardmill.dataset.layout_digest": record.layout_digest,
    }


def _tags_of_version(model: str) -> dict[str, str]:
    client, named = connect(""), model.removeprefix(SCHEME)
    name, at, alias = named.rpartition("@")
    if not at:
        name, _, number = named.rpartition("/")
    try:
        found = client.get_model_version_by_alias(name, alias) if at else client.get_model_version(name, number)
    except Exception as error:  # mlflow's own, which this module does not import
        if _code(error) in (_ABSENT, "INVALID_PARAMETER_VALUE"):
            raise UsageError(
                f"the model registry has no {model}: {error}", f"expected {SCHEME}NAME@ALIAS or {SCHEME}NAME/VERSION"
            ) from None
        raise StorageError(
            f"the model registry does not tell what {model} is: {error}", "", "check MLFLOW_TRACKING_URI"
        ) from error
    return dict(found.tags)


def _find(client: MlflowClient, name: str, models_uri: str, export: Export) -> ModelVersion | None:
    wanted = tags_of(models_uri, export)
    try:
        versions = list(_versions(client, name))
    except Exception as error:
        if _code(error) != _ABSENT:
            raise
        versions = []
    return next((each for each in versions if _is_of(each.tags, wanted)), None)


def _is_of(tags: dict[str, str], wanted: dict[str, str]) -> bool:
    return all(tags.get(tag) == wanted[tag] for tag in _IDENTITY)


def _versions(client: MlflowClient, name: str) -> Iterator[ModelVersion]:
    token: str | None = None
    while token != "":
        page = client.search_model_versions(f"name = '{name}'", page_token=token)
        yield from page
        token = page.token or ""


def _create(client: MlflowClient, name: str, models_uri: str, export: Export, card: str) -> ModelVersion:
    """A version whose run holds the metrics of the evaluation and names the dataset."""
    try:
        client.create_registered_model(name)
    except Exception as error:
        if _code(error) != _EXISTS:
            raise
    tags = tags_of(models_uri, export)
    run_id = _finished_run(client, f"{name}: export {export.number}", export, tags)
    # A server takes no path of this machine's disk.
    source = tags["shardmill.artifacts"] if models_uri.startswith("s3://") else f"runs:/{run_id}/export"
    return client.create_model_version(
        name,
        source,
        run_id,
        tags=tags,
        description=_description(card, join_uri(models_uri, CARD)),
        await_creation_for=_READY_SECONDS,
    )


def _description(card: str, card_uri: str) -> str:
    rest = f"\n\n... {card_uri} has the rest\n"
    return card if len(card) <= _MAX_DESCRIPTION_CHARS else card[: _MAX_DESCRIPTION_CHARS - len(rest)] + rest


def _finished_run(client: MlflowClient, run_name: str, export: Export, tags: dict[str, str]) -> str:
    """The run of an export. An earlier registration may have failed in it or behind it: there is never a second one."""
    experiment = experiment_id(client)
    # A URI may hold any quotes, so it is not in the filter.
    same = f"tags.`{NUMBER}` = '{tags[NUMBER]}' AND tags.`{WEIGHTS}` = '{tags[WEIGHTS]}'"
    runs = [run for run in client.search_runs([experiment], same) if run.info.run_name == run_name]
    run = next((run for run in runs if _is_of(run.data.tags, tags)), None)
    if run is not None and run.info.status == "FINISHED":
        return run.info.run_id
    run = run or client.create_run(experiment, run_name=run_name, tags=tags)
    try:
        _log(client, run.info.run_id, export, tags)
    except Exception:
        # The same server may refuse this too; the first error tells why.
        with suppress(Exception):
            client.set_terminated(run.info.run_id, "FAILED")
        raise
    client.set_terminated(run.info.run_id, "FINISHED")
    return run.info.run_id


def _log(client: MlflowClient, run_id: str, export: Export, tags: dict[str, str]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric

    record = export.record
    dataset = Dataset(
        name=record.dataset.uri.rstrip("/").rpartition("/")[2],
        digest=record.content_digest[:_DIGEST_CHARS],
        source_type="shardmill",
        source=json.dumps({"uri": tags["shardmill.dataset"]}),
    )
    client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])
    if (found := record.evaluation) is not None:
        now = int(time.time() * 1000)
        metrics = {f"{found.split}/{found.metric.name}": found.metric_value, f"{found.split}/loss": found.loss}
        client.log_batch(run_id, metrics=[Metric(key, value, now, 0) for key, value in metrics.items()])


def _version_of_alias(client: MlflowClient, registry: RegistryConfig) -> str:
    """Empty if nothing has the alias."""
    try:
        return str(client.get_model_version_by_alias(registry.name, registry.alias).version)
    except Exception as error:
        if _code(error) not in (_ABSENT, "INVALID_PARAMETER_VALUE"):
            raise
        return ""


def _code(error: Exception) -> Any:
    """The code of an error of MLflow's client; empty for any other error."""
    return getattr(error, "error_code", "")
