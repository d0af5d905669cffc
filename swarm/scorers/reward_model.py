"""A reward model: reads a prompt and an answer as a conversation and returns its quality."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any

from swarm._util.settings import checked
from swarm.errors import UserError
from swarm.scorers.hf_model import LocalModelScorer, label_names, replace_surrogates
from swarm.tasks.base import Item, Score
from swarm.tasks.dataset import text_field_error

PLAIN_TEMPLATE = "User: {prompt}\n\nAssistant: {answer}"
"""The conversation for a reward model without chat template and without pairs of texts."""

CLASSIFIER_SUFFIX = "ForSequenceClassification"


@checked("task.scorer")
@dataclass(eq=False)
class RewardModelScorer(LocalModelScorer):
    """Scores texts with a reward model, as answers to the items' "prompt".

    Two kinds of model: a sequence classifier of transformers with one output, which is the reward;
    and, as InternLM2-Reward, a model that brings code with `get_scores(tokenizer, conversations)`
    or `get_score(tokenizer, conversation)`, which runs with `trust_remote_code` only.

    The conversation, the user's prompt and the answer, is formatted with the model's own chat
    template; without one, as a pair of texts if its tokenizer separates such, else as
    `PLAIN_TEMPLATE`. Of a conversation beyond a classifier's context, its first token and its end
    are read.

    Answers are stripped, as in the original. A score's measures are "reward", the model's raw
    number, and "length", the answer's number of tokens by the reward model's tokenizer with its
    special tokens. The value is the raw reward, on no scale
    (`swarm.tasks.reward_model.RewardModelTask` has one). A blank answer counts as unparsed, but has
    its reward; one whose reward is not finite counts as unparsed too, without that measure, and its
    value is minus infinity.

    Args are those of `LocalModelScorer`.
    """

    def open(self, device: str) -> None:
        """See `LocalModelScorer.open`.

        Raises:
            UserError: The model cannot be opened, or its code has no score.
        """
        super().open(device)
        self._own = bool({"get_score", "get_scores"} & set(dir(self.network)))
        if not self._own and not type(self.network).__name__.endswith(CLASSIFIER_SUFFIX):
            raise UserError(f"""task.scorer.model={self.model}: its code has no get_score or
                get_scores""")

    def model_class(self, config: Mapping[str, Any]) -> str:
        path, auto_map = f"task.scorer.model={self.model}", config.get("auto_map") or {}
        classes = [str(name) for name in config.get("architectures") or []]
        kind = f"AutoModel{CLASSIFIER_SUFFIX}"
        if kind in auto_map or any(name.endswith(CLASSIFIER_SUFFIX) for name in classes):
            if len(named := label_names(config)) != 1:
                raise UserError(f"""{path}: a reward model has one output, this one has {len(named)}
                    ({", ".join(named[:6])})""")
            return kind
        if "AutoModel" not in auto_map:
            raise UserError(f"""{path} is {", ".join(classes) or "of unknown class"}: a reward model
                is a ...{CLASSIFIER_SUFFIX}, or has code with get_score""")
        if not self.trust_remote_code:
            raise UserError(f"""{path} comes with Python code ({auto_map["AutoModel"]}): review it,
                then allow it with task.scorer.trust_remote_code=true""")
        return "AutoModel"

    def item_error(self, item: Item) -> str | None:
        """Return an item's error; it needs a prompt, whatever the task's template."""
        return text_field_error(item, "prompt")

    def score(self, items: Sequence[Item], texts: Sequence[str]) -> list[Score]:
        pairs = [(item["prompt"], text.strip()) for item, text in zip(items, texts, strict=True)]
        rewards = self._custom_rewards(pairs) if self._own else self._classifier_rewards(pairs)
        scores = []
        for text, (_, answer), reward in zip(texts, pairs, rewards, strict=True):
            measures: dict[str, float] = {"length": len(self.encode(answer)["input_ids"])}
            if isfinite(reward):
                measures["reward"] = reward
                scores.append(Score(reward, text if answer else None, text, measures=measures))
            else:
                scores.append(Score(-inf, None, text, measures=measures))
        return scores

    def _classifier_rewards(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the rewards of (prompt, answer) pairs by a classifier's single logit."""
        limit = self.max_input_tokens()
        rows = []
        for prompt, answer in pairs:
            if self.tokenizer.chat_template:
                # The template contains the special tokens itself.
                turns = _conversation(prompt, answer)
                text = str(self.tokenizer.apply_chat_template(turns, tokenize=False))
                row = self.encode(text, special=False)
            elif self.tokenizer.sep_token is not None:
                row = self.encode(prompt, answer)
            else:
                row = self.encode(PLAIN_TEMPLATE.format(prompt=prompt, answer=answer))
            for name, ids in row.items():
                if len(ids) > limit:
                    row[name] = [*ids[:1], *ids[len(ids) - limit + 1 :]]
            rows.append(row)
        return [row[0] if row else nan for row in self.compute_logits(rows)]

    def _custom_rewards(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the rewards of (prompt, answer) pairs by the model's own code."""
        import torch

        network, tokenizer = self.network, self.tokenizer

        def score_batch(places: list[int]) -> list[float]:
            chosen = [_conversation(*pairs[i]) for i in places]
            with torch.inference_mode():
                if hasattr(network, "get_scores"):
                    rewards = network.get_scores(tokenizer, chosen)
                else:
                    rewards = [network.get_score(tokenizer, turn) for turn in chosen]
            # For one conversation such code may return a bare number.
            return [float(x) for x in torch.as_tensor(rewards, dtype=torch.float64).flatten()]

        lengths = [len(self.encode(prompt + answer)["input_ids"]) for prompt, answer in pairs]
        return self.run_batches(lengths, score_batch)


def _conversation(prompt: str, answer: str) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": replace_surrogates(prompt)},
        {"role": "assistant", "content": replace_surrogates(answer)},
    ]
