"""Every command of the README and of docs/ is run, small, or is named with the reason why not."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import searches
import tiny

from swarm.registry.local_models import shipped_base

PAGES = [
    searches.ROOT / "README.md",
    searches.ROOT / "initial_experts" / "README.md",
    *sorted((searches.ROOT / "docs").glob("*.md")),
]
NOT_HERE = {
    "bash scripts/test.sh": "is what runs this test",
    "python -m swarm.search engine=vllm": "test_vllm_search.py, small",
    "python scripts/skill_domains.py": "test_initial_experts.py trains a small one",
    "ray start": "needs a cluster's nodes; test_ray.py starts one",
    "python -m swarm.search executor=ray": "test_ray.py, the same keys on a two-node cluster",
    "python -m swarm.report search/": "tests/unit/report/test_report.py, on run folders",
    "python -m swarm.search experiment=token_swarms": "test_token_swarms.py runs small ones",
    "python -m swarm.search experiment=full_models": "test_full_models.py runs small ones",
    "python -m swarm.search task=nlgraph_mini name=first tracker=": "test_wandb.py, small",
    "python -m swarm.search task=rm_concise": "test_scorers.py, with a small reward model",
    "python -m swarm.search task=human": "test_judge.py, with a judge on loopback",
    "python -m swarm.search task=nlgraph_mini pool=initial_experts,": "test_own_file.py",
    "python -m swarm.evaluate task=": "test_candidates.py runs every candidate, small",
    "python -m swarm.study": "many searches; test_study.py runs small ones",
    "python -m swarm.finetune task": "test_finetune.py, on a small model",
    "python -m swarm.export search/": "test_export.py, from a run folder",
    "python -m swarm.moa": "test_moa_command.py, with endpoints on the loopback",
    "python -m swarm.serve": "test_serve_command.py, on a free port",
    "python -m swarm.ui": "test_ui_runs.py, on a free port",
    "python -m swarm.consortium": "test_consortium_command.py, with functions as members",
    "llm consortium": "as python -m swarm.consortium",
    "cat notes.txt | llm consortium": "test_consortium_command.py, from standard input",
    "llm -": "test_llm_plugin.py, with functions as members",
    "python -m swarm.judge alpaca_eval": "test_judge_alpaca.py, with a judge on loopback",
    "bash scripts/eval_alpaca.sh": "test_judge_alpaca.py, on loopback",
    "python -m swarm.judge mt_bench": "test_mt_bench.py, with a judge on loopback",
    "python -m swarm.judge flask": "test_flask.py, with a judge on loopback",
    "MODEL=moa/lite JUDGE=gpt-4o bash scripts/eval_mt_bench.sh": "test_flask.py, on loopback",
    "python -m swarm.compare run": "test_compare_command.py, with functions as models",
    "python -m swarm.compare finetune": "test_compare_command.py",
    "python -m swarm.compare view": "test_compare_command.py",
    "pip": "takes the network",
    "python -m swarm.experts train": "test_initial_experts.py, on a small model",
    "python -m swarm.fetch_data mmlu": "test_fetch_data.py, from a server on loopback",
    "python examples/own_folder.py": "the fixture own_folder",
}


INDENTED = r"(?:^    (?:python|bash|pip|ray|sbatch|GPUS=).*\n(?:^    .*\n)*)"
ORIGINALS = searches.ROOT.parent / "shared" / "data" / "eval"


def commands() -> list[tuple[str, str]]:
    """(page, command) for each line of a shell block, fenced or indented."""
    found = []
    for page in PAGES:
        text = page.read_text()
        blocks = re.findall(r"```(?:bash|sh|shell)\n(.*?)```", text, re.DOTALL)
        blocks += re.findall(INDENTED, text, re.MULTILINE)
        for block in blocks:
            for line in block.replace("\\\n", " ").splitlines():
                command = " ".join(shlex.split(line, comments=True))
                if command:
                    found.append((page.name, command))
    return found


def reason(command: str) -> str | None:
    """Why a command is not run here, or `None`."""
    return next((why for start, why in NOT_HERE.items() if command.startswith(start)), None)


def unnamed(command: str) -> str:
    """A command without the name of its run and its GPUs, which differ between pages."""
    return re.sub(r" (name=\S+|gpus=[\d,]+)", "", command)


RUN = sorted({unnamed(command) for _, command in commands() if reason(command) is None})


def test_there_are_commands_and_each_exception_is_used() -> None:
    everything = [command for _, command in commands()]
    assert len(RUN) >= 8
    unused = [start for start in NOT_HERE if not any(c.startswith(start) for c in everything)]
    assert unused == []


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base that reads the longest prompts of the commands, and its pool."""
    base = tiny.model(tmp_path_factory.mktemp("patient") / "base", context=16_384)
    return base, tiny.pool(base, tmp_path_factory.mktemp("patient") / "pool")


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `mine` of the pages, with what examples/own_folder.py writes."""
    home = tmp_path_factory.mktemp("own")
    example = [sys.executable, str(searches.ROOT / "examples" / "own_folder.py")]
    subprocess.run(example, cwd=home, env=searches.environment(), check=True)
    return home / "mine"


@pytest.fixture
def shell(tmp_path: Path, patient: tuple[Path, Path], own_folder: Path) -> tuple[Path, list[str]]:
    """A working folder with small data under the right names, and arguments that make it small."""
    shutil.copytree(searches.ROOT / "examples", tmp_path / "examples")
    shutil.copy(searches.ROOT / "README.md", tmp_path)
    shutil.copytree(own_folder, tmp_path / "mine")
    for name in ("mmlu", "nlgraph", "gsm8k", "hearsay", "citation_prediction_classification"):
        file = tmp_path / "data" / "eval" / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        searches.choice_file(file)
        if name in ("nlgraph", "gsm8k"):
            content = json.loads(file.read_text())
            for split in ("dev", "test"):
                for item in content[split]:
                    item["answer"] = str(item["id"])
            file.write_text(json.dumps(content))
    small = [
        "model=local",
        f"model.path={patient[0]}",
        f"pool.folder={patient[1]}",
        "gpus=[]",
        "optimizer.particles=4",
        "optimizer.max_iterations=1",
        "ensemble=2",
        "tracker=none",
        f"folder={tmp_path / 'search'}",
    ]
    return tmp_path, small


def small_task(command: str) -> list[str]:
    """A few items of the command's task; those of a mixture belong to its parts."""
    if "legal" in command:
        return [
            f"task.tasks.{part}.{split}_limit=4"
            for split in ("dev", "test")
            for part in ("hearsay", "citation_prediction_classification")
        ]
    if "task=mixture" in command:
        parts = re.findall(r"@task\.tasks\.(\w+)=", command)
        return [f"task.tasks.{part}.{split}_limit=4" for split in ("dev", "test") for part in parts]
    windows = ["task.window=120", "task.context=60"] if "task=perplexity" in command else []
    return ["++task.dev_limit=4", "++task.test_limit=4", *windows]


@pytest.mark.parametrize("command", RUN)
def test_the_command_runs(command: str, shell: tuple[Path, list[str]]) -> None:
    run(command, *shell)


def test_the_second_tutorial_in_order(shell: tuple[Path, list[str]]) -> None:
    """Each command of the tutorial finds what the ones before it have written."""
    page = "tutorial_own_adapters.md"
    for command in [command for name, command in commands() if name == page][1:]:
        run(command, *shell)
    assert (shell[0] / "search" / "mine" / "report.html").is_file()
    assert (shell[0] / "exported" / "mine" / "adapter_model.safetensors").is_file()


def run(command: str, folder: Path, small: list[str]) -> None:
    """Run a command of a page, its searches small."""
    arguments = [*small, *small_task(command)]
    variables = dict(re.findall(r"^(\w+)=(\S+) ", command))
    words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", command))
    small_sweep = {"GPUS": "[]", "TRIALS": "2", "PYTHON": sys.executable}
    environment = searches.environment(**{**variables, **small_sweep})
    if words[:1] == ["python"]:
        words[0] = sys.executable
        if words[1].endswith(".py"):
            words[1] = str(searches.ROOT / words[1])
        searching = "swarm.search" in words and "--help" not in words
        words += arguments if searching else []
        # Rows that the pool adds make more experts than the particles of a small search, the base
        # model of a constraint takes one.
        rows = r"(pool\.(base_row|recipes)|optimizer\.constraints)="
        more = re.search(rows, command)
        words += ["optimizer.particles=8"] if searching and more else []
        swarm = searching and not re.search(r"optimizer=|experiment=|optimizer@", command)
        words += ["optimizer.descent.steps=3"] if swarm else []
        # The small pool has other names than the one of the command.
        named = searching and "pool.experts=" in command
        words += ["pool.experts=[amber,birch,cedar]"] if named else []
    elif words[0] == "bash":
        words[1] = str(searches.ROOT / words[1])
        words += arguments
        if "search_" in command and not ORIGINALS.is_dir():
            pytest.skip("this script begins with fetching the original's data")
        environment |= {
            "VENV": str(ready_environment(folder)),
            "MODEL_SWARMS_DATA_URL": ORIGINALS.as_uri(),
        }
    else:
        pytest.fail(f"say in NOT_HERE why this is not run, or run it: {command}")
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


def ready_environment(folder: Path) -> Path:
    """What scripts/install.sh takes for an environment that is installed already."""
    home = folder / "venv"
    (home / "bin").mkdir(parents=True)
    # A link would be an interpreter without this environment's packages.
    python = home / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    stamp = subprocess.run(
        ["bash", "-c", "cat pyproject.toml constraints-cpu.txt | cksum"],
        cwd=searches.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    (home / ".installed").write_text(f"{stamp} \n")
    return home


LOADED = """
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(best.base.resolve())
asked = tokenizer("What is 9 + 4?", return_tensors="pt")
new = model.generate(**asked, max_new_tokens=6, do_sample=False)[0, asked.input_ids.shape[1] :]
text = tokenizer.decode(new, skip_special_tokens=True)
assert text == best.generate("What is 9 + 4?", 6, chat=False), text
print(best.base.path, model.peft_config["default"].base_model_name_or_path)
"""


def test_a_result_is_loaded_by_peft_without_a_network(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default base as a wheel left it: no folder of the hub has it."""
    monkeypatch.setenv("MODEL_SWARMS_CACHE", str(tmp_path / "cache"))
    base = shipped_base()
    shutil.copytree(tiny_llama, base._converted_folder())
    pool = tiny.pool(tiny_llama, tmp_path / "pool")
    for folder in pool.iterdir():
        tiny.change(folder, base_model_name_or_path=base.name)
    words = searches.arguments(tmp_path, base, pool, "first", model="smollm2", test="false")
    words = [word for word in words if not word.startswith("model.path=")]
    command = [sys.executable, "-m", "swarm.search", *words, "optimizer.max_iterations=1"]
    alone = searches.environment(HF_HOME=str(tmp_path / "hub"))
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (searches.ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (one for one in blocks if "open_run" in one and "PeftModel.from_pretrained" in one)
    command = [sys.executable, "-c", code + LOADED]
    done = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [base.path, base.name]


def test_the_readme_is_short() -> None:
    assert len((searches.ROOT / "README.md").read_text().split()) <= 500


def test_the_address_that_is_not_known_is_left_open_in_one_place() -> None:
    found = [page.name for page in PAGES if "URL_OF_THIS_REPOSITORY" in page.read_text()]
    assert found == ["README.md"]


def test_what_is_not_on_the_package_index_is_not_installed_from_it() -> None:
    files = [
        *PAGES,
        *(searches.ROOT / "swarm").rglob("*.py"),
        *searches.ROOT.glob("conf/**/*.yaml"),
    ]
    for file in [*files, *(searches.ROOT / "scripts").glob("*.*")]:
        named = re.findall(r"pip install [\"']?model-swarms(?!\S* @)\S*", file.read_text("utf-8"))
        assert named == [], file


def test_links_and_files_named_are_there() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_scripts_parse() -> None:
    for script in [*(searches.ROOT / "scripts").glob("*.sh"), searches.ROOT / ".ci" / "run"]:
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK) or script.name == "install.sh", script
    assert shutil.which("bash")
