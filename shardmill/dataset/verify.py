"""Checks a committed version against every rule of contract 1, from its manifest down to (with `deep`) every byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.deep import read_everything
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.rules import RecordRules
from shardmill.dataset.segment import RESTORE
from shardmill.errors import IntegrityError, SecurityRefusal, ShardmillError, StorageError
from shardmill.shown import Shown
from shardmill.values import DatasetPin


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and what was found."""

    rule: str
    detail: str
    problem: str = ""
    """Empty if the rule holds."""


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Shown):
    """All rules of one version."""

    pin: DatasetPin
    manifest: Manifest
    deep: bool
    checks: tuple[Check, ...]

    @property
    def uri(self) -> str:
        return self.pin.uri

    @property
    def version(self) -> int:
        return self.pin.version

    @property
    def problems(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.problem)

    def raise_if_failed(self) -> None:
        """Raise IntegrityError (exit 3) for the first broken rule."""
        if self.problems:
            first = self.problems[0]
            others = len(self.problems) - 1
            raise IntegrityError(
                f"{self.uri}@{self.version}: {first.problem}",
                f"the rule: {first.rule}" + (f" ({others} more rules are broken)" if others else ""),
                f"repair the named file: {RESTORE}",
            )


def verify_dataset(
    dataset: Dataset, *, deep: bool = False, on_shard: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Check every rule and report each. `deep` re-reads every byte of every shard.

    `on_shard` is called with (shards done, all shards). Opening `dataset` has checked the manifest's own rules.
    """
    rules = RecordRules(dataset)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("the manifest is whole, canonical and of a known schema", rules.manifest),
        ("no committed version is missing, and this manifest is the committed one", rules.recorded),
        ("index and ledger segments have their stated SHA-256", rules.segments),
        ("every shard and row segment exists with its stated size", rules.files_exist),
        ("chunks follow each other without gaps, and their rows add up", rules.chunks),
        ("all formats hold the same chunks", rules.formats_agree),
        ("row segments have their stated SHA-256 and rows", rules.row_segments),
        ("each sample id is unique and follows from its source key", rules.sample_ids),
        ("listed == accepted + rejected, by path", rules.accounting),
        ("rows, classes and splits are as counted", rules.counts),
        ("notes and duplicates are as counted", rules.notes),
        ("channel sums follow from the rows", rules.sums),
        ("the content digest follows from the rows", rules.content),
        ("the layout digest follows from the chunks", rules.layout),
    ]
    if deep:
        rule = "every byte has its checksums, and every row decodes to what was counted"
        checks.append((rule, lambda: read_everything(dataset, rules.rows_of, on_shard)))
    found = tuple(_checked(rule, check) for rule, check in checks)
    return VerifyReport(dataset.pin, dataset.manifest, deep, found)


def _checked(rule: str, check: Callable[[], str]) -> Check:
    try:
        return Check(rule, check())
    except (StorageError, SecurityRefusal):
        # A store that fails proves nothing about the dataset, and a hostile record must not be read any further.
        raise
    except ShardmillError as error:
        return Check(rule, "", "; ".join(part for part in (error.what, error.expected) if part))
    except Exception as error:  # a parser's error on a damaged record is a finding; the other rules are still checked
        return Check(rule, "", f"cannot be checked: {type(error).__name__}: {error}".splitlines()[0])
