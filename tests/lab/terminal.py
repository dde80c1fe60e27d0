"""A command in a terminal: bars are drawn there, and whatever writes to it is seen."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import threading
from pathlib import Path

from tests.lab.commands import ENVIRONMENT

# What Spark, Hadoop and the JVM say when they start, warn or fail.
SPARK_LINES = re.compile(r"\bWARN\b|INFO|ERROR [^0-9]|log4j|default log level|NativeCode|Picked up|\tat |java\.")


class Terminal:
    """A command in a terminal of its own, and what a person would see there."""

    def __init__(self, *command: str | Path, cwd: Path) -> None:
        primary, secondary = pty.openpty()
        environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "150"}
        self.process = subprocess.Popen(
            [str(part) for part in command], cwd=cwd, env=environment, stdin=secondary, stdout=secondary,
            stderr=secondary, start_new_session=True,
        )  # fmt: skip
        os.close(secondary)
        self._bytes = b""
        self._reader = threading.Thread(target=self._read, args=(primary,), daemon=True)
        self._reader.start()

    def _read(self, primary: int) -> None:
        # At the end of the other side, Linux answers EIO.
        try:
            while data := os.read(primary, 65536):
                self._bytes += data
        except OSError:
            pass
        finally:
            os.close(primary)

    def text(self) -> str:
        """All that was shown, after the command has ended; control sequences removed."""
        self._reader.join(20)
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._bytes.decode(errors="replace"))
