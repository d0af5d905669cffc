"""Training files of chats (JSONL): validation line by line, and the cost of a training."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from swarm._util.files import parse_json
from swarm._util.terminal import pluralize
from swarm.errors import InvalidArgument

MIN_EXAMPLES = 10
"""Minimum examples of a training file at OpenAI; a validation file needs one."""

MAX_FINDINGS_SHOWN = 10
"""Maximum number of errors, and of warnings, that are printed."""

MESSAGE_KEYS = {
    "system": {"role", "content", "name"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "weight", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}
"""Allowed keys of a message by role."""

EXAMPLE_KEYS = {"messages", "tools", "parallel_tool_calls"}
"""Allowed keys of an example; servers ignore or reject others."""

SPECIAL_TOKENS = tuple(
    f"<|{word}|>" for word in ("endoftext", "endofprompt", "fim_prefix", "fim_suffix", "fim_middle")
)
"""Texts of special tokens of the tokenizers cl100k_base and o200k_base."""


class Finding(NamedTuple):
    """An error or a warning, with its line from 1; 0 is the file."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}" if self.line else self.message


@dataclass
class ValidationResult:
    """Result of a file's validation."""

    valid: bool
    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    num_examples: int = 0

    def __str__(self) -> str:
        errors = pluralize(len(self.errors), "error")
        verdict = "valid" if self.valid else f"not valid, {errors}"
        lines = [f"{verdict}; {pluralize(self.num_examples, 'example')}"]
        for kind, found in (("error", self.errors), ("warning", self.warnings)):
            lines += [f"  {kind}: {one}" for one in found[:MAX_FINDINGS_SHOWN]]
            lines += (
                [f"  and {len(found) - MAX_FINDINGS_SHOWN} more"]
                if len(found) > MAX_FINDINGS_SHOWN
                else []
            )
        return "\n".join(lines)


def validate_dataset(data: bytes, minimum: int = MIN_EXAMPLES) -> ValidationResult:
    """Validate the content of a file.

    Args:
        data: Bytes of the file.
        minimum: Minimum number of examples.
    """
    errors: list[Finding] = []
    warnings: list[Finding] = []
    seen: Counter[bytes] = Counter()
    number = 0
    for line_number, line in iter_lines(data):
        number += 1
        seen[hashlib.md5(line).digest()] += 1
        if seen[hashlib.md5(line).digest()] == 2:
            warnings.append(Finding(line_number, "duplicate of an earlier example"))
        try:
            example = parse_json(line)
        except ValueError as error:
            errors.append(Finding(line_number, f"not JSON: {error}"))
            continue
        errors += [Finding(line_number, problem) for problem in find_errors(example)]
        warnings += [Finding(line_number, problem) for problem in _find_warnings(example)]
    if number < minimum:
        errors.append(Finding(0, f"{number} examples, at least {minimum} are required"))
    return ValidationResult(not errors, errors, warnings, number)


def read_training_file(file_name: str) -> bytes:
    """Read a training file.

    Raises:
        InvalidArgument: It cannot be read.
    """
    try:
        return Path(file_name).expanduser().read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidArgument(f"file_name={file_name}: cannot be read ({reason})") from None


def iter_lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines with their numbers, from 1."""
    for line_number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield line_number, line.strip()


def find_errors(example: Any) -> Iterator[str]:
    """Yield the errors of an example, which prevent training on it."""
    if not isinstance(example, dict):
        yield "an example must be an object, with messages"
        return
    messages = example.get("messages")
    if not isinstance(messages, list) or not messages:
        yield "messages: must be a non-empty list"
        return
    for index, message in enumerate(messages):
        yield from (f"messages[{index}]{problem}" for problem in _find_message_errors(message))
    turns = [one if isinstance(one, dict) else {} for one in messages]
    answers = [turn for turn in turns if turn.get("role") == "assistant"]
    if turns[-1].get("role") != "assistant":
        yield f"the last message must be from the assistant, not from {turns[-1].get('role')!r}"
    if not answers:
        yield "there is no assistant message, so there is nothing to learn"
    elif answers[-1].get("weight") == 0:
        yield "the last assistant message has weight 0, so nothing is learnt from it"


def _find_message_errors(message: Any) -> Iterator[str]:
    if not isinstance(message, dict):
        yield ": must be an object"
        return
    role = message.get("role")
    if not isinstance(role, str) or role not in MESSAGE_KEYS:
        yield f".role: {role!r} is not one of {', '.join(MESSAGE_KEYS)}"
        return
    if unknown := sorted(message.keys() - MESSAGE_KEYS[role]):
        allowed = ", ".join(sorted(MESSAGE_KEYS[role]))
        yield f": {role} has {', '.join(unknown)}; allowed: {allowed}"
    if "content" in message:
        yield from _find_content_errors(message["content"], role, "tool_calls" in message)
    elif "tool_calls" not in message:
        yield ".content: is missing"
    weight = message.get("weight", 1)
    if role == "assistant" and (type(weight) not in (int, float) or weight not in (0, 1)):
        yield f".weight: must be 0 or 1, not {weight!r}"
    if role == "assistant" and "tool_calls" in message:
        yield from _find_tool_call_errors(message["tool_calls"])
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        yield ".tool_call_id: must be a string"


def _find_content_errors(content: Any, role: str, calls: bool) -> Iterator[str]:
    if isinstance(content, str):
        yield from (
            f".content: contains the special token {one}"
            for one in SPECIAL_TOKENS
            if one in content
        )
    elif content is None:
        if not calls:
            yield ".content: may be null only with tool_calls"
    elif not isinstance(content, list):
        yield f".content: must be a string or a list of parts, not {type(content).__name__}"
    else:
        for index, part in enumerate(content):
            yield from (f".content[{index}]{problem}" for problem in _find_part_errors(part, role))


def _find_part_errors(part: Any, role: str) -> Iterator[str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            yield ".text: must be a string"
        else:
            yield from (
                f".text: contains the special token {one}" for one in SPECIAL_TOKENS if one in text
            )
    elif kind == "image_url":
        image = part.get("image_url")
        if not isinstance(image, dict) or not isinstance(image.get("url"), str):
            yield ".image_url: must be an object with a url"
        if role == "assistant":
            yield ": an assistant message cannot contain images"
    elif not isinstance(kind, str):
        yield ": must be an object with a type"


def _find_tool_call_errors(calls: Any) -> Iterator[str]:
    if not isinstance(calls, list) or not calls:
        yield ".tool_calls: must be a non-empty list"
        return
    for index, call in enumerate(calls):
        location = f".tool_calls[{index}]"
        if not isinstance(call, dict):
            yield f"{location}: must be an object"
            continue
        if not isinstance(call.get("id"), str):
            yield f"{location}.id: must be a string"
        if call.get("type") != "function":
            yield f"{location}.type: must be 'function'"
        function = call.get("function")
        if not isinstance(function, dict):
            yield f"{location}.function: must be an object"
            continue
        for key in ("name", "arguments"):
            if not isinstance(function.get(key), str):
                yield f"{location}.function.{key}: must be a string"


def _find_warnings(example: Any) -> Iterator[str]:
    """Yield properties that a server may accept, but are seldom intended."""
    if not isinstance(example, dict) or not isinstance(example.get("messages"), list):
        return
    if unknown := sorted(map(str, example.keys() - EXAMPLE_KEYS)):
        yield f"{', '.join(unknown)}: not trained on, may be rejected"
    turns = [turn for turn in example["messages"] if isinstance(turn, dict)]
    if any(turn.get("role") == "system" for turn in turns[1:]):
        yield "a system message is not the first message"
    if any(turn.get("role") == "assistant" and turn.get("content") == "" for turn in turns):
        yield "an answer without text"
    if not any(turn.get("role") in ("user", "tool") for turn in turns):
        yield "no user message"


TOKENS_PER_MESSAGE, TOKENS_PER_EXAMPLE = 4, 2
"""Tokens that OpenAI's chat format adds to a message, and to an example."""

CHARS_PER_TOKEN = 4
"""Approximate characters per token of English."""

ENCODING = "o200k_base"


class TrainingCost(NamedTuple):
    """Cost of a training.

    Attributes:
        tokens: Tokens per epoch.
        exact: Whether a tokenizer was used; else a token is counted as 4 characters.
        epochs: Number of epochs.
        prices: Price of a million tokens by model.
    """

    tokens: int
    exact: bool
    epochs: int
    prices: Mapping[str, float]

    def price_for(self, model: str) -> float:
        """Return the cost of all epochs."""
        return self.tokens * self.epochs * self.prices[model] / 1e6

    def __str__(self) -> str:
        method = f"by {ENCODING}" if self.exact else f"estimated at {CHARS_PER_TOKEN} characters"
        lines = [f"{self.tokens:,} tokens an epoch ({method}); epochs: {self.epochs}"]
        lines += [
            f"  {model}: {price:g} a million tokens, {self.price_for(model):,.2f}"
            for model, price in self.prices.items()
        ]
        note = "  no price known: give the price per million tokens, --price MODEL=PRICE"
        return "\n".join(lines if self.prices else [*lines, note])


def estimate_cost(
    file_name: str,
    prices: Mapping[str, float] | None = None,
    epochs: int = 1,
    count: Callable[[str], int] | None = None,
) -> TrainingCost:
    """Estimate the cost of training on a file.

    Args:
        file_name: JSONL file of chats; malformed lines are skipped.
        prices: Price of a million trained tokens by model; there are no built-in prices, as they
            change.
        epochs: Number of epochs.
        count: Counts the tokens of a text; `None` is tiktoken's o200k_base if it is installed, else
            a quarter of the characters.

    Raises:
        InvalidArgument: The file cannot be read, or a price is negative.
    """
    for model, price in (prices or {}).items():
        if not price >= 0:
            raise InvalidArgument(f"prices: {model} costs {price!r}; must be a number, 0 or more")
    exact = count or _load_tiktoken()
    counted = exact or (lambda text: -(-len(text) // CHARS_PER_TOKEN))
    total = 0
    for _, line in iter_lines(read_training_file(file_name)):
        try:
            messages = parse_json(line)["messages"]
            total += TOKENS_PER_EXAMPLE + sum(
                _count_message_tokens(message, counted) for message in messages
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            continue
    return TrainingCost(total, exact is not None, epochs, prices or {})


def _count_message_tokens(message: dict[str, Any], count: Callable[[str], int]) -> int:
    texts = [value for value in message.values() if isinstance(value, str)]
    if isinstance(parts := message.get("content"), list):
        texts += [part["text"] for part in parts if isinstance(part.get("text"), str)]
    if isinstance(calls := message.get("tool_calls"), list):
        texts += [json.dumps(call.get("function")) for call in calls]
    # A name replaces the role in the format.
    return TOKENS_PER_MESSAGE + sum(map(count, texts)) - ("name" in message)


def _load_tiktoken() -> Callable[[str], int] | None:
    """Return tiktoken's token counter, if it and its vocabulary can be had."""
    try:
        import tiktoken

        encoding = tiktoken.get_encoding(ENCODING)
    except Exception:  # not installed, or its vocabulary, a download, cannot be fetched
        return None
    return lambda text: len(encoding.encode(text, disallowed_special=()))
