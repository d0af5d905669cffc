"""Prompts and responses: read from files or reasoning-gym, tokenized and batched."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swarm.errors import UserError
from swarm.experts.domains import Pair

TEMPLATE = "{prompt}\nAnswer:"
"""Prompt template; the response follows after a space and ends with the end token."""
CHUNK = 256
"""Number of examples sorted by length together; more reduces padding, fewer mixes better."""

Encoded = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response."""


def read_jsonl(path: Path) -> list[Pair]:
    """Read the pairs of a file with one {"prompt": ..., "response": ...} per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--jsonl {path} cannot be read: {error}") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            pairs.append((str(row["prompt"]), str(row["response"])))
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{path}, line {number}: expected an object {{"prompt": ..., "response": ...}}'
            ) from None
    return pairs


def read_gym(categories: list[str], count: int, seed: int) -> list[Pair]:
    """Generate `count` pairs with reasoning-gym, in equal parts from each category."""
    try:
        import reasoning_gym
    except ImportError:
        raise UserError(
            "--gym needs the package reasoning-gym: pip install reasoning-gym"
        ) from None
    size = -(-count // len(categories))
    pairs = []
    for category in categories:
        try:
            tasks = reasoning_gym.create_dataset(category, size=size, seed=seed)
        except ValueError:
            raise UserError(f"--gym {category} is not a category of reasoning-gym") from None
        pairs += [(task["question"].strip(), str(task["answer"])) for task in tasks]
    return pairs


def encode(tokenizer: Any, pairs: list[Pair], longest: int) -> list[Encoded]:
    """Tokenize the pairs that fit into `longest` tokens; the response ends the text."""
    found = []
    for prompt, response in pairs:
        prompt_ids = tokenizer.encode(TEMPLATE.format(prompt=prompt))
        response_ids = tokenizer.encode(" " + response, add_special_tokens=False)
        if len(prompt_ids) + len(response_ids) < longest:
            found.append((prompt_ids, [*response_ids, tokenizer.eos_token_id]))
    if not found:
        raise UserError(f"none of the {len(pairs)} examples fits into --tokens {longest}")
    return found


def batches(data: list[Encoded], tokens: int, seed: int) -> Iterator[list[Encoded]]:
    """Yield batches of examples of similar length, at most `tokens` with padding, endlessly."""
    generator = random.Random(seed)
    data = list(data)
    while True:
        generator.shuffle(data)
        for start in range(0, len(data), CHUNK):
            grouped: list[list[Encoded]] = [[]]
            for pair in sorted(data[start : start + CHUNK], key=lambda both: sum(map(len, both))):
                if (len(grouped[-1]) + 1) * sum(map(len, pair)) > tokens:
                    grouped.append([])
                grouped[-1].append(pair)
            generator.shuffle(grouped)
            yield from (batch for batch in grouped if batch)
