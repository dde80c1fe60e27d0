"""Reads the bytes of listed images in a task, and distinguishes a missing source from a missing file."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from etl.sources import SourceReader
from etl.units.units import UnitTask
from shardmill.errors import AccessDenied, StorageError
from shardmill.values import NO_SUCH_FILE, UNKNOWN_SIZE, Rejection, RejectReason, SourceImage


def in_reading_order(sources: Sequence[SourceImage]) -> list[SourceImage]:
    """Sort images in containers by position, so that each block is read once; separate files keep the given order."""
    return sorted(sources, key=lambda image: (image.container, image.place) if image.is_in_block else ("", 0))


def is_reading_order(sources: Sequence[SourceImage]) -> bool:
    """Whether the sources are read in the given order."""
    return not any(image.is_in_block for image in sources)


def read_source(reader: SourceReader, image: SourceImage, task: UnitTask) -> bytes | Rejection:
    """The bytes of one listed image, or the rejection that says why not.

    Raises StorageError if the store fails, or has lost every probe as well: an absent root is not an absent file.
    """
    try:
        data = reader.read(image)
    except FileNotFoundError:
        path = image.container or image.key
        check_source(reader, places_of(task), tuple(probe for probe in task.probes if probe != path))
        was_seen = image.size_bytes != UNKNOWN_SIZE or image.mtime_ns != 0 or image.etag != ""
        return image.rejected(RejectReason.MISSING, "listed, but gone when it was read" if was_seen else NO_SUCH_FILE)
    except AccessDenied as error:
        # This concerns one file. Any other fault is the store's: the task fails and is tried again.
        return image.rejected(RejectReason.UNREADABLE, error.what)
    if not isinstance(data, Rejection) and image.size_bytes not in (UNKNOWN_SIZE, len(data)):
        return image.rejected(RejectReason.SOURCE_CHANGED, f"listed with {image.size_bytes} bytes, read {len(data)}")
    return data


def places_of(task: UnitTask) -> str:
    """The URIs of the task's source, for an error."""
    return ", ".join(task.source.uris().values())


def check_source(reader: SourceReader, uri: str, probes: tuple[str, ...]) -> None:
    """Raise StorageError, naming this host, if the source holds none of the listed `probes` any more.

    The root itself proves little: a mount that is gone leaves an empty folder behind.
    """
    if any(reader.is_there(path) for path in probes or ("",)):
        return
    raise StorageError(
        f"host {socket.gethostname()} does not see the source {uri}: "
        + (f"{probes[0]!r} and {len(probes) - 1} other listed files are missing" if probes else "it is missing"),
        "expected the files that the driver listed; nothing was published",
        "mount it at the same path on every host (or use s3:// or hdfs://), then run the same command again",
    )
