"""The section `train.non_finite` of the config: the handling of batches whose loss or gradient is not finite."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardmill.section import Section
from train.settings.kinds import EXECUTION


class NonFiniteConfig(Section):
    """What happens to a batch whose loss or gradient is not finite."""

    action: Annotated[Literal["stop", "skip"], EXECUTION] = "stop"
    """`stop`: end the training before the update; `skip`: skip the update and count it."""
    max_skipped_in_a_row: Annotated[int, EXECUTION] = Field(default=3, ge=1)
    """With `action = "skip"`: stop the training after more than this many skipped batches in a row."""
