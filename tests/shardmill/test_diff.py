"""The difference of two versions: exactly what was done to the source in between."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from etl.config import EtlConfig
from shardmill.dataset.diff import ChangeKind, RowPlace, count_changes, diff_versions
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.open import open_dataset
from tests.lab.datasets import build_here, write_images

_SEED = random.SystemRandom().randrange(2**32)
_CONFIG = EtlConfig(image_size=16, encoding="png", unit_min_images=8, formats=("tfrecord",))


def test_added_removed_changed_and_relabelled_images_are_found_by_their_keys(tmp_path: Path):
    print(f"seed {_SEED}")
    images = tmp_path / "images"
    write_images(images, num_images=60)
    root = build_here(str(images), str(tmp_path / "dataset"), _CONFIG)
    first = open_dataset(root)

    rng = random.Random(_SEED)
    keys = sorted(str(path.relative_to(images)) for path in images.rglob("*.png"))
    rng.shuffle(keys)
    removed, changed, moved = set(keys[:3]), set(keys[3:8]), keys[8]
    for key in removed:
        (images / key).unlink()
    write_images(tmp_path / "others", num_images=60, seed=1)
    for key in changed:
        shutil.copy(tmp_path / "others" / key, images / key)
    # A class is a folder: an image in another class has another key.
    new_key = f"class_x/{Path(moved).name}"
    (images / new_key).parent.mkdir()
    (images / moved).rename(images / new_key)
    build_here(str(images), root, _CONFIG)
    second = open_dataset(root)

    changes = diff_versions(first, second)
    by_kind = {kind: {each.source for each in changes if each.kind == kind} for kind in ChangeKind}
    assert by_kind == {
        ChangeKind.ADDED: {new_key},
        ChangeKind.REMOVED: removed | {moved},
        ChangeKind.CHANGED: changed,
    }
    [added] = [each for each in changes if each.kind == ChangeKind.ADDED]
    assert added.before is None and added.after is not None and added.after.class_name == "class_x"
    counts = count_changes(changes)
    assert counts.total() == len(changes) == 10
    assert counts[ChangeKind.ADDED, RowPlace(added.after.split, "class_x")] == 1

    # The other way round, everything is the other way round; and a compaction changes no row.
    backwards = diff_versions(second, first)
    assert {each.source for each in backwards if each.kind == ChangeKind.REMOVED} == by_kind[ChangeKind.ADDED]
    compact_dataset(second, "compacting")
    assert not diff_versions(second, open_dataset(root))
    assert len(diff_versions(first, open_dataset(root))) == 10
