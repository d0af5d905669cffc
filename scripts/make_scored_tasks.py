"""Writes data/sentences.json, data/contrary.json and the weights of the latter's classifier.

The items have no gold answers: sentences.json is valued by a function
(swarm/scorers/short_sentence.py), contrary.json by a logistic regression
(swarm/scorers/word_pairs.py). It is trained here to tell whether a text has the opposite of the
prompt's adjective and no third one. A minute on one thread; run it from anywhere.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from skill_domains import OPPOSITES, SPELLED  # noqa: E402

from swarm.experts.train import TEMPLATE  # noqa: E402
from swarm.scorers.word_pairs import hash_features  # noqa: E402

SIZES = {"dev": 160, "test": 400}
STEPS, BATCH, RATE, FEATURES = 600, 256, 0.05, 1 << 17
PAIRS = [pair.split() for pair in OPPOSITES.split("|")]
OTHERS = set(
    "up day left first push buy begin win love north east in on over above before inside front top "
    "always all more most many yes maximum".split()
)
"""First words of the pairs before `LAST` that are no adjectives."""
LAST = PAIRS.index(["vertical", "horizontal"])
CONTRARY = {
    one: other
    for pair in PAIRS[: LAST + 1]
    for one, other in (pair, pair[::-1])
    if not OTHERS & set(pair)
}
THINGS = "road soup room story plan house".split()
QUESTION = "The {thing} is {word}. Say the contrary."
FORMS = ("{0}", "{0}.", "It is {0}.", "The {2} is {0}.", "The opposite of {1} is {0}.", "? ? {0} ?")
WRONG = ("", "? ? ?", "The {2} is not {1}.", "{1}", "The {2} is {0} and {3}.", "{0} {3} {4}")
"""Answers: {0} an adjective, {1} that of the prompt, {2} its thing, {3} and {4} others; ? any."""


def sentences(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Prompts for a sentence with two words: opposites, or any two."""
    while True:
        words = generator.choice((generator.choice(PAIRS), generator.sample(SPELLED, 2)))
        asked = f"Write a sentence of at most eight words with {words[0]} and {words[1]}."
        yield {"prompt": TEMPLATE.format(prompt=asked), "words": words}


def contraries(generator: random.Random) -> Iterator[dict[str, Any]]:
    """Prompts for the contrary of a sentence."""
    while True:
        thing, word = generator.choice(THINGS), generator.choice(list(CONTRARY))
        yield {"prompt": TEMPLATE.format(prompt=QUESTION.format(thing=thing, word=word))}


def write_items(name: str, drawn: Iterator[dict[str, Any]]) -> None:
    """Write as many different items as the splits have, in the order of the draws."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < sum(SIZES.values()):
        item = next(drawn)
        found.setdefault(item["prompt"], item)
    rows = [json.dumps(item) for item in found.values()]
    dev, test = rows[: SIZES["dev"]], rows[SIZES["dev"] :]
    parts = (
        f'"{split}": [\n' + ",\n".join(some) + "]" for split, some in (("dev", dev), ("test", test))
    )
    (ROOT / "data" / f"{name}.json").write_text("{" + ",\n".join(parts) + "}\n")


def train_classifier() -> None:
    """Train the classifier on right and wrong answers in several forms; print its accuracy."""
    import torch
    from safetensors.torch import save_file

    generator, adjectives = random.Random(1), list(CONTRARY)
    fill = [word.strip(".,") for text in (*FORMS, *WRONG) for word in text.split()] + SPELLED

    def draw() -> tuple[list[int], float]:
        thing, word = generator.choice(THINGS), generator.choice(adjectives)
        right, *others = CONTRARY[word], *generator.sample(adjectives, 3)
        form = generator.choice(FORMS if generator.random() < 0.75 else WRONG)
        text = form.format(generator.choice((right, right, others[0])), word, thing, *others[1:])
        text = " ".join(generator.choice(fill) if w == "?" else w for w in text.split())
        found = {w.strip(".") for w in text.split()} & CONTRARY.keys()
        prompt = TEMPLATE.format(prompt=QUESTION.format(thing=thing, word=word))
        return list(hash_features(prompt, text, FEATURES)), float(found - {word} == {right})

    torch.manual_seed(0)
    weights = torch.nn.EmbeddingBag(FEATURES, 1, mode="sum")
    torch.nn.init.zeros_(weights.weight)
    adam = torch.optim.Adam(weights.parameters(), lr=RATE)
    right = 0.0
    for step in range(STEPS):
        rows, labels = zip(*(draw() for _ in range(BATCH)), strict=True)
        offsets = torch.tensor([0, *map(len, rows[:-1])]).cumsum(0)
        logits = weights(torch.tensor([one for row in rows for one in row]), offsets)[:, 0]
        wanted = torch.tensor(labels)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted)
        adam.zero_grad()
        loss.backward()
        adam.step()
        right = ((logits > 0) == (wanted > 0.5)).float().mean().item()
        if step % 100 == 99:
            print(f"step {step}: loss {loss.item():.3f}, right {right:.3f}", flush=True)
    found = weights.weight.detach()[:, 0].half().contiguous()
    save_file({"weights": found}, ROOT / "data" / "contrary_weights.safetensors")


if __name__ == "__main__":
    write_items("sentences", sentences(random.Random(1)))
    write_items("contrary", contraries(random.Random(1)))
    train_classifier()
