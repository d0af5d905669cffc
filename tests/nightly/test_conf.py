"""Every yaml composes, builds, and says what is wrong in one line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import searches
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from swarm._util.cli import format_hydra_error, normalize_arguments
from swarm._util.files import conf_folder
from swarm.loop.run import Run
from swarm.optimizers.base import Optimizer
from swarm.search import build_run

CONF = conf_folder()
OTHERS = ("candidate", "consortium", "moa", "model/moa.yaml", "pool/gemma_7b.yaml", "study")
ELSEWHERE = (CONF, *(CONF / other for other in OTHERS))
"""No options of a search, or one that downloads; test_candidates.py builds the candidates."""
GROUPS = sorted(p for p in CONF.rglob("*.yaml") if not {p, p.parent} & {*ELSEWHERE})


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("search", overrides=["name=test", *overrides])


NEEDED = {
    "local": ["model.path=models/mine"],
    "models": ["pool.models=[models/mine,models/other]"],
    "token_swarms": ["pool.models=[models/mine,models/other]"],
    "full_models": ["pool.models=[models/mine,models/other]"],
    "file": ["task.file=data/nlgraph_mini.json"],
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
    assert isinstance(run, Run) and path.read_text().startswith("#")


def test_a_list_of_gpus_needs_no_brackets() -> None:
    given = ("gpus=0,1,2", "gpus=3", "gpus=[]", "task=nlgraph", "seed=1,2")
    wanted = ["gpus=[0,1,2]", "gpus=[3]", "gpus=[]", "task=nlgraph", "seed=1,2"]
    assert normalize_arguments(given) == wanted


def test_the_experiments_set_what_they_promise() -> None:
    paper = build_run(composed("experiment=paper"))[0].optimizer
    code = build_run(composed("experiment=reference_code"))[0].optimizer
    assert (paper.particles, paper.max_iterations, paper.patience) == (20, 50, 10)
    assert paper.crossover_maximum == 1.0 and code.crossover_maximum == 2.0
    assert (code.inertia, code.max_iterations) == (0.4, 200)
    for optimizer in (paper, code):
        checked: Optimizer = optimizer
        checked.start(10, 0)
        assert checked.ask().shape[1] == 10


def started(*words: str, cwd: Path = searches.ROOT, **environment: str) -> Any:
    """A search as a process of its own."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=searches.environment(**environment),
        capture_output=True,
        text=True,
    )


def test_help_imports_nothing_heavy() -> None:
    """How long it takes is measured by benchmarks/startup.py."""
    for entry, said in (("search", "gpus=0,1,2"), ("evaluate", "candidate=ensemble")):
        out = started("-X", "importtime", "-m", f"swarm.{entry}", "--help")
        assert out.returncode == 0 and said in out.stdout and "nlgraph_mini" in out.stdout
        loaded = set(re.findall(r"\| +(\w+)", out.stderr))
        assert "hydra" in loaded
        assert not loaded & {"torch", "transformers", "wandb", "peft", "aiohttp"}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optimizer.particels=9", "did you mean optimizer.particles? `--help` lists the keys"),
        ("particles=9", "did you mean optimizer.particles or job.particles? `--help`"),
        ("sed=9", "did you mean seed? `--help`"),
        ("taks=nlgraph", "did you mean task? `--help`"),
        ("optimizer.gene=1", "'optimizer.gene'; it is a key of optimizer=genome; `--help`"),
        ("optimizer.xyz=1", "Could not override 'optimizer.xyz'; `--help` lists the keys"),
        ("task=nlgraph_min", "did you mean task=nlgraph_mini? allowed: abstain_mmlu, "),
        ("nlgraph_mini", "nlgraph_mini: write task=nlgraph_mini (KEY=VALUE); `--help`"),
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


def test_the_printed_configuration_has_no_secret() -> None:
    words = ("-m", "swarm.search", "--cfg", "job", "name=x")
    out = started(*words, WANDB_API_KEY="s3cret", HF_TOKEN="s3cret")
    assert out.returncode == 0 and "s3cret" not in out.stdout
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
    done = started("-m", "swarm.search", *asked, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "made").exists()
