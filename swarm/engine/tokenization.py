"""Encode requests as token ids, and decode token ids to texts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swarm.errors import UserError
from swarm.models.base import Completion, Message, Request, Token

if TYPE_CHECKING:
    from swarm.engine.decode import DecodingRow


def encode_prompt(tokenizer: Any, prompt: Any) -> list[int]:
    """Return the token ids of a request's prompt, turns formatted with the chat template.

    An empty text is encoded as the beginning-of-text token or, if there is none, the end-of-text
    token, which separates two texts.

    Raises:
        UserError: The prompt has turns, and the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        first = tokenizer.bos_token_id
        return list(tokenizer(prompt).input_ids) or [
            tokenizer.eos_token_id if first is None else first
        ]
    return list(apply_chat_template(tokenizer, prompt, return_dict=True)["input_ids"])


def apply_chat_template(tokenizer: Any, turns: Sequence[Message], **how: Any) -> Any:
    """Format turns with the chat template, the answer's header last.

    If a template refuses a system turn, its text is put before the first user turn.

    Args:
        how: Passed to transformers' `apply_chat_template`.

    Raises:
        UserError: There is no template, or it refuses the turns.
    """
    from jinja2 import TemplateError

    # Tokenizers that format turns in code have no such attribute.
    if not getattr(tokenizer, "chat_template", True):
        raise UserError(
            f"{tokenizer.name_or_path} has no chat template: set task.chat=false, or use a "
            "chat model (required for a judge)"
        )
    for tried in (turns, merge_system_turn(turns)):
        try:
            messages = [turn._asdict() for turn in tried]
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **how)
        except TemplateError as error:
            reason = error
    raise UserError(f"{tokenizer.name_or_path}: its chat template rejects the messages: {reason}")


def merge_system_turn(turns: Sequence[Message]) -> list[Message]:
    """Return the turns without a system turn; its text is prepended to the first user turn."""
    system = [turn.content for turn in turns if turn.role == "system"]
    rest = [turn for turn in turns if turn.role != "system"]
    first = rest.pop(0).content if rest and rest[0].role == "user" else None
    parts = [text for text in (*system, first) if text is not None]
    return [Message("user", "\n\n".join(parts)), *rest] if parts else rest


def encode_choice(tokenizer: Any, prompt: Any, choice: str) -> list[int]:
    """Return the token ids of a choice, as written after its prompt.

    If the two would share a token ("1" and "2" as "12"), those of the choice alone.
    """
    if isinstance(prompt, str) and prompt:
        start, full = encode_prompt(tokenizer, prompt), list(tokenizer(prompt + choice).input_ids)
        if full[: len(start)] == start:
            return full[len(start) :]
    return list(tokenizer(choice, add_special_tokens=False).input_ids)


def count_choice_tokens(choices: list[list[int]]) -> int:
    """Return the number of tokens read beyond the prompt to score these choices."""
    return sum(max(len(choice) - 1, 0) for choice in choices)


def build_scored_completion(
    prompt: int, choices: list[list[int]], scores: Sequence[tuple[float, bool]]
) -> Completion:
    """Return the completion of a request with choices.

    Args:
        prompt: Number of tokens of the prompt.
        choices: Token ids of each choice.
        scores: Of each choice its log probability, and whether greedy decoding generates it.
    """
    logprobs, greedy = zip(*scores, strict=True)
    counts = tuple(map(len, choices))
    return Completion("", logprobs, prompt, count_choice_tokens(choices), greedy, counts)


def end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return every token id that ends a text, from the model and the tokenizer."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    ends = stated if isinstance(stated, list) else [stated]
    return frozenset(e for e in [*ends, tokenizer.eos_token_id] if e is not None)


def context_length_of(model: Any) -> float:
    """Return a model's context length in tokens; infinity if its configuration sets none."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found or math.inf


def clip_new_tokens(
    context: float,
    request: Request,
    prompt: int,
    longest: int,
    limit: str = "max_position_embeddings",
) -> Request:
    """Return a request with no more new tokens than fit into the model's context.

    Args:
        context: See `context_length_of`.
        prompt, longest: Tokens of the prompt, and of the longest choice.
        limit: Name of the setting that limits the tokens.

    Raises:
        UserError: Not even one fits.
    """
    if (needed := prompt + max(1, longest)) > context:
        what = f"a choice of {longest}" if longest else "one to answer"
        raise UserError(
            f"{prompt} tokens and {what} make {needed}, more than the model's {context} "
            f"({limit}): shorten the prompt"
        )
    return replace(request, max_new_tokens=int(min(request.token_limit, context - prompt)))


def stop_check(request: Request) -> Callable[[str], bool] | None:
    """Return a check whether a text has ended, by the request's stop texts and its `stop_check`."""
    decided, stop = request.stop_check, request.stop
    if not stop:
        return decided
    return lambda text: any(one in text for one in stop) or bool(decided and decided(text))


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first of the stop texts."""
    return text[: min([len(text), *(text.find(one) for one in stop if one in text)])]


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return generated tokens as text, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def build_completion(tokenizer: Any, request: Request, row: "DecodingRow") -> Completion:
    """Return the completion of a finished row."""
    decoded = decode_text(tokenizer, row.new)
    text = cut_at_stop(decoded, request.stop)
    stopped = len(text) < len(decoded) or len(row.new) < row.limit
    tokens: list[Token] = []
    length = 0
    for index, (logprob, top) in enumerate(row.draw.logprobs[: len(row.new)] if row.draw else ()):
        if len(text) < len(decoded) and length >= len(text):
            break
        before = row.new[max(0, index - 1) : index]
        likeliest = tuple((_token_text(tokenizer, before, token), value) for token, value in top)
        tokens.append(Token(_token_text(tokenizer, before, row.new[index]), logprob, likeliest))
        length += len(tokens[-1].text)
    return Completion(
        text,
        (),
        len(row.prompt),
        len(row.new),
        finish="stop" if stopped else "length",
        tokens=tuple(tokens),
    )


def _token_text(tokenizer: Any, before: Sequence[int], token: int) -> str:
    """Return the text that a token adds to the one before it.

    A special token is its name, an incomplete character U+FFFD.
    """
    # Some tokenizers write a word's leading space only if a token precedes it.
    start, full = (
        tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        for ids in ([*before], [*before, token])
    )
    return str(full[len(start) :])


class TokenCache:
    """Token ids of texts; the cache is cleared when it exceeds `limit` tokens.

    The prompts of a task are repeated for every particle; those that quote an answer never are, and
    would fill the memory.

    Args:
        limit: Tokens that may be cached before another text is prepared.
    """

    def __init__(self, limit: int = 4_000_000) -> None:
        self.limit = limit
        self.token_count = 0
        self._found: dict[object, list[int]] = {}

    def get_ids(self, text: object, prepare: Callable[[], list[int]]) -> list[int]:
        """Return the token ids of a text, or of another key; prepared if not cached."""
        # Several threads may use one model: another may clear the cache at any time, so `found` is
        # a local.
        if (found := self._found.get(text)) is None:
            if self.token_count > self.limit:
                self._found.clear()
                self.token_count = 0
            found = self._found[text] = prepare()
            self.token_count += len(found)
        return found
