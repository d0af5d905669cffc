"""The experts that ship, the scripts that train and fetch others, and the demo's data file."""

import importlib
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from file_servers import environment, hub, serving

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import skill_domains as domains  # noqa: E402

from swarm.experts import train  # noqa: E402

EXPERTS = ROOT / "initial_experts"
FILES = ("adapter_config.json", "adapter_model.safetensors")


def script(path: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


def call(action: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run an action of swarm.experts to its end."""
    command = [sys.executable, "-m", "swarm.experts", action, *map(str, words)]
    given = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=given, cwd=ROOT, check=False)


@pytest.mark.parametrize("name", sorted(domains.DOMAINS))
def test_domain_is_seeded_and_short(name: str) -> None:
    pairs = domains.examples(name, 50, seed=3)
    assert pairs == domains.examples(name, 50, seed=3) != domains.examples(name, 50, seed=4)
    assert len({prompt for prompt, _ in pairs}) == len(pairs) == 50
    assert all(prompt and response and len(prompt) < 200 for prompt, response in pairs)


def test_domains_answer_rightly() -> None:
    for prompt, response in domains.examples("arithmetic", 200, seed=1):
        left, sign, right = re.search(r"(\d+) ([-+*]) (\d+)", prompt).groups()  # type: ignore[union-attr]
        assert (
            int(response)
            == {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
            }[sign]
        )
    for prompt, response in domains.examples("roads", 200, seed=1):
        sizes = {
            frozenset(names): int(size)
            for *names, size in re.findall(r"(\w+) to (\w+) (\d) km", prompt)
        }
        start, goal = re.search(r"far is (\w+) from (\w+)", prompt).groups()  # type: ignore[union-attr]
        through = [
            sizes[frozenset((start, name))] + sizes[frozenset((name, goal))]
            for name in set().union(*sizes)
            if frozenset((start, name)) in sizes and frozenset((name, goal)) in sizes
        ]
        assert int(response) == sizes.get(frozenset((start, goal)), min(through, default=0))


@pytest.mark.parametrize("name", sorted(domains.DOMAINS))
def test_shipped_expert(name: str) -> None:
    from safetensors import safe_open

    folder = EXPERTS / name
    config = json.loads((folder / FILES[0]).read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (folder / FILES[1]).stat().st_size < 600_000
    with safe_open(folder / FILES[1], "pt") as weights:
        assert len(weights.keys()) == 30 * 2 * 2
        assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"BF16"}  # noqa: SIM118


def test_no_expert_saw_the_demo() -> None:
    asked = [prompt for name in domains.DOMAINS for prompt, _ in domains.examples(name, 300, 0)]
    assert not [prompt for prompt in asked if "Edges" in prompt or "path" in prompt]


def test_demo_file_is_what_its_script_writes() -> None:
    made = script(ROOT / "scripts" / "make_nlgraph_mini.py").build()
    assert made == json.loads((ROOT / "data" / "nlgraph_mini.json").read_text())


def test_demo_items() -> None:
    data = json.loads((ROOT / "data" / "nlgraph_mini.json").read_text())
    assert (len(data["dev"]), len(data["test"])) == (200, 400)
    questions = [item["question"] for split in ("dev", "test") for item in data[split]]
    assert len(set(questions)) == 600
    for split in ("dev", "test"):
        items = data[split]
        assert len({item["id"] for item in items}) == len(items)
        counts = Counter(item["answer"] for item in items)
        assert counts["Yes"] == counts["No"] == len(items) // 4
        assert max(counts[str(size)] for size in range(1, 10)) <= len(items) // 16
        for item in items:
            assert item["answer"] == solve(item["question"])


def test_skills_file_is_what_its_script_writes() -> None:
    made = script(ROOT / "scripts" / "make_skills.py").build()
    assert made == json.loads((ROOT / "data" / "skills.json").read_text())


def test_skills_are_new_to_the_experts() -> None:
    data = json.loads((ROOT / "data" / "skills.json").read_text())
    questions = [item["question"] for split in ("dev", "test") for item in data[split]]
    assert len(set(questions)) == len(questions) == 1080
    for name in domains.DOMAINS:
        mine = {
            split: [
                (item["question"].removesuffix("\nAnswer:"), item["answer"])
                for item in data[split]
                if item["domain"] == name
            ]
            for split in ("dev", "test")
        }
        assert (len(mine["dev"]), len(mine["test"])) == (20, 100)
        facts = [{domains.fact(name, pair) for pair in mine[split]} for split in mine]
        trained = {domains.fact(name, pair) for pair in domains.trained_on(name)}
        assert trained and not facts[0] & facts[1] and not trained & (facts[0] | facts[1])


def test_skills_have_no_constant_answer() -> None:
    data = json.loads((ROOT / "data" / "skills.json").read_text())
    for split in ("dev", "test"):
        (_, most), *_ = Counter(item["answer"] for item in data[split]).most_common(1)
        assert most <= 0.08 * len(data[split])
        whole = re.compile(r"[\w.]+( [\w.]+)*")
        assert all(whole.fullmatch(item["answer"]) for item in data[split])


@pytest.mark.parametrize("category", ["chain_sum", "needle_haystack"])
def test_gym_file_is_what_its_script_writes(category: str) -> None:
    from importlib.metadata import version

    data = json.loads((ROOT / "data" / f"gym_{category}.json").read_text())
    assert (len(data["dev"]), len(data["test"])) == (320, 400)
    assert len({item["question"] for split in ("dev", "test") for item in data[split]}) == 720
    for split in ("dev", "test"):
        (_, most), *_ = Counter(item["answer"] for item in data[split]).most_common(1)
        assert most <= 0.1 * len(data[split])
    lengths = {split: [len(item["question"]) for item in data[split]] for split in ("dev", "test")}
    # Neither split is the easier one: Kolmogorov-Smirnov's bound of 1 %, for what chance does.
    bound = 1.63 * (1 / 320 + 1 / 400) ** 0.5
    for short in sorted(set(lengths["dev"])):
        shares = [sum(n <= short for n in found) / len(found) for found in lengths.values()]
        assert abs(shares[0] - shares[1]) < bound
    pytest.importorskip("reasoning_gym")
    if version("reasoning-gym") != "0.1.25":
        pytest.skip("another release draws other items")
    assert data == script(ROOT / "scripts" / "make_gym.py").build(category)


def solve(question: str) -> str:
    """The right answer, found in another way than by the generator (every simple path)."""
    graph, asked = question.split(". ", 1)
    edges: dict[str, dict[str, int]] = {}
    for edge in graph.split(": ")[1].split(", "):
        left, right, *weight = edge.split()
        size = int(weight[0]) if weight else 1
        edges.setdefault(left, {})[right] = edges.setdefault(right, {})[left] = size
    start, goal = re.findall(r"\b[A-Z]\b", asked)
    ways = list(lengths(edges, start, goal, {start}))
    return str(min(ways)) if "weight" in graph else ("Yes" if ways else "No")


def lengths(
    edges: dict[str, dict[str, int]], start: str, goal: str, seen: set[str]
) -> Iterator[int]:
    """The length of every simple path."""
    if start == goal:
        yield 0
    for name, size in edges.get(start, {}).items():
        if name not in seen:
            yield from (size + rest for rest in lengths(edges, name, goal, seen | {name}))


def write_jsonl(path: Path) -> Path:
    """Forty small questions."""
    pairs = [{"prompt": f"What is {number}?", "response": str(number)} for number in range(40)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def test_training_learns_saves_and_repeats(tiny_llama: Path, tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    file = write_jsonl(tmp_path / "numbers.jsonl")
    common = ("--jsonl", file, "--base", tiny_llama, "--steps", 20, "--device", "cpu")
    for folder in ("first", "second"):
        done = call("train", "numbers", *common, "--to", tmp_path / folder)
        assert done.returncode == 0, done.stderr
    first, second = (
        load_file(tmp_path / folder / "numbers" / FILES[1]) for folder in ("first", "second")
    )
    assert sorted(path.name for path in (tmp_path / "first" / "numbers").iterdir()) == [*FILES]
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert {weight.dtype for weight in first.values()} == {torch.bfloat16}
    assert any(weight.abs().sum() > 0 for key, weight in first.items() if "lora_B" in key)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    PeftModel.from_pretrained(base, tmp_path / "first" / "numbers")


def test_training_of_another_rank_and_other_layers(tiny_llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    file = write_jsonl(tmp_path / "numbers.jsonl")
    common = ("--jsonl", file, "--base", tiny_llama, "--steps", 2, "--device", "cpu")
    shape = ("--rank", 2, "--alpha", 6, "--targets", "o_proj", "--targets", "up_proj")
    done = call("train", "numbers", *common, *shape, "--to", tmp_path)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "numbers" / FILES[0]).read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 6)
    assert config["target_modules"] == ["o_proj", "up_proj"]
    tensors = load_file(tmp_path / "numbers" / FILES[1])
    assert {key.split(".")[-3] for key in tensors} == {"o_proj", "up_proj"}
    assert {min(weight.shape) for weight in tensors.values()} == {2}
    done = call(
        *("train", "numbers", *common),
        *("--targets", "o_proj", "--targets", "abacus", "--to", tmp_path),
    )
    assert done.returncode == 1 and "--targets abacus: not a linear layer" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "Missing argument"),
        (("mine",), "give the examples"),
        (("mine", "--jsonl", "x", "--gym", "chain_sum"), "give the examples"),
        (("mine", "--jsonl", "nowhere.jsonl"), "cannot be read"),
        (("mine", "--gym", "x", "--steps", "0"), "must be an integer, at least 1"),
        (("mine", "--gym", "x", "--device", "abacus"), "abacus"),
    ],
)
def test_training_mistakes_take_one_line(words: tuple[str, ...], says: str) -> None:
    done = call("train", *words)
    assert done.returncode in (1, 2) and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_gym_pairs() -> None:
    pytest.importorskip("reasoning_gym")
    found = train.read_gym(["chain_sum", "letter_counting"], 10, seed=0)
    assert len(found) == 10 and found == train.read_gym(["chain_sum", "letter_counting"], 10, 0)
    with pytest.raises(Exception, match="not a category"):
        train.read_gym(["nonsense"], 10, 0)


def test_batches_keep_to_the_budget() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(5, 32) for _ in range(600)]
    stream = train.token_batches(lengths, 128, seed=0)
    for _ in range(200):
        batch = next(stream)
        assert len(batch) * max(lengths[index] for index in batch) <= 128


ADAPTERS: dict[str, dict[str, bytes] | str] = {
    "owner/good": {FILES[0]: b'{"r": 4}', FILES[1]: b"weights", "README.md": b"unwanted"},
    "owner/other": {FILES[0]: b'{"r": 8}', FILES[1]: b"others"},
    "owner/pickled": {FILES[0]: b"{}", "adapter_model.bin": b"unwanted"},
    "owner/gated": "gated",
}


def test_fetching_takes_two_files_and_skips(tmp_path: Path) -> None:
    asked: list[str] = []
    with serving(hub(ADAPTERS, asked)) as address:
        given = environment(address, tmp_path / "cache")
        done = call("fetch", "owner/good", "owner/other", "--to", tmp_path, **given)
        count = len(asked)
        again = call("fetch", "owner/good", "--to", tmp_path, **given)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "other"]
    assert sorted(path.name for path in (tmp_path / "good").iterdir()) == [*FILES]
    assert (tmp_path / "good" / FILES[1]).read_bytes() == b"weights"
    assert "already there" in again.stdout and len(asked) == count
    assert not [path for path in asked if path.endswith("README.md")]


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        ("owner/pickled", "pickled weights"),
        ("owner/nobody", "does not exist on"),
        ("owner/gated", "is gated"),
        ("no/hub/id", "is not a hub id"),
    ],
)
def test_fetching_mistakes_take_one_line(tmp_path: Path, adapter: str, says: str) -> None:
    with serving(hub(ADAPTERS, [])) as address:
        given = environment(address, tmp_path / "cache")
        done = call("fetch", adapter, "--to", tmp_path / "pool", **given)
    assert done.returncode == 1 and says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.rglob("*.json"))


def test_fetching_offline(tmp_path: Path) -> None:
    done = call("fetch", "--to", tmp_path, HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "HF_HUB_OFFLINE is set" in done.stderr
    silent = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = call("fetch", "--to", tmp_path, **silent)
    assert done.returncode == 1 and "cannot be reached" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
