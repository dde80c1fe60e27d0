"""The same files as a folder, a tar and a ZIP archive, and what their labels become."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import pytest

from etl.config import SourceConfig
from etl.listing.listing import Listing
from shardmill.errors import UsageError
from tests.etl.building import images_of, list_images
from tests.etl.source_files import (
    Members,
    picture,
    write_tar,
    zip_bytes,
    zip_source,
)

Kind = Literal["folders", "webdataset", "zip"]

KINDS: tuple[Kind, ...] = ("folders", "webdataset", "zip")


def source_of(kind: Kind, folder: Path, *names: str, **keys: object) -> SourceConfig:
    """The same files as a folder, a tar or a ZIP archive."""
    return source_with(kind, folder, {name: picture(number) for number, name in enumerate(names)}, **keys)


def source_with(kind: Kind, folder: Path, members: Members, **keys: object) -> SourceConfig:
    if kind == "webdataset":
        source = write_tar(folder / "a.tar", members)
    elif kind == "zip":
        source = zip_source(folder / "a.zip", zip_bytes(members))
    else:
        for name, data in members.items():
            (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "images" / name).write_bytes(data)
        source = SourceConfig(uri=str(folder / "images"))
    return source.model_copy(update=keys)


def found(listing: Listing) -> Counter[tuple[str | None, str | None]]:
    return Counter((image.split, image.label) for image in images_of(listing))


def refuses(source: SourceConfig, sign: str) -> None:
    """It has no labels and seems to have some; a dataset without labels can be asked for."""
    with pytest.raises(UsageError, match=f"would have no labels, and .* seems to have some: .*{sign}"):
        list_images(source)
    listing = list_images(source.model_copy(update={"label_kind": "none"}))
    assert listing.num_images and not listing.class_names
