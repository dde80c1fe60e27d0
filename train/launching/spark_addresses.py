"""Finds the addresses on which a driver on Spark listens for its ranks: those of the application's own driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.contracts.world import LOOPBACK

if TYPE_CHECKING:
    from pyspark import SparkContext


def driver_addresses(context: SparkContext) -> tuple[str, str]:
    """(the address to bind to, the address that executors connect to), by Spark's settings for its own ports."""
    if str(context.master).startswith("local"):
        return LOOPBACK, LOOPBACK
    conf = context.getConf()
    advertised = conf.get("spark.driver.host")
    assert advertised is not None, "the context sets it when it starts"
    bind = conf.get("spark.driver.bindAddress")
    return advertised if bind is None else bind, advertised
