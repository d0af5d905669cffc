"""A Ray cluster, found or started quietly and within a bounded time."""

import logging
import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.errors import UserError

MIN_OBJECT_STORE = 100 * 2**20
"""Bytes of object store that a cluster of our own gets beside the experts; jobs are kilobytes."""
CONNECT_TIMEOUT_S = 10.0
"""How long a cluster's port may take to accept a connection, and then to say a word."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a gRPC client says first (RFC 9113, 3.4): the preface and an empty settings frame."""
RAY_ENVIRONMENT = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""What keeps Ray's own words off the terminal; the user's values win."""


def import_ray() -> Any:
    """Ray, imported only here and only when it is used.

    Raises:
        UserError: It is not installed.
    """
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise UserError("executor=ray needs Ray: pip install 'model-swarms[ray]'") from None
    return ray


def connect_cluster(address: str | None, gpus: Sequence[int], cpus: float | None, store: int) -> bool:
    """Join the cluster at `address`, or start one on this machine; True if it is ours to leave.

    Args:
        address: "auto", "host:port", "ray://host:port"; `None` starts a cluster.
        gpus: The device numbers that a started cluster may use.
        cpus: The CPU slots of a started cluster; `None` is one a core.
        store: Bytes that will be put into the object store of a started cluster.

    Raises:
        UserError: There is no cluster at the address, or it cannot be joined.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    where = f"executor.address={address}"
    try:
        if address is None:
            where = "a local Ray could not be started"
            with limit_visible_gpus(gpus):
                ray.init(
                    "local", num_cpus=cpus and max(1, round(cpus)), num_gpus=len(gpus),
                    object_store_memory=MIN_OBJECT_STORE + store, include_dashboard=False, **quiet,
                )  # fmt: skip
        else:
            check_reachable(address)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ray.init(address, **quiet)
    except UserError:
        raise
    except Exception as error:  # Ray and gRPC raise whatever comes; none of it has a common base.
        words = " ".join(str(error).split())[:300]
        raise UserError(f"{where}: {words or type(error).__name__}") from None
    return True


def check_reachable(address: str) -> None:
    """Ask whether anything listens at an address at all; Ray itself would try for minutes.

    Raises:
        UserError: Nothing does, or the address is none.
    """
    asked = address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or latest_address()
        if address in ("", "auto", "local"):
            return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f'executor.address={address}: must be null, "auto", "host:port" or "ray://host:port"'
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S) as line:
            line.sendall(HTTP2_PREFACE)
            heard = line.recv(9)
        # Under TLS the greeting is not understood, and Ray has to find out for itself.
        if heard[3:4] != b"\x04" and os.environ.get("RAY_USE_TLS", "0") == "0":
            raise OSError("something else is at that port")
    except (OSError, OverflowError) as error:
        raise UserError(
            f"executor.address={asked}: no Ray cluster answers at {address} ({error}); start one "
            "with `ray start --head`, or leave executor.address=null for this machine alone"
        ) from None


def latest_address() -> str:
    """The address of the cluster last started on this machine, as Ray notes it, or nothing."""
    place = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return (Path(place) / "ray" / "ray_current_cluster").read_text().strip()
    except OSError:
        return ""


@contextmanager
def limit_visible_gpus(gpus: Sequence[int]) -> Iterator[None]:
    """Let a cluster that is started inside see these devices only."""
    name = "CUDA_VISIBLE_DEVICES"
    before = os.environ.get(name)
    known = before.split(",") if before else None
    os.environ[name] = ",".join(known[g] if known else str(g) for g in gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def list_nodes() -> list[dict[str, float]]:
    """The resources of every living node of the cluster."""
    return [dict(n["Resources"]) for n in import_ray().nodes() if n["Alive"]]


def is_node_alive() -> bool:
    """Whether Ray's own process of this machine (raylet) is at work, by what the cluster says."""
    ray = import_ray()
    here = ray.get_runtime_context().get_node_id()
    return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == here)


def find_head() -> str:
    """The address of the process that manages the cluster (gcs_server); empty if not known."""
    try:
        return str(import_ray().get_runtime_context().gcs_address or "")
    except Exception:  # a client (ray://) has no connection of its own to it
        return ""


def is_open(address: str) -> bool:
    """Whether something accepts a connection at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def describe_resources() -> str:
    """What the cluster has, in words."""
    ray = import_ray()
    total, free = ray.cluster_resources(), ray.available_resources()
    parts = [f"{total.get(k, 0):g} {k} ({free.get(k, 0):g} free)" for k in ("GPU", "CPU")]
    return f"the cluster has {' and '.join(parts)} on {len(list_nodes())} nodes"
