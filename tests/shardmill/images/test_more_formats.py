"""HEIC and JPEG XL: refused by name unless the options ask for them; then within the limits, and part of the id."""

from __future__ import annotations

import io
from importlib import metadata

import numpy as np
import pillow_heif
import pytest
from PIL import Image
from pillow_jxl import JpegXLImagePlugin

from shardmill.dataset.manifest import encode_manifest, parse_manifest
from shardmill.dataset.open import open_dataset
from shardmill.images.decoder_id import decoder_id, normalization_fingerprint
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason
from tests.lab.datasets import make_dataset
from tests.shardmill.images.make import OPTIONS, decode, mean_error, over_white, photo, ramp_alpha, refusal

MORE = OPTIONS.model_copy(update={"more_formats": ("heic", "jpeg_xl")})
SAVED = {"heic": "HEIF", "jpeg_xl": JpegXLImagePlugin.JXLImageFile.format}
EVERY = pytest.mark.parametrize("name", SAVED)


def encoded(name: str, pixels_HWC: np.ndarray) -> bytes:
    pillow_heif.register_heif_opener()
    file = io.BytesIO()
    options = {"quality": 100, "chroma": 444} if name == "heic" else {"lossless": True}
    Image.fromarray(pixels_HWC).save(file, SAVED[name], **options)
    return file.getvalue()


@EVERY
def test_they_are_accepted_if_the_options_name_them(name: str) -> None:
    data = encoded(name, photo())
    reason, detail = refusal(data)
    assert reason is RejectReason.UNSUPPORTED_FORMAT and f'etl.more_formats = ["{name}"] accepts it' in detail
    decoded = decode(data, MORE)
    assert mean_error(decoded.pixels_HWC, photo()) < 1.5 and decoded.notes == ()
    flattened = decode(encoded(name, np.dstack([photo(), ramp_alpha()])), MORE)
    assert mean_error(flattened.pixels_HWC, over_white(photo(), ramp_alpha())) < 2
    assert flattened.notes == ("alpha_flattened",)


@EVERY
@pytest.mark.parametrize("shape_HW", [(24, 24), (77, 100), (480, 640), (3, 250)])
def test_sizes_are_checked_before_anything_is_decoded(name: str, shape_HW: tuple[int, int]) -> None:
    data = encoded(name, photo(*shape_HW))
    assert decode(data, MORE).pixels_HWC.shape[:2] == shape_HW
    limited = MORE.model_copy(update={"max_source_side_pixels": max(shape_HW) - 1})
    reason, detail = refusal(data, limited)
    assert reason is RejectReason.TOO_MANY_PIXELS and f"declares {shape_HW[1]}x{shape_HW[0]}" in detail
    damaged = (RejectReason.TRUNCATED, RejectReason.BAD_HEADER, RejectReason.CORRUPT_SCAN)
    assert refusal(data[: len(data) // 2], MORE)[0] in damaged
    assert refusal(data[:14], MORE)[0] in damaged


# Three frames of 24 x 32 pixels: dark, gray, bright. The plugin decodes the last one, and writes no animations.
ANIMATED = (
    "ff0ac5044d0020260804010040004b188b158055fe7f0000a50300d01c090804010044004b188b15801dfcff0000500700182d22010804050044"
    "004b188b15805dfcff000052070050294202"
)


def test_an_animated_jpeg_xl_is_refused() -> None:
    data = bytes.fromhex(ANIMATED)
    assert refusal(data, MORE) == (RejectReason.UNSUPPORTED_MODE, "jpeg_xl with an animation")


def test_the_size_of_a_jpeg_xl_may_have_its_longest_form() -> None:
    # 1 bit (not small), the selector and 30 bits of the height, no ratio, the selector and 30 bits of the width.
    size = 0 | 3 << 1 | (24 - 1) << 3 | 0 << 33 | 3 << 36 | (40 - 1) << 38
    data = b"\xff\x0a" + (size | 1 << 68).to_bytes(9, "little")
    # All that is missing is the picture behind its head.
    assert refusal(data, MORE)[0] is RejectReason.BAD_HEADER
    limited = MORE.model_copy(update={"max_source_side_pixels": 39})
    assert refusal(data, limited)[0] is RejectReason.TOO_MANY_PIXELS


def test_a_jpeg_xl_that_was_made_from_a_jpeg_is_upright_too(tmp_path) -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    Image.fromarray(photo(24, 40)).save(tmp_path / "turned.jpg", quality=95, subsampling=0, exif=exif)
    file = io.BytesIO()
    Image.open(tmp_path / "turned.jpg").save(file, SAVED["jpeg_xl"], lossless_jpeg=True)
    decoded = decode(file.getvalue(), MORE)
    assert decoded.orientation == 6 and decoded.pixels_HWC.shape == (40, 24, 3)
    assert mean_error(decoded.pixels_HWC, np.rot90(photo(24, 40), -1)) < 3


def test_the_packages_are_part_of_the_id_and_their_absence_changes_nothing(tmp_path) -> None:
    assert decoder_id(MORE).endswith(f"+pillow-jxl-plugin-{metadata.version('pillow-jxl-plugin')}")
    assert "heif" not in decoder_id(OPTIONS)
    assert normalization_fingerprint(MORE) != normalization_fingerprint(OPTIONS)
    # A shardmill without the setting reads the manifest of a dataset that does not use it.
    manifest = open_dataset(make_dataset(tmp_path, num_images=12)).manifest
    assert b"more_formats" not in encode_manifest(manifest).split(b'"normalize"')[1].split(b"}")[0]
    asked = manifest.model_copy(update={"normalize": NormalizeOptions(more_formats=("heic",))})
    assert parse_manifest(encode_manifest(asked), 1, "").normalize.more_formats == ("heic",)
