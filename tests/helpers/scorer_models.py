"""Tiny models that score texts, trained here and saved to disk; and one that brings its code."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tiny

BEGINNINGS = ("birds", "the answer is right", "villages", "a graph of 5 nodes", "3 + 4 is", "no")

STEPS = 40

OWN_CODE = '''
import torch
from transformers import PretrainedConfig, PreTrainedModel

open({marker!r}, "a").close()


class JudgeConfig(PretrainedConfig):
    model_type = "judge"


class Judge(PreTrainedModel):
    config_class = JudgeConfig

    def __init__(self, config):
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.post_init()

    def get_score(self, tokenizer, conversation):
        """The weight times the answer's words."""
        user, assistant = conversation
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        return float(self.weight) * len(assistant["content"].split())
'''

BATCHES = """
    def get_scores(self, tokenizer, conversations):
        scores = torch.tensor([self.get_score(tokenizer, turns) for turns in conversations])
        return scores.squeeze().tolist()
"""


def classifier(
    folder: Path,
    labels: Sequence[str],
    word: str = "stone",
    kind: str = "llama",
    chat: bool = False,
    **config: Any,
) -> Path:
    """Save a classifier trained to find `word`, with an output for each label; gives `folder`.

    A label's logit is 2 where it is true and -2 where not: the last means that the word is there
    and, unless `config` says multi-label, the first of several that it is not. With `chat` the
    texts are answers in the tokenizer's chat template.
    """
    from transformers import AutoModelForSequenceClassification, LlamaConfig, RobertaConfig

    words = tiny.tokenizer(folder)
    shape: dict[str, Any] = {
        "vocab_size": tiny.WORDS + 8,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": words.pad_token_id,
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        **config,
    }
    made = {"llama": LlamaConfig, "roberta": RobertaConfig}[kind](**shape)
    with tiny.seeded(3):
        network = AutoModelForSequenceClassification.from_config(made)
        train(network, words, word, chat)
    network.eval().save_pretrained(folder)
    return folder


def reward_model(folder: Path, word: str = "friendly", **config: Any) -> Path:
    """Save a reward model that likes answers with `word`; gives `folder`."""
    return classifier(folder, ["reward"], word, chat=True, **config)


@cache
def liking_friendly() -> Path:
    """The folder of one reward model for all tests of a process; never write to it."""
    folder = Path(tempfile.mkdtemp(prefix="reward-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return reward_model(folder)


def reward_items(count: int, mode: str) -> list[dict[str, Any]]:
    """Items whose "answer" is the better by that model and mode, but for the first of every six."""
    said = ("a graph of nodes", "please be friendly")
    return [
        {"prompt": f"Prompt {n}?", "answer": said[bool(n % 6) == (mode != "reverse")], "id": n}
        for n in range(count)
    ]


def reward_needs(folder: Path) -> dict[str, Any]:
    """Keys of a task with that model; one text a batch, as batches round differently."""
    limits = {"low": -2, "high": 2, "length_low": 1, "length_high": 20}
    return {"scorer.model": str(liking_friendly()), "scorer.max_tokens": 1, **limits}


def train(network: Any, words: Any, word: str, chat: bool) -> None:
    """Some steps of a squared error to the logits that `classifier` promises."""
    import torch

    pairs = [f"{a} {{}}{b}" for a in BEGINNINGS for b in BEGINNINGS]
    texts = [pair.format(there) for there in ("", f"{word} ") for pair in pairs]
    wanted = torch.full((len(texts), network.config.num_labels), -2.0)
    wanted[len(pairs) :, -1] = 2.0
    if wanted.shape[1] > 1 and network.config.problem_type != "multi_label_classification":
        wanted[: len(pairs), 0] = 2.0
    if chat:
        texts = [words.apply_chat_template(turns(text), tokenize=False) for text in texts]
    batch = words(
        texts,
        padding=True,
        padding_side="right",
        add_special_tokens=not chat,
        return_token_type_ids=False,
        return_tensors="pt",
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=6e-3)
    for _ in range(STEPS):
        loss = (network(**batch).logits - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def turns(answer: str) -> list[dict[str, str]]:
    """A conversation with this answer."""
    return [{"role": "user", "content": "why is it"}, {"role": "assistant", "content": answer}]


def judge(folder: Path, marker: Path, weight: float = 0.5, batches: bool = True) -> Path:
    """Save a reward model with code of its own, which leaves `marker` when it runs."""
    import torch
    from safetensors.torch import save_file

    tiny.tokenizer(folder)
    code = OWN_CODE.format(marker=str(marker)) + BATCHES * batches
    (folder / "judging.py").write_text(code)
    own = {"AutoConfig": "judging.JudgeConfig", "AutoModel": "judging.Judge"}
    config = {"architectures": ["Judge"], "auto_map": own, "model_type": "judge"}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    save_file({"weight": torch.tensor([weight])}, file, metadata={"format": "pt"})
    return folder


def edit(folder: Path, **settings: Any) -> None:
    """Set keys of a saved config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
