"""Has something in its private temporary folder, which it prints, until its input ends."""

import sys
import tempfile

from shardmill.jobs.process import private_temporary_folder

with private_temporary_folder() as folder:
    handle, _ = tempfile.mkstemp()
    print(folder, flush=True)
    sys.stdin.read()
