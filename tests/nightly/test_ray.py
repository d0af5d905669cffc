"""Searches on a real Ray cluster of two nodes are the same, also when workers are killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import searches
import test_executors

from swarm.errors import UserError
from swarm.executors import ray as packing
from swarm.executors.ray import RayExecutor
from swarm.pool.pool import Pool
from swarm.runs.folder import read_state

cluster_utils = pytest.importorskip("ray.cluster_utils")
# The contract of all executors, asked here of those on the cluster.
inline, expected = test_executors.inline, test_executors.expected
test_every_job_is_answered = test_executors.test_every_job_is_answered_once_and_the_same
test_an_error_is_one_line = test_executors.test_an_error_in_a_worker_is_one_line
SMALL = {"num_cpus": 2, "object_store_memory": 100 * 2**20, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster() -> Iterator[cluster_utils.Cluster]:
    """Two nodes of two CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        # A Faulty task has to be found by the workers, and busy neighbours not to be let past.
        places = [searches.ROOT, searches.HELPERS, Path(test_executors.__file__).parent]
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, places)))
        patch.setenv("RAY_worker_niceness", "0")
        for left in (2, 1, 0):  # Ray gives a node 30 s to start, whatever the machine is doing
            nodes = cluster_utils.Cluster()
            try:
                nodes.add_node(**SMALL)
                nodes.add_node(**SMALL)
                break
            except Exception:
                nodes.shutdown()
                if not left:
                    raise
        yield nodes
        nodes.shutdown()


@pytest.fixture(scope="module")
def executor(
    cluster: cluster_utils.Cluster, tiny_llama: Path, tiny_pool: Path
) -> Iterator[RayExecutor]:
    """What the contract of all executors is asked of; the tests below read the experts' path."""
    made = RayExecutor(address=cluster.address, workers=2, experts="store", wait_s=300)
    made.open(test_executors.recipe(tiny_llama, tiny_pool))
    yield made
    made.close()


def processes(parents: set[int], word: str) -> list[int]:
    """The children of some processes whose command line has a word in it."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in parents and word.encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue  # it has just ended
    return found


def kill_one(search: "subprocess.Popen[str]", folder: Path, busy: Callable[[], list[int]]) -> None:
    """SIGKILL to a worker as soon as one is seen at work after the first iteration."""
    while search.poll() is None:
        if (read_state(folder) or {}).get("rounds") and (seen := busy()):
            os.kill(seen[0], signal.SIGKILL)
            return
        time.sleep(0.005)


def test_a_search_is_the_same_on_any_workers_and_when_they_are_killed(
    cluster: cluster_utils.Cluster, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """One worker here; two processes, one of them killed; two nodes, one worker killed."""
    raylets = {node.all_processes["raylet"][0].process.pid for node in cluster.list_all_nodes()}
    more = {"job__items": 4, "optimizer__max_iterations": 4, "pool__space": "delta"}
    descent = "{_target_: swarm.optimizers.gradient.Descent, steps: 2, batch: 2}"
    more |= {"optimizer__descent": descent, "pool__new_adapter": 2}
    kinds = {
        "inline": {},
        "processes": {"executor__workers": 2, "executor__threads": 1},
        "ray": {
            "executor__workers": 2,
            "executor__address": cluster.address,
            "executor__experts": "store",
        },
    }
    trees = {}
    for kind, keys in kinds.items():
        command = searches.arguments(
            tmp_path, tiny_llama, tiny_pool, kind, executor=kind, **more, **keys
        )
        # A worker is found among the children of the process that was started.
        search = searches.start(command)
        folder = tmp_path / "search" / kind
        if kind == "processes":
            kill_one(search, folder, lambda pid=search.pid: processes({pid}, "spawn_main"))
        if kind == "ray":
            kill_one(search, folder, lambda: processes(raylets, "ray::RayWorker.run"))
        out, err = search.communicate(timeout=180)
        assert search.returncode == 0, out + err
        assert all(line.startswith("WARNING: ") for line in err.splitlines()), err
        assert "raylet" not in out and "\x1b[" not in out
        assert ("died" in (folder / "log.txt").read_text()) == (kind != "inline")
        trees[kind] = searches.tree(folder)
    assert any(name.startswith("adapters/") for name in trees["inline"])
    for kind in ("processes", "ray"):
        assert trees[kind].keys() == trees["inline"].keys()
        assert [n for n in trees[kind] if trees[kind][n] != trees["inline"][n]] == []


@contextmanager
def opened(base: Path, pool: Path, **more: Any) -> Iterator[RayExecutor]:
    executor = RayExecutor(**more)
    try:
        executor.open(test_executors.recipe(base, pool))
        yield executor
    finally:
        executor.close()


def test_a_job_that_kills_three_workers_ends_the_run(
    cluster: cluster_utils.Cluster, tiny_llama: Path, tiny_pool: Path
) -> None:
    with (
        opened(tiny_llama, tiny_pool, address=cluster.address, workers=1) as executor,
        pytest.raises(UserError, match=r"3 workers died .*items 14 to 14"),
    ):
        list(executor.map(test_executors.jobs(range(14, 15), 1)))


def test_a_worker_that_may_not_be_restarted_is_done_without(
    cluster: cluster_utils.Cluster,
    expected: dict[int, object],
    tiny_llama: Path,
    tiny_pool: Path,
) -> None:
    """Its jobs go to the other; when that dies too, the run ends."""
    import ray

    more = {"address": cluster.address, "workers": 2, "max_restarts": 0}
    with opened(tiny_llama, tiny_pool, **more) as executor:
        pids = [ray.get(slot.worker.ready.remote()) for slot in executor._slots]
        os.kill(pids[0], signal.SIGKILL)
        assert test_executors.by_number(executor) == expected
        end = time.monotonic() + 60
        while len(executor._slots) > 1 and time.monotonic() < end:
            # The other may have done all before word of the death came.
            assert list(executor.map(test_executors.jobs()))
        assert len(executor._slots) == 1
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(UserError, match=r"executor\.max_restarts=0"):
            list(executor.map(test_executors.jobs()))


def test_what_has_no_place_is_said(
    cluster: cluster_utils.Cluster, tiny_llama: Path, tiny_pool: Path
) -> None:
    for more, words in (
        ({"workers": 9}, ["9 workers of 0 GPU and 1 CPU", "4 CPU", "2 nodes"]),
        ({"gpus_per_worker": 1}, ["1 workers of 1 GPU", "0 GPU", "executor.wait_s"]),
    ):
        with (
            pytest.raises(UserError, match="workers could not be scheduled") as caught,
            opened(tiny_llama, tiny_pool, address=cluster.address, wait_s=1, **more),
        ):
            pass
        assert int(str(caught.value).split(": ")[1].split()[0]) >= more.get("workers", 1) - 4
        assert all(word in str(caught.value) for word in words)


def test_where_no_cluster_is_one_line_says_so(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    """Within seconds, and the folder is none or one that goes on."""
    began = time.monotonic()
    for address, word in (
        ("127.0.0.1:1", "refused"),
        ("nonsense", "null"),
        ("ray://127.0.0.1:1", "refused"),
    ):
        with pytest.raises(UserError, match=f"executor.address={address}: .*{word}"):
            packing.check_reachable(address)
    command = searches.arguments(
        tmp_path, tiny_llama, tiny_pool, executor="ray", executor__address="127.0.0.1:1"
    )
    result = searches.run_process(command)
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: executor.address=127.0.0.1:1: no Ray cluster")
    assert time.monotonic() - began < 50


def test_without_ray_the_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError\n")
    code = "from swarm.executors import ray; ray.import_ray()"
    seen = searches.environment(PYTHONPATH=f"{tmp_path}:{searches.ROOT}")
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=searches.ROOT, capture_output=True, text=True, env=seen
    )
    assert 'needs Ray: pip install -e ".[ray]"' in out.stderr.splitlines()[-1]


def test_packed_experts_are_the_same_pool(tiny_pool: Path, tmp_path: Path) -> None:
    pool = Pool(tiny_pool, ["dune", "amber"]).open()
    packed = packing.pack_experts(pool)
    copy = packing.unpack_experts(packed, tmp_path / "copy", pool).open()
    assert copy.names == ["dune", "amber"] and copy.fingerprint() == pool.fingerprint()


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"gpus_per_worker": 2}, "executor.gpus_per_worker"),
        ({"experts": "mail"}, "executor.experts"),
        ({"gpus": [0], "address": "auto"}, "gpus"),
        ({"gpus": [97]}, "no CUDA device 97"),
    ],
)
def test_wrong_settings_are_named(more: dict[str, object], key: str) -> None:
    with pytest.raises(UserError, match=key):
        RayExecutor(**more)  # type: ignore[arg-type]
