"""The experts of a pool as one object: sent once, unpacked where they are needed."""

from pathlib import Path

import numpy as np

from swarm.engine import ExpertPool
from swarm.errors import UserError
from swarm.pool import Pool

PackedExperts = dict[str, dict[str, np.ndarray]]
"""Folder -> name of a file -> its bytes; arrays, because Ray shares those instead of copying."""


def pack_experts(pool: ExpertPool) -> PackedExperts:
    """The files of an opened pool; mapped, so that they are read when they are sent.

    Raises:
        UserError: Its experts are whole models.
    """
    if not isinstance(pool, Pool):
        raise UserError("executor.experts=store sends adapters only; choose executor.experts=path")
    return {
        name: {path.name: np.asarray(np.memmap(path, np.uint8, "r")) for path in files}
        for name, files in pool.parts().items()
    }


def packed_size(pack: PackedExperts) -> int:
    """The bytes of all files."""
    return sum(len(data) for files in pack.values() for data in files.values())


def unpack_experts(pack: PackedExperts, folder: Path, pool: Pool) -> Pool:
    """Write the files below `folder`; gives the same pool with these files, closed."""
    for name, files in pack.items():
        (folder / name).mkdir(parents=True)
        for file, data in files.items():
            (folder / name / file).write_bytes(data.data)
    return pool.with_folder(folder)
