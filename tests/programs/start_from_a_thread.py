"""Starts the module argv[1] from a thread that ends at once."""

import subprocess
import sys
import threading

started = []
command = [sys.executable, "-m", sys.argv[1]]
thread = threading.Thread(target=lambda: started.append(subprocess.Popen(command)))
thread.start()
thread.join()
started[0].wait()
