"""Every yaml composes to the configuration that was recorded, key by key.

`python tests/contract/test_yaml_net.py` records it anew; read the differences before you commit.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from swarm._util.files import conf_folder

CONF = conf_folder()
RECORD = Path(__file__).with_suffix(".json")
NEEDED = {
    "local": ["model.path=models/mine"],
    "models": ["pool.models=[models/mine,models/other]"],
    "token_swarms": ["pool.models=[models/mine,models/other]"],
    "full_models": ["pool.models=[models/mine,models/other]"],
}
"""What has to be given with an option."""
APART = ("candidate", "consortium", "moa", "scorer", "suite", "study")
"""Groups that no search composes: their files are recorded as they are."""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value; lists and empty mappings are values."""
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def compose_search(*words: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = compose("search", overrides=["name=test", *words])
    return flatten(OmegaConf.to_container(found, resolve=True))


def options() -> list[str]:
    """Name of each yaml: "task=gsm8k" of a group, "moa/lite" and "evaluate" of files apart."""
    names = []
    for path in sorted(CONF.rglob("*.yaml")):
        group = path.parent.relative_to(CONF)
        apart = (
            path.parent == CONF
            or group.parts[0] in APART
            or (group.name, path.stem) == ("model", "moa")
        )
        names.append(
            str(path.relative_to(CONF).with_suffix("")) if apart else f"{group}={path.stem}"
        )
    return [name for name in names if name != "search"]


def composed(name: str, base: dict[str, Any]) -> dict[str, Any]:
    """What an option sets that the default search does not; the content of a file apart."""
    if "=" not in name:
        return flatten(yaml.safe_load((CONF / f"{name}.yaml").read_text()))
    whole = compose_search(name, *NEEDED.get(name.partition("=")[2], []))
    return {k: v for k, v in whole.items() if k not in base or base[k] != v} | {
        k: "(gone)" for k in base if k not in whole
    }


def record() -> dict[str, dict[str, Any]]:
    base = compose_search()
    return {"search": base, **{name: composed(name, base) for name in options()}}


@pytest.fixture(scope="module")
def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text())


def test_there_is_a_record_of_each(recorded: dict[str, dict[str, Any]]) -> None:
    assert sorted(recorded) == sorted(["search", *options()])


@pytest.mark.parametrize("name", ["search", *options()])
def test_a_yaml_composes_as_before(name: str, recorded: dict[str, dict[str, Any]]) -> None:
    base = compose_search()
    assert (base if name == "search" else composed(name, base)) == recorded[name]


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(keys)}" for name, keys in record().items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
