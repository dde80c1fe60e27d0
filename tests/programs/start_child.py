"""Starts the module argv[1] with the arguments after it, and ends with its exit code: as spark-submit or a shell."""

import subprocess
import sys

sys.exit(subprocess.run([sys.executable, "-m", *sys.argv[1:]]).returncode)
