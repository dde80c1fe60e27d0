"""Machines that would make other pixels than the driver are named before any work, with how to go on."""

from __future__ import annotations

import socket

import pytest

from etl.config import EtlConfig
from etl.units.decoders import check_decoders, decoders_here
from shardmill.errors import UsageError
from shardmill.images.decoder_id import DECODER_ID, decoder_id

NATIVE = f"{DECODER_ID}+native-7"


def test_equal_decoders_pass():
    check_decoders(NATIVE, {"node1": NATIVE, "node2": NATIVE})
    config = EtlConfig(image_size=16, kernel="wheels")
    check_decoders(decoder_id(config.normalize_options()), dict(decoders_here(config)))


def test_hosts_without_the_kernel_are_named_with_both_ways_to_continue():
    with pytest.raises(UsageError) as caught:
        check_decoders(NATIVE, {"node1": NATIVE, "node3": DECODER_ID, "node2": DECODER_ID})
    said = str(caught.value)
    assert "kernel is missing on node2, node3: " in said and "node1" not in said
    assert "pip install ./native" in said and "etl.kernel = wheels" in said


def test_other_versions_are_named_with_the_packages():
    with pytest.raises(UsageError, match="^node2 decodes with x; the driver decodes with ") as caught:
        check_decoders(NATIVE, {"node1": NATIVE, "node2": "x"})
    assert "simplejpeg" in str(caught.value) and "missing" not in str(caught.value)


def test_a_host_without_a_kernel_that_was_asked_for_still_answers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shardmill.kernel.NATIVE_ID", "")
    assert dict(decoders_here(EtlConfig(image_size=16, kernel="native"))) == {socket.gethostname(): DECODER_ID}
