"""A task's process that has started the module argv[1] with the arguments after it."""

import subprocess
import sys

from airflow_dags.processes import tied_to_this_process

subprocess.Popen([sys.executable, "-m", *sys.argv[1:]], **tied_to_this_process()).wait()
