"""A command that ends what it has started: a shell that starts another process when it is asked to end."""

import subprocess

from pipeline.output.ending import end_children

SHELL = "trap 'sleep 1000 & exit' TERM; echo ready; while :; do sleep 0.01; done"
shell = subprocess.Popen(["bash", "-c", SHELL], stdout=subprocess.PIPE)
assert shell.stdout is not None and shell.stdout.readline() == b"ready\n"
end_children()
