"""The built wheel, in an environment of its own, away from the checkout."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import searches


def call(*command: object, cwd: Path) -> str:
    """Run a command without the checkout on the path; its standard output."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**environment, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", searches.ROOT),
        *("--wheel-dir", folder),
        cwd=folder,
    )
    return next(folder.glob("model_swarms-*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path) -> Path:
    """A fresh environment with the wheel; its dependencies are lent by the environment at hand."""
    home = wheel.parent / "venv"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", wheel, cwd=wheel.parent)
    site = call(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=wheel.parent
    )
    Path(site.strip(), "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_holds_code_configuration_and_the_small_task(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    folders = {path.parent.name for path in (searches.ROOT / "conf").rglob("*.yaml")} - {"conf"}
    for path in (searches.ROOT / "conf").rglob("*.yaml"):
        assert f"swarm/conf/{path.relative_to(searches.ROOT / 'conf')}" in names
    assert {"task", "model", "optimizer", "executor", "engine", "experiment"} <= folders
    assert "swarm/data/nlgraph_mini.json" in names and "swarm/py.typed" in names
    packages = {
        str(p.parent.relative_to(searches.ROOT))
        for p in (searches.ROOT / "swarm").rglob("__init__.py")
    }
    assert {f"{p}/__init__.py" for p in packages} <= set(names), "a package is not listed"
    assert not [name for name in names if name.startswith(("tests", "data/eval"))]


def test_a_search_runs_from_the_wheel(
    python: Path, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    where = call(python, "-c", "import swarm; print(swarm.__file__)", cwd=tmp_path)
    assert where.startswith(str(python.parent.parent))
    help_text = call(python, "-m", "swarm.search", "--help", cwd=tmp_path)
    assert "nlgraph_mini" in help_text
    assert call(python.with_name("model-swarms"), "search", "--help", cwd=tmp_path) == help_text
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, optimizer__max_iterations=1)
    out = call(python, "-m", "swarm.search", *command, cwd=tmp_path)
    assert out.splitlines()[-1].startswith("report: ")
    small = call(
        python,
        "-c",
        "from swarm._util.files import find_path; print(find_path('data/nlgraph_mini.json'))",
        cwd=tmp_path,
    )
    assert Path(small.strip()).is_file()


def test_an_empty_folder_and_the_wheel_are_enough(
    wheel: Path, python: Path, tmp_path: Path
) -> None:
    """The experts that ship, the hashes of the data, and the commands around a search."""
    assert "local/rooms" in call(python, "-m", "swarm.moa", "--list", cwd=tmp_path)
    assert "gsm8k  absent" in call(python, "-m", "swarm.fetch_data", "--list", cwd=tmp_path)
    assert "--jsonl" in call(python, "-m", "swarm.experts", "train", "--help", cwd=tmp_path)
    where = call(
        python,
        "-c",
        "from swarm._util.files import find_path; print(find_path('initial_experts/rooms'))",
        cwd=tmp_path,
    ).strip()
    assert (Path(where) / "adapter_model.safetensors").is_file()
    assert list(tmp_path.iterdir()) == [], "nothing is written by looking"
    hint = "from swarm.errors import install_command; print(install_command('ui'))"
    assert call(python, "-c", hint, cwd=tmp_path) == f'pip install "{wheel}[ui]"\n'
    version = call(python, "-m", "swarm", "--version", cwd=tmp_path)
    for command in ("search", "evaluate", "finetune"):
        assert call(python, "-m", f"swarm.{command}", "--version", cwd=tmp_path) == version
