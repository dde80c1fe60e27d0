"""What a task needs of its host, the driver's decoders and source, and the bytes of listed images.

Several reads go on at once: remote reads overlap and are returned in order; a disk gets hints about the next reads.
A missing source is not a missing file.
"""

from __future__ import annotations

import resource
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from etl.config import EtlConfig
from etl.sources import SourceReader
from etl.units.units import UnitTask
from shardmill.errors import AccessDenied, StorageError, UsageError
from shardmill.images.decoder_id import DECODER_ID, decoder_id
from shardmill.kernel import HOW_TO_INSTALL
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
        "mount it at the same path on every host (or use a bucket or hdfs://), then run the same command again",
    )


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


Data = bytes | Rejection
# A cold file of 110 kB took 0.35 ms on the disk of a virtual machine, and 0.13 ms if announced so early.
_NUM_EXPECTED = 16
# To announce a file that is in memory takes as long as to read it; to ask whether reads wait, a twentieth.
_NUM_READS_PER_CHECK = 4


def read_ahead(
    read: Callable[[SourceImage], Data],
    expect: Callable[[SourceImage], None],
    images: Sequence[SourceImage],
    num_threads: int,
) -> Iterator[tuple[SourceImage, Data]]:
    """Each image with what `read` gives or raises, in order; at most `num_threads` of them wait in memory.

    With one thread, `read` runs in the caller's, and as long as reads wait for a disk, `expect` receives each image
    some time before.
    """
    if num_threads == 1:
        yield from _read_in_turn(read, expect, images)
        return
    waiting: deque[tuple[SourceImage, Future[Data]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read-ahead") as pool:
        try:
            for image in images:
                if len(waiting) == num_threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
                waiting.append((image, pool.submit(read, image)))
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def _read_in_turn(
    read: Callable[[SourceImage], Data], expect: Callable[[SourceImage], None], images: Sequence[SourceImage]
) -> Iterator[tuple[SourceImage, Data]]:
    num_told, num_waits, has_waited = 0, _num_waits(), False
    for place, image in enumerate(images):
        if place % _NUM_READS_PER_CHECK == 0:
            before, num_waits = num_waits, _num_waits()
            has_waited = num_waits > before
        if has_waited:
            end = place + 1 + _NUM_EXPECTED
            for later in images[max(num_told, place + 1) : end]:
                expect(later)
            num_told = end
        yield image, read(image)


def _num_waits() -> int:
    """Count how often this thread has waited, for a disk or a server, or started a disk read."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw + usage.ru_inblock
