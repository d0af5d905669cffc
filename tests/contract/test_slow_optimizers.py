"""Optimizers as their yaml has them that take long or need torch, and the journal of each."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_optimizers as contract
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from swarm._util.files import conf_folder, encode_json
from swarm.runs.folder import apply_difference, difference

SLOW = [file for file in contract.FILES if contract.claims(file).slow]
each_slow = pytest.mark.parametrize("file", SLOW, ids=[file.stem for file in SLOW])


@each_slow
@pytest.mark.parametrize(
    "test",
    [
        contract.test_comes_near_the_optimum_of_a_bowl,
        contract.test_beats_random_search_of_the_same_budget,
        contract.test_groups_find_mixtures_of_their_own,
    ],
)
def test_the_slow_keep_the_contract(test: Any, file: Path) -> None:
    test(file)


@pytest.mark.parametrize("name", ["bayes", "bayes_free", "auto"])
def test_goes_on_from_its_state_as_it_is(name: str) -> None:
    """Those whose quick options are another method, not fewer epochs."""
    (file,) = (file for file in SLOW if file.stem == name)
    contract.go_on(file, quick=False)


# The state of a Gaussian process's search is its trials, as that of any other sampler.
QUICK = {
    "evogm": ["optimizer.epochs=2"],
    "bayes": ["optimizer.sampler=tpe"],
    "auto": ["optimizer.surrogate=false"],
}
OPTIMIZERS = sorted(path.stem for path in (conf_folder() / "optimizer").glob("*.yaml"))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizers_state_is_in_its_differences(name: str) -> None:
    """Exactly, signs of zero too; and a difference is no longer in late rounds."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        keys = ["name=x", f"optimizer={name}", *QUICK.get(name, [])]
        optimizer = instantiate(compose("search", keys).optimizer, _convert_="all")
    optimizer = optimizer.choose(4)
    optimizer.start(4, 0, 1)
    kept: dict[str, Any] = {}
    sizes = []
    for _ in range(24):
        rows = optimizer.ask()
        found = np.where(optimizer.evaluate, -((rows - 0.2) ** 2).sum(axis=1), np.nan)
        parts = np.stack([found, -(rows[:, 0] ** 2)], axis=1)
        optimizer.tell(found, objectives=parts)
        line = encode_json(difference(kept, optimizer.state_dict()))
        apply_difference(kept, json.loads(line))
        assert json.dumps(kept, sort_keys=True) == json.dumps(
            optimizer.state_dict(), sort_keys=True
        )
        sizes.append(len(line))
        if optimizer.stop_reason():
            break
    if len(sizes) == 24:
        assert max(sizes[-3:]) < 1.5 * max(sizes[:12]), sizes
