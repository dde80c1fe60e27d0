"""The kinds of settings: fields of section `etl` declare what changing them means for an existing dataset.

A field without `REBUILDS_NOTHING` decides what a work unit produces: changing it builds everything anew.
"""

from __future__ import annotations

from shardmill.section import SettingKind

REBUILDS_NOTHING = SettingKind("changing it alone does not build stored images again")
EQUAL_IN_APPENDS = SettingKind("an append needs the value that the dataset was built with")
