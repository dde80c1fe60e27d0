"""Where a training lives below the models' root, and which one a job goes on with.

trainings/<training id>/v00000003-<first 8 digits of the manifest's SHA-256>/   checkpoints/..., result.json
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

from pydantic import ValidationError

from shardmill.dataset.pin import DatasetPin
from shardmill.errors import IntegrityError
from shardmill.storage import Store, join_uri
from train.checkpoint import find_checkpoint, settings_that_matter
from train.config import TrainConfig
from train.values import TrainResult, from_json

TRAININGS = "trainings"
# train/worker.py writes it when all is done.
RESULT = "result.json"


@dataclass(frozen=True, slots=True)
class TrainingChoice:
    """What a job has to train: the version, the folder, and what is there already."""

    dataset: DatasetPin
    training_dir: str
    """Relative to the models' root."""
    result: TrainResult | None
    """Of a training that has finished: nothing is left to do."""


def training_id(config: TrainConfig, dataset_uri: str) -> str:
    """16 hex digits over the dataset's root and all settings that decide what comes out of a training."""
    content = json.dumps([dataset_uri, settings_that_matter(config)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def training_dir(config: TrainConfig, dataset: DatasetPin) -> str:
    """The folder of the training with these settings on this dataset version."""
    version = f"v{dataset.version:08d}-{dataset.manifest_sha256[:8]}"
    return f"{TRAININGS}/{training_id(config, dataset.uri)}/{version}"


def choose_training(store: Store, config: TrainConfig, latest: DatasetPin, is_pinned: bool = False) -> TrainingChoice:
    """What to do where `latest` is the newest version: nothing, go on, or start.

    A training that was begun on an older version and has a complete checkpoint is finished on ITS version first, unless
    there is one on the latest already, or `is_pinned`: somebody asked for this version and no other.
    """
    folder = training_dir(config, latest)
    result = read_result(store, folder)
    if result is None and not is_pinned and find_checkpoint(store, folder) is None:
        for older in _unfinished(store, folder, latest.version):
            found = find_checkpoint(store, older)
            if found is not None:
                return TrainingChoice(found.marker.identity.dataset, older, None)
    return TrainingChoice(latest, folder, result)


def read_result(store: Store, folder: str) -> TrainResult | None:
    """What a finished training left, or None. Raises IntegrityError where the file is not a result."""
    path = f"{folder}/{RESULT}"
    try:
        return from_json(TrainResult, store.read(path))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise IntegrityError(
            f"{join_uri(store.uri, path)} is not a training's result: {error.errors()[0]['msg']}",
            "it was altered, or another version of this program wrote it",
            "delete it; the training goes on from its last checkpoint",
        ) from None


def _unfinished(store: Store, folder: str, latest_version: int) -> list[str]:
    """Folders of the same training on older versions that have no result, newest version first."""
    parent = folder.rpartition("/")[0]
    paths = [file.path for file in store.list(parent)]
    folders = {match[0] for path in paths if (match := re.match(rf"{re.escape(parent)}/v\d{{8}}-[0-9a-f]{{8}}", path))}
    finished = {path.rpartition("/")[0] for path in paths if path.endswith(f"/{RESULT}")}
    older = [each for each in folders - finished if int(each.rpartition("/v")[2][:8]) < latest_version]
    return sorted(older, reverse=True)
