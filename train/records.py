"""Checksummed records below a models' root: numbered records (the highest is the latest) and records of one training.

A numbered record never changes; `put_if_absent` decides who writes it.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shardmill.checksummed import verified_body, with_checksum
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import Store, join_uri
from train.contracts.values import from_json

Record = TypeVar("Record", bound=BaseModel)
Value = TypeVar("Value")
# Of numbers that are there, in an error message.
MAX_RANGES = 8


def record_path(folder: str, number: int) -> str:
    """Return the path of record `number` below the models' root."""
    return f"{folder}/{number:08d}.json"


def record_numbers(store: Store, folder: str) -> list[int]:
    """The numbers that exist, ascending."""
    names = (re.fullmatch(rf"{folder}/(\d{{8}})\.json", file.path) for file in store.list(folder))
    return sorted(int(name[1]) for name in names if name)


def numbers_in_words(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges, `1 to 3, 5, 8`; of many ranges the last ones."""
    # Of consecutive numbers, number minus position is constant.
    runs = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ranges = [[number for _, number in run] for _, run in runs]
    words = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in ranges]
    return ", ".join([*["..."][: len(words) > MAX_RANGES], *words[-MAX_RANGES:]])


def put_record(store: Store, folder: str, number: int, record: BaseModel) -> bool:
    """Publish a record under a number that is still free; False if another writer took it first.

    Each call is an attempt with an id of its own, so that one whose first PUT succeeded, but whose reply was lost
    before the store's client sent it again, finds itself there.
    """
    body = {"attempt": secrets.token_hex(16), "record": record.model_dump(mode="json")}
    data = with_checksum(json.dumps(body, ensure_ascii=False).encode())
    path = record_path(folder, number)
    return store.put_if_absent(path, data) or store.read(path) == data


def read_record(store: Store, folder: str, number: int, kind: type[Record]) -> Record:
    """Raises IntegrityError if the record is missing or was altered, UsageError if it is of another layout."""
    path = record_path(folder, number)
    where = join_uri(store.uri, path)
    try:
        data = store.read(path)
    except FileNotFoundError:
        raise IntegrityError(f"{where} is missing", f"expected record {number} of {folder}/") from None
    body = verified_body(data, where, fix="restore it from a backup, or use another models.uri")
    try:
        return kind.model_validate_json(json.dumps(json.loads(body)["record"]))
    except (ValidationError, ValueError, KeyError, TypeError):
        # Not damage: a caller must not treat it as lost and continue without it.
        raise UsageError(
            f"{where} has a different layout",
            f"expected a {kind.__name__} of this version; another version of this program wrote it",
            "use that version, or another models.uri",
        ) from None


def read_if_whole(kind: type[Value], store: Store, path: str) -> Value | None:
    """A value in a checksummed file; None if it is missing or altered: for records that only people look at."""
    try:
        return from_json(kind, verified_body(store.read(path), join_uri(store.uri, path)))
    except (FileNotFoundError, IntegrityError, ValueError):
        return None
