"""Checks that every machine of a build decodes the driver's pixels: on executors before any work, and in every unit."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping

from etl.config import EtlConfig
from shardmill.errors import UsageError
from shardmill.images.decoder_id import DECODER_ID, decoder_id
from shardmill.kernel import HOW_TO_INSTALL


def decoders_here(config: EtlConfig, _: Iterable[object] = ()) -> Iterator[tuple[str, str]]:
    """This host, and what it decodes with; as a task of Spark, for any partition."""
    try:
        yield socket.gethostname(), decoder_id(config.normalize_options())
    except UsageError:
        # The driver has the native kernel and this host has not: `check_decoders` says so with the host's name.
        yield socket.gethostname(), DECODER_ID


def check_decoders(expected: str, decoder_by_host: Mapping[str, str]) -> None:
    """Raises UsageError if a host decodes with anything but `expected`: it names all such hosts, and the fix."""
    others = {host: found for host, found in sorted(decoder_by_host.items()) if found != expected}
    if not others:
        return
    lacking = [host for host, found in others.items() if expected.startswith(f"{found}+")]
    if lacking:
        fix = (
            f"the native kernel is missing on {', '.join(lacking)}: install it there ({HOW_TO_INSTALL}), or set "
            "etl.kernel = wheels, which decodes every image of an existing dataset again"
        )
    else:
        fix = (
            "install the same simplejpeg, opencv-python-headless, pillow and shardmill-native everywhere (without the "
            "last: etl.kernel = wheels); other versions produce different pixels"
        )
    found = "; ".join(f"{host} decodes with {decoder}" for host, decoder in others.items())
    raise UsageError(found, f"the driver decodes with {expected}", fix)
