"""Files of each kind of source, as tests write them."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq

from etl.config import SourceConfig
from etl.listing.listing import Listing
from shardmill.formats.tf_example import (
    FeatureValue,
    encode_example,
)
from shardmill.formats.tfrecord import frame
from tests.etl.building import images_of


def idx_bytes(items: np.ndarray) -> bytes:
    return struct.pack(f">HBB{items.ndim}I", 0, 8, items.ndim, *items.shape) + items.tobytes()


def write_pair(
    folder: Path, name: str, count: int, packed: bool = False, channels: int = 0, seed: int = 0
) -> np.ndarray:
    """`count` small images and their labels from 0 to 2; returns the images."""
    shape = (count, 8, 6, channels) if channels else (count, 8, 6)
    images = np.random.default_rng(seed).integers(0, 255, shape, np.uint8)
    folder.mkdir(exist_ok=True, parents=True)
    files = {
        f"{name}-images-idx{images.ndim}-ubyte": images,
        f"{name}-labels-idx1-ubyte": np.arange(count, dtype=np.uint8) % 3,
    }
    for file, items in files.items():
        data = idx_bytes(items)
        (folder / f"{file}{'.gz' * packed}").write_bytes(gzip.compress(data, 1) if packed else data)
    return images


def idx(uri: object) -> SourceConfig:
    return SourceConfig(uri=str(uri), kind="idx")


Members = dict[str, bytes]


def picture(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), np.uint8)
    return cv2.imencode(".png", pixels)[1].tobytes()


def write_tar(
    file: Path, members: Members, mode: Literal["w", "w:gz"] = "w", form: int = tarfile.PAX_FORMAT
) -> SourceConfig:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode, format=form) as tar:
        for name, data in members.items():
            add_member(tar, name, data)
    return SourceConfig(uri=str(file), kind="webdataset")


def samples(count: int = 40) -> Members:
    members = {}
    for number in range(count):
        members[f"{number:04d}.png"] = picture(number)
        members[f"{number:04d}.cls"] = str(number % 3).encode()
        members[f"{number:04d}.json"] = json.dumps({"class": {"name": f"c{number % 3}"}, "id": number}).encode()
    return members


def labels(listing: Listing) -> dict[str, str | None]:
    return {image.key.partition("\0")[2]: image.label for image in images_of(listing)}


def reasons(listing: Listing) -> Counter[str]:
    return Counter(str(each.reason) for each in listing.rejections)


def write_table(file: Path, rows: dict[str, list], metadata: dict[bytes, bytes] | None = None) -> SourceConfig:
    """The same rows in the format that the name asks for."""
    table = pa.table(rows).replace_schema_metadata(metadata)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.name.endswith(".parquet"):
        pq.write_table(table, file, row_group_size=3)
    elif file.name.endswith((".feather", ".arrow")):
        pyarrow.feather.write_feather(table, str(file), chunksize=3)
    elif file.name.endswith(".csv"):
        pyarrow.csv.write_csv(table, file)
    else:
        lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
        file.write_bytes(gzip.compress(lines.encode()) if file.name.endswith(".gz") else lines.encode())
    return SourceConfig(uri=str(file), kind="table")


class Unseekable(io.RawIOBase):
    """Python then writes sizes and checksums behind the data."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.data += data
        return len(data)


def zip_bytes(members: dict[str, bytes], kind: int = zipfile.ZIP_DEFLATED, *, streamed: bool = False) -> bytes:
    out = Unseekable() if streamed else io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as archive:  # pyright: ignore[reportArgumentType]
        for name, data in members.items():
            archive.writestr(name, data)
    return bytes(out.data) if isinstance(out, Unseekable) else out.getvalue()


def zip_source(file: Path, data: bytes) -> SourceConfig:
    file.write_bytes(data)
    return SourceConfig(uri=str(file), kind="zip")


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def write_records(file: Path, records: list[dict[str, FeatureValue]]) -> SourceConfig:
    file.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(frame(encode_example(record)) for record in records)
    file.write_bytes(gzip.compress(data, 1) if file.name.endswith(".gz") else data)
    return SourceConfig(uri=str(file), kind="tfrecord")


def records(count: int, start: int = 0) -> list[dict[str, FeatureValue]]:
    return [{"image": picture(start + number), "label": number % 3, "id": b"n%d" % number} for number in range(count)]


def record(**features: FeatureValue) -> dict[str, FeatureValue]:
    return {"image/encoded": picture(0)} | {f"image/class/{name}": value for name, value in features.items()}
