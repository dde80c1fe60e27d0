"""What ranks agree on through the driver: exchanges of values, and the step before which they stop after SIGTERM.

Neither needs a collective, so both work for every strategy, before the ranks have one and beside it: a thread that
writes checkpoints exchanges in a separate lane, independent of the training thread.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import get_args

from train.launching.messages import Exchange, Exchanged, Lane

LANES: tuple[Lane, ...] = get_args(Lane)


class ExchangeAssembler:
    """Assembles the contributions of the ranks to one exchange, on the driver."""

    def __init__(self, world_size: int) -> None:
        self._waiting: dict[Lane, list[deque[str]]] = {lane: [deque() for _ in range(world_size)] for lane in LANES}

    def add(self, rank: int, given: Exchange) -> Exchanged | None:
        """The answer to all ranks that this completes, or None."""
        of_ranks = self._waiting[given.lane]
        of_ranks[rank].append(given.data_hex)
        if not all(of_ranks):
            return None
        return Exchanged(tuple(of_rank.popleft() for of_rank in of_ranks), given.lane)


class RankExchange:
    """Implements `World.exchange` and `World.exchange_aside` on a rank."""

    def __init__(self, send: Callable[[Exchange], None], lane: Lane) -> None:
        self._send = send
        self._lane: Lane = lane
        self._answers: queue.SimpleQueue[Exchanged] = queue.SimpleQueue()

    def __call__(self, data: bytes) -> list[bytes]:
        self._send(Exchange(data.hex(), self._lane))
        return [bytes.fromhex(each) for each in self._answers.get().data_hex_of_ranks]

    def answer(self, message: Exchanged) -> None:
        """Called by the thread that receives from the driver."""
        self._answers.put(message)


class StopPoint:
    """A rank's side. The training thread calls `may_begin`, and the thread that receives from the driver calls the
    rest.

    The driver sends `Hold`; each rank's listening thread answers at once with the last step that the rank has begun,
    and from then on the rank begins no other. The largest of the answers, which the driver sends to all, is a step that
    nobody has passed and that every rank can still reach: one that has begun it needs its peers in its collectives, and
    they begin it now. All stop behind it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = -1
        self._is_held = False
        self._last: int | None = None

    def may_begin(self, global_step: int) -> bool:
        """`World.may_begin`; waits while the ranks agree."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held or self._last is not None)
            if self._last is not None and global_step > self._last:
                return False
            # A chief begins steps ahead of those that its loop comes to.
            self._begun = max(self._begun, global_step)
            return True

    def hold(self) -> int:
        """Begin no other step until `stop_after`. -> the last one that was begun, -1 for none; the same every time."""
        with self._changed:
            self._is_held = True
            return self._begun

    def stop_after(self, global_step: int) -> None:
        """All ranks continue to the end of this step, and no further."""
        with self._changed:
            self._last = global_step
            self._changed.notify_all()


class StopAgreement:
    """The driver's side: the answers of the ranks."""

    def __init__(self) -> None:
        self.is_asked = False
        self._begun: dict[int, int] = {}
        self._is_agreed = False

    def answer(self, rank: int, global_step: int) -> None:
        """`rank` has begun `global_step` last, and holds."""
        self._begun[rank] = global_step

    def agreed(self, at_work: set[int]) -> int | None:
        """The step to stop after, once: when all ranks that are still at work have answered."""
        if not self.is_asked or self._is_agreed or not at_work or not at_work <= self._begun.keys():
            return None
        self._is_agreed = True
        return max(self._begun.values())
