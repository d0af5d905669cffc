"""Every yaml composes, builds, and says what is wrong in one line."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import searches
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

from swarm._util.cli import format_hydra_error, normalize_gpu_list
from swarm._util.files import conf_folder
from swarm.loop.run import Run
from swarm.optimizers.base import Optimizer
from swarm.search import build_run

CONF = conf_folder()
OTHERS = ("candidate", "consortium", "moa", "model/moa.yaml", "study")
ELSEWHERE = (CONF, *(CONF / other for other in OTHERS))
"""No options of a search; the candidates are built by test_candidates.py."""
GROUPS = sorted(p for p in CONF.rglob("*.yaml") if not {p, p.parent} & {*ELSEWHERE})


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("search", overrides=["name=test", *overrides])


NEEDED = {
    "local": ["model.path=models/mine"],
    "models": ["pool.models=[models/mine,models/other]"],
    "token_swarms": ["pool.models=[models/mine,models/other]"],
    "full_models": ["pool.models=[models/mine,models/other]"],
    "mixture": ["+task@task.tasks.graphs=nlgraph_mini"],
}
"""What has to be given with an option."""


@pytest.mark.parametrize("path", GROUPS, ids=lambda p: str(p.relative_to(CONF)))
def test_every_option_composes_and_builds(path: Path) -> None:
    group, option = path.parent.relative_to(CONF), path.stem
    extra = NEEDED.get(option, [])
    if str(group) == "scorer":
        group, extra = Path("scorer@task.scorer"), ["task=realtoxicityprompts"]
    run = build_run(composed(f"{group}={option}", *extra))[0]
    assert isinstance(run, Run)


@pytest.mark.parametrize("path", GROUPS, ids=lambda p: str(p.relative_to(CONF)))
def test_every_key_is_explained(path: Path) -> None:
    """A comment on the first line, and on each key but those that repeat another."""
    lines = path.read_text().splitlines()
    assert lines[0].startswith("#")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("gpus=0,1,2", "gpus=[0,1,2]"),
        ("gpus=3", "gpus=[3]"),
        ("gpus=[]", "gpus=[]"),
        ("task=nlgraph", "task=nlgraph"),
        ("seed=1,2", "seed=1,2"),
    ],
)
def test_a_list_of_gpus_needs_no_brackets(given: str, wanted: str) -> None:
    assert normalize_gpu_list(given) == wanted


def test_the_experiments_set_what_they_promise() -> None:
    paper = build_run(composed("experiment=paper"))[0].optimizer
    code = build_run(composed("experiment=reference_code"))[0].optimizer
    assert (paper.particles, paper.max_iterations, paper.patience) == (20, 50, 10)
    assert paper.crossover_maximum == 1.0 and code.crossover_maximum == 2.0
    assert (code.inertia, code.max_iterations) == (0.4, 200)
    for rival, asks, rows in (
        ("pso_merging", 5, 10),
        ("mergevolve", 50, 11),
        ("evogm", 7, 18),
        ("adamerging", 50, 10),
    ):
        run = build_run(composed(f"experiment={rival}"))[0]
        run.optimizer.start(9, 0)
        assert (run.optimizer.NAME, run.optimizer.max_iterations) == (rival, asks)
        assert len(run.optimizer.ask()) == rows
        assert run.budget.prompts is None and run.limit.minutes is None
        assert run.pool.space == "delta"
    for optimizer in (paper, code):
        checked: Optimizer = optimizer
        checked.start(10, 0)
        assert checked.ask().shape[1] == 10


def test_help_imports_nothing_heavy() -> None:
    """How long it takes is measured by benchmarks/startup.py."""
    command = [sys.executable, "-X", "importtime", "-m", "swarm.search", "--help"]
    out = subprocess.run(
        command,
        cwd=searches.ROOT,
        capture_output=True,
        text=True,
        env=searches.environment(),
        check=True,
    )
    assert "gpus=0,1,2" in out.stdout and "nlgraph_mini" in out.stdout
    loaded = set(re.findall(r"\| +(\w+)", out.stderr))
    assert "hydra" in loaded and not loaded & {"torch", "transformers", "wandb", "peft"}


WRONG = [
    (["task=chess"], 2, ["task=chess", "nlgraph", "gsm8k"]),
    (["optimizer.inertja=0.2"], 2, ["inertja"]),
    (["wandb=offline"], 2, ["wandb", "tracker=wandb tracker.mode=offline"]),
    (["tracker=sometimes"], 2, ["tracker=sometimes", "tensorboard"]),
    (["tracker=wandb", "tracker.mode=sometimes"], 1, ["tracker.mode=sometimes", "offline"]),
    (["gpus=0,0"], 2, ["gpus"]),
    (["gpus=99"], 1, ["gpus", "no CUDA device 99"]),
    (["gpus=foo"], 2, ["gpus"]),
    (["task.file=missing.json"], 1, ["missing.json"]),
    (["optimizer.repel=-1"], 1, ["optimizer.repel"]),
    (["optimizer.particles=1"], 1, ["optimizer.particles"]),
    (["optimizer.particles=3"], 1, ["optimizer.particles=3", "4"]),
    (["pool.folder=nowhere"], 1, ["nowhere"]),
    (["model.path=nowhere/at/all"], 1, ["nowhere/at/all"]),
    (["model.path=null"], 1, ["model.path"]),
    (["name=a/b"], 1, ["name"]),
    (["seed=-1"], 1, ["seed"]),
    (["job.items=0"], 1, ["job.items"]),
    (["engine.plan=magic"], 1, ["engine.plan"]),
    (["task.parser=clever"], 1, ["parser"]),
    (["gpus=-1"], 2, ["gpus"]),
    (["test=maybe"], 1, ["test"]),
    (["job.particles=true"], 1, ["job.particles"]),
    (["executor=processes", "executor.threads=foo"], 1, ["executor.threads"]),
]


@pytest.mark.parametrize(("change", "code", "words"), WRONG, ids=lambda v: str(v)[:40])
def test_a_mistake_is_one_line_and_leaves_nothing(
    change: list[str],
    code: int,
    words: list[str],
    tmp_path: Path,
    tiny_llama: Path,
    tiny_pool: Path,
) -> None:
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool)
    result = searches.run([*command, *change])
    lines = result.stderr.strip().splitlines()
    assert (result.returncode, len(lines)) == (code, 1), result.stderr
    assert lines[0].startswith("error: ") and "Traceback" not in result.stderr
    for word in words:
        assert word in lines[0]
    assert not (tmp_path / "search").exists()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optimizer.particels=9", "did you mean optimizer.particles? `--help` lists the keys"),
        ("optimiser.particles=9", "did you mean optimizer.particles? `--help` lists the keys"),
        ("particles=9", "did you mean optimizer.particles or job.particles? `--help`"),
        ("dev_limit=9", "did you mean task.dev_limit? `--help`"),
        ("sed=9", "did you mean seed? `--help`"),
        ("taks=nlgraph", "did you mean task? `--help`"),
        ("optimizer.gene=1", "'optimizer.gene'; it is a key of optimizer=genome; `--help`"),
        ("optimizer.xyz=1", "Could not override 'optimizer.xyz'; `--help` lists the keys"),
        ("task=nlgraph_min", "did you mean task=nlgraph_mini? allowed: abstain_mmlu, "),
        ("nlgraph_mini", "nlgraph_mini: write task=nlgraph_mini (KEY=VALUE); `--help`"),
        ("cmae", "cmae: write optimizer=cmaes (KEY=VALUE); `--help`"),
        ("paper", "paper: write experiment=paper (KEY=VALUE); `--help`"),
        ("search/first", "search/first: write KEY=VALUE; `--help` lists the keys"),
    ],
)
def test_a_misspelt_word_is_told_with_the_nearest(word: str, told: str) -> None:
    with pytest.raises(HydraException) as caught:
        composed(word)
    assert told in format_hydra_error(caught.value)


def test_only_keys_of_the_entry_that_runs_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["swarm/evaluate.py"])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for word, told in (
            ("candidate.foldr=x", "did you mean candidate.folder?"),
            ("splt=dev", "did you mean split?"),
            ("optimizer.particles=9", "'optimizer.particles'; `--help`"),
        ):
            with pytest.raises(HydraException) as caught:
                compose("evaluate", overrides=["candidate=adapter", word])
            assert told in format_hydra_error(caught.value)


def test_an_expert_that_is_not_finite_leaves_nothing(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    pool = tmp_path / "pool"
    shutil.copytree(tiny_pool, pool)
    file = pool / "birch" / "adapter_model.safetensors"
    weights = load_file(file)
    next(iter(weights.values()))[0, 0] = float("nan")
    save_file(weights, file)
    result = searches.run(searches.arguments(tmp_path, tiny_llama, pool))
    assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1
    assert "birch" in result.stderr and not (tmp_path / "search").exists()


def test_an_unknown_option_lists_the_options_and_nothing_else(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    result = searches.run([*searches.arguments(tmp_path, tiny_llama, tiny_pool), "task=chess"])
    assert result.stderr.rstrip().split("; ")[-1].endswith("truthfulqa_mini")


def test_online_without_a_login_leaves_nothing(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    command = searches.arguments(tmp_path, tiny_llama, tiny_pool, tracker="wandb")
    environment = searches.environment(HOME=str(tmp_path), WANDB_API_KEY="")
    result = subprocess.run(
        [sys.executable, "-m", "swarm.search", *command],
        cwd=searches.ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and "wandb login" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and not (tmp_path / "search").exists()


@pytest.mark.parametrize("content", ["[]", "{}", "no"])
def test_a_state_that_is_none_is_one_line(
    content: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    folder = tmp_path / "search" / "run"
    folder.mkdir(parents=True)
    (folder / "rounds.jsonl").write_text(f"{content}\n")
    result = searches.run(searches.arguments(tmp_path, tiny_llama, tiny_pool))
    assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1
    assert "rounds.jsonl" in result.stderr


@pytest.mark.parametrize("content", ["{", '{"dev": [], "test": []}', '{"dev": [{}], "test": [{}]}'])
def test_a_bad_data_file_is_one_line_and_leaves_nothing(
    content: str, tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    (tmp_path / "tiny.json").write_text(content)
    result = searches.run(searches.arguments(tmp_path, tiny_llama, tiny_pool))
    assert result.returncode == 1 and len(result.stderr.strip().splitlines()) == 1
    assert "tiny.json" in result.stderr and not (tmp_path / "search").exists()


def test_the_printed_configuration_has_no_secret(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "swarm.search", "--cfg", "job", "name=x"]
    secrets = searches.environment(WANDB_API_KEY="s3cret", HF_TOKEN="s3cret")
    out = subprocess.run(
        command, cwd=searches.ROOT, capture_output=True, text=True, check=True, env=secrets
    )
    assert "s3cret" not in out.stdout
    assert OmegaConf.create(out.stdout).name == "x"
    assert json.dumps(OmegaConf.to_container(OmegaConf.create(out.stdout)))


@pytest.mark.parametrize(
    "words",
    [
        "task=nlgraph task.parser=original task.dedupe=false",
        "task=gsm8k task.parser=original task.dedupe=false task.last_words=10",
        "task=mmlu task.parser=original task.dedupe=false",
        "task=abstain_mmlu task.parser=original task.dedupe=false",
        "task=rm_concise task.dedupe=false task.chat=false",
        "task=human task.dedupe=false",
        "task=legal task.tasks.hearsay.parser=original",
    ],
)
def test_the_reading_of_the_reference_code(words: str) -> None:
    """What the header of conf/experiment/reference_code.yaml names, for every kind of task."""
    header = (CONF / "experiment" / "reference_code.yaml").read_text().partition("\ndefaults:")[0]
    keys = [word for word in words.split() if not word.startswith("task=")]
    assert all(word in header for word in keys)
    composed("experiment=reference_code", "model.dtype=float16", *words.split())


def test_every_flag_of_the_original_has_its_key() -> None:
    text = (CONF.parent / "docs" / "pso.md").read_text()
    section = text.partition("## From the original's flags")[2].partition("\n## ")[0]
    assert len(set(re.findall(r"--\w+", section))) == 32
    known = composed("model=gemma_7b", "tracker=wandb")
    keys = set(re.findall(r"([a-z_.]+)=", section))
    assert len(keys) == 24
    for key in keys - {"task", "model"}:
        node, _, last = key.rpartition(".")
        assert last in (OmegaConf.select(known, node) if node else known), key


def test_the_last_experiment_counts() -> None:
    """scripts/search_*.sh say experiment=paper, and take another one behind it."""
    assert composed("experiment=paper", "experiment=reference_code").optimizer.inertia == 0.4


def test_a_dry_run_makes_no_folder_of_hydra(
    tmp_path: Path, tiny_llama: Path, tiny_pool: Path
) -> None:
    words = searches.arguments(tmp_path, tiny_llama, tiny_pool)
    asked = [*words, "dry_run=true", f"hydra.run.dir={tmp_path / 'made'}"]
    done = subprocess.run(
        [sys.executable, "-m", "swarm.search", *asked],
        cwd=tmp_path,
        env=searches.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "made").exists()
