"""Exchanges between ranks through the driver: the messages, the driver's side, and a rank's side.

It needs no collective, so it works before the ranks have one, and beside it: a thread that writes checkpoints exchanges
in a separate lane, independent of the training thread.
"""

from __future__ import annotations

import queue
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
