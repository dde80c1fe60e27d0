"""`train.init_from` takes over what fits, on each rank its slices, and runs nothing; `train.freeze` holds it still."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

import io
import json
import math
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import WARNING
from shardmill.stores import open_store
from tests.lab.datasets import make_dataset
from tests.lab.scale import exhaustive
from tests.train.learners import SHAPE, THREE, TORCH_MODELS, batch_of, learner
from tests.train.ranks import train_on_ranks
from tests.train.training import MODELS, Killed, Recorder, check_terms, keras_model_of, train_here
from train.api import Learner, StatePart
from train.backends import BACKENDS
from train.backends.weight_files import read_arrays
from train.checkpoints.arrays import (
    BUFFER_BYTES,
    MOST_BYTES_BETWEEN,
    WEIGHTS,
    StoredArray,
    WeightFile,
    load_arrays,
    rank_file,
)
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.shards import read_whole_model
from train.config import TrainConfig
from train.identity import settings_that_matter
from train.initialization.initial import arrays_of_checkpoint, find_initial, match_weights, pinned, read_pinned
from train.planning.trainings import training_dir
from train.published.exported import read_export
from train.rank.initialize import read_initialized
from train.results import read_result

NORMED = {"keras": f"{MODELS}:stateful", "torch": f"{TORCH_MODELS}:stateful"}


def safetensors(arrays: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    header, body = {}, b""
    for name, (dtype, shape, data) in arrays.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + body


def plain(arrays: dict[str, np.ndarray]) -> bytes:
    return safetensors({name: ("F32", each.shape, each.astype("<f4").tobytes()) for name, each in arrays.items()})


def test_safetensors_of_every_float():
    values = np.array([1.0, -2.5, 3.25], np.float32)
    upper_halves = (values.view("<u4") >> 16).astype("<u2")
    data = safetensors({"a": ("F32", (3,), values.tobytes()), "b": ("BF16", (3, 1), upper_halves.tobytes()),
                        "c": ("F16", (3,), values.astype("<f2").tobytes())})  # fmt: skip
    arrays = read_arrays(data, ".safetensors", "f")
    assert [arrays[name].ravel().tolist() for name in "abc"] == [[1.0, -2.5, 3.25]] * 3 and arrays["b"].shape == (3, 1)


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 8 + b"{}", (10).to_bytes(8, "little") + b"{}", safetensors({"a": ("F32", (4,), b"1234")}),
     safetensors({"a": ("F32", (-1, -1), b"1234")}), safetensors({"a": ("XX", (1,), b"1234")}),
     safetensors({"a": ("F32", (1,), b"1234")})[:-1], (2).to_bytes(8, "little") + b"[]"],
)  # fmt: skip
def test_a_damaged_or_hostile_file_is_an_error(data):
    for suffix in (".safetensors", ".weights.h5", ".keras"):
        with pytest.raises(UsageError, match=f"f cannot be read as {suffix}"):
            read_arrays(data, suffix, "f")


def test_a_small_file_of_endless_arrays_is_refused():
    import h5py

    bomb = io.BytesIO()
    with h5py.File(bomb, "w") as file:
        # Declared, and never written.
        file.create_dataset("layers/dense/vars/0", (100_000, 1_000), "f4", chunks=(1_000, 100), compression="gzip")
    with pytest.raises(UsageError, match=r"its arrays have 400000000 bytes, in a file of \d+; expected a complete"):
        read_arrays(bomb.getvalue(), ".weights.h5", "f")
    many = io.BytesIO()
    with zipfile.ZipFile(many, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", bytes(150_000_000))
    with pytest.raises(UsageError, match="its arrays have 150000000 bytes"):
        read_arrays(many.getvalue(), ".keras", "f")
    # Many names for the same bytes.
    header = {str(n): {"dtype": "F32", "shape": [1_000_000], "data_offsets": [0, 4_000_000]} for n in range(200)}
    halves = {name: {**entry, "dtype": "BF16", "shape": [2_000_000]} for name, entry in header.items()}
    for named, num_bytes in ((header, 800_000_000), (halves, 1_600_000_000)):
        text = json.dumps(named).encode()
        with pytest.raises(UsageError, match=f"its arrays have {num_bytes} bytes"):
            read_arrays(len(text).to_bytes(8, "little") + text + bytes(4_000_000), ".safetensors", "f")


def test_an_archive_with_code_gives_its_arrays_alone(tmp_path):
    """A `.keras` file whose configuration names a lambda: the configuration is not even read."""
    one = learner("keras", "small_cnn")
    keras_model_of(one, "small_cnn", SHAPE, THREE).save(tmp_path / "a.keras")
    hostile = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "a.keras") as source, zipfile.ZipFile(hostile, "w") as target:
        target.writestr("config.json", '{"class_name": "Lambda", "module": "os", "config": "system"}')
        target.writestr("model.weights.h5", source.read("model.weights.h5"))
    arrays = read_arrays(hostile.getvalue(), ".keras", "f")
    named = one.named_weights(arrays.keys())
    assert set(named.arrays()) <= set(arrays) and len(named.arrays()) == len(one.arrays(StatePart.WEIGHTS))


def test_nothing_is_unpickled(tmp_path):
    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    import torch

    torch.save({"a": torch.ones(2), "b": Attack()}, tmp_path / "a.pt")
    reader = learner("torch", f"{TORCH_MODELS}:linear")
    for data in ((tmp_path / "a.pt").read_bytes(), pickle.dumps(Attack())):
        with pytest.raises(UsageError, match=r"^f holds more than tensors.*; expected a state_dict") as refused:
            reader.read_weights(WeightFile.of_bytes(data, ".pt", "f"))
        assert "weights_only" not in str(refused.value), "PyTorch's own advice is to run it"
    with pytest.raises(UsageError, match="f cannot be read as .pt: "):
        reader.read_weights(WeightFile.of_bytes(b"PK\x03\x04 cut", ".pt", "f"))
    assert not (tmp_path / "ran").exists()


NAMED = {"a.w": (2, 2), "a.b": (2,), "head.w": (2, 3)}


def ones(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: np.ones(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(("of_file", "of_model"), [("", ""), ("module.", ""), ("", "backbone."), ("a.", "")])
def test_names_are_matched_below_a_common_prefix(of_file, of_model):
    weights = {of_model + name: shape for name, shape in NAMED.items()}
    given = ones({**{of_file + name: shape for name, shape in NAMED.items()}, of_file + "head.w": (2, 9), "step": ()})
    match = match_weights(weights, given, (f"{of_model}head.w",), "f")
    assert set(match.arrays) == {f"{of_model}a.w", f"{of_model}a.b"}
    assert all((array[...] == 1).all() for array in match.arrays.values())
    assert match.replaced == (f"{of_model}head.w: (2, 9) in the file, (2, 3) in the model",)
    assert (match.missing, match.unused) == ((), ("step",))
    assert match.initialized("f", weights).share == 0.5


def test_a_head_for_other_classes_is_replaced_and_anything_else_that_does_not_fit_refused():
    weights = NAMED
    assert match_weights(weights, ones(NAMED), ("head.w",), "f").replaced == ()
    match = match_weights(weights, ones(NAMED), ("head.w",), "f", other_classes=True)
    assert match.replaced == ("head.w: belongs to other classes",) and "head.w" not in match.arrays
    # Half of another head is none.
    whole = {**NAMED, "head.b": (3,)}
    half = match_weights(
        whole,
        ones({**whole, "head.w": (2, 3, 1)}), ("head.w", "head.b"), "f",
    )  # fmt: skip
    assert len(half.replaced) == 2 and set(half.arrays) == {"a.w", "a.b"}
    # A count is an array without axes, and stays one.
    assert match_weights({"n": ()}, {"n": np.array(3)}, (), "f").arrays["n"].shape == ()
    with pytest.raises(UsageError) as refused:
        match_weights(weights, ones({**NAMED, "a.w": (2, 5), "a.b": (5,)}), ("head.w",), "f")
    assert "f does not fit the model: a.w: (2, 5) in the file, (2, 2) in the model; a.b: (5,)" in str(refused.value)
    with pytest.raises(UsageError, match=r"no array of f fits .* the model has a.w; a.b; head.w; the file has z"):
        match_weights(weights, ones({"z": (1,)}), (), "f")


@pytest.mark.parametrize("name", BACKENDS)
def test_every_weight_of_a_file_of_the_same_model_is_taken(name, tmp_path):
    one, other = learner(name, NORMED[name]), learner(name, NORMED[name])
    one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), 0.1)
    one.write_portable(tmp_path, batch_of(SHAPE).images_NHWC, 1e-3)
    kinds = {".safetensors": plain(dict(one.named_weights().arrays()))}
    if name == "torch":
        kinds[".pt"] = (tmp_path / "state_dict.pt").read_bytes()
    else:
        kinds[".keras"] = (tmp_path / "model.keras").read_bytes()
        model = keras_model_of(one, NORMED[name], SHAPE, THREE)
        model.save_weights(tmp_path / "a.weights.h5")
        kinds[".weights.h5"] = (tmp_path / "a.weights.h5").read_bytes()
        model.save(tmp_path / "a.h5")
        kinds[".h5"] = (tmp_path / "a.h5").read_bytes()
    for suffix, data in kinds.items():
        other = learner(name, NORMED[name], seed=3)
        given = other.read_weights(WeightFile.of_bytes(data, suffix, "f"))
        named = other.named_weights(given.keys())
        match = match_weights(named.shapes, given, named.head, "f")
        assert (match.replaced, match.missing) == ((), ()), suffix
        named.assign(match.arrays)
        assert other.weights_sha256() == one.weights_sha256(), suffix


def test_a_training_starts_from_an_export(exported, tmp_path):
    models = Path(shutil.copytree(exported, tmp_path / "models"))
    first = read_result(open_store(models), "t")
    five = make_dataset(tmp_path / "five", num_images=60, num_classes=5)

    start = pinned(TrainConfig(init_from=f"{models}@1"))
    [exported] = [each for each in read_export(str(models), 1).record.files if each.path.endswith(".keras")]
    assert start.init_from == f"{models}@1#sha256={exported.sha256}"
    with pytest.raises(UsageError, match=rf"the file of export 1 has SHA-256 {exported.sha256}; expected {'0' * 64}"):
        check_terms(TrainConfig(init_from=f"{models}@1#sha256={'0' * 64}"), SparkConfig())
    settings = {"model": "small_cnn", "epochs": 1, "init_from": start.init_from, "freeze": ["all_but_head"]}
    recorder = Recorder()
    result = train_here(five, tmp_path / "other", recorder, **settings)
    [said] = recorder.named("initialized")
    assert said["loaded"] == said["weights"] - 2 and said["source"].endswith("/model.keras")
    assert "(5,) in the model" in said["replaced"] and said["missing"] == ""
    found = read_initialized(open_store(tmp_path / "other"), "t")
    assert found is not None and found.num_loaded == said["loaded"]
    # Frozen, what was taken over is still there, bit by bit; the head is another one.
    old = load_arrays((models / first.checkpoint / WEIGHTS).read_bytes())
    new = load_arrays((tmp_path / "other" / result.checkpoint / rank_file(0)).read_bytes())
    assert len(new) == len(old) - 2 and all((a == b).all() for a, b in zip(old, new, strict=False))

    # Going on from a checkpoint takes nothing from the file: only the driver reads it, for its hash.
    shutil.rmtree(models)
    (tmp_path / "other" / "t" / "result.json").unlink()
    again = Recorder()
    train_here(five, tmp_path / "other", again, **settings)
    assert again.named("resumed") and not again.named("initialized")


@pytest.mark.parametrize("place", ["folder", pytest.param("bucket", marks=pytest.mark.starts("server"))])
def test_a_training_starts_from_a_file_and_the_files_hash_is_part_of_its_name(place, tmp_path, tiny_uri, request):
    place = open_store(tmp_path if place == "folder" else request.getfixturevalue("s3_bucket"))
    pin, model = open_dataset(tiny_uri).pin, f"{TORCH_MODELS}:linear"
    weights = learner("torch", model).named_weights().arrays()
    configs = {}
    for name, value in {"a": 0.01, "same": 0.01, "b": 0.02}.items():
        place.put(f"{name}.safetensors", plain({key: np.full(old.shape, value) for key, old in weights.items()}))
        configs[name] = pinned(TrainConfig(model=model, init_from=f"{place.uri}/{name}.safetensors"))
    folders = {name: training_dir(config, pin, "") for name, config in configs.items()}
    assert folders["a"] == folders["same"] != folders["b"]
    assert not {"init_from", "freeze", "unfreeze_epoch"} & settings_that_matter(TrainConfig()).keys()
    assert configs["a"].init_from.startswith(f"{place.uri}/a.safetensors#sha256="), "ranks may start elsewhere"
    assert pinned(configs["a"]) == configs["a"]
    recorder = Recorder()
    train_here(tiny_uri, tmp_path / "models", recorder, model=model, epochs=1, init_from=configs["a"].init_from)
    [said] = recorder.named("initialized")
    assert (said["source"], said["share"]) == (f"{place.uri}/a.safetensors", 1.0)
    place.put("a.safetensors", plain({"w": np.zeros(3)}))
    with pytest.raises(IntegrityError, match="expected .*, which the driver found"):
        read_pinned(configs["a"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_from": "nowhere/a.keras"}, "nowhere/a.keras': no such file"),
        ({"init_from": "a.pt"}, r"'small_cnn' is a Keras model; expected .keras, .weights.h5, .h5, .safetensors or an"),
        ({"init_from": "a.keras", "model": f"{TORCH_MODELS}:linear"}, r"a PyTorch model; expected .pt, .pth, .safeten"),
        ({"init_from": "page.keras"}, r"page.keras' begins with b'<!DOCTYP'; which is no .keras file"),
        ({"init_from": "nowhere@3"}, "nowhere holds no exports; expected a models folder"),
        ({"init_from": "whole.keras#sha256=abc"}, r"ends with #sha256=abc; expected a SHA-256, 64 hexadecimal digits"),
        ({"init_from": f"whole.keras#sha256={'0' * 64}"}, rf"expected {'0' * 64}, as in train.init_from"),
        ({"init_from": "models"}, r"did you mean models@2\?"),
        ({"init_from": "."}, r"did you mean \./models@2\?"),
        ({"init_from": "whole.pt"}, r"a Keras model; .*; convert the file"),
        ({"init_from": "a.pt"}, "the file does not exist"),
        ({"freeze": ("all_but_head",)}, r"'small_cnn' starts with random weights, .*; set train.init_from"),
        ({"unfreeze_epoch": 2}, r"unfreeze_epoch = 2, but train.freeze is empty"),
    ],
)  # fmt: skip
def test_unreadable_initial_weights_are_refused_before_anything_starts(settings, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("page.keras").write_text("<!DOCTYPE html>")
    Path("whole.keras").write_bytes(b"PK\x03\x04")
    Path("whole.pt").write_bytes(b"PK\x03\x04")
    Path("models/exports").mkdir(parents=True)
    for number in (1, 2):
        Path(f"models/exports/{number:08}.json").write_text("{}")
    with pytest.raises(UsageError, match=message):
        check_terms(TrainConfig(**settings), SparkConfig())


def test_a_different_size_is_reported(exported, tmp_path):
    """A larger image gets one more convolution from `small_cnn`."""
    large = make_dataset(tmp_path / "large", num_images=60, image_size=64)
    recorder = Recorder()
    init_from = pinned(TrainConfig(init_from=f"{exported}@1")).init_from
    train_here(large, tmp_path / "other", recorder, model="small_cnn", epochs=1, init_from=init_from)
    [said] = recorder.named("initialized")
    assert said[WARNING].endswith(
        "; it was trained on images of 16 x 16 x 3, and this dataset has 64 x 64 x 3: set etl.image_size to match"
    )


CONFIG = {"num_streams": 12, "global_batch_size": 24, "epochs": 1, "label_smoothing": 0.1}


@given(st.data())
def test_a_slice_has_the_elements_of_the_array(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    array = np.arange(math.prod(shape), dtype="<f4").reshape(shape)
    stored = StoredArray(WeightFile.of_bytes(b"head" + array.tobytes(), "", "f"), 4, array.dtype, shape)
    bounds = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape]
    places = tuple(slice(first, end) for first, end in bounds)
    assert np.array_equal(stored[places], array[places])
    assert np.array_equal(stored[...], array)


def test_no_more_is_read_than_a_box_needs():
    shape, asked = (8, 4, MOST_BYTES_BETWEEN), []

    def read_range(start: int, num_bytes: int) -> bytes:
        asked.append(num_bytes)
        return bytes(num_bytes)

    stored = StoredArray(WeightFile("", "f", 4 * math.prod(shape), read_range), 0, np.dtype("<f4"), shape)
    of_row = 4 * MOST_BYTES_BETWEEN
    stored[slice(2, 4), slice(0, 4), slice(0, shape[2])]
    assert sum(asked) == 2 * 4 * of_row
    asked.clear()
    # Each row of its own: what lies between is longer than a request is worth.
    stored[slice(0, 8), slice(1, 2), slice(0, shape[2])]
    assert asked == [of_row] * 8


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("suffix", ["safetensors", exhaustive("pt")])
def test_each_rank_reads_its_own_slices(tiny_uri, tmp_path, suffix):
    """Rank 0 also all of it once, for its hash, and never more than some megabytes at a time."""
    import torch

    model = "tests.train.sharded_models:wide_vit"
    arrays = learner("torch", model, seed=3).named_weights().arrays()
    file = tmp_path / f"given.{suffix}"
    if suffix == "pt":
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
    else:
        file.write_bytes(plain(arrays))
    config = {**CONFIG, "model": model}
    config["init_from"] = pinned(TrainConfig(model=model, init_from=str(file))).init_from
    one = Recorder()
    train_here(tiny_uri, tmp_path / "one", one, **config)
    [said] = one.named("initialized")
    assert said["share"] == 1.0

    sharded = {**config, "strategy": "torch_fsdp"}
    _, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, sharded, worker="every_rank_reports_how_much_it_reads")
    expected = [float.fromhex(loss) for loss in one.losses.values()]
    assert [float.fromhex(loss) for loss in watcher.losses.values()] == pytest.approx(expected, rel=1e-5)
    of_ranks = [int((tmp_path / "two" / "read" / f"rank-{rank}").read_text()) for rank in range(2)]
    size, weights = file.stat().st_size, sum(array.nbytes for array in arrays.values())
    # An archive is looked at around each of its entries.
    listing = 2 * (size - weights) + 3 * len(arrays) * BUFFER_BYTES
    assert weights / 2 <= of_ranks[1] < weights / 2 + listing < 0.9 * size
    assert of_ranks[0] <= size + of_ranks[1] + BUFFER_BYTES


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("strategy", ["torch_fsdp", exhaustive("tensor_parallel")])
def test_a_training_starts_from_a_checkpoint_of_shards(tiny_uri, tmp_path, strategy):
    """With the moving statistics of its batch norms."""
    model = "tests.train.torch_models:normed"
    first, _ = train_on_ranks(tiny_uri, tmp_path / "first", 2, {**CONFIG, "model": model, "strategy": strategy})
    folder = tmp_path / "first" / first.checkpoint
    found = open_checkpoint(open_store(tmp_path / "first"), first.checkpoint)
    whole = read_whole_model(found.files(open_store(tmp_path / "first")))
    config = pinned(TrainConfig(model=model, init_from=str(folder)))

    one = learner("torch", model, seed=3)
    named, stored = one.named_weights(), arrays_of_checkpoint(find_initial(config).uri)
    match = match_weights(named.shapes, stored, named.head, "f")
    assert (match.replaced, match.missing) == ((), ())
    named.assign(match.arrays)
    for part, arrays in ((StatePart.WEIGHTS, whole.weights), (StatePart.OWN, whole.own)):
        # But for generators.
        assert all(map(np.array_equal, one.arrays(part)[: None if part is StatePart.WEIGHTS else -1], arrays))

    again = {**CONFIG, "model": model, "init_from": config.init_from}
    recorder = Recorder()
    train_here(tiny_uri, tmp_path / "one", recorder, **again)
    _, watcher = train_on_ranks(tiny_uri, tmp_path / "two", 2, {**again, "strategy": "tensor_parallel"})
    assert "initialized" in watcher.names
    expected = [float.fromhex(loss) for loss in recorder.losses.values()]
    assert [float.fromhex(loss) for loss in watcher.losses.values()] == pytest.approx(expected, rel=1e-5)

    # The marker is as it was, so only the file itself can tell. Found by the driver, before any rank starts.
    damaged = max(folder.glob("weights-*.npz"), key=lambda path: path.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(IntegrityError, match=rf"{damaged.name} was altered"):
        pinned(TrainConfig(model=model, init_from=str(folder)))


def test_a_checkpoint_without_names_is_refused(tiny_uri, tmp_path):
    model = "tests.train.torch_models:linear"
    result = train_here(tiny_uri, tmp_path, **CONFIG, model=model)
    with pytest.raises(UsageError, match=r"is a checkpoint whose arrays have no names; .*; export that training"):
        find_initial(TrainConfig(model=model, init_from=str(tmp_path / result.checkpoint)))


def step(one: Learner) -> dict[str, np.ndarray]:
    """The weights after an update at a high rate."""
    assert one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), 0.1).is_applied
    return dict(one.named_weights().arrays())


def moved(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> set[str]:
    return {name for name in after if (before[name] != after[name]).any()}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("unfreeze_epoch", [0, 2])
def test_what_is_frozen_does_not_move_nor_do_its_statistics(name, unfreeze_epoch):
    settings = {"unfreeze_epoch": unfreeze_epoch, "optimizer": "adamw", "weight_decay": 0.5}
    one = learner(name, NORMED[name], freeze=("all_but_head",), **settings)
    named, before = one.named_weights(), one.named_weights().arrays()
    all_weights = len(learner(name, NORMED[name]).arrays(StatePart.WEIGHTS))
    assert len(one.arrays(StatePart.WEIGHTS)) == (all_weights if unfreeze_epoch else len(named.head))
    if unfreeze_epoch:
        one.freeze()
    step(one)
    after = step(one)
    assert moved(before, after) == set(named.head)

    if unfreeze_epoch:
        one.unfreeze()
        # An optimizer of many steps that has never seen a weight would begin with steps that are too long for it.
        fresh = learner(name, NORMED[name], freeze=("all_but_head",), **settings).arrays(StatePart.OPTIMIZER)
        assert all(map(np.array_equal, one.arrays(StatePart.OPTIMIZER), fresh))
        assert len(moved(after, step(one))) > len(named.head)


@pytest.mark.parametrize("name", [exhaustive("keras"), "torch"])
def test_weights_learn_from_the_epoch_on_also_in_a_training_that_is_killed_in_each(name, tiny_uri, tmp_path):
    how = {"model": NORMED[name], "epochs": 3, "freeze": ["all_but_head"], "unfreeze_epoch": 1,
           "checkpoint": {"keep": 9}, "checkpoint_every_steps": 1}  # fmt: skip
    whole, parts = Recorder(), Recorder(killed_at=1)
    result = train_here(tiny_uri, tmp_path / "whole", whole, **how)
    num_steps = whole.steps[0].num_steps
    # In the first epoch, after its last step, and in the middle of the second.
    for killed_at in (1, num_steps, num_steps + 2):
        recorder = Recorder(killed_at=killed_at)
        with pytest.raises(Killed):
            train_here(tiny_uri, tmp_path / "parts", recorder, **how)
        parts.steps += recorder.steps
    again = train_here(tiny_uri, tmp_path / "parts", parts_end := Recorder(), **how)
    parts.steps += parts_end.steps
    assert again.weights_sha256 == result.weights_sha256 and parts.losses == whole.losses

    folders = sorted((tmp_path / "whole" / "t" / "checkpoints").iterdir())
    first, frozen, last = (load_arrays((folders[step] / WEIGHTS).read_bytes()) for step in (0, num_steps - 1, -1))
    head = [(a != b).any() for a, b in zip(first, frozen, strict=True)]
    assert sum(head) == 2 and all((a != b).any() for a, b in zip(frozen, last, strict=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_pattern_that_names_nothing_is_refused(name):
    with pytest.raises(UsageError, match=r"train.freeze = 'nothing\*' matches no weight of .*; it has "):
        learner(name, NORMED[name], freeze=("nothing*",))
    with pytest.raises(UsageError, match=r"freezes all weights of"):
        learner(name, NORMED[name], freeze=("*",))


@pytest.mark.drill
@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("small_cnn", {"strategy": "horovod", "num_workers": 2}),
        exhaustive("small_cnn", {"strategy": "multi_worker_mirrored", "num_workers": 2}),
        exhaustive("small_cnn", {"strategy": "mirrored", "num_workers": 1, "mirrored": {"num_devices": 2}}),
        exhaustive("small_cnn", {"strategy": "torch_ddp", "num_workers": 2}),
        # One worker does one step after the other.
        exhaustive("small_cnn", {"strategy": "parameter_server", "num_workers": 1}),
        exhaustive(f"{TORCH_MODELS}:smooth", {"strategy": "torch_ddp", "num_workers": 2}),
        (f"{TORCH_MODELS}:smooth", {"strategy": "local_sgd", "num_workers": 2}),
    ],
)
def test_ranks_start_from_the_same_file_and_unfreeze_together(model, how, tiny_uri, tmp_path):
    how = dict(how)
    name = "torch" if model.startswith(TORCH_MODELS) else "keras"
    given = learner(name, model, seed=3).named_weights().arrays()
    (tmp_path / "given.safetensors").write_bytes(plain(dict(given)))
    settings = {"model": model, "init_from": str(tmp_path / "given.safetensors"), "freeze": ["all_but_head"],
                "unfreeze_epoch": 1, "epochs": 3, "optimizer": "sgd", "learning_rate": 0.02, "schedule": "constant",
                "num_streams": 12,
                "global_batch_size": 24, "label_smoothing": 0.1, "augment": {}}  # fmt: skip
    settings["init_from"] = pinned(TrainConfig(**settings)).init_from
    one = Recorder()
    train_here(tiny_uri, tmp_path / "one", one, **settings)
    assert one.named("initialized")[0]["share"] == 1.0

    _, several = train_on_ranks(tiny_uri, tmp_path / "several", how.pop("num_workers"), {**settings, **how})
    assert "initialized" in several.names and several.losses.keys() == one.losses.keys()
    for place, loss in one.losses.items():
        assert float.fromhex(several.losses[place]) == pytest.approx(float.fromhex(loss), rel=1e-5)
