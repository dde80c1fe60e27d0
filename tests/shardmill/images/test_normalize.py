"""Normalization keeps its geometry and its integers, and every stored encoding gives back what it was given."""

from __future__ import annotations

import hashlib
import re

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.errors import IntegrityError
from shardmill.formats.encodings import decode_stored, encode_image
from shardmill.images.decoder_id import DECODER_ID, RULES_VERSION, SERVED_RULES, is_served, normalization_fingerprint
from shardmill.images.normalize import normalize
from shardmill.options import ENCODINGS, NormalizeOptions
from tests.processes import memory_below
from tests.shardmill.images.make import gray_photo, jpeg, photo, png, ramp_alpha, webp
from tests.shardmill.images.reference import ssim

LOSSLESS = {"png", "raw"}


def options_of(size: int, **changes: object) -> NormalizeOptions:
    return NormalizeOptions(image_size=size).model_copy(update=changes)


@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    size=st.integers(1, 50),
    mode=st.sampled_from(["crop", "pad", "stretch"]),
    color=st.sampled_from(["rgb", "gray"]),
    is_gray_source=st.booleans(),
)
def test_any_size_becomes_the_asked_shape(
    height: int, width: int, size: int, mode: str, color: str, is_gray_source: bool
) -> None:
    options = options_of(size, resize_mode=mode, color=color)
    source_HWC = photo(height, width)[:, :, : 1 if is_gray_source else 3]
    image_HWC = normalize(source_HWC, options)
    assert (image_HWC.shape, image_HWC.dtype) == (options.image_shape_HWC, np.uint8)
    assert np.array_equal(image_HWC, normalize(source_HWC.copy(), options))
    # No kernel here overshoots: what comes out lies between what went in, or is the black of padding.
    assert image_HWC.max() <= source_HWC.max() + 1
    if mode != "pad" and color == "rgb":
        assert image_HWC.min() >= source_HWC.min() - 1


def test_crop_takes_the_centre_square_before_any_resize() -> None:
    wide_HWC = np.zeros((10, 31, 3), np.uint8)
    wide_HWC[:, 10:20] = 200  # (31 - 10) // 2 = 10
    assert (normalize(wide_HWC, options_of(10)) == 200).all()
    assert (normalize(wide_HWC, options_of(5)) == 200).all()
    assert (normalize(wide_HWC.transpose(1, 0, 2), options_of(23)) == 200).all()


def test_pad_keeps_everything_on_black() -> None:
    image_HWC = normalize(np.full((10, 20, 3), 200, np.uint8), options_of(10, resize_mode="pad"))
    assert (image_HWC[2:7] == 200).all()
    assert not image_HWC[:2].any()
    assert not image_HWC[7:].any()


def test_shrinking_by_a_whole_factor_is_the_rounded_mean() -> None:
    source_HWC = photo(40, 40)
    means_HWC = source_HWC.reshape(10, 4, 10, 4, 3).astype(np.float64).mean(axis=(1, 3))
    assert np.abs(normalize(source_HWC, options_of(10)) - means_HWC).max() <= 0.5


def test_gray_is_the_fixed_integer_formula() -> None:
    source_HWC = photo(16, 16).astype(np.int64)
    red, green, blue = (source_HWC[:, :, channel] for channel in range(3))
    luma_HW = (19595 * red + 38470 * green + 7471 * blue + 32768) // 65536
    assert np.array_equal(normalize(photo(16, 16), options_of(16, color="gray"))[:, :, 0], luma_HW)
    white_HWC = np.full((16, 16, 3), 255, np.uint8)
    assert normalize(white_HWC, options_of(16, color="gray")).min() == 255


def test_what_has_the_stored_shape_already_is_not_copied() -> None:
    source_HWC = photo(16, 16)
    assert normalize(source_HWC, options_of(16)) is source_HWC
    upright_HWC = normalize(source_HWC[::-1], options_of(16))
    assert upright_HWC.flags.c_contiguous and np.array_equal(upright_HWC, source_HWC[::-1])


def test_golden_digests_of_the_resize_kernels() -> None:
    """If these change, pixels of existing datasets change: raise RULES_VERSION, or find out what moved them."""
    image_HWC = np.random.RandomState(11).randint(0, 256, (61, 83, 3)).astype(np.uint8)
    digests = [hashlib.sha256(normalize(image_HWC, options_of(size)).tobytes()).hexdigest()[:16] for size in (29, 97)]
    assert digests == ["31b3b7fb5dc36069", "85faf03fddfe1aed"]


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_encodings_give_back_the_image(encoding: str, color: str) -> None:
    options = options_of(24, encoding=encoding, color=color, jpeg_quality=98, webp_quality=100)
    image_HWC = normalize(photo(24, 24), options)
    data = encode_image(image_HWC, options)
    assert data == encode_image(image_HWC.copy(), options)
    decoded_HWC = decode_stored(data, encoding, options.image_shape_HWC)
    difference = np.abs(decoded_HWC.astype(int) - image_HWC)
    # WebP halves the colour resolution, and this picture is nothing but colour.
    assert difference.max() == 0 if encoding in LOSSLESS else difference.mean() < (10 if encoding == "webp" else 2)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_stored_bytes_of_another_shape_or_damaged_are_an_integrity_error(encoding: str) -> None:
    options = options_of(24, encoding=encoding)
    data = encode_image(normalize(photo(24, 24), options), options)
    for damaged, shape_HWC in ((data, (25, 25, 3)), (data[: len(data) // 2], (24, 24, 3)), (b"", (24, 24, 3))):
        with pytest.raises(IntegrityError, match=encoding):
            decode_stored(damaged, encoding, shape_HWC)


@pytest.mark.parametrize("encoding", ["jpeg", "webp"])
def test_quality_counts(encoding: str) -> None:
    image_HWC = normalize(photo(), options_of(24))
    options = [options_of(24, encoding=encoding, **{f"{encoding}_quality": quality}) for quality in (50, 90, 100)]
    sizes = [len(encode_image(image_HWC, each)) for each in options]
    assert sizes == sorted(set(sizes))


def test_webp_of_a_photograph_is_smaller_than_jpeg_at_the_same_quality() -> None:
    rough_HWC = np.random.RandomState(2).randint(-20, 20, (96, 96, 1)) + photo(96, 96).astype(int)
    image_HWC = np.clip(rough_HWC, 0, 255).astype(np.uint8)
    stored = {name: encode_image(image_HWC, options_of(96, encoding=name)) for name in ("jpeg", "webp")}
    assert len(stored["webp"]) < 0.8 * len(stored["jpeg"])
    decoded = {name: decode_stored(data, name, image_HWC.shape) for name, data in stored.items()}
    assert abs(ssim(decoded["webp"], image_HWC) - ssim(decoded["jpeg"], image_HWC)) < 0.03


def test_stored_webp_is_one_plain_image_and_nothing_else() -> None:
    with_alpha = webp(np.dstack([photo(24, 24), ramp_alpha(24, 24)]), 80)
    for data in (with_alpha, webp(photo(24, 24))[:24], png(photo(24, 24))):
        with pytest.raises(IntegrityError, match="WebP"):
            decode_stored(memoryview(data), "webp", (24, 24, 3))
    assert decode_stored(memoryview(webp(photo(24, 24))), "webp", (24, 24, 3)).shape == (24, 24, 3)


def test_the_fingerprint_covers_every_option_and_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.kernel.NATIVE_ID", "native-0")  # as if it were installed
    monkeypatch.setattr("shardmill.images.decoder_id.NATIVE_ID", "native-0")
    base = NormalizeOptions()
    changed = [
        NormalizeOptions(image_size=225),
        NormalizeOptions(resize_mode="pad"),
        NormalizeOptions(color="gray"),
        NormalizeOptions(encoding="png"),
        NormalizeOptions(jpeg_quality=91),
        NormalizeOptions(webp_quality=91),
        NormalizeOptions(kernel="native"),
        NormalizeOptions(keep_bytes=True),
        NormalizeOptions(max_source_bytes=1),
        NormalizeOptions(min_source_bytes=2),
        NormalizeOptions(max_source_pixels=1),
        NormalizeOptions(max_source_side_pixels=1),
        NormalizeOptions(upscale="never"),
        NormalizeOptions(min_source_side_pixels=2),
        NormalizeOptions(max_aspect_ratio=1.5),
        NormalizeOptions(significant_bits=12),
        NormalizeOptions(more_formats=("heic",)),
    ]
    assert len(changed) == len(NormalizeOptions.model_fields)
    fingerprints = {normalization_fingerprint(options) for options in [base, *changed]}
    assert len(fingerprints) == 1 + len(changed)
    assert normalization_fingerprint(NormalizeOptions()) == normalization_fingerprint(base)
    monkeypatch.setattr("shardmill.images.decoder_id.DECODER_ID", DECODER_ID + "x")
    assert normalization_fingerprint(base) not in fingerprints
    # What datasets of older shardmills have in their manifests: later options at their defaults change nothing.
    monkeypatch.setattr("shardmill.images.decoder_id.DECODER_ID", "decoder")
    older = "752e3e3701665db36469b3444064210219a7c9d4401ad5a7c8edaded56a79812"
    assert normalization_fingerprint(NormalizeOptions(image_size=32, encoding="png")) == older


@pytest.mark.parametrize("rules_version", [RULES_VERSION, RULES_VERSION + 1])
def test_models_of_older_rules_with_the_same_pixels_are_served(
    rules_version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fingerprint(decoder: str) -> str:
        monkeypatch.setattr("shardmill.images.decoder_id.DECODER_ID", decoder)
        return normalization_fingerprint(options)

    options, of_rules = NormalizeOptions(image_size=32), DECODER_ID.replace(f"rules-{RULES_VERSION}+", "rules-{}+")
    # Rules 3 to 5 knew no AVIF; today's are served here, and will be by the next ones.
    before_avif = re.sub(r"\+libavif-[^+]+", "", of_rules)
    ids = [*(before_avif.format(rules) for rules in (3, 4, 5)), of_rules.format(6)]
    other = [of_rules.format(2), before_avif.format(6), of_rules.format(6) + "x"]
    served, refused = [fingerprint(each) for each in ids], [fingerprint(each) for each in other]
    monkeypatch.setattr("shardmill.images.decoder_id.DECODER_ID", of_rules.format(rules_version))
    monkeypatch.setattr("shardmill.images.decoder_id.RULES_VERSION", rules_version)
    assert [is_served(options, each) for each in served] == [True] * 4
    assert [is_served(options, each) for each in refused] == [False] * 3
    assert not is_served(NormalizeOptions(image_size=33), served[0])
    assert RULES_VERSION in SERVED_RULES


def test_the_decoder_id_names_what_pixels_depend_on() -> None:
    for part in ("simplejpeg-", "opencv-", "shrink-area", "enlarge-linear-exact", "ipp-off"):
        assert part in DECODER_ID


def test_gray_pixels_of_any_stride_are_taken() -> None:
    turned_HWC = gray_photo(40, 30)[::-1, ::-1].T[:, :, np.newaxis]
    assert np.array_equal(
        normalize(turned_HWC, options_of(20)), normalize(np.ascontiguousarray(turned_HWC), options_of(20))
    )


@pytest.mark.parametrize("encoding", ["jpeg", "png", "webp"])
def test_a_bomb_in_a_shard_is_refused_by_its_header(encoding: str) -> None:
    bomb = {"jpeg": jpeg, "png": png, "webp": webp}[encoding](np.zeros((6000, 6000, 3), np.uint8))
    with memory_below(20_000_000), pytest.raises(IntegrityError, match=r"declares \(6000, 6000\)"):
        decode_stored(bomb, encoding, (24, 24, 3))
    for cut in (0, 3, 20):
        with pytest.raises(IntegrityError):
            decode_stored(bomb[:cut], encoding, (24, 24, 3))


def test_stored_png_is_8_bit_png_and_nothing_else() -> None:
    shape_HWC = (24, 24, 3)
    good = png(np.zeros(shape_HWC, np.uint8))
    _, bmp = cv2.imencode(".bmp", np.zeros((300, 300, 3), np.uint8))
    disguised = bytearray(bmp.tobytes())
    disguised[16:24] = good[16:24]
    _, deep = cv2.imencode(".png", np.zeros(shape_HWC, np.uint16))
    for data in (bytes(disguised), deep.tobytes(), jpeg(np.zeros(shape_HWC, np.uint8)), good[:24]):
        with pytest.raises(IntegrityError, match="like a PNG|8 bits"):
            decode_stored(memoryview(data), "png", shape_HWC)
    assert decode_stored(memoryview(good), "png", shape_HWC).shape == shape_HWC
    with pytest.raises(IntegrityError, match="like a JPEG"):
        decode_stored(memoryview(good), "jpeg", shape_HWC)
