"""Requests as rows of token ids, and rows of generated token ids as completions."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swarm.errors import NotFinite, UserError
from swarm.models.base import Completion, Message, Request, Token


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
    parts = [turn.content for turn in turns if turn.role == "system"]
    rest = [turn for turn in turns if turn.role != "system"]
    if rest and rest[0].role == "user":
        parts.append(rest.pop(0).content)
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


def build_scored_completion(
    prompt: int, choices: Sequence[Sequence[int]], scores: Sequence[tuple[float, bool]]
) -> Completion:
    """Return the completion of a request with choices.

    Args:
        prompt: Number of tokens of the prompt.
        choices: Token ids of each choice.
        scores: Of each choice its log probability, and whether greedy decoding generates it.
    """
    logprobs, greedy = zip(*scores, strict=True)
    counts = tuple(map(len, choices))
    read = sum(max(count - 1, 0) for count in counts)
    return Completion("", logprobs, prompt, read, greedy, counts)


def end_token_ids(config: Any, tokenizer: Any) -> frozenset[int]:
    """Return every token id that ends a text, by a generation configuration and the tokenizer."""
    stated = getattr(config, "eos_token_id", None)
    ends = stated if isinstance(stated, list) else [stated]
    return frozenset(end for end in [*ends, tokenizer.eos_token_id] if end is not None)


def context_length_of(config: Any) -> float:
    """Return a model's context length in tokens; infinity if its configuration sets none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


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
    """
    if (needed := prompt + max(1, longest)) > context:
        what = f"a choice of {longest}" if longest else "one to answer"
        raise UserError(
            f"{prompt} tokens and {what} make {needed}, more than the model's {context} "
            f"({limit}): shorten the prompt"
        )
    return replace(request, max_new_tokens=int(min(request.token_limit, context - prompt)))


@dataclass(slots=True)
class DecodingRow:
    """One prompt being continued.

    Attributes:
        prompt: Prompt token ids.
        limit: Maximum number of new tokens.
        stop_check: Returns whether these new tokens determine the answer.
        temperature: 0 is greedy.
        key: Key of the noise of its draws.
        top: See `Request.top_logprobs`.
        particle: Index of its position.
        new: Token ids generated so far, without the end token.
        logprobs: If `top` is not 0, for each generated token its log probability, and the likeliest
            token ids with theirs, in descending order; of the model's own distribution, at any
            temperature.
        live: Whether more tokens are wanted.
    """

    prompt: list[int]
    limit: int
    stop_check: Callable[[list[int]], bool] | None = None
    temperature: float = 0.0
    key: bytes = b""
    top: int = 0
    particle: int = 0
    new: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    live: bool = True

    def add_token(self, found: dict[str, Any], end_tokens: frozenset[int]) -> None:
        """Append one token, and update `live`.

        Args:
            found: The row's values of a result of `swarm.engine.decode.choose_tokens`.

        Raises:
            NotFinite: The logits were not finite.
        """
        if (token := found["tokens"]) < 0:
            raise NotFinite(self.particle, "activations")
        if self.top:
            top = list(zip(found["ids"], found["values"], strict=True))[: max(0, self.top)]
            self.logprobs.append((found["logprobs"], top))
        if token in end_tokens:
            self.live = False
            return
        self.new.append(token)
        self.live = len(self.new) < self.limit and not (
            self.stop_check and self.stop_check(self.new)
        )


def build_row(
    tokenizer: Any, request: Request, prompt: list[int], particle: int = 0
) -> DecodingRow:
    """Return the row of a request for text with this prompt; a seed of `None` is 0."""
    heat, top, stop = request.temperature or 0.0, request.top_logprobs, request.stop
    if not 0 <= heat < math.inf:
        raise UserError(f"temperature={heat}: must be a number from 0 on; 0 is greedy")
    if top < -1:
        raise UserError(
            f"top_logprobs={top}: must be -1 (the chosen token alone), 0 (none) or more"
        )
    if not all(stop):
        raise UserError("stop: must not contain an empty string")
    row = DecodingRow(prompt, request.token_limit, None, heat, b"", top, particle)
    if heat:
        text = repr((request.seed or 0, request.sample, prompt))
        row.key = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if (decided := request.stop_check) or stop:

        def settled(new: list[int]) -> bool:
            text = decode_text(tokenizer, new)
            return any(one in text for one in stop) or bool(decided and decided(text))

        row.stop_check = settled
    return row


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return generated tokens as text, without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def build_completion(tokenizer: Any, request: Request, row: DecodingRow) -> Completion:
    """Return the completion of a finished row."""
    decoded = decode_text(tokenizer, row.new)
    text = decoded[: min([len(decoded), *(decoded.find(s) for s in request.stop if s in decoded)])]
    stopped = len(text) < len(decoded) or len(row.new) < row.limit
    tokens: list[Token] = []
    length = 0
    for index, (logprob, top) in enumerate(row.logprobs[: len(row.new)]):
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


class CachedEncoder:
    """An encoder that keeps its results, and forgets all when they exceed `limit` tokens.

    The prompts of a task are repeated for every particle; those that quote an answer never are, and
    would fill the memory. It can be pickled.
    """

    def __init__(self, encode: Callable[..., list[int]], limit: int = 4_000_000) -> None:
        self._encode, self._limit, self._count = encode, limit, 0
        self._found: dict[tuple[Any, ...], list[int]] = {}

    def __call__(self, *given: Any) -> list[int]:
        """Return the token ids."""
        # Several threads may use one model: another may clear the cache at any time.
        if (ids := self._found.get(given)) is None:
            if self._count > self._limit:
                self._found.clear()
                self._count = 0
            ids = self._found[given] = self._encode(*given)
            self._count += len(ids) + sum(len(str(one)) // 4 for one in given)  # of the key, too
        return ids
