"""The experts that ship, the command that trains others, and the demo's data file."""

import importlib
import importlib.util
import json
import operator
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
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

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
def test_a_domain_and_its_shipped_expert(name: str) -> None:
    pairs = domains.examples(name, 50, seed=3)
    assert pairs == domains.examples(name, 50, seed=3) != domains.examples(name, 50, seed=4)
    assert len({prompt for prompt, _ in pairs}) == len(pairs) == 50
    assert all(prompt and response and len(prompt) < 200 for prompt, response in pairs)
    # No expert saw the demo.
    asked = [prompt for prompt, _ in domains.examples(name, 300, 0)]
    assert not [prompt for prompt in asked if "Edges" in prompt or "path" in prompt]
    folder = EXPERTS / name
    config = json.loads((folder / FILES[0]).read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert (folder / FILES[1]).stat().st_size < 600_000
    weights = load_file(folder / FILES[1])
    assert len(weights) == 30 * 2 * 2
    assert {one.dtype for one in weights.values()} == {torch.bfloat16}


def test_domains_answer_rightly() -> None:
    signs = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    for prompt, response in domains.examples("arithmetic", 200, seed=1):
        left, sign, right = re.search(r"(\d+) ([-+*]) (\d+)", prompt).groups()  # type: ignore[union-attr]
        assert int(response) == signs[sign](int(left), int(right))
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


@pytest.mark.parametrize("name", ["nlgraph_mini", "skills"])
def test_a_data_file_is_what_its_script_writes(name: str) -> None:
    made = script(ROOT / "scripts" / f"make_{name}.py").build()
    assert made == json.loads((ROOT / "data" / f"{name}.json").read_text())


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
    whole = re.compile(r"[\w.]+( [\w.]+)*")
    for split in ("dev", "test"):
        (_, most), *_ = Counter(item["answer"] for item in data[split]).most_common(1)
        assert most <= 0.08 * len(data[split])
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


def test_composed_file_is_what_its_script_writes() -> None:
    data = json.loads((ROOT / "data" / "composed.json").read_text())
    assert (len(data["dev"]), len(data["test"])) == (320, 400)
    assert len({item["answer"] for split in ("dev", "test") for item in data[split]}) == 720
    assert data == script(ROOT / "scripts" / "make_composed.py").build()


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


def test_training_learns_saves_and_repeats(tiny_llama: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"What is {number}?", "response": str(number)} for number in range(40)]
    file = tmp_path / "numbers.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    common = ("--jsonl", file, "--base", tiny_llama, "--device", "cpu")

    def trained(name: str, *words: object) -> dict[str, torch.Tensor]:
        done = call("train", "numbers", *common, *words, "--to", tmp_path / name)
        assert done.returncode == 0, done.stderr
        return load_file(tmp_path / name / "numbers" / FILES[1])

    first, second = (trained(name, "--steps", 20) for name in ("first", "second"))
    assert sorted(path.name for path in (tmp_path / "first" / "numbers").iterdir()) == [*FILES]
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert {weight.dtype for weight in first.values()} == {torch.bfloat16}
    assert any(weight.abs().sum() > 0 for key, weight in first.items() if "lora_B" in key)
    base = AutoModelForCausalLM.from_pretrained(tiny_llama)
    PeftModel.from_pretrained(base, tmp_path / "first" / "numbers")

    shape = ("--rank", 2, "--alpha", 6, "--targets", "o_proj", "--targets", "up_proj")
    tensors = trained("other", "--steps", 2, *shape)
    config = json.loads((tmp_path / "other" / "numbers" / FILES[0]).read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 6)
    assert config["target_modules"] == ["o_proj", "up_proj"]
    assert {key.split(".")[-3] for key in tensors} == {"o_proj", "up_proj"}
    assert {min(weight.shape) for weight in tensors.values()} == {2}
    done = call("train", "numbers", *common, "--targets", "o_proj", "--targets", "abacus")
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
