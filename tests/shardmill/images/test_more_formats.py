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
from tests.shardmill.images.make import OPTIONS, decode, mean_error, over_white, photo, ramp_alpha, refusal
from tests.support import make_dataset

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


def test_the_packages_are_part_of_the_id_and_their_absence_changes_nothing(tmp_path) -> None:
    assert decoder_id(MORE).endswith(f"+pillow-jxl-plugin-{metadata.version('pillow-jxl-plugin')}")
    assert "heif" not in decoder_id(OPTIONS)
    assert normalization_fingerprint(MORE) != normalization_fingerprint(OPTIONS)
    # A shardmill without the setting reads the manifest of a dataset that does not use it.
    manifest = open_dataset(make_dataset(tmp_path, num_images=12)).manifest
    assert b"more_formats" not in encode_manifest(manifest).split(b'"normalize"')[1].split(b"}")[0]
    asked = manifest.model_copy(update={"normalize": NormalizeOptions(more_formats=("heic",))})
    assert parse_manifest(encode_manifest(asked), 1, "").normalize.more_formats == ("heic",)
