"""Training files of chats (JSONL): validation line by line, and what a training costs."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from swarm._util.files import parse_json
from swarm._util.settings import Settings, parse_settings
from swarm._util.terminal import pluralize
from swarm.errors import InvalidArgument, UserError

MIN_EXAMPLES = 10
"""Minimum examples of a training file at OpenAI; a validation file needs one."""

MAX_FINDINGS_SHOWN = 10
"""Maximum number of errors, and of warnings, that are printed."""

SPECIAL_TOKENS = tuple(
    f"<|{word}|>" for word in ("endoftext", "endofprompt", "fim_prefix", "fim_suffix", "fim_middle")
)
"""Texts of special tokens of the tokenizers cl100k_base and o200k_base."""

CHARS_PER_TOKEN, TOKENS_PER_MESSAGE, TOKENS_PER_EXAMPLE = 4, 4, 2
"""Characters of English in a token, and what OpenAI's chat format adds."""


def check_text(text: str) -> str:
    """Refuse special tokens, which a server would refuse after the upload."""
    if found := [token for token in SPECIAL_TOKENS if token in text]:
        raise ValueError(f"contains the special token {found[0]}")
    return text


class OpenSettings(BaseModel):
    """Settings with further keys, which the server knows or refuses."""

    model_config = ConfigDict(strict=True, extra="allow")


class Part(OpenSettings):
    """Part of a message's content."""

    type: str
    text: Annotated[str, AfterValidator(check_text)] | None = None


class Message(Settings):
    """Turn of an example."""

    role: Literal["system", "user", "assistant", "tool"]
    content: list[Part] | None = None
    name: str | None = None
    weight: Literal[0, 1] | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _as_parts(cls, content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content


class Example(OpenSettings):
    """One line of a file."""

    messages: Annotated[list[Message], Field(min_length=1)]


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
        verdict = "valid" if self.valid else f"not valid, {pluralize(len(self.errors), 'error')}"
        lines = [f"{verdict}; {pluralize(self.num_examples, 'example')}"]
        for kind, found in (("error", self.errors), ("warning", self.warnings)):
            lines += [f"  {kind}: {one}" for one in found[:MAX_FINDINGS_SHOWN]]
            if len(found) > MAX_FINDINGS_SHOWN:
                lines.append(f"  and {len(found) - MAX_FINDINGS_SHOWN} more")
        return "\n".join(lines)


def validate_dataset(data: bytes, minimum: int = MIN_EXAMPLES) -> ValidationResult:
    """Validate the content of a file.

    Args:
        data: Bytes of the file.
        minimum: Minimum number of examples.
    """
    result = ValidationResult(False)
    seen: set[bytes] = set()
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        result.num_examples += 1
        digest = hashlib.md5(line.strip()).digest()
        if digest in seen:
            result.warnings.append(Finding(number, "duplicate of an earlier example"))
        seen.add(digest)
        try:
            messages = parse_settings(Example, parse_json(line)).messages
        except ValueError as error:  # no JSON, or not an example
            result.errors.append(Finding(number, str(error)))
            continue
        result.errors += [Finding(number, problem) for problem in find_errors(messages)]
        answers = [one for one in messages if one.role == "assistant"]
        if any(part.text == "" for one in answers for part in one.content or ()):
            result.warnings.append(Finding(number, "an answer without text"))
    if result.num_examples < minimum:
        too_few = f"{result.num_examples} examples, at least {minimum} are required"
        result.errors.append(Finding(0, too_few))
    result.valid = not result.errors
    return result


def find_errors(messages: list[Message]) -> Iterator[str]:
    """Yield the reasons why nothing could be trained on these messages."""
    last = messages[-1]
    if last.role != "assistant":
        yield f"the last message must be from the assistant, not from {last.role!r}"
    elif last.weight == 0:
        yield "the last assistant message has weight 0, so nothing is learnt from it"
    for number, one in enumerate(messages):
        if one.content is None and not one.tool_calls:
            yield f"messages[{number}].content: is missing"
        if one.role == "tool" and one.tool_call_id is None:
            yield f"messages[{number}].tool_call_id: is missing"


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


def count_training_tokens(file_name: str) -> int:
    """Estimate the tokens of one epoch of a training file.

    Raises:
        InvalidArgument: The file cannot be read, or has no valid example.
    """
    tokens = 0
    for line in read_training_file(file_name).decode(errors="replace").splitlines():
        try:
            messages = parse_settings(Example, parse_json(line)).messages
        except (ValueError, UserError):  # `validate_dataset` names what is wrong
            continue
        characters = sum(len(part.text or "") for one in messages for part in one.content or ())
        tokens += TOKENS_PER_EXAMPLE + TOKENS_PER_MESSAGE * len(messages)
        tokens += -(-characters // CHARS_PER_TOKEN)
    if not tokens:
        raise InvalidArgument(f"{file_name}: has no valid example; validate says why")
    return tokens
