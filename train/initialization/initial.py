"""Resolves `train.init_from`: the file of a training's first weights and its hash, which is part of the training's id.

Nothing here imports a framework: the driver finds and hashes the file, rank 0 reads it again and compares.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import zipfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardmill.dataset.versions import split_version
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import Store, join_uri
from shardmill.stores import open_store
from train.checkpoints.arrays import (
    INDEX,
    MARKER,
    OPTIMIZER_FILES,
    ArrayLike,
    Slices,
    StoredArray,
    WeightFile,
    box_of,
    rank_file,
)
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.shards import WEIGHTS_PART, Shard, filled, read_index
from train.config import SHA256_OF_FILE, TrainConfig
from train.models import MODELS
from train.models.user import framework_of, imported_packages
from train.published.exported import EXPORTS, read_export
from train.records import record_numbers

KERAS_SUFFIXES = (".keras", ".weights.h5", ".h5", ".safetensors")
TORCH_SUFFIXES = (".pt", ".pth", ".safetensors")
MAX_FILE_BYTES = 8_000_000_000

_ZIP, _HDF5 = rb"PK\x03\x04", rb"\x89HDF\r\n\x1a\n"
_BEGINS = {
    ".keras": _ZIP,
    ".weights.h5": _HDF5,
    ".h5": _HDF5,
    # A length below 2**32, then JSON.
    ".safetensors": rb"....\0\0\0\0\s*\{",
    # Of today, and of PyTorch before 1.6.
    ".pt": rb"PK\x03\x04|\x80\x02",
    ".pth": rb"PK\x03\x04|\x80\x02",
    MARKER: rb"\{",
}
"""First bytes of each kind of file, which detect a saved web page before anything starts."""
_LONGEST_BEGINNING = 64
_BLOCK_BYTES = 8_000_000


@dataclass(frozen=True, slots=True)
class InitialFile:
    """One file of trained weights."""

    uri: str
    """Absolute: ranks may start elsewhere."""
    suffix: str
    class_names: tuple[str, ...] | None = None
    """Class names of a shardmill export; None if the file has none."""
    image_shape_HWC: tuple[int, int, int] | None = None
    """Image shape, likewise."""
    sha256: str = ""
    """Digest in the export's record or the config; empty if the file is not hashed yet."""

    def check(self) -> None:
        """Raises UsageError if there is none, if it begins as no file of its kind, or if it is larger than any model
        that one process could hold."""
        if self.sha256 and not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise UsageError(
                f"train.init_from ends with {SHA256_OF_FILE}{self.sha256}",
                "expected a SHA-256, 64 hexadecimal digits",
                "give the file's SHA-256 (sha256sum), or remove it",
            )
        store, name = self._place()
        found = store.stat(name)
        if found is None:
            raise UsageError(
                f"train.init_from = {self.uri!r}: no such file",
                "expected a file of weights, or an export MODELS@N",
                "check the path",
            )
        if found.size_bytes > MAX_FILE_BYTES:
            raise UsageError(
                f"train.init_from = {self.uri!r} has {found.size_bytes} bytes", f"expected at most {MAX_FILE_BYTES}"
            )
        begins = store.read_range(name, 0, min(_LONGEST_BEGINNING, found.size_bytes))
        if not re.match(_BEGINS[self.suffix], begins, re.DOTALL):
            raise UsageError(
                f"train.init_from = {self.uri!r} begins with {begins[:8]!r}",
                f"which is no {self.suffix} file",
                "download or save it again",
            )

    def opened(self) -> WeightFile:
        """Raises as `check` does."""
        self.check()
        store, name = self._place()
        found = store.stat(name)
        assert found is not None
        return WeightFile(self.suffix, self.uri, found.size_bytes, partial(store.read_range, name))

    def read_digest(self) -> str:
        """SHA-256 of its bytes, of which few are in memory at a time. Raises as `check` does.

        That of a checkpoint is its marker's, which has those of its files. Raises IntegrityError if one is damaged.
        """
        if self.suffix == MARKER:
            _verify_arrays(self.uri)
        digest = hashlib.sha256()
        with self.opened().opened() as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()

    def _place(self) -> tuple[Store, str]:
        folder, _, name = self.uri.rpartition("/")
        return open_store(folder or "/"), name


def _verify_arrays(marker_uri: str) -> None:
    root, folder, _ = marker_uri.rsplit("/", 2)
    store = open_store(root)
    found = open_checkpoint(store, folder)
    found.verify(store, {file.path for file in found.marker.files if not file.path.startswith(OPTIMIZER_FILES)})


def find_initial(config: TrainConfig) -> InitialFile:
    """The file that `train.init_from` names. Raises UsageError if the framework of the model does not read its kind."""
    given, _, sha256 = config.init_from.partition(SHA256_OF_FILE)
    packages = imported_packages(config)
    is_keras = "keras" in packages or framework_of(config, packages) != "torch"
    root, number = split_version(given)
    if number is not None:
        return _in_export(root, number, "model.keras" if is_keras else "state_dict.pt", sha256)
    suffixes = KERAS_SUFFIXES if is_keras else TORCH_SUFFIXES
    # The longest: `.weights.h5` is also `.h5`, and another format.
    suffix = max((each for each in suffixes if given.endswith(each)), key=len, default=None)
    if suffix is None and not is_keras and (marker := _marker_in(given)):
        return InitialFile(marker, MARKER, sha256=sha256)
    if suffix is None:
        kind = "Keras" if is_keras else "PyTorch"
        raise UsageError(
            f"train.init_from = {given!r}, but train.model = {config.model!r} is a {kind} model",
            f"expected {', '.join(suffixes)} or an export MODELS@N",
            _instead_of(given),
        )
    store, name = _place_of(given)
    return InitialFile(join_uri(store.uri, name), suffix, sha256=sha256)


def _marker_in(given: str) -> str:
    """URI of the marker of the checkpoint `given`; empty for no checkpoint. Raises UsageError if its arrays have no
    names."""
    store, name = _place_of(given.removesuffix(f"/{MARKER}"))
    if not name or store.stat(name) is not None or store.stat(f"{name}/{MARKER}") is None:
        return ""
    if store.stat(f"{name}/{INDEX}") is None:
        raise UsageError(
            f"train.init_from = {given!r} is a checkpoint whose arrays have no names",
            "expected one of a strategy that shards the model, or an export MODELS@N",
            "export that training (`shardmill export`), and give the export",
        )
    return join_uri(store.uri, f"{name}/{MARKER}")


def _place_of(given: str) -> tuple[Store, str]:
    folder, _, name = given.rpartition("/")
    at_root = given.startswith("/") and not folder
    return open_store("/" if at_root else folder or "."), name


def _instead_of(given: str) -> str:
    """The fix for a file of a kind that the model does not take, or a path that is not a file."""
    store, name = _place_of(given)
    if name and store.stat(name) is not None:
        return "convert the file, or choose another model"
    for models_uri in (given, join_uri(given, "models")):
        if numbers := record_numbers(open_store(models_uri), EXPORTS):
            return f"did you mean {models_uri}@{numbers[-1]}?"
    return "check the path, too: the file does not exist"


def check_initial(config: TrainConfig) -> None:
    """Raises UsageError if there is no such file, its kind is none that the model takes, random weights would be held
    still, or nothing is unfrozen."""
    if config.init_from:
        _check_digest(find_initial(config))
    # A factory of the user's own may give its model trained weights itself.
    elif config.freeze and not MODELS.is_own(config.model):
        raise UsageError(
            f"train.freeze = {list(config.freeze)} without train.init_from",
            f"train.model = {config.model!r} starts with random weights, and frozen weights would stay random",
            "set train.init_from, or remove train.freeze",
        )
    if config.unfreeze_epoch and not config.freeze:
        raise UsageError(
            f"train.unfreeze_epoch = {config.unfreeze_epoch}, but train.freeze is empty",
            "expected weights to unfreeze",
            'set train.freeze = ["all_but_head"]',
        )


def _check_digest(file: InitialFile) -> None:
    """Raises UsageError for another file than the one that the config insists on."""
    file.check()
    if file.sha256 and file.class_names is None and (digest := file.read_digest()) != file.sha256:
        raise _other_digest(f"train.init_from = {file.uri!r}", digest, file.sha256)


def _other_digest(what: str, digest: str, given: str) -> UsageError:
    return UsageError(
        f"{what} has SHA-256 {digest}",
        f"expected {given}, as in train.init_from",
        "give the intended file, or its digest",
    )


def pinned(config: TrainConfig) -> TrainConfig:
    """`config` with the SHA-256 of the file behind `init_from`: changing the file starts a new run."""
    if not config.init_from:
        return config
    file = find_initial(config)
    sha256 = file.sha256 or file.read_digest()
    root, number = split_version(config.init_from.partition(SHA256_OF_FILE)[0])
    # Which export it is stays said: it knows its classes.
    place = file.uri if number is None else f"{open_store(root).uri}@{number}"
    return config.model_copy(update={"init_from": f"{place}{SHA256_OF_FILE}{sha256}"})


def read_pinned(config: TrainConfig) -> InitialFile:
    """The file. Raises IntegrityError if its bytes are not those that the driver hashed."""
    file = find_initial(config)
    digest = file.read_digest()
    if digest != file.sha256:
        raise IntegrityError(
            f"{file.uri} has SHA-256 {digest}",
            f"expected {file.sha256}, which the driver found",
            "do not change it while a training starts",
        )
    return file


def _in_export(root: str, number: int, name: str, sha256: str) -> InitialFile:
    record, store = read_export(root, number).record, open_store(root)
    for file in record.files:
        if file.path == f"{record.artifact_dir}/{name}":
            if sha256 and sha256 != file.sha256:
                what = f"train.init_from = {root}@{number}: the file of export {number}"
                raise _other_digest(what, file.sha256, sha256)
            suffix = f".{name.rpartition('.')[2]}"
            shape_HWC = record.image_shape_HWC
            return InitialFile(join_uri(store.uri, file.path), suffix, record.class_names, shape_HWC, file.sha256)
    raise UsageError(
        f"train.init_from = {root}@{number}: the export has no {name}",
        f"its model {record.model!r} is of the backend {record.backend!r} {record.keras_note}".strip(),
        "start from an export of the same framework, or from a file",
    )


MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Initialized:
    """The weights that a training loaded from `train.init_from`."""

    source: str
    num_loaded: int
    num_weights: int
    """Arrays of the model."""
    share: float
    """Share of the model's numbers."""
    replaced: tuple[str, ...]
    """Weights of the head that keep their fresh values, and why: other shapes, or other classes."""
    missing: tuple[str, ...]
    """Weights of the model that the file does not have; they keep their fresh values."""
    unused: tuple[str, ...]
    """Arrays of the file that the model does not have."""


@dataclass(frozen=True, slots=True)
class Match:
    """Values for some of a model's weights, and what is said of the others; as in `Initialized`."""

    arrays: Mapping[str, ArrayLike]
    """Not read yet, if they are in a file."""
    replaced: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    def initialized(self, source: str, shapes: Mapping[str, tuple[int, ...]]) -> Initialized:
        """Return the record."""
        size = sum(map(math.prod, shapes.values()))
        share = sum(array.size for array in self.arrays.values()) / max(1, size)
        return Initialized(source, len(self.arrays), len(shapes), share, self.replaced, self.missing, self.unused)


def match_weights(
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, ArrayLike],
    head: Collection[str],
    source: str,
    *,
    other_classes: bool = False,
) -> Match:
    """`shapes`: those of the model's weights, `given`: the file's arrays, by name; `head`: the last layer's names.

    Names of either side may have a common prefix: a model inside an export or in DistributedDataParallel, a file of a
    backbone that is a part of the model. The head's arrays are left out if one of them does not fit, or with
    `other_classes`. Raises UsageError that lists all other weights of which the file has another shape, or if nothing
    fits.
    """
    of_file, of_model = _prefixes(shapes, given)
    # The head as a whole: half of another one is none.
    shapes_there = {
        name: given[there].shape for name in head if (there := of_file + name.removeprefix(of_model)) in given
    }
    other_head = other_classes or any(shapes[name] != shape for name, shape in shapes_there.items())
    arrays, replaced, unfit, missing = {}, [], [], []
    taken: set[str] = set()
    for name, shape in shapes.items():
        name_there = of_file + name.removeprefix(of_model)
        array = given.get(name_there) if name.startswith(of_model) else None
        if array is None:
            missing.append(name)
            continue
        taken.add(name_there)
        both = f"{name}: {array.shape} in the file, {shape} in the model"
        if name in head and other_head:
            replaced.append(both if array.shape != shape else f"{name}: belongs to other classes")
        elif array.shape != shape:
            unfit.append(both)
        else:
            arrays[name] = array
    if unfit:
        raise UsageError(
            f"{source} does not fit the model: {listed(unfit)}",
            "expected equal shapes, except in the last layer",
            "use the model and the image size with which the file was created",
        )
    if not arrays:
        raise UsageError(
            f"no array of {source} fits a weight of the model",
            f"the model has {listed(list(shapes))}; the file has {listed(list(given)) or 'none'}",
            "use the model with which the file was created",
        )
    return Match(arrays, tuple(replaced), tuple(missing), tuple(sorted(given.keys() - taken)))


def listed(names: Collection[str], most: int = MAX_NAMED) -> str:
    """List the first names for people, and how many follow."""
    shown = "; ".join(list(names)[:most])
    return shown + (f"; and {len(names) - most} more" if len(names) > most else "")


def _prefixes(shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, ArrayLike]) -> tuple[str, str]:
    """The file's and the model's under which most names are found with their shapes; of equal ones the shortest.

    One of the two is empty.
    """
    found = Counter({("", ""): 0})
    by_end: dict[str, list[str]] = {}
    for name in given:
        by_end.setdefault(_end(name), []).append(name)
    for weight, shape in shapes.items():
        for name in by_end.get(_end(weight), ()):
            if given[name].shape != shape:
                continue
            of_file, of_model = name.removesuffix(weight), weight.removesuffix(name)
            if name == weight:
                found["", ""] += 1
            elif name.endswith(weight) and of_file[-1] in "./":
                found[of_file, ""] += 1
            elif weight.endswith(name) and of_model[-1] in "./":
                found["", of_model] += 1
    return min(found, key=lambda each: (-found[each], len("".join(each))))


def _end(name: str) -> str:
    return name.replace(".", "/").rpartition("/")[2]


_LOCAL_HEADER_BYTES = 30
_LONGEST_NPY_HEADER = 1 << 12


def arrays_of_checkpoint(marker_uri: str) -> Mapping[str, ArrayLike]:
    """Raises IntegrityError if the checkpoint is not complete by marker and sizes."""
    root, folder, _ = marker_uri.rsplit("/", 2)
    store = open_store(root)
    index = read_index(open_checkpoint(store, folder).files(store).read)
    boxes: dict[str, list[tuple[Shard, ArrayLike]]] = {}
    for rank in range(len(index.of_ranks)):
        written = index.written_by(rank, WEIGHTS_PART)
        stored = _stored_in_npz(store, f"{folder}/{index.file(WEIGHTS_PART, rank)}") if written else []
        for shard, array in zip(written, stored, strict=True):
            boxes.setdefault(shard.name, []).append((shard, array))
    own = dict(zip(index.own, _stored_in_npz(store, f"{folder}/{rank_file(0)}"), strict=False)) if index.own else {}
    return {name: _BoxedArray(each[0][0].global_shape, each, marker_uri) for name, each in boxes.items()} | own


@dataclass(frozen=True, slots=True)
class _BoxedArray:
    """An array of which each box is in a place of its own."""

    shape: tuple[int, ...]
    boxes: Sequence[tuple[Shard, ArrayLike]]
    where: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, slices: Slices) -> np.ndarray:
        whole = box_of(self.shape, slices)
        any_box = self.boxes[0][0]
        offsets, sizes = tuple(each.start for each in whole), tuple(each.stop - each.start for each in whole)
        return filled(Shard(any_box.part, any_box.name, self.shape, offsets, sizes), self.boxes, self.where)


def _stored_in_npz(store: Store, path: str) -> list[StoredArray]:
    """The arrays of a file that `train.checkpoints.arrays.dump_arrays` has made, in its order."""
    found = store.stat(path)
    assert found is not None
    file = WeightFile(".npz", f"{store.uri}/{path}", found.size_bytes, partial(store.read_range, path))
    with zipfile.ZipFile(file.opened()) as archive:
        return [_stored_in(file, entry) for entry in sorted(archive.infolist(), key=lambda entry: entry.filename)]


def _stored_in(file: WeightFile, entry: zipfile.ZipInfo) -> StoredArray:
    local = file.read_range(entry.header_offset, _LOCAL_HEADER_BYTES)
    # Lengths of the name and of an extra field, which follow.
    start = (
        entry.header_offset + _LOCAL_HEADER_BYTES + sum(int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
    )
    head = io.BytesIO(file.read_range(start, min(entry.file_size, _LONGEST_NPY_HEADER)))
    version = np.lib.format.read_magic(head)
    shape, is_by_column, dtype = np.lib.format.read_array_header_1_0(head)
    if entry.compress_type != zipfile.ZIP_STORED or version != (1, 0) or is_by_column or dtype.hasobject:
        raise IntegrityError(
            f"{file.where} holds {entry.filename} in another form", "expected plain arrays, row by row", "save it again"
        )
    return StoredArray(file, start + head.tell(), dtype, shape)
