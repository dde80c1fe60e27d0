"""What two calls of a benchmark measured: kept side by side, and never compared."""

from __future__ import annotations

from pathlib import Path

from benchmarks.results import Result, Results

WORKLOAD, SIZE = "full256", 100


def _call(path: Path, started: str, seconds: dict[str, list[float]]) -> None:
    """Adds what one call measured to the file."""
    results = Results.load(path)
    results.call = started
    for name, rounds in seconds.items():
        for number, each in enumerate(rounds):
            results.add(WORKLOAD, SIZE, name, number, Result(loop_seconds=each))
    results.save(path)


def test_a_call_keeps_the_rounds_of_another_call_and_no_ratio_mixes_them(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    _call(path, "2026-11-26T20:00:00", {"ours": [1.0, 1.0], "peer": [2.0, 2.0], "third": [4.0]})
    # The machine is slower by now, and the third contestant does not run.
    _call(path, "2026-11-26T21:00:00", {"ours": [10.0], "peer": [20.0]})
    results = Results.load(path)
    newest, earlier = (results.of_call(call) for call in results.calls(WORKLOAD, SIZE))
    assert newest.seconds(WORKLOAD, SIZE, "ours") == [10.0]
    assert newest.seconds(WORKLOAD, SIZE, "third") == []
    assert earlier.ratio(WORKLOAD, SIZE, "ours", "third") == 4.0
    assert newest.ratio(WORKLOAD, SIZE, "ours", "peer") == earlier.ratio(WORKLOAD, SIZE, "ours", "peer") == 2.0
    # What each contestant did last: of the two that ran in the newest call there is a ratio.
    assert results.newest().ratio(WORKLOAD, SIZE, "ours", "peer") == 2.0
    assert results.newest().ratio(WORKLOAD, SIZE, "ours", "third") is None


def test_a_call_is_forgotten_once_all_its_contestants_were_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    _call(path, "2026-11-26T20:00:00", {"ours": [1.0], "peer": [2.0]})
    _call(path, "2026-11-26T21:00:00", {"ours": [1.0]})
    assert len(Results.load(path).calls(WORKLOAD, SIZE)) == 2
    _call(path, "2026-11-26T22:00:00", {"ours": [1.0], "peer": [3.0]})
    assert Results.load(path).calls(WORKLOAD, SIZE) == ["2026-11-26T22:00:00"]


def test_a_round_that_failed_is_left_out_of_the_pairs_of_its_round_only(tmp_path: Path) -> None:
    results = Results()
    for number, (ours, peer) in enumerate(((1.0, None), (1.0, 3.0))):
        results.add(WORKLOAD, SIZE, "ours", number, Result(loop_seconds=ours + number))
        results.add(WORKLOAD, SIZE, "peer", number, Result(loop_seconds=peer, fault="" if peer else "it ended"))
    assert results.ratio(WORKLOAD, SIZE, "ours", "peer") == 3.0 / 2.0
