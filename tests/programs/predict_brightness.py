"""Predicts SOURCE into OUT by `tests.etl.brightness`, and prints how many units an earlier run had finished."""

from __future__ import annotations

import sys
from pathlib import Path

from shardmill.jobs.process import report_error
from tests.etl.brightness import predict


def main() -> int:
    source, out = map(Path, sys.argv[1:])
    try:
        outcome = predict(source, out, engine="local")
    except Exception as error:
        return report_error(error, debug=False)
    sys.stdout.write(f"{outcome.num_units_kept} kept, {outcome.num_task_retries} retries\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
