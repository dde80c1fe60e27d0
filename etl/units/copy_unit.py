"""Copies the remaining rows of an older version's shard that lost some rows, without decoding any image."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pyarrow as pa

from etl.units.pending import keep_result
from etl.units.shard_rows import RowCopier
from etl.units.units import CopyUnit, UnitTask
from shardmill.dataset.build import UnitResult
from shardmill.dataset.row_segments import RowReader
from shardmill.stores import open_store


def copy_rows(unit: CopyUnit, task: UnitTask) -> UnitResult:
    """New shards with the rows that stay, and a record as `write_unit` leaves one. Safe to run twice, also at once.

    Raises IntegrityError if the shard or its row segment does not match the older version's record.
    """
    store = open_store(task.dataset_uri)
    bits = np.frombuffer(base64.b64decode(unit.kept), np.uint8)
    is_kept_N = np.unpackbits(bits, count=unit.copies[0].num_rows).astype(bool)
    restated = pa.ipc.open_stream(base64.b64decode(unit.restated)).read_all() if unit.restated else None
    copier = RowCopier(RowReader(store, task.row_schema), task.config)
    result = copier.result_of(unit.index, unit.copies, is_kept_N, restated)
    assert result is not None, "a unit has rows that stay"
    result = replace(result, fingerprint=unit.fingerprint)
    keep_result(store, unit, result)
    return result
