"""Writes a version of the dataset in the folder argv[1], by the operation argv[2]; exits as a command would."""

import sys
from pathlib import Path

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.errors import ShardmillError
from shardmill.jobs.config import DatasetConfig
from shardmill.stores import open_store
from tests.lab.datasets import HERE
from tests.shardmill.collecting import config_of


def _build(images: Path, root: str, config: EtlConfig) -> None:
    config = config.model_copy(update={"engine": HERE})
    source, dataset = SourceConfig(uri=str(images)), DatasetConfig(uri=root)
    build_dataset(EtlTree(source=source, dataset=dataset, etl=config), run_id="stopped")


def write_version(folder: Path, operation: str, root: str) -> None:
    """To the dataset at the URI `root`."""
    if operation == "etl":
        _build(folder / "images", root, config_of(10))
    elif operation == "append":
        _build(folder / "tuesday", root, config_of(9).model_copy(update={"write_mode": "append"}))
    elif operation == "compact":
        compact_dataset(open_dataset(root), "stopped")
    else:
        roll_back(open_store(root), 1, "stopped")


def main(folder: Path, operation: str) -> int:
    try:
        write_version(folder, operation, str(folder / "dataset"))
    except ShardmillError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
