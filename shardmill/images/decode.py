"""Detects the format of bytes by content alone, never by name, and decodes them to upright uint8 pixels."""

from __future__ import annotations

import re
from collections.abc import Callable

from shardmill.images.decoder_id import MORE_FORMATS, more_decoder
from shardmill.images.jpeg import decode_jpeg
from shardmill.images.pillow import decode_avif, decode_bmp, decode_gif
from shardmill.images.pixels import DecodedImage, Refused
from shardmill.images.png import decode_png
from shardmill.images.tiff import decode_tiff
from shardmill.images.webp import decode_webp
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

DECODERS: dict[str, Callable[[bytes, NormalizeOptions], DecodedImage]] = {
    "jpeg": decode_jpeg,
    "png": decode_png,
    "gif": decode_gif,
    "webp": decode_webp,
    "bmp": decode_bmp,
    "tiff": decode_tiff,
    "avif": decode_avif,
}


def decode_image(data: bytes, options: NormalizeOptions) -> tuple[str, DecodedImage]:
    """The format's name and the decoded first frame; raises `Refused` for what is not an intact image within limits."""
    name = sniff_format(data)
    if name not in MORE_FORMATS:
        return name, DECODERS[name](data, options)
    if name not in options.more_formats:
        accepting = f'etl.more_formats = ["{name}"] accepts it, with an extra'
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, f"format={name}; {accepting}")
    return name, more_decoder(name)(data, options)


SUPPORTED_SIGNATURES = (
    (b"\xff\xd8", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF87a", "gif"),
    (b"GIF89a", "gif"),
    (b"II*\0", "tiff"),
    (b"MM\0*", "tiff"),
)
BMP_HEADER_SIZES_BYTES = frozenset({12, 40, 52, 56, 64, 108, 124})
UNSAFE_SIGNATURES = ((b"%!PS", "postscript"), (b"\xc5\xd0\xd3\xc6", "eps"), (b"%PDF", "pdf"))
JPEG_XL_SIGNATURES = (b"\0\0\0\x0cJXL \r\n\x87\n", b"\xff\x0a")
UNSUPPORTED_SIGNATURES = (
    (b"\0\0\0\x0cjP  \r\n\x87\n", "jp2"),
    (b"\xffO\xffQ", "jp2"),
    (b"\0\0\1\0", "ico"),
    (b"\0\0\2\0", "cur"),
    (b"8BPS", "psd"),
    (b"SIMPLE  =", "fits"),
    (b"\xd7\xcd\xc6\x9a", "wmf"),
    (b"\1\0\0\0\x58\0\0\0", "emf"),
    (b"\x76\x2f\x31\x01", "openexr"),
    (b"#?RADIANCE", "radiance_hdr"),
    (b"DDS ", "dds"),
    (b"qoif", "qoi"),
    (b"II+\0", "bigtiff"),
    (b"MM\0+", "bigtiff"),
    (b"BPG\xfb", "bpg"),
    (b"IIU\0", "rw2"),
    (b"IIRO", "orf"),
    (b"IIRS", "orf"),
    (b"MMOR", "orf"),
    (b"FUJIFILMCCD-RAW", "raf"),
    (b"gimp xcf", "xcf"),
)
LOOKS_LIKE_SIGNATURES = (
    (b"version https://git-lfs", "git_lfs"),
    (b"\0\5\x16\7", "apple_double"),
    (b"PK\3\4", "zip"),
    (b"PK\5\6", "zip"),
    (b"\x1f\x8b", "gzip"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!", "rar"),
    (b"\x1aE\xdf\xa3", "matroska"),
    (b"PAR1", "parquet"),
    (b"\x7fELF", "elf"),
    (b"MZ", "windows_program"),
    (b"ID3", "mp3"),
    (b"OggS", "ogg"),
    (b"\xd0\xcf\x11\xe0", "ole2"),
)
ISO_IMAGE_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "avif"),
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis"), "heic"),
}
# Of any codec: the compatible brands say which.
ISO_CONTAINER_BRANDS = frozenset({b"mif1", b"msf1", b"miaf"})
_MAX_BRANDS = 64
NETPBM = re.compile(rb"P[1-7f]\s|PF\s")
HTML = re.compile(rb"<(!doctype html|html|head|body)\b", re.IGNORECASE)
CONTROL_CHARACTERS = re.compile("[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def sniff_format(data: bytes) -> str:
    """One of the formats that we can decode, a key of `DECODERS` or `MORE_FORMATS`; refuses everything else by name."""
    if not data:
        raise Refused(RejectReason.EMPTY_FILE, "0 bytes")
    for signature, name in SUPPORTED_SIGNATURES:
        if data.startswith(signature):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if iso_format := _iso_format(data):
        return iso_format
    if data.startswith(JPEG_XL_SIGNATURES):
        return "jpeg_xl"
    # Two letters alone could begin any text; a header cut inside its size says nothing either.
    if data[:2] == b"BM" and len(data) >= 18 and int.from_bytes(data[14:18], "little") in BMP_HEADER_SIZES_BYTES:
        return "bmp"
    for signature, name in UNSAFE_SIGNATURES:
        if data.startswith(signature):
            raise Refused(RejectReason.UNSAFE_FORMAT, f"format={name}; such files are programs and are never opened")
    unsupported = _unsupported_format(data)
    if unsupported:
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, f"format={unsupported}")
    raise Refused(RejectReason.NOT_AN_IMAGE, f"looks_like={_looks_like(data)}")


def _unsupported_format(data: bytes) -> str:
    if data[-18:-2] == b"TRUEVISION-XFILE":  # first: a TGA has no signature of its own and may begin like a cursor
        return "tga"
    for signature, name in UNSUPPORTED_SIGNATURES:
        if data.startswith(signature):
            return name
    if NETPBM.match(data):
        return "netpbm"
    head = _text_head(data)
    if head.startswith((b"<svg", b"<?xml", b"<!--", b"<!DOCTYPE svg")) and b"<svg" in head:
        return "svg"
    return ""


def _iso_format(data: bytes) -> str:
    """By the brands of an ISO base media file; empty if none of them is of an image."""
    if data[4:8] != b"ftyp":
        return ""
    major, end = data[8:12], min(int.from_bytes(data[:4], "big"), 16 + 4 * _MAX_BRANDS)
    if major not in ISO_CONTAINER_BRANDS:
        return ISO_IMAGE_BRANDS.get(major, "")
    compatible = (data[start : start + 4] for start in range(16, end, 4))
    return next((ISO_IMAGE_BRANDS[brand] for brand in compatible if brand in ISO_IMAGE_BRANDS), "heic")


def _looks_like(data: bytes) -> str:
    for signature, name in LOOKS_LIKE_SIGNATURES:
        if data.startswith(signature):
            return name
    if data[4:8] == b"ftyp":
        return "video"
    if data[:4] == b"RIFF":
        return "riff"
    if not data.strip(b"\0"):
        return "zeros"
    head = _text_head(data)
    if HTML.match(head):
        return "html"
    if head[:1] == b"<":
        return "xml"
    # A character may be cut at the end of the head, so bytes that do not decode there are dropped.
    text = head.decode("utf-8", errors="ignore")
    if len(text.encode()) + 3 < len(head) or CONTROL_CHARACTERS.search(text) or not text:
        return "unknown"
    return "json" if head[:1] in (b"{", b"[") else "text"


def _text_head(data: bytes) -> bytes:
    return data[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
