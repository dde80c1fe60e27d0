"""What a change of a setting means for a training that was begun: each field of section `train` declares its kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SettingKind:
    """A field without one identifies the training: changing it starts a new one."""

    meaning: str


EXECUTION = SettingKind("execution setting: it may differ between two attempts at one training, and starts no new run")
DURATION = SettingKind("duration setting: a longer training continues a shorter one")
DEFAULTED = SettingKind("changing it starts a new run; trainings that began before it existed have its default")
RESUMABLE = SettingKind("resumable setting: no checkpoint depends on it, `--allow-change` may change it")
