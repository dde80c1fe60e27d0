"""Every reader feeds the same loop; what each promises of an epoch is counted on its batches."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from shardmill import recycled_memory
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.loader.samples import read_samples
from shardmill.stores import STORES
from tests.counting_store import BYTES_READ
from tests.far_store import ENTRY, SCHEME
from tests.lab.datasets import make_dataset
from tests.train.ranks import train_on_ranks
from tests.train.training import Killed, Recorder, train_here
from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.contracts.mesh_shape import MeshShape
from train.planning.preflight import check_ranks, check_trainable
from train.readers import READERS
from train.readers.petastorm import shares_of_ranks
from train.readers.reader import Epochs

CONFIG = {"global_batch_size": 24, "num_streams": 6, "augment": {"random_crop_padding": 0, "random_flip": False}}
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def config_of(reader: str, **more) -> TrainConfig:
    return TrainConfig(**{**CONFIG, "reader": reader, "strategy": "torch_ddp", **more})


@pytest.fixture(scope="module")
def many_uri(tmp_path_factory) -> str:
    """300 images in several row groups, so that ranks have some to share."""
    return make_dataset(tmp_path_factory.mktemp("many"), num_images=300)


def batches_of(reader: str, uri: str, epoch: int, num_ranks: int, **more):
    """By rank: all batches of an epoch."""
    dataset, config = open_dataset(uri), config_of(reader, num_workers=num_ranks, **more)
    found = []
    for rank in range(num_ranks):
        opened = Epochs(READERS[reader], dataset, config, Mesh.of(config).data_index(rank))[epoch]
        with opened.read(0) as batches:
            found.append(list(batches))
        assert len(found[-1]) == opened.num_steps
        for step in range(opened.num_steps):
            assert opened.num_rows_of_step(step) > 0
        assert sum(map(opened.num_rows_of_step, range(opened.num_steps))) == opened.num_rows
    return found


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_read_in_equal_steps_and_no_sample_twice(many_uri, reader, num_ranks):
    of_ranks = batches_of(reader, many_uri, 0, num_ranks)
    assert len({len(batches) for batches in of_ranks}) == 1
    stored = {sample.sample_id: sample for sample in read_samples(open_dataset(many_uri), "train", 10**6)}
    seen: Counter[int] = Counter()
    for batch in (batch for batches in of_ranks for batch in batches):
        for place in np.flatnonzero(batch.weights_N > 0):
            sample = stored[int(batch.sample_ids_N[place])]
            assert np.array_equal(batch.images_NHWC[place], sample.image_HWC)
            assert batch.labels_N[place] == sample.label
            seen[sample.sample_id] += 1
    assert set(seen.values()) == {1} and set(seen) <= set(stored)
    config = config_of(reader, num_workers=num_ranks)
    opened = Epochs(READERS[reader], open_dataset(many_uri), config, Mesh.of(config).data_index(0))
    assert len(seen) == opened.num_rows
    if READERS[reader].is_exact:
        assert set(seen) == set(stored)
    else:
        # Nothing but what fills no whole batch on the poorest rank is left out.
        assert len(stored) - opened.num_rows < 24 * num_ranks + 16 * num_ranks


@pytest.mark.parametrize("reader", READERS)
def test_an_epoch_has_an_order_of_its_own_and_the_same_one_again(many_uri, reader):
    def order(epoch: int, seed: int = 0) -> list[int]:
        [batches] = batches_of(reader, many_uri, epoch, 1, seed=seed)
        return [sample_id for batch in batches for sample_id in batch.sample_ids_N.tolist()]

    assert order(0) == order(0)
    assert order(0) != order(1) and order(0) != order(0, seed=1)


def test_a_training_by_petastorm_continues_at_the_start_of_its_epoch(tiny_uri, tmp_path):
    config = {"reader": "petastorm", "epochs": 3, "global_batch_size": 24, "num_streams": 6, "record_samples": True,
              "checkpoint_every_steps": 1, "model": "small_cnn"}  # fmt: skip
    whole, resumed = Recorder(), Recorder()
    fresh = train_here(tiny_uri, tmp_path / "fresh", whole, **config)
    steps_of_an_epoch = whole.steps[0].num_steps
    assert steps_of_an_epoch >= 2
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "killed", Recorder(steps_of_an_epoch + 1), **config)
    result = train_here(tiny_uri, tmp_path / "killed", resumed, **config)
    assert result.resumed_from is not None and (result.resumed_from.epoch, result.resumed_from.step) == (1, 0)
    # All that an inexact reader does by epochs it does exactly.
    assert result.weights_sha256 == fresh.weights_sha256
    assert resumed.losses == {key: loss for key, loss in whole.losses.items() if key[0] > 0}
    assert result.evaluation == fresh.evaluation


@pytest.mark.starts("ranks")
def test_two_ranks_train_by_petastorm(tiny_uri, tmp_path):
    config = {"reader": "petastorm", "strategy": "torch_ddp", "model": "tests.train.torch_models:smooth", "epochs": 2,
              "global_batch_size": 24, "num_streams": 6, "record_samples": True}  # fmt: skip
    result, watcher = train_on_ranks(tiny_uri, tmp_path, 2, config)
    opened = Epochs(
        READERS["petastorm"],
        open_dataset(tiny_uri),
        config_of("petastorm", num_workers=2),
        Mesh(MeshShape(data=2), num_streams=8).data_index(0),
    )
    assert result.num_steps == 2 * opened.num_steps > 0
    for epoch in range(2):
        seen = [sample_id for (number, _), ids in watcher.sample_ids.items() if number == epoch for sample_id in ids]
        assert len(seen) == len(set(seen)) == opened.num_rows


def test_its_metadata_is_never_unpickled(tmp_path):
    """Beside the shards lies a `_common_metadata` file as Petastorm writes it, whose pickle writes a file."""
    from petastorm.etl.dataset_metadata import UNISCHEMA_KEY, get_schema_from_dataset_url

    uri = make_dataset(tmp_path)
    [folder] = {Path(file).parent for file in open_dataset(uri).files("train", "parquet")}
    proof = tmp_path / "unpickled"
    schema = pq.read_schema(next(folder.glob("*.parquet"))).with_metadata({UNISCHEMA_KEY: pickle.dumps(Trap(proof))})
    pq.write_metadata(schema, folder / "_common_metadata")
    pq.write_metadata(schema, folder / "_metadata")
    train_here(uri, tmp_path / "models", reader="petastorm", epochs=1, global_batch_size=24, num_streams=6)
    assert not proof.exists()
    # Petastorm itself, on the folder, falls into it.
    get_schema_from_dataset_url(folder.as_uri())
    assert proof.exists()


class Trap:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        # Petastorm unpickles what its own list of modules holds; `builtins` is among them.
        return (exec, (f"open({str(self.proof)!r}, 'w').close()",))


def test_what_it_cannot_read_is_refused_before_anything_starts(tmp_path, many_uri):
    tfrecord = open_dataset(make_dataset(tmp_path, formats=("tfrecord",)))
    with pytest.raises(
        UsageError, match=r"on a dataset of tfrecord; it reads Parquet only.*train.reader = 'shardmill'"
    ):
        check_trainable(config_of("petastorm"), tfrecord)
    many = open_dataset(many_uri)
    with pytest.raises(UsageError, match=r"train.format = 'tfrecord'.*Parquet only"):
        check_trainable(config_of("petastorm", format="tfrecord"), many)
    shares = shares_of_ranks(many, config_of("petastorm"), 6)
    too_large = 6 * (min(share.num_rows for share in shares) + 1)
    with pytest.raises(UsageError, match=rf"row groups rank \d gets \d+ rows.*expected at least its {too_large // 6}"):
        check_trainable(config_of("petastorm", num_workers=6, global_batch_size=too_large), many)
    check_trainable(config_of("petastorm"), many)
    # Fewer ranks are no easier case: of four row groups each of four ranks has one, and of three ranks one has two of
    # the streams to fill with one row group.
    few = open_dataset(make_dataset(tmp_path / "few", chunk_bytes=10**6, formats=("parquet",)))
    rows = few.index("train", "parquet").chunk_rows.tolist()
    assert len(rows) == 4, rows
    config = config_of("petastorm", num_workers=4, num_streams=4, global_batch_size=4 * (min(rows) - 1))
    check_ranks(config, few)
    with pytest.raises(UsageError, match=r"row groups rank 2 gets \d+ rows"):
        check_ranks(config.model_copy(update={"num_workers": 3}), few)
    assert "samples an epoch" in READERS["petastorm"].limits(config_of("petastorm", num_workers=1), many)


def test_the_default_leaves_old_trainings_what_they_were():
    from train.identity import settings_that_matter

    assert "reader" not in settings_that_matter(config_of("shardmill"))
    assert settings_that_matter(config_of("petastorm"))["reader"] == '"petastorm"'


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.parametrize("is_remote", [False, True], ids=["local", "remote with a cache"])
def test_twenty_epochs_of_a_training_take_the_memory_of_one(
    is_remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of 10 MB of pixels an epoch, in windows of a fifth of it."""
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    uri = make_dataset(tmp_path, num_images=300, image_size=128, encoding="raw", chunk_bytes=500_000)
    reading = {"prefetch_bytes": 1, "window_budget_bytes": 2_000_000, "threads": 2}
    cache = {"dir": str(tmp_path / "cache")} if is_remote else {}
    config = config_of("shardmill", num_workers=1, num_streams=2, reading=reading, cache=cache)
    opened = Epochs(
        READERS["shardmill"], open_dataset(f"{SCHEME}://{uri}" if is_remote else uri), config,
        Mesh.of(config).data_index(0),
    )  # fmt: skip
    assert opened[0].num_steps == opened.num_steps and not (tmp_path / "cache").exists(), "made when an epoch is read"
    addresses, resident, taken = set(), [], []
    monkeypatch.setattr(
        recycled_memory.RecycledMemory, "_new", lambda *given, new=recycled_memory.RecycledMemory._new: (
            taken.append(given[1]), new(*given)
        )[1]
    )  # fmt: skip
    for number in range(20):
        with opened[number].read(0) as batches:
            for batch in batches:
                addresses.add(batch.images_NHWC.ctypes.data)
        resident.append((resident_mb(), taken.count(24 * 128 * 128 * 3)))
    assert len(addresses) <= 2 + 4, "the batches in the queue and the threads, those of the loop"
    assert resident[-1][1] - resident[4][1] == 0, f"new memory of batches in late epochs: {resident}"
    assert resident[-1][0] - resident[4][0] < 8, resident


def test_a_split_within_the_windows_is_read_once_for_all_epochs_of_a_training(many_uri: str, monkeypatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    config = config_of("shardmill", num_workers=1)
    opened = Epochs(READERS["shardmill"], open_dataset(f"{SCHEME}://{many_uri}"), config, Mesh.of(config).data_index(0))
    orders = []
    for number in range(3):
        BYTES_READ.clear()
        with opened[number].read(0) as batches:
            orders.append([batch.sample_ids_N.tolist() for batch in batches])
        assert any(path.startswith("shards/") for path in BYTES_READ) == (number == 0)
    assert orders[0] != orders[1] != orders[2]
    with opened[1].read(2) as batches:
        assert [batch.sample_ids_N.tolist() for batch in batches] == orders[1][2:]


def test_ranks_keep_chunks_of_a_remote_dataset(many_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    cache, uri = {"dir": str(tmp_path)}, f"{SCHEME}://{many_uri}"
    expected = batches_of("shardmill", many_uri, 0, 2)
    BYTES_READ.clear()
    for epoch in (0, 1, 0):
        found = batches_of("shardmill", uri, epoch, 2, cache=cache)
    for batch, other in zip(chain(*found), chain(*expected), strict=True):
        assert np.array_equal(batch.images_NHWC, other.images_NHWC)
    stored = sum(shard.size_bytes for shard in open_dataset(uri).shards_of("train"))
    # A chunk that was read twice would be more; of each file its first four bytes are never read.
    assert 0.9 * stored < sum(size for path, size in BYTES_READ.items() if path.startswith("shards/")) <= stored
    config = config_of("shardmill", cache={**cache, "limit_bytes": 999})
    with pytest.raises(
        UsageError, match=r"train.cache.limit_bytes = 999; expected at least \d+ bytes, one shuffle window"
    ):
        check_trainable(config, open_dataset(uri))
    check_trainable(config, open_dataset(many_uri))
    alone = config_of("shardmill", cache={"limit_bytes": 999})
    with pytest.raises(UsageError, match=r"train.cache.limit_bytes = 999 without train.cache.dir.*set both"):
        check_trainable(alone, open_dataset(many_uri))
    with pytest.raises(UsageError, match=r"train.cache.dir = 's3://a/b'; expected a folder on a local disk"):
        check_trainable(config_of("shardmill", cache={"dir": "s3://a/b"}), open_dataset(many_uri))
