"""A job (its records: argv[1]) in which a library logs a traceback before Ctrl-C ends it; argv[2]: --debug or empty."""

import logging
import sys

from shardmill.jobs.run_record import run_job


def job(record: object, observer: object) -> None:
    try:
        raise ConnectionError("the JVM is gone")
    except ConnectionError:
        logging.getLogger("py4j.clientserver").exception("Exception while sending command.")
    raise KeyboardInterrupt


sys.exit(run_job(job, sys.argv[1], "run", command="", sections=(), debug=bool(sys.argv[2])))
