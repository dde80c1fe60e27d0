"""Reads and checks the result that a finished training leaves in its folder."""

from __future__ import annotations

from pydantic import ValidationError

from shardmill.checksummed import check_relative_path, verified_body
from shardmill.errors import IntegrityError
from shardmill.storage import Store, join_uri
from train.contracts.values import RESULT, TrainResult, from_json


def read_result(store: Store, folder: str) -> TrainResult | None:
    """Read the result of a finished training, or None. Raises IntegrityError if a byte of it was altered."""
    path = f"{folder}/{RESULT}"
    where = join_uri(store.uri, path)
    fix = "restore it from a backup, or delete it: the training then resumes from its last checkpoint"
    try:
        result = from_json(TrainResult, verified_body(store.read(path), where, fix=fix))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise IntegrityError(
            f"{where} is not a valid training result: {error.errors()[0]['msg']}",
            "another version of this program wrote it",
            "use that version, or delete the file: the training resumes from its last checkpoint",
        ) from None
    for each in (result.checkpoint, result.last_checkpoint):
        check_relative_path(each)
    if result.training_dir != folder:
        raise IntegrityError(f"{where} is the result of {result.training_dir}", f"expected that of {folder}", fix)
    return result
