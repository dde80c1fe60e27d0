"""Records everything that other users can see of a cluster's processes while a job runs, to find leaked secrets."""

from __future__ import annotations

import contextlib
import http.client
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.services.marked import marked

ON_EXECUTORS = ("CoarseGrainedExecutorBackend", "pyspark.daemon", "etl.engines", "train.launching")


@dataclass(slots=True)
class Watch:
    """What everybody on the machine can see of a cluster's processes, sampled while a job runs."""

    mark: str
    ui_port: int
    drivers_key: str
    arguments: set[str] = field(default_factory=set)
    """Each process that was seen, as its command line."""
    pages: set[str] = field(default_factory=set)
    """Of the driver's UI, those that came."""
    pages_with_canaries: set[str] = field(default_factory=set)
    hides_a_key: bool = False
    """Whether a page names the setting of a planted key, whatever it shows as its value."""
    has_drivers_key: set[str] = field(default_factory=set)
    """Processes of executors with that key, of the driver alone, in their environment."""
    ended: threading.Event = field(default_factory=threading.Event)
    failed: Exception | None = None

    def look(self) -> None:
        """Until `ended`; what it raises is in `failed`."""
        try:
            self._look()
        except Exception as error:
            self.failed = error

    def _look(self) -> None:
        while not self.ended.wait(0.2):
            for pid, words in marked(self.mark).items():
                line = " ".join(words)
                self.arguments.add(line)
                with contextlib.suppress(OSError):
                    environ = Path(f"/proc/{pid}/environ").read_bytes()
                    if self.drivers_key.encode() in environ and any(part in line for part in ON_EXECUTORS):
                        self.has_drivers_key.add(line)
            for path in ("environment/", "executors/", "jobs/", "stages/"):
                # The UI ends with the job, in the middle of a page if so.
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self._open(path)

    def _open(self, path: str) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ui_port}/{path}", timeout=20) as answer:
            page = answer.read()
        self.pages.add(path)
        self.hides_a_key |= b"spark.hadoop.fs.s3a.secret.key" in page
        if b"canary" in page.lower():
            self.pages_with_canaries.add(path)


@contextlib.contextmanager
def watching(mark: str, ui_port: int, drivers_key: str) -> Iterator[Watch]:
    watch = Watch(mark, ui_port, drivers_key)
    thread = threading.Thread(target=watch.look, daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        watch.ended.set()
        thread.join(60)
        looked = not thread.is_alive() and watch.failed is None
    assert looked, watch.failed or "it still looks"
