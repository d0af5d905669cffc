"""The folders of the tests: what is where, and that the rule of tests/unit holds from the start."""

import re
import subprocess
import sys
import tomllib

import searches
import yaml

TESTS = searches.ROOT / "tests"
FOLDERS = {"unit", "contract", "journey", "nightly"}


def test_each_test_file_has_a_folder_and_a_name_of_its_own() -> None:
    files = list(TESTS.rglob("test_*.py"))
    names = [file.name for file in files]
    assert {file.relative_to(TESTS).parts[0] for file in files} == FOLDERS
    assert sorted(names) == sorted(set(names))
    packages = {file.parent.name for file in (TESTS / "unit").rglob("test_*.py")}
    assert all((searches.ROOT / "swarm" / package).is_dir() for package in packages)


def test_unit_tests_import_no_torch_when_they_are_collected() -> None:
    code = (
        "import pytest, sys\n"
        "ended = pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider', 'tests/unit'])\n"
        "sys.exit(ended or ('torch imported' if 'torch' in sys.modules else 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=searches.ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_dependency_is_imported_and_the_environment_has_what_tests_need() -> None:
    project = tomllib.loads((searches.ROOT / "pyproject.toml").read_text())["project"]
    sources = "\n".join(path.read_text() for path in (searches.ROOT / "swarm").rglob("*.py"))
    requirements = project["dependencies"]
    assert len(requirements) == len(set(requirements))
    for requirement in requirements:
        name = re.split(r"[<>=]", requirement)[0].removesuffix("-core")
        if name == "accelerate":  # transformers' Trainer imports it
            name = "transformers import .*Trainer"
        assert re.search(rf"^\s*(import|from) {name}\b", sources, re.MULTILINE), requirement
    environment = yaml.safe_load((searches.ROOT / "environment.yml").read_text())
    (installed,) = environment["dependencies"][-1]["pip"]
    extras = set(re.findall(r"\w+", installed.partition("[")[2]))
    found = " ".join(one for extra in extras for one in project["optional-dependencies"][extra])
    assert "pytest>=" in found and "datasets>=" in found
