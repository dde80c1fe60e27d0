"""The Horovod strategy: one process per rank, gradients summed by ONE grouped allreduce per step.

One group, because its tensors are fused in a fixed order: the default per-tensor `DistributedGradientTape` fuses
whatever is ready and gave 5 different sums in 12 identical calls at 3 ranks, one group gave 1 (docs/decisions).
Horovod's own `broadcast_object` and `allgather_object` are not used: they unpickle what arrives over the network.

Its processes meet at a protected rendezvous: one interface, a secret path, write-once keys. Horovod's own servers
listen on every interface, and its key-value store accepts any request (CVE-2024-10190, CVE-2026-31234): one PUT of a
wrong port made a training hang. What remains open is in docs/decisions/0006.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardmill.applications import OnExecutor
from shardmill.errors import TrainingError
from shardmill.jobs.process import python_path
from shardmill.values import Batch
from train.api import GLOO_LOST_PEER, Learner, MemberStep, Strategy
from train.config import TrainConfig
from train.contracts.mesh import DataIndex
from train.contracts.values import Reporter
from train.contracts.world import World, ipv4_of, nic_with
from train.strategies.collective import AnnouncedCollective
from train.strategies.replicated import ReplicatedMember, replicated

if TYPE_CHECKING:
    from train.backends.keras.backend import KerasLearner


TIMELINE = "horovod_timeline.json"


class HorovodCollective:
    """Horovod's TensorFlow binding."""

    def __init__(self, world: World, compression: str = "none", bucket_bytes: int = 0, profiled: bool = False) -> None:
        if bucket_bytes:
            # Read once, when Horovod starts its thread.
            os.environ["HOROVOD_FUSION_THRESHOLD"] = str(bucket_bytes)
        if profiled:
            # Likewise: `timeline` may begin one later.
            os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
        import horovod.tensorflow as hvd

        self._hvd = hvd
        self._is_compressed = compression == "fp16"
        self._meeting = ExitStack()
        # If Horovod itself has started this process (`horovod_spark`), it has also said where the others are.
        if world.world_size > 1 and GLOO_ADDRESS not in os.environ:
            os.environ.update(self._meeting.enter_context(meeting(world)))
        hvd.init()
        if (hvd.rank(), hvd.size()) != (world.rank, world.world_size):
            raise TrainingError(
                f"Horovod made this process rank {hvd.rank()} of {hvd.size()}",
                f"the launcher said rank {world.rank} of {world.world_size}",
                "start all ranks with one of shardmill's launchers",
            )
        self._rank: int = world.rank

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        # Inside a compiled function ranks know an operation by its name: one of our own, which no trace counts up.
        if not self._is_compressed:
            return self._hvd.grouped_allreduce(tensors, op=self._hvd.Sum, name="gradients", ignore_name_scope=True)
        import tensorflow as tf

        # A loss of a thousand samples should not be told in sixteen bits; a group has one type.
        *gradients, metrics = tensors
        halves: list[Any] = self._hvd.grouped_allreduce(
            [tf.cast(each, tf.float16) for each in gradients], op=self._hvd.Sum, name="halves", ignore_name_scope=True
        )
        summed = self._hvd.allreduce(metrics, op=self._hvd.Sum, name="metrics", ignore_name_scope=True)
        return [*(tf.cast(each, tf.float32) for each in halves), summed]

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(self._hvd.grouped_allreduce([array], op=self._hvd.Sum)[0])

    def broadcast_bytes(self, data: bytes) -> bytes:
        size = int(self._hvd.broadcast(np.array([len(data)], dtype=np.int64), root_rank=0).numpy()[0])
        mine = np.frombuffer(data, dtype=np.uint8) if self._rank == 0 else np.zeros(size, dtype=np.uint8)
        # An empty tensor cannot be broadcast.
        return self._hvd.broadcast(mine, root_rank=0).numpy().tobytes() if size else b""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = self._hvd.allgather(np.array([len(data)], dtype=np.int64)).numpy()
        joined = self._hvd.allgather(np.frombuffer(data, dtype=np.uint8)).numpy()
        stops = np.cumsum(sizes)
        return [joined[stop - size : stop].tobytes() for size, stop in zip(sizes, stops, strict=True)]

    def barrier(self) -> None:
        self._hvd.allreduce(np.zeros(1, dtype=np.float32), op=self._hvd.Sum)

    def close(self) -> None:
        self._hvd.shutdown()
        self._meeting.close()


class HorovodMember(ReplicatedMember):
    """A replica whose step is one compiled function, with the group in it."""

    def __init__(
        self,
        learner: Learner,
        collective: AnnouncedCollective,
        data: DataIndex,
    ) -> None:
        super().__init__(learner, collective, data)
        # The only backend that this strategy runs with.
        self._keras_learner = cast("KerasLearner", learner)
        self._sum = collective.sum_inside()
        self._keras_learner.sum_by(self._sum)
        self._sums_moments = False

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        if self._sums_moments:
            self._sum.expect_others()
        outcome = self._keras_learner.whole_step(batch, global_weight, self.data.fraction, learning_rate)
        return MemberStep(outcome, self._sum.seconds)

    def announce_moments(self, reporter: Reporter) -> None:
        super().announce_moments(reporter)
        self._sums_moments = True


@contextmanager
def timeline(folder: Path) -> Iterator[None]:
    """Horovod's own, for Perfetto and Chrome: when the ranks agreed on each exchange, and how long it took."""
    import horovod.tensorflow as hvd

    # The others tell it.
    if hvd.rank() != 0:
        yield
        return
    hvd.start_timeline(str(folder / TIMELINE))
    # Not `finally`: it returns when Horovod's thread has written the end, which is never once that has failed.
    yield
    hvd.stop_timeline()


def join_horovod(world: World, config: TrainConfig) -> HorovodCollective:
    """`train.strategies.replicated.JoinCollective`."""
    return HorovodCollective(world, config.compression, config.bucket_bytes, bool(config.log.profile_steps))


def _sum_in_step(tensor: Any, name: str) -> Any:
    """`SumInStep`: inside a compiled function ranks know an operation by its name, whatever scope it is in."""
    import horovod.tensorflow as hvd

    return hvd.allreduce(tensor, op=hvd.Sum, name=name, ignore_name_scope=True)


HOROVOD = Strategy(
    backends=("keras",),
    synchronous=True,
    exact_resume=True,
    syncs_batch_norm=True,
    can_skip_batches=True,
    max_world_size=None,
    join=replicated(join_horovod, _sum_in_step, HorovodMember),
    timeline=timeline,
    # The binding's operations do not take bfloat16.
    compressions=("none", "fp16"),
    secondary_error=re.compile(
        r"HorovodInternalError|Horovod has been shut down|Horovod(Grouped)?(Allreduce|Allgather|Broadcast|Barrier)"
        rf"|{GLOO_LOST_PEER}",
        re.IGNORECASE,
    ),
)


GLOO_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
GLOO_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
# The watchdog finds lost ranks. Gloo's default of 30 s would end a job in which one rank is only slow.
GLOO_TIMEOUT_SECONDS = 3600
# What Gloo stores is a few hundred bytes for each pair of ranks.
MAX_VALUE_BYTES = 1 << 24


def derive(secret: bytes, purpose: str) -> str:
    """A secret of its own for each purpose, from one that both sides have."""
    return hmac.new(secret, purpose.encode(), hashlib.sha256).hexdigest()


def address_variables(host: str, port: int, path: str) -> dict[str, str]:
    """Environment variables that give a rank's Gloo the address of the store; without them it cannot be used.

    Gloo asks `http://<address>:<port>/<scope>/<key>`, whatever the address holds: with a path inside it, the store is
    at `http://<host>:<port>/<path>:<port>/`.
    """
    return {GLOO_ADDRESS: f"{host}:{port}/{path}", GLOO_PORT: str(port)}


def open_rendezvous(host: str, path: str) -> Any:
    """Horovod's key-value server on one interface, not yet serving; it answers below the secret `path` only."""
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class GuardedHandler(RendezvousHandler):
        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            server: Any = self.server
            root = f"/{path}:{server.server_port}"
            if not hmac.compare_digest(self.path[: len(root)].encode(), root.encode()):
                self.send_status_code(403)
                return False
            self.path = self.path[len(root) :]
            return True

        def do_PUT(self) -> None:
            scope, _, key = self.path.strip("/").partition("/")
            num_bytes = int(self.headers.get("Content-Length", "0"))
            if not 0 <= num_bytes <= MAX_VALUE_BYTES:
                self.send_status_code(413)
                return
            value = self.rfile.read(num_bytes)
            server: Any = self.server
            with server.cache_lock:
                kept = server.cache.setdefault(scope, {}).setdefault(key, value)
            # A rank that did not get our answer repeats its request.
            self.send_status_code(200 if kept == value else 409)

        def do_DELETE(self) -> None:
            # Sent by a rank that leaves. Nothing is deleted: a free key could be written with another value.
            self.send_status_code(200)

        def do_HEAD(self) -> None:
            # The inherited method would list the working directory.
            self.send_status_code(405)

    return RendezvousHTTPServer((host, 0), GuardedHandler, verbose=0)


class GuardedRendezvous:
    """The replacement for Horovod's `RendezvousServer` that `launch_gloo` accepts."""

    def __init__(self, host: str, path: str) -> None:
        self._host, self._path = host, path
        self._server = open_rendezvous(host, path)
        # A peer that keeps its connection open must not hold up the end.
        self._server.daemon_threads, self._server.block_on_close = True, False
        self._is_serving = False

    def serve(self) -> dict[str, str]:
        """Start, and say where: the variables of `address_variables`."""
        self._server.init([])
        return address_variables(self._host, self.start(), self._path)

    def start(self) -> int:
        threading.Thread(target=self._server.serve_forever, name="gloo-rendezvous", daemon=True).start()
        self._is_serving = True
        return self._server.server_address[1]

    def init(self, host_alloc_plan: Any) -> None:
        self._server.init(host_alloc_plan)

    def stop(self) -> None:
        if self._is_serving:
            # Waits for the serving thread, and would wait forever if there is none.
            self._server.shutdown()
        self._server.server_close()


@contextmanager
def listening_on(nics: set[str] | None) -> Iterator[None]:
    """Let Horovod's services in this process listen on the chosen interface alone; on all if there is no single one."""
    import horovod.runner.common.util.network as network

    host = ipv4_of(next(iter(nics))) if nics and len(nics) == 1 else ""
    find_port = network.find_port

    def open_port(server_at: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
        server = server_at((host, 0))
        return server, server.socket.getsockname()[1]

    network.find_port = open_port
    try:
        yield
    finally:
        network.find_port = find_port


def guarded_mapper(driver_addresses: Any, settings: Any, use_gloo: bool, is_elastic: bool) -> Callable[..., Any]:
    """Replaces `horovod.spark.runner._make_mapper`: the function that Spark sends to its tasks."""
    key = settings.key

    def mapper(index: int, _: Any) -> Iterator[Any]:
        from horovod.spark.runner import _task_fn  # pyright: ignore[reportPrivateUsage]

        # The rank's process inherits the environment, and what Spark added to this process's path is not in there.
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = python_path()
        try:
            with listening_on(settings.nics):
                yield _task_fn(index, driver_addresses, key, settings, use_gloo, is_elastic)
        finally:
            os.environ["PYTHONPATH"] = before  # empty is as good as not set

    return OnExecutor(mapper)


@contextmanager
def meeting(world: World) -> Iterator[dict[str, str]]:
    """The variables with which Horovod finds the other ranks of this world; rank 0 keeps the store while it lasts."""
    variables = rank_variables(world.exchange(world.address.encode()))[world.rank]
    server = GuardedRendezvous(world.address, secrets.token_hex(32)) if world.rank == 0 else None
    try:
        store = server.serve() if server is not None else {}
        [store_of_rank_0, *_] = world.exchange(json.dumps(store).encode())
        yield {
            **variables,
            **json.loads(store_of_rank_0),
            "HOROVOD_GLOO_IFACE": nic_with(world.address),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_SECONDS),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
    finally:
        if server is not None:
            server.stop()


def rank_variables(hosts: Sequence[bytes]) -> list[dict[str, str]]:
    """Horovod's variables for each rank's place, from the host of each rank in rank order.

    "Local" ranks share a host; "cross" ranks are those with the same local rank on different hosts.
    """
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    found = []
    for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True)):
        cross = list(dict.fromkeys(h for h, local in zip(hosts, local_ranks, strict=True) if local == local_rank))
        variables = {
            "RANK": rank,
            "SIZE": len(hosts),
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": hosts.count(host),
            "CROSS_RANK": cross.index(host),
            "CROSS_SIZE": len(cross),
            "HOSTNAME": host.decode(),
        }
        found.append({f"HOROVOD_{name}": str(value) for name, value in variables.items()})
    return found
