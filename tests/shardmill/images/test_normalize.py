"""Normalization: size, crop, encoding, the kept bytes, and the resampler against NumPy."""

from __future__ import annotations

import hashlib
import itertools
import re

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import given
from hypothesis import strategies as st

from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.encodings import decode_stored, encode_image
from shardmill.images.decoder_id import DECODER_ID, RULES_VERSION, SERVED_RULES, is_served, normalization_fingerprint
from shardmill.images.jpeg import decode_jpeg
from shardmill.images.normalize import REDUCTIONS, choose_reduction, kept_spans, normalize, reduced_length
from shardmill.images.process import process_image
from shardmill.options import ENCODINGS, NormalizeOptions
from shardmill.values import ImageSample, RejectReason, SourceImage
from tests.processes import memory_below
from tests.shardmill.images.make import (
    STORED_FOR_ORIENTATION,
    by_opencv,
    gray_jpeg,
    gray_photo,
    jpeg,
    one_of_each_format,
    photo,
    png,
    png_chunk,
    ramp_alpha,
    refusal,
    rgb_profile,
    webp,
    with_orientation,
    with_profile,
    with_segment,
)
from tests.shardmill.images.reference import (
    LEAST_PSNR_DB,
    LEAST_REDUCED_PSNR_DB,
    LEAST_REDUCED_SSIM,
    LEAST_SSIM,
    MOST_LEVELS,
    encoded,
    noise,
    normalize_reference,
    photographs,
    psnr,
    resize_reference,
    ssim,
    whole,
)

LOSSLESS = {"png", "raw"}


def options_of(size: int, **changes: object) -> NormalizeOptions:
    return NormalizeOptions(image_size=size).model_copy(update=changes)


@given(
    height=st.integers(1, 90), width=st.integers(1, 90), size=st.integers(1, 50),
    mode=st.sampled_from(["crop", "pad", "stretch"]), color=st.sampled_from(["rgb", "gray"]),
    is_gray_source=st.booleans(),
)  # fmt: skip
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
        NormalizeOptions(image_size=225), NormalizeOptions(resize_mode="pad"), NormalizeOptions(color="gray"),
        NormalizeOptions(encoding="png"), NormalizeOptions(jpeg_quality=91), NormalizeOptions(webp_quality=91),
        NormalizeOptions(kernel="native"), NormalizeOptions(keep_bytes=True), NormalizeOptions(max_source_bytes=1),
        NormalizeOptions(min_source_bytes=2), NormalizeOptions(max_source_pixels=1),
        NormalizeOptions(max_source_side_pixels=1), NormalizeOptions(upscale="never"),
        NormalizeOptions(min_source_side_pixels=2), NormalizeOptions(max_aspect_ratio=1.5),
        NormalizeOptions(significant_bits=12), NormalizeOptions(more_formats=("heic",)),
    ]  # fmt: skip
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
def test_models_of_older_rules_with_the_same_pixels_are_served(rules_version: int, monkeypatch: pytest.MonkeyPatch):
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


SIDE = 24
PICTURE = photo(SIDE, SIDE)
SECRET = b"taken at home"
PLAIN = {
    "jpeg": jpeg(PICTURE, 70), "progressive jpeg": by_opencv(".jpg", PICTURE, [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]),
    "png": png(PICTURE), "webp": webp(PICTURE, 60), "lossless webp": webp(PICTURE),
}  # fmt: skip


def keeping(encoding: str, **changes: object) -> NormalizeOptions:
    values = {"image_size": SIDE, "encoding": encoding, "keep_bytes": True, **changes}
    return NormalizeOptions.model_validate(values)


def stored(data: bytes, options: NormalizeOptions) -> ImageSample:
    sample = process_image(SourceImage(key="x", size_bytes=len(data)), data, options)
    assert isinstance(sample, ImageSample), sample
    return sample


def is_encoded_again(data: bytes, encoding: str, **changes: object) -> bool:
    again = stored(data, keeping(encoding, keep_bytes=False, **changes)).image
    return stored(data, keeping(encoding, **changes)).image == again


@pytest.mark.parametrize("name", PLAIN)
def test_a_file_without_metadata_is_stored_byte_for_byte(name: str) -> None:
    encoding = name.split()[-1]
    sample = stored(PLAIN[name], keeping(encoding))
    assert sample.image == PLAIN[name]
    decoded_HWC = decode_stored(sample.image, encoding, (SIDE, SIDE, 3)).astype(int)
    assert sample.channel_sums == tuple(decoded_HWC.sum(axis=(0, 1)))  # these are the pixels that were counted
    assert sample.notes == ()


def test_gray_is_kept_where_gray_is_asked_for() -> None:
    gray = gray_jpeg(gray_photo(SIDE, SIDE))
    assert stored(gray, keeping("jpeg", color="gray")).image == gray
    assert is_encoded_again(gray, "jpeg")
    assert is_encoded_again(PLAIN["jpeg"], "jpeg", color="gray")


def test_metadata_is_dropped_and_the_scan_is_not_touched() -> None:
    plain = PLAIN["jpeg"]
    tagged = with_orientation(with_segment(plain, 0xFE, SECRET), 1)
    tagged = with_segment(with_segment(tagged, 0xE1, b"http://ns.adobe.com/xap/1.0/\0" + SECRET), 0xED, SECRET)
    tagged = with_segment(tagged, 0xE0, b"JFXX\0\x10" + SECRET) + SECRET
    sample = stored(tagged, keeping("jpeg"))
    assert sample.image == plain
    assert sample.notes == ("trailing_bytes",)

    head = b"\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1"
    with_thumbnail = plain.replace(head + b"\0\0", head.replace(b"\x10", b"\x13") + b"\1\1abc")
    assert with_thumbnail != plain
    assert stored(with_thumbnail, keeping("jpeg")).image == plain

    comment = png_chunk(b"tEXt", b"Comment\0" + SECRET)
    assert stored(PLAIN["png"][:33] + comment + PLAIN["png"][33:], keeping("png")).image == PLAIN["png"]


def test_a_comment_between_two_scans_is_no_reason_to_keep_it() -> None:
    data = PLAIN["progressive jpeg"]
    last_scan = data.rindex(b"\xff\xda")
    hidden = data[:last_scan] + b"\xff\xfe\0\x0f" + SECRET + data[last_scan:]
    assert SECRET not in stored(hidden, keeping("jpeg")).image
    assert is_encoded_again(hidden, "jpeg")


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        (with_orientation(PLAIN["jpeg"], 6), "jpeg"),
        (with_profile(PLAIN["jpeg"], rgb_profile()), "jpeg"),
        (jpeg(photo(SIDE, SIDE + 1)), "jpeg"),
        (jpeg(photo(2 * SIDE, 2 * SIDE)), "jpeg"),
        (one_of_each_format()["cmyk"], "jpeg"),
        (PLAIN["png"], "jpeg"),
        (PLAIN["jpeg"], "png"),
        (png(np.dstack([PICTURE, ramp_alpha(SIDE, SIDE)])), "png"),
        (png(PICTURE.astype(np.uint16) * 257), "png"),
        (webp(np.dstack([PICTURE, ramp_alpha(SIDE, SIDE)]), 80), "webp"),
        (PLAIN["png"], "raw"),
    ],
)
def test_what_would_be_stored_otherwise_is_encoded_again(data: bytes, encoding: str) -> None:
    assert is_encoded_again(data, encoding)


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_kept_was_decoded_first(name: str) -> None:
    data = PLAIN[name]
    damaged = data[:-12] + data[-2:]
    outcome = process_image(SourceImage(key="x", size_bytes=len(damaged)), damaged, keeping(name.split()[-1]))
    assert not isinstance(outcome, ImageSample)


SQUARE_MODES, FREE_MODES = ("crop", "pad", "stretch"), ("shorter", "longer", "none")
HEIGHTS, WIDTHS, SIZES = (5, 33, 64, 97, 300), (7, 64, 90, 250), (16, 64, 100)


def resizing(size: int, mode: str, *, upscale: bool = True) -> NormalizeOptions:
    chosen = "always" if upscale else "never"
    return NormalizeOptions.model_validate({"image_size": size, "resize_mode": mode, "upscale": chosen})


@pytest.mark.parametrize("upscale", [True, False])
@pytest.mark.parametrize("mode", SQUARE_MODES + FREE_MODES)
def test_every_mode_is_the_reference_within_the_bounds(mode: str, upscale: bool) -> None:
    for height, width, size in itertools.product(HEIGHTS, WIDTHS, SIZES):
        image_HWC = normalize(noise(height, width), resizing(size, mode, upscale=upscale))
        expected_HWC = normalize_reference(noise(height, width), size, mode, upscale=upscale)
        case = f"{width}x{height} to {size}"
        assert np.abs(image_HWC - expected_HWC).max() <= MOST_LEVELS, case
        assert psnr(image_HWC, expected_HWC) >= LEAST_PSNR_DB, case
        assert ssim(image_HWC, expected_HWC) >= LEAST_SSIM, case


def test_the_measures_tell_kernels_apart() -> None:
    """A linear kernel, which skips pixels when it shrinks, is far outside the bounds."""
    source_HWC = noise(256, 256)
    skipping_HWC = source_HWC[4::8, 4::8]
    reference_HWC = resize_reference(source_HWC, 32, 32)
    assert psnr(skipping_HWC, reference_HWC) < 20
    assert ssim(skipping_HWC, reference_HWC) < 0.5


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_side_that_shrinks_is_averaged_although_the_other_grows(is_turned: bool) -> None:
    stripes_HWC = np.zeros((20, 400, 3), np.uint8)
    stripes_HWC[:, ::2] = 200
    source_HWC = stripes_HWC.transpose(1, 0, 2) if is_turned else stripes_HWC
    assert (normalize(source_HWC, resizing(40, "stretch")) == 100).all()


def test_stretch_fills_the_square_with_everything() -> None:
    source_HWC = np.zeros((10, 40, 3), np.uint8)
    source_HWC[:, :20] = 200
    image_HWC = normalize(source_HWC, resizing(20, "stretch"))
    assert (image_HWC[:, :10] == 200).all()
    assert not image_HWC[:, 10:].any()


@pytest.mark.parametrize(
    ("mode", "height", "width", "kept_height", "kept_width"),
    [("crop", 10, 14, 10, 10), ("pad", 10, 14, 10, 14), ("stretch", 10, 60, 10, 20), ("pad", 10, 60, 3, 20)],
)
def test_without_upscaling_a_small_source_keeps_its_pixels_on_black(
    mode: str, height: int, width: int, kept_height: int, kept_width: int
) -> None:
    source_HWC = np.maximum(photo(height, width), 1)
    image_HWC = normalize(source_HWC, resizing(20, mode, upscale=False))
    rows, columns = (np.flatnonzero(image_HWC.any(axis=(axis, 2))) for axis in (1, 0))
    assert (len(rows), len(columns)) == (kept_height, kept_width)
    assert (rows[0], columns[0]) == ((20 - kept_height) // 2, (20 - kept_width) // 2)
    if (kept_height, kept_width) == (height, width):
        assert np.array_equal(image_HWC[np.ix_(rows, columns)], source_HWC)


@pytest.mark.parametrize("mode", SQUARE_MODES)
def test_upscaling_changes_nothing_for_sources_that_are_large_enough(mode: str) -> None:
    source_HWC = photo(60, 90)
    without_HWC = normalize(source_HWC, resizing(20, mode, upscale=False))
    assert np.array_equal(without_HWC, normalize(source_HWC, resizing(20, mode)))


@pytest.mark.parametrize(
    ("mode", "source", "stored"),
    [
        ("shorter", (60, 90), (20, 30)),
        ("shorter", (90, 61), (30, 20)),
        ("shorter", (10, 15), (10, 15)),
        ("shorter", (15, 60), (15, 60)),
        ("longer", (60, 90), (13, 20)),
        ("longer", (10, 15), (10, 15)),
        ("longer", (1, 90), (1, 20)),
        ("none", (60, 90), (60, 90)),
    ],
)
def test_other_modes_keep_the_aspect_ratio_and_enlarge_only_if_asked(
    mode: str, source: tuple[int, int], stored: tuple[int, int]
) -> None:
    options = NormalizeOptions.model_validate({"image_size": 20, "resize_mode": mode})
    assert normalize(photo(*source), options).shape[:2] == stored
    assert options.one_shape_HWC is None
    assert stored[0] * stored[1] <= options.max_stored_pixels
    with pytest.raises(UsageError, match="etl.resize_mode"):
        _ = options.image_shape_HWC


def test_enlarging_to_a_side_when_asked() -> None:
    assert normalize(photo(10, 15), resizing(20, "shorter")).shape[:2] == (20, 30)
    assert normalize(photo(10, 15), resizing(20, "longer")).shape[:2] == (13, 20)
    assert np.array_equal(
        normalize(photo(10, 15), resizing(20, "crop")),
        normalize(photo(10, 15), NormalizeOptions(image_size=20)),
    )


def test_raw_has_no_place_for_sizes() -> None:
    with pytest.raises(ValueError, match="raw stores no sizes"):
        NormalizeOptions(resize_mode="shorter", encoding="raw")


MODES = ("crop", "pad", "stretch")


def reducing(size: int, mode: str = "crop") -> NormalizeOptions:
    return NormalizeOptions.model_validate({"image_size": size, "resize_mode": mode})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("subsampling", ["420", "444"])
def test_the_result_is_that_of_the_whole_image_within_the_bounds(mode: str, subsampling: str) -> None:
    scales = set()
    for pixels_HWC, size in itertools.product(photographs(), (16, 24, 32, 48, 64, 72, 100, 128, 150)):
        options, data = reducing(size, mode), encoded(pixels_HWC, subsampling)
        scale = choose_reduction(pixels_HWC.shape[0], pixels_HWC.shape[1], options)
        decoded = decode_jpeg(data, options)
        assert decoded.pixels_HWC.shape[:2] == tuple(reduced_length(side, scale) for side in pixels_HWC.shape[:2])
        if scale > 1:
            scales.add(scale)
            exact_HWC = whole(data, options)
            assert psnr(normalize(decoded.pixels_HWC, options), exact_HWC) >= LEAST_REDUCED_PSNR_DB, (size, scale)
            assert ssim(normalize(decoded.pixels_HWC, options), exact_HWC) >= LEAST_REDUCED_SSIM, (size, scale)
    assert scales >= {2, 4}


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_image_is_within_the_bounds_too(orientation: int) -> None:
    upright_HWC = photographs()[0]
    stored_HWC = np.ascontiguousarray(STORED_FOR_ORIENTATION[orientation](upright_HWC))
    options = reducing(64)
    assert choose_reduction(stored_HWC.shape[0], stored_HWC.shape[1], options) == 2
    decoded = decode_jpeg(with_orientation(encoded(stored_HWC), orientation), options)
    assert psnr(normalize(decoded.pixels_HWC, options), whole(encoded(upright_HWC), options)) >= LEAST_REDUCED_PSNR_DB


@given(
    height=st.integers(1, 5000), width=st.integers(1, 5000), size=st.integers(1, 600), mode=st.sampled_from(MODES),
)  # fmt: skip
def test_small_sources_are_decoded_whole_and_no_edge_moves_far(height: int, width: int, size: int, mode: str) -> None:
    options = reducing(size, mode)
    scale = choose_reduction(height, width, options)
    kept = kept_spans(height, width, options)
    if max(span.length for span in kept) < 2 * size:
        assert scale == 1
    if scale > 1:
        blocks = kept_spans(reduced_length(height, scale), reduced_length(width, scale), options)
        # What a stored pixel covers of the source; the shorter side of `pad` is rounded to whole pixels.
        covered = max(span.length for span in kept) / size * (2 if mode == "pad" else 1)
        for exact, reduced in zip(kept, blocks, strict=True):
            assert abs(reduced.start * scale - exact.start) <= covered / 64
            assert abs(reduced.end * scale - exact.end) <= covered / 64


def test_libjpeg_gives_the_pixels_that_were_planned_at_every_scale() -> None:
    for height, width in itertools.product(range(64, 81), (64, 71, 72, 73, 200)):
        data = encoded(np.zeros((height, width, 3), np.uint8))
        for scale in REDUCTIONS:
            planned = reduced_length(height, scale), reduced_length(width, scale)
            pixels_HWC = simplejpeg.decode_jpeg(data, "RGB", min_height=planned[0], min_width=planned[1])
            assert pixels_HWC.shape[:2] == planned


@pytest.mark.parametrize(
    ("height", "width", "size", "scale"),
    [
        (3000, 4000, 256, 4), (3024, 4032, 224, 4), (3468, 4624, 256, 2), (3001, 4001, 256, 1), (375, 500, 256, 1),
        (512, 512, 256, 1),
    ],
)  # fmt: skip
def test_the_scale_for_usual_photographs(height: int, width: int, size: int, scale: int) -> None:
    assert choose_reduction(height, width, reducing(size)) == scale
    assert choose_reduction(width, height, reducing(size)) == scale


def test_damage_is_found_at_a_reduced_scale_too() -> None:
    data = encoded(photographs()[0])
    assert choose_reduction(416, 640, reducing(32)) == 4
    for start in (len(data) // 3, len(data) - 40):
        damaged = data[:start] + b"\x55\xaa" * 10 + data[start + 20 :]
        assert refusal(damaged, reducing(32))[0] is RejectReason.CORRUPT_SCAN
    assert refusal(data[: len(data) // 2], reducing(32))[0] is RejectReason.TRUNCATED
