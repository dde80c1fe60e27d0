"""A task reads one source: its bytes, or the rejection that says why not. An absent root is never an absent file."""

from __future__ import annotations

import socket

from shardmill.errors import StorageError
from shardmill.storage import AccessDenied, Store
from shardmill.values import Rejection, RejectReason, SourceImage

_NUM_WITNESSES = 8


def choose_witnesses(images: tuple[SourceImage, ...]) -> tuple[str, ...]:
    """Keys of a few listed images, from the whole listing: where none of them is left, the source itself is absent."""
    num_witnesses = min(_NUM_WITNESSES, len(images))
    return tuple(images[place * len(images) // num_witnesses].key for place in range(num_witnesses))


def read_source(store: Store, image: SourceImage, witnesses: tuple[str, ...]) -> bytes | Rejection:
    """The bytes of one listed image. Raises StorageError if the store fails, or has lost every witness as well."""

    def rejection(reason: RejectReason, detail: str) -> Rejection:
        return Rejection(image.key, reason, detail, image.size_bytes, image.mtime_ns, image.etag, stage="read")

    try:
        data = store.read(image.key)
    except FileNotFoundError:
        check_source(store, tuple(key for key in witnesses if key != image.key))
        return rejection(RejectReason.MISSING, "listed, but gone when it was read")
    except AccessDenied as error:
        # One file's matter. Any other fault is the store's: the task fails and is tried again.
        return rejection(RejectReason.UNREADABLE, error.what)
    if len(data) != image.size_bytes:
        return rejection(RejectReason.SOURCE_CHANGED, f"listed with {image.size_bytes} bytes, read {len(data)}")
    return data


def check_source(store: Store, witnesses: tuple[str, ...]) -> None:
    """Raise StorageError, naming this host, if the source holds none of the listed `witnesses` any more.

    The root itself proves little: a mount that is gone leaves an empty folder behind.
    """
    if any(store.stat(path) is not None for path in witnesses or ("",)):
        return
    raise StorageError(
        f"host {socket.gethostname()} does not see the source {store.uri}: "
        + (f"{witnesses[0]!r} and {len(witnesses) - 1} other listed files are gone" if witnesses else "it is gone"),
        "expected the files that the driver listed; nothing was published",
        "mount it at the same place on every host (or use s3://), then run the same command again",
    )
