"""A protected rendezvous for Horovod's processes: one interface, a secret path, write-once keys.

Horovod's own servers listen on every interface, and its key-value store accepts any request (CVE-2024-10190,
CVE-2026-31234): one PUT of a wrong port made a training hang. What remains open is in docs/decisions/0006.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardmill.applications import OnExecutor
from shardmill.jobs.process import python_path
from train.contracts.world import World
from train.strategies.nics import ipv4_of, nic_with

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
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = python_path()
        try:
            with listening_on(settings.nics):
                yield _task_fn(index, driver_addresses, key, settings, use_gloo, is_elastic)
        finally:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before

    return OnExecutor(mapper)


@contextmanager
def meeting(world: World) -> Iterator[dict[str, str]]:
    """The variables with which Horovod finds the other ranks of this world; rank 0 keeps the store while it lasts."""
    place = places(world.exchange(world.address.encode()))[world.rank]
    server = GuardedRendezvous(world.address, secrets.token_hex(32)) if world.rank == 0 else None
    try:
        store = server.serve() if server is not None else {}
        [store_of_rank_0, *_] = world.exchange(json.dumps(store).encode())
        yield {
            **place,
            **json.loads(store_of_rank_0),
            "HOROVOD_GLOO_IFACE": nic_with(world.address),
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_SECONDS),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
    finally:
        if server is not None:
            server.stop()


def places(hosts: Sequence[bytes]) -> list[dict[str, str]]:
    """Horovod's variables for each rank's place, from the host of each rank in rank order.

    "Local" ranks share a host; "cross" ranks are those with the same local rank on different hosts.
    """
    local_ranks = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    found = []
    for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True)):
        cross = list(dict.fromkeys(h for h, local in zip(hosts, local_ranks, strict=True) if local == local_rank))
        place = {
            "RANK": rank,
            "SIZE": len(hosts),
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": hosts.count(host),
            "CROSS_RANK": cross.index(host),
            "CROSS_SIZE": len(cross),
            "HOSTNAME": host.decode(),
        }
        found.append({f"HOROVOD_{name}": str(value) for name, value in place.items()})
    return found
