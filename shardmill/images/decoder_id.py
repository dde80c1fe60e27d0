"""Identifies everything that pixels depend on as one string: the rules of this package, library versions, the kernel,
and formats that need a package of their own, which a build accepts if `etl.more_formats` names them.

The string is part of the normalization fingerprint, and executors refuse to work beside a driver with another one. It
has a module of its own so that a driver can name the decoders without loading them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import cv2
import PIL
import simplejpeg
from PIL import features

from shardmill.errors import UsageError
from shardmill.ids import canonical_digest
from shardmill.images.extensions import FORMAT_BY_EXTENSION
from shardmill.kernel import KERNEL_VERSION, NATIVE_ID, resolve_kernel
from shardmill.options import NormalizeOptions
from shardmill.registry import Entry, install_hint, load_object

if TYPE_CHECKING:
    from shardmill.images.pixels import DecodedImage


# Increase it with every change to this package that can change a pixel or a rejection.
RULES_VERSION = 6
_AVIF = f"+libavif-{features.version('avif')}"
# Rules of which the pixels of all ordinary files are those of today: what was trained on them still serves. Beside each
# what its ids had not yet.
# 3: rejected what libjpeg warns of, took the preview of a TIFF, and did not look for the declared bits of 16-bit files.
# 4: made BMPs of sixteen bits a little darker.
# 5: refused AVIF.
SERVED_RULES = {3: _AVIF, 4: _AVIF, 5: _AVIF, 6: ""}
# Files of these names had the pixels of today by older rules; None: whatever was accepted. Of 3 not what may have
# previews or 16 bits, of 4 not what Pillow decodes since.
_OF_JPEG_AND_WEBP = frozenset({"jpg", "jpeg", "jpe", "jfif", "webp"})
EQUAL_SUFFIXES = {3: _OF_JPEG_AND_WEBP, 4: _OF_JPEG_AND_WEBP | {"png", "tif", "tiff"}, 5: None, 6: None}
# The kernel before this one left JPEGs with a profile to the wheels, whose areas are up to a level apart.
BEFORE_COLOURS = "+native-1+"
NOT_OF_JPEG = frozenset(each for each, name in FORMAT_BY_EXTENSION.items() if name != "jpeg")
# Releases of OpenCV with the pixels, files and refusals of the first one (tests/shardmill/images/test_golden.py).
_EQUAL_OPENCV = ("4.11.0", "5.0.0")
_OPENCV = _EQUAL_OPENCV[0] if cv2.__version__ in _EQUAL_OPENCV else cv2.__version__
DECODER_ID = (
    f"rules-{RULES_VERSION}+simplejpeg-{simplejpeg.__version__}+opencv-{_OPENCV}"
    f"+pillow-{PIL.__version__}+littlecms-{features.version('littlecms2')}{_AVIF}+shrink-area+enlarge-linear-exact+ipp-off"
)
# All that this interpreter can decode with: its child processes must be able to do the same.
INSTALLED_DECODERS = f"{DECODER_ID}+{NATIVE_ID}" if NATIVE_ID else DECODER_ID


def decoder_id(options: NormalizeOptions) -> str:
    """`DECODER_ID`, with those of the native kernel and of more formats if the options ask for them.

    Raises UsageError if one is not installed.
    """
    kernel = f"+{NATIVE_ID}" if resolve_kernel(options.kernel) == "native" else ""
    return f"{DECODER_ID}{kernel}{more_decoders_id(options.more_formats)}"


def is_served(options: NormalizeOptions, fingerprint: str) -> bool:
    """Whether this machine makes the pixels that a model was trained on, whose dataset has this fingerprint."""
    return rules_of(options, fingerprint) is not None


def rules_of(options: NormalizeOptions, fingerprint: str) -> int | None:
    """The rules by which the decoders of this machine made what has this fingerprint; None if it is of others."""
    here = decoder_id(options)
    kernels = (here, here.replace(f"+native-{KERNEL_VERSION}+", BEFORE_COLOURS))
    names = ((rules, _id_of_rules(rules, kernel)) for rules in SERVED_RULES for kernel in kernels)
    return next((rules for rules, name in names if _fingerprint(options, name) == fingerprint), None)


def _id_of_rules(rules: int, here: str) -> str:
    lacking = SERVED_RULES[rules]
    return here.replace(lacking, "", 1).replace(f"rules-{RULES_VERSION}+", f"rules-{rules}+", 1)


def normalization_fingerprint(options: NormalizeOptions) -> str:
    """SHA-256 over the options and `decoder_id`: equal fingerprints promise equal stored bytes for equal sources."""
    return _fingerprint(options, decoder_id(options))


def _fingerprint(options: NormalizeOptions, decoder: str) -> str:
    deciding = options.model_dump(mode="json")
    # The kernel is in the id: what the wheels made before there was a choice keeps its fingerprint.
    del deciding["kernel"]
    # So does what was made before there were these, whose defaults change nothing.
    for name in ("min_source_bytes", "significant_bits", "more_formats"):
        if getattr(options, name) == NormalizeOptions.model_fields[name].default:
            del deciding[name]
    return canonical_digest({"options": deciding, "decoder_id": decoder})


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
