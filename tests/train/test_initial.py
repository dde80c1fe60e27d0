"""`train.init_from` takes over what fits, says what does not, and runs nothing in the file."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

import io
import json
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.stores import open_store
from tests.lab.datasets import make_dataset
from tests.train.learners import SHAPE, THREE, TORCH_MODELS, batch_of
from tests.train.training import MODELS, Recorder, check_terms, keras_model_of, train_here
from train.backends import BACKENDS
from train.backends.backend import InputScale, ModelSpec, StatePart
from train.backends.weight_files import read_arrays
from train.checkpoints.state import WEIGHTS, load_arrays, rank_file
from train.checkpoints.stored_arrays import WeightFile
from train.config import TrainConfig
from train.contracts.world import World
from train.identity import settings_that_matter
from train.initialization.initial import pinned, read_pinned
from train.initialization.match_weights import match_weights
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


def learner(name: str, model: str, **config: Any):
    BACKENDS[name].start(World(), 0)
    spec = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3))
    return BACKENDS[name].build(TrainConfig(model=model, **config), spec)


def test_safetensors_of_every_float():
    values = np.array([1.0, -2.5, 3.25], np.float32)
    upper_halves = (values.view("<u4") >> 16).astype("<u2")
    data = safetensors(
        {
            "a": ("F32", (3,), values.tobytes()),
            "b": ("BF16", (3, 1), upper_halves.tobytes()),
            "c": ("F16", (3,), values.astype("<f2").tobytes()),
        }
    )
    arrays = read_arrays(data, ".safetensors", "f")
    assert [arrays[name].ravel().tolist() for name in "abc"] == [[1.0, -2.5, 3.25]] * 3 and arrays["b"].shape == (3, 1)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8 + b"{}",
        (10).to_bytes(8, "little") + b"{}",
        safetensors({"a": ("F32", (4,), b"1234")}),
        safetensors({"a": ("F32", (-1, -1), b"1234")}),
        safetensors({"a": ("XX", (1,), b"1234")}),
        safetensors({"a": ("F32", (1,), b"1234")})[:-1],
        (2).to_bytes(8, "little") + b"[]",
    ],
)
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
        (
            {"init_from": f"whole.keras#sha256={'0' * 64}"},
            rf"expected {'0' * 64}, as in train.init_from",
        ),
        ({"init_from": "models"}, r"did you mean models@2\?"),
        ({"init_from": "."}, r"did you mean \./models@2\?"),
        ({"init_from": "whole.pt"}, r"a Keras model; .*; convert the file"),
        ({"init_from": "a.pt"}, "the file does not exist"),
        ({"freeze": ("all_but_head",)}, r"'small_cnn' starts with random weights, .*; set train.init_from"),
        ({"unfreeze_epoch": 2}, r"unfreeze_epoch = 2, but train.freeze is empty"),
    ],
)
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
