"""A task in a command's process, whose parent is a shell: it is to go on when that is gone."""

import os
import time

from airflow_dags.processes import end_with_worker

end_with_worker()
shell = os.getppid()
print("ready", flush=True)
while os.getppid() == shell:
    time.sleep(0.02)
print("goes on", flush=True)
