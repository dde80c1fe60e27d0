"""What a change of a setting means for a training that was begun: each field of section `train` declares its kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SettingKind:
    """A field without one identifies the training: changing it starts a new one."""

    meaning: str


EXECUTION = SettingKind("it decides how a training is done, not which numbers come out: two attempts may differ in it")
DURATION = SettingKind("the name of a training's folder says it (train/trainings.py): a longer one continues a shorter")
DEFAULTED = SettingKind("it came after trainings that do not record it: at its default it makes no difference")
RESUMABLE = SettingKind("later steps use it, no checkpoint depends on it: `--allow-change` may name it")
