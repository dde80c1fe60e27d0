"""Converts tasks and work units to JSON and back, to send them to another process."""

from __future__ import annotations

from functools import cache

from pydantic import TypeAdapter

from etl.units.units import CopyUnit, UnitTask, WorkUnit


def encode_task(task: UnitTask) -> bytes:
    """A task as JSON."""
    return _tasks().dump_json(task)


def decode_task(data: bytes) -> UnitTask:
    """The task that `encode_task` wrote."""
    return _tasks().validate_json(data)


def encode_unit(unit: WorkUnit | CopyUnit) -> bytes:
    """A work unit as JSON."""
    return _units().dump_json(unit)


def decode_unit(data: bytes) -> WorkUnit | CopyUnit:
    """The work unit that `encode_unit` wrote."""
    return _units().validate_json(data)


# Made once: making one takes longer than sending ten units.
@cache
def _tasks() -> TypeAdapter[UnitTask]:
    return TypeAdapter(UnitTask)


@cache
def _units() -> TypeAdapter[WorkUnit | CopyUnit]:
    return TypeAdapter(WorkUnit | CopyUnit)
