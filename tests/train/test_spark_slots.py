"""The number of ranks that Spark can run at once, as far as its settings show; see tests/test_yarn.py for real
clusters.
"""

from __future__ import annotations

import os

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from tests.train.training import check_terms
from train.config import TrainConfig
from train.launching.spark_slots import num_places_of, num_slots_of


@pytest.mark.parametrize(
    ("master", "conf", "expected"),
    [
        ("local", {}, 1),
        ("local[4]", {"spark.task.cpus": "2"}, 2),
        ("local[3,2]", {}, 3),
        ("local[*]", {}, os.cpu_count()),
        ("local-cluster[2,3,1024]", {"spark.task.cpus": "2"}, 2),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "4"}, 12),
        ("yarn", {"spark.executor.instances": "3"}, None),
        (
            "yarn",
            {
                "spark.executor.instances": "3",
                "spark.executor.cores": "4",
                "spark.dynamicAllocation.enabled": "true",
            },
            None,
        ),
        ("spark://host:7077", {}, None),
        # A standalone master does not know this setting, and starts as many executors as fit.
        ("spark://host:7077", {"spark.executor.instances": "3", "spark.executor.cores": "4"}, None),
        ("spark://host:7077", {"spark.cores.max": "6", "spark.task.cpus": "4"}, 1),
    ],
)
def test_slots_are_counted_where_they_are_known(master, conf, expected):
    assert num_slots_of(master, conf) == expected


@pytest.mark.parametrize(
    ("master", "conf", "num_places"),
    [
        ("local[4]", {"spark.executor.instances": "3"}, None),
        ("yarn", {}, None),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "8"}, 3),
        ("yarn", {"spark.executor.instances": "3", "spark.dynamicAllocation.enabled": "true"}, None),
        ("spark://a:7077", {"spark.cores.max": "8"}, None),
        ("spark://a:7077", {"spark.cores.max": "8", "spark.executor.cores": "4"}, 2),
        ("local-cluster[2,4,1024]", {}, 2),
        ("yarn", {"spark.executor.instances": "3", "spark.executor.cores": "8",
                  "spark.executor.resource.gpu.amount": "4", "spark.task.resource.gpu.amount": "1"}, 12),
    ],
)  # fmt: skip
def test_places_of_a_cluster(master: str, conf: dict[str, str], num_places: int | None):
    assert num_places_of(master, conf) == num_places


@pytest.mark.parametrize(
    ("master", "conf", "expected"),
    [
        ("yarn", {}, 2),
        ("k8s://https://host:6443", {"spark.executor.instances": "3"}, 3),
        ("yarn", {"spark.executor.cores": "4", "spark.task.cpus": "2"}, 4),
        ("yarn", {"spark.dynamicAllocation.enabled": "true"}, None),
        ("spark://host:7077", {}, None),
        ("local[3]", {}, 3),
    ],
)
def test_sparks_own_defaults_count_once_all_settings_are_known(master, conf, expected, monkeypatch):
    """Before that, spark-defaults.conf may set more executors or cores."""
    assert num_slots_of(master, conf, is_all=True) == expected
    section = SparkConfig(master=master, train=SparkApplicationConfig(conf=conf))
    asks_for_more = TrainConfig(num_workers=5, strategy="horovod", launcher="horovod_spark")
    if not master.startswith("local"):
        check_terms(asks_for_more, section)
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    if expected is None:
        check_terms(asks_for_more, section)
        return
    with pytest.raises(UsageError, match=rf"training of 5 ranks, .* runs {expected} task\(s\) at a time"):
        check_terms(asks_for_more, section)
