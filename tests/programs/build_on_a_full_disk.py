"""Writes the first unit of the images in argv[1] under a file size limit: write() then fails as on a full disk."""

import resource
import sys
from pathlib import Path

from etl.plan import plan_build
from etl.units.write_unit import write_unit
from shardmill.errors import StorageError
from tests.etl.building import tree_for

plan = plan_build(tree_for(Path(sys.argv[1]), "dataset"), run_id="a")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_unit(plan.units[0], plan.task)
except StorageError as error:
    print(error)
