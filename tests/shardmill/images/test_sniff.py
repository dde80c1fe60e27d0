"""Bytes that are no image of ours are refused by name, and nothing of them is ever run."""

from __future__ import annotations

import subprocess

import pytest

from shardmill.images.decode import DECODERS
from shardmill.images.sniff import sniff_format
from shardmill.values import RejectReason
from tests.shardmill.images.make import one_of_each_format, refusal

REFUSED = {
    b"": (RejectReason.EMPTY_FILE, "0 bytes"),
    b"\xff": (RejectReason.NOT_AN_IMAGE, "looks_like=unknown"),
    bytes(100_000): (RejectReason.NOT_AN_IMAGE, "looks_like=zeros"),
    b"  <!DOCTYPE HTML><p>404": (RejectReason.NOT_AN_IMAGE, "looks_like=html"),
    b"\xef\xbb\xbf<html lang=de>": (RejectReason.NOT_AN_IMAGE, "looks_like=html"),
    b'<?xml version="1.0"?><Error/>': (RejectReason.NOT_AN_IMAGE, "looks_like=xml"),
    b'{"error": "AccessDenied"}': (RejectReason.NOT_AN_IMAGE, "looks_like=json"),
    b"BMW is a make of car": (RejectReason.NOT_AN_IMAGE, "looks_like=text"),
    "Übung".encode() * 1000: (RejectReason.NOT_AN_IMAGE, "looks_like=text"),
    b"version https://git-lfs.github.com/spec/v1\noid": (RejectReason.NOT_AN_IMAGE, "looks_like=git_lfs"),
    b"\0\5\x16\7\0\2\0\0": (RejectReason.NOT_AN_IMAGE, "looks_like=apple_double"),
    b"\0\0\0\x18ftypisom": (RejectReason.NOT_AN_IMAGE, "looks_like=video"),
    b"RIFF\0\0\0\0WAVE": (RejectReason.NOT_AN_IMAGE, "looks_like=riff"),
    b"%!PS-Adobe-3.0 EPSF-3.0\n": (RejectReason.UNSAFE_FORMAT, "format=postscript"),
    b"\xc5\xd0\xd3\xc6": (RejectReason.UNSAFE_FORMAT, "format=eps"),
    b"%PDF-1.7": (RejectReason.UNSAFE_FORMAT, "format=pdf"),
    b"\0\0\0\x1cftypheic": (RejectReason.UNSUPPORTED_FORMAT, "format=heic"),
    b"\0\0\0\x0cjP  \r\n\x87\n": (RejectReason.UNSUPPORTED_FORMAT, "format=jp2"),
    b"<svg xmlns='x'/>": (RejectReason.UNSUPPORTED_FORMAT, "format=svg"),
    b'<?xml version="1.0"?>\n<svg/>': (RejectReason.UNSUPPORTED_FORMAT, "format=svg"),
    b"\0\0\1\0\1\0": (RejectReason.UNSUPPORTED_FORMAT, "format=ico"),
    b"P6\n1 1\n255\n...": (RejectReason.UNSUPPORTED_FORMAT, "format=netpbm"),
    b"8BPS\0\1": (RejectReason.UNSUPPORTED_FORMAT, "format=psd"),
    b"SIMPLE  =  T": (RejectReason.UNSUPPORTED_FORMAT, "format=fits"),
    b"\0\0\2\0" + bytes(20) + b"TRUEVISION-XFILE.\0": (RejectReason.UNSUPPORTED_FORMAT, "format=tga"),
}


@pytest.mark.parametrize("data", REFUSED, ids=lambda data: repr(data[:16]))
def test_refused_by_name(data: bytes) -> None:
    expected_reason, expected_detail = REFUSED[data]
    reason, detail = refusal(data)
    assert reason is expected_reason
    assert detail.startswith(expected_detail)


def test_every_decoder_is_reached_by_content() -> None:
    assert {sniff_format(data) for data in one_of_each_format().values()} == set(DECODERS)


def test_no_program_is_started_for_postscript(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    assert refusal(b"%!PS\n(%pipe%id) (r) file")[0] is RejectReason.UNSAFE_FORMAT
