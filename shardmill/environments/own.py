"""Processes whose launcher sets shardmill's own variables, as shardmill's launchers do for their ranks."""

from __future__ import annotations

from shardmill.environments import Starter, local_numbers
from shardmill.environments.place import OURS

OWN = Starter("shardmill's own variables", OURS[0], OURS[1], local_numbers(OURS[2], OURS[3]))
