"""Chats of a training file as what a model on this machine learns from: prompts and answers."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from swarm.compare.errors import InvalidArgument
from swarm.compare.finetuning.validation import iter_lines
from swarm.models import Message


class ChatExample(NamedTuple):
    """An answer of the assistant's, and what was said before it.

    Attributes:
        line: Of the file, from 1 on.
        turns: What was said before.
        answer: What is learnt.
    """

    line: int
    turns: tuple[Message, ...]
    answer: str


def parse_examples(data: bytes) -> list[ChatExample]:
    """Every answer that is learnt: the assistant's messages whose weight is not 0.

    A chat with three answers gives three examples, each with all that was said before.

    Args:
        data: A file that `swarm.compare.finetuning.validation.validate` has found valid.

    Raises:
        WrongValue: It holds what is no text: images, or calls of tools.
    """
    found = []
    for line, text in iter_lines(data):
        turns: list[Message] = []
        for message in json.loads(text)["messages"]:
            role, words = message["role"], _message_text(line, message)
            if role == "assistant" and message.get("weight", 1):
                found.append(ChatExample(line, tuple(turns), words))
            turns.append(Message(role, words))
    return found


def _message_text(line: int, message: dict[str, Any]) -> str:
    content = message.get("content")
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if message["role"] == "tool" or message.get("tool_calls") or parts is None:
        raise InvalidArgument(f"line {line}: tools cannot be trained on this machine; texts alone can")
    if any(part.get("type") != "text" for part in parts):
        raise InvalidArgument(f"line {line}: images cannot be trained on this machine; texts alone can")
    return "".join(part["text"] for part in parts)


def tokenize_examples(found: Sequence[ChatExample], tokenizer: Any, context: float) -> list[tuple[Any, Any]]:
    """The token ids of each prompt, and of its answer with the token that ends it.

    Args:
        tokenizer: Its chat template writes both.
        context: How many tokens the model can have.

    Raises:
        UserError: There is no template, it refuses a chat, or one is too long.
    """
    made = []
    for example in found:
        pair = _tokenize_example(example, tokenizer)
        if (length := len(pair[0]) + len(pair[1])) > context:
            raise InvalidArgument(
                f"line {example.line}: {length} tokens, and the model can have {context:g}; "
                "shorten it, or leave it out"
            )
        made.append(pair)
    return made


def _tokenize_example(example: ChatExample, tokenizer: Any) -> tuple[list[int], list[int]]:
    from swarm.engine.tokens import encode_choice, encode_prompt

    prompt, end = encode_prompt(tokenizer, example.turns), tokenizer.eos_token_id
    whole = _apply_chat_template(tokenizer, (*example.turns, Message("assistant", example.answer)))
    if whole[: len(prompt)] == prompt and end in whole[len(prompt) :]:
        # What the template writes behind the end token would never be generated.
        last = len(whole) - whole[::-1].index(end)
        return prompt, whole[len(prompt) : last]
    return prompt, [*encode_choice(tokenizer, example.turns, example.answer), end]


def _apply_chat_template(tokenizer: Any, turns: Sequence[Message]) -> list[int]:
    """A whole chat as the template writes it; nothing where it refuses."""
    from jinja2 import TemplateError

    from swarm.engine.tokens import merge_system_turn

    for tried in (turns, merge_system_turn(turns)):
        try:
            asked = [turn._asdict() for turn in tried]
            return list(tokenizer.apply_chat_template(asked, return_dict=True)["input_ids"])
        except TemplateError:
            continue
    return []
