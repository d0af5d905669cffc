"""What CONTRIBUTING.md shows is put through the contract tests; the files of the project hold."""

import importlib.util
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import searches
import test_models
import test_optimizers
import test_tasks
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf

import swarm
from swarm.registry import registry

ROOT = searches.ROOT
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WORDS = ["Paris", "seven", "Oslo", "blue"]
ECHO = """sh -c 'text=$(cat); [ "$text" != fail ] && printf %s "$text"'"""


def shown(path: str) -> str:
    """The block that follows the file's name on the page."""
    found = re.search(rf"`{re.escape(path)}`.*?\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, path
    return found[1]


def loaded(path: str, folder: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """The block as the module that it would be."""
    name = path.removesuffix(".py").replace("/", ".")
    file = folder / Path(path).name
    file.write_text(shown(path), encoding="utf-8")
    specification = importlib.util.spec_from_file_location(name, file)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    patch.setitem(sys.modules, name, module)
    patch.setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module, False)
    specification.loader.exec_module(module)
    return module


def configuration(path: str, folder: Path) -> Path:
    file = folder / Path(path).name
    file.write_text(shown(path), encoding="utf-8")
    return file


def contract(module: ModuleType, *allowed: str) -> dict[str, Any]:
    """The tests of a module that need these arguments and no others."""
    return {
        name: test
        for name, test in vars(module).items()
        if name.startswith("test_")
        and len(inspect.signature(test).parameters) > 0
        and set(inspect.signature(test).parameters) <= set(allowed)
    }


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shown")


TASK = contract(test_tasks, "task", "ready", "parts", "config", "tmp_path")


@pytest.mark.parametrize("test", TASK.values(), ids=TASK)
def test_the_task_keeps_the_contract(
    test: Any, folder: Path, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    loaded("swarm/tasks/last_word.py", folder, patch)
    config = OmegaConf.load(configuration("conf/task/last_word.yaml", folder))
    patch.setitem(
        test_tasks.MAKERS,
        config["_target_"],
        lambda count: [
            {"question": f"Question {n}?", "answer": WORDS[n % 4]} for n in range(count)
        ],
    )
    parts = test_tasks.small(config, tmp_path)
    task = instantiate(config, _convert_="all")
    assert not task.needs_setup
    given = {"task": task, "ready": task, "parts": parts, "config": config, "tmp_path": tmp_path}
    test(**{name: given[name] for name in inspect.signature(test).parameters})


OPTIMIZER = contract(test_optimizers, "file")


@pytest.mark.parametrize("test", OPTIMIZER.values(), ids=OPTIMIZER)
def test_the_optimizer_keeps_the_contract(
    test: Any, folder: Path, patch: pytest.MonkeyPatch
) -> None:
    loaded("swarm/optimizers/climbing.py", folder, patch)
    test(configuration("conf/optimizer/climbing.yaml", folder))


def test_the_optimizer_keeps_it_in_groups(folder: Path, patch: pytest.MonkeyPatch) -> None:
    loaded("swarm/optimizers/climbing.py", folder, patch)
    file = configuration("conf/optimizer/climbing.yaml", folder)
    test_optimizers.go_on(file, quick=True, groups=3)
    test_optimizers.test_positions_of_groups(file, 3, 10)


MODEL = contract(test_models, "case")


@pytest.mark.parametrize("test", MODEL.values(), ids=MODEL)
def test_the_model_keeps_the_contract(test: Any, folder: Path, patch: pytest.MonkeyPatch) -> None:
    module = loaded("swarm/models/program.py", folder, patch)
    test(test_models.Case(module.Program(ECHO), by_rule=False))


def test_the_model_has_a_name_by_one_case(folder: Path, patch: pytest.MonkeyPatch) -> None:
    module = loaded("swarm/models/program.py", folder, patch)
    source, place = inspect.getsource(registry), '    "llm": lambda roster, name: LLM('
    assert source.count(place) == 1
    line = textwrap.indent(shown("swarm/registry/registry.py"), " " * 4)
    space = {"__name__": "swarm.registry", "Program": module.Program}
    exec(source.replace(place, line + place), space)
    assert space["Roster"](cache=None).model("program/cat").label == "program/cat"


def test_each_is_short() -> None:
    paths = re.findall(r"`(swarm/\w+/\w+\.py)`[^\n]*:\n", PAGE)
    assert len(set(paths) - {"swarm/registry/registry.py"}) == 3
    for path in paths:
        code = [line for line in shown(path).splitlines() if line.strip()]
        assert len(code) <= 30, (path, len(code))


def test_what_is_shown_is_clean(folder: Path) -> None:
    for path in (
        "swarm/tasks/last_word.py",
        "swarm/optimizers/climbing.py",
        "swarm/models/program.py",
    ):
        (folder / Path(path).name).write_text(shown(path), encoding="utf-8")
        for command in (["check"], ["format", "--check"]):
            options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
            done = subprocess.run(
                [sys.executable, "-m", "ruff", *command, *options, str(folder / Path(path).name)],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == swarm.__version__ and citation["license"] == "Apache-2.0"
