"""The driver's memory does not grow with the chunks and classes of the units that have finished."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from benchmarks.driver_memory import unit_result
from etl.units.finished import Finished
from tests.etl.listings import images, listed

_NUM_UNITS = 100


def test_a_finished_unit_leaves_two_kilobytes(tmp_path: Path):
    finished = Finished(listed(images(1)), [unit_result(0)])
    tracemalloc.start()
    try:
        for place in range(1, _NUM_UNITS):
            finished.add(unit_result(place))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # A unit's chunks alone, in two formats, take 30 kB; its counts of 1,000 classes as much.
    assert held < 2_000 * _NUM_UNITS
    for place, result in enumerate(finished.results):
        whole = unit_result(place)
        assert (tuple(result.shards), tuple(result.splits)) == (tuple(whole.shards), tuple(whole.splits))
        assert (len(result.shards), result.shards[1], result.shards[:1]) == (
            2,
            whole.shards[1],
            tuple(whole.shards[:1]),
        )
    folder = finished.folder
    results = finished.results
    del finished
    # The file goes with the last of those who may ask for it.
    assert results[0].splits[0].split == "train" and folder.exists()
    del results, result
    assert not folder.exists()
