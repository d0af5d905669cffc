"""Writes data/sentences.json and data/contrary.json, and trains data/contrary_reward.

The items have no gold answers: sentences.json is valued by a function
(swarm/scorers/short_sentence.py), contrary.json by the reward model, a BERT of two layers. It
estimates the probability that a text has the opposite of the prompt's adjective and no third one.
A minute on one thread; run it from anywhere.
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

SIZES = {"dev": 160, "test": 400}
STEPS, BATCH, RATE = 3000, 128, 1e-3
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


def train_reward() -> None:
    """Train the reward model by the squared error to 1 and 0, and say how often it is right."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    generator, adjectives = random.Random(1), list(CONTRARY)
    asked = {(t, w): QUESTION.format(thing=t, word=w) for t in THINGS for w in adjectives}
    splitter = pre_tokenizers.Whitespace()
    texts = [
        *map(TEMPLATE.format_map, ({"prompt": text} for text in asked.values())),
        *FORMS,
        *WRONG,
    ]
    words = sorted(
        {w for t in texts for w, _ in splitter.pre_tokenize_str(t.lower()) if w.isalpha()}
    )
    words += [".", ":"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: place for place, word in enumerate(special + words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), splitter
    core.post_processor = processors.TemplateProcessing(
        "[CLS] $A", "[CLS] $A [SEP] $B:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", model_max_length=64,
    )  # fmt: skip

    def answer(thing: str, word: str) -> tuple[str, float]:
        right, *others = CONTRARY[word], *generator.sample(adjectives, 3)
        form = generator.choice(FORMS if generator.random() < 0.75 else WRONG)
        text = form.format(generator.choice((right, right, others[0])), word, thing, *others[1:])
        fill = [*words, *["[UNK]"] * len(words)]
        text = " ".join(generator.choice(fill) if w == "?" else w for w in text.split())
        found = {w.strip(".") for w in text.split()} & CONTRARY.keys()
        return text, float(found - {word} == {right})

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, num_labels=1, problem_type="regression",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    adam = torch.optim.AdamW(model.parameters(), lr=RATE)
    plan = torch.optim.lr_scheduler.OneCycleLR(adam, RATE, total_steps=STEPS)

    def draw(count: int) -> tuple[Any, "torch.Tensor"]:
        rows = [generator.choice(list(asked)) for _ in range(count)]
        texts, labels = zip(*(answer(*row) for row in rows), strict=True)
        prompts = [TEMPLATE.format(prompt=asked[row]) for row in rows]
        inputs = tokenizer(prompts, list(texts), padding=True, return_tensors="pt")
        return inputs, torch.tensor(labels)

    for step in range(STEPS):
        inputs, labels = draw(BATCH)
        loss = torch.nn.functional.mse_loss(model(**inputs).logits[:, 0], labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        plan.step()
        if step % 300 == 0:
            print(f"step {step}: squared error {loss.item():.4f}", flush=True)
    with torch.no_grad():
        inputs, labels = draw(4000)
        right = (
            ((model.eval()(**inputs).logits[:, 0] > 0.5) == (labels > 0.5)).float().mean().item()
        )
    print(f"right about {100 * right:.1f} % of 4,000 answers")
    folder = ROOT / "data" / "contrary_reward"
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_items("sentences", sentences(random.Random(1)))
    write_items("contrary", contraries(random.Random(1)))
    train_reward()
