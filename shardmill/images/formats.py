"""The names of image formats: which one the extension of a file promises, and which need a package of their own.

A listing takes files of these extensions for images; a build accepts what needs a package if `etl.more_formats` names
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.registry import Entry, install_hint, load_object

if TYPE_CHECKING:
    from shardmill.images.pixels import DecodedImage
    from shardmill.options import NormalizeOptions


FORMAT_BY_EXTENSION = {
    **dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), "jpeg"),
    **dict.fromkeys(("png", "apng"), "png"),
    **dict.fromkeys(("bmp", "dib"), "bmp"),
    **dict.fromkeys(("tif", "tiff"), "tiff"),
    "gif": "gif",
    "webp": "webp",
    "avif": "avif",
    **dict.fromkeys(("heic", "heif", "hif"), "heic"),
    "jxl": "jpeg_xl",
    "mpo": "jpeg",
}
"""In lower case, without a dot -> a name of `sniff_format`."""


def has_other_extension(key: str, format_name: str) -> bool:
    """True if the name ends like one image format and the content is another."""
    extension = key.rpartition("/")[2].rpartition(".")[2].lower()
    return FORMAT_BY_EXTENSION.get(extension, format_name) != format_name


@dataclass(frozen=True, slots=True)
class MoreFormat:
    """One of them."""

    entry: Entry
    distribution: str
    """The name under which its package is installed: its version decides pixels."""


MORE_FORMATS = {
    "heic": MoreFormat(
        Entry("shardmill.images.pillow:decode_heic", "HEIC and HEIF", extra="heic", packages=("pillow_heif",)),
        "pillow-heif",
    ),
    "jpeg_xl": MoreFormat(
        Entry("shardmill.images.pillow:decode_jpeg_xl", "JPEG XL", extra="jpeg_xl", packages=("pillow_jxl",)),
        "pillow-jxl-plugin",
    ),
}
"""The keys are names of `sniff_format`."""


def more_decoder(name: str) -> Callable[[bytes, NormalizeOptions], DecodedImage]:
    """The decoder of one of these formats."""
    return load_object(MORE_FORMATS[name].entry.target)


def more_decoders_id(names: tuple[str, ...]) -> str:
    """What a decoder's id has more for these formats. Raises UsageError if a package is missing."""
    for name in names:
        entry = MORE_FORMATS[name].entry
        if missing := entry.missing_packages():
            raise UsageError(
                f"etl.more_formats: {name} needs {' and '.join(missing)}",
                "not installed here",
                install_hint(entry.extra),
            )
    packages = (MORE_FORMATS[name].distribution for name in sorted(names))
    return "".join(f"+{package}-{metadata.version(package)}" for package in packages)
