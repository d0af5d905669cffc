"""Requests as token ids, and token ids as texts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swarm.errors import UserError
from swarm.models.base import Completion, Message, Request, Token

if TYPE_CHECKING:
    from swarm.engine.decode import DecodingRow


def encode_prompt(tokenizer: Any, prompt: Any) -> list[int]:
    """The token ids of a request's prompt, turns put through the chat template.

    Of an empty text this is what texts begin with: the beginning-of-text token or, where there is
    none, the end-of-text token, which stands between two texts.

    Raises:
        UserError: Turns are to be written, and the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        first = tokenizer.bos_token_id
        return list(tokenizer(prompt).input_ids) or [
            tokenizer.eos_token_id if first is None else first
        ]
    return list(apply_chat_template(tokenizer, prompt, return_dict=True)["input_ids"])


def apply_chat_template(tokenizer: Any, turns: Sequence[Message], **how: Any) -> Any:
    """Turns as the chat template writes them, the answer's beginning last.

    A template that refuses a system's turn gets its text before the first user's.

    Args:
        how: Goes to transformers' `apply_chat_template`.

    Raises:
        UserError: There is no template, or it refuses the turns.
    """
    from jinja2 import TemplateError

    # A kind of tokenizer that writes turns by rules of its own has no such attribute.
    if not getattr(tokenizer, "chat_template", True):
        raise UserError(
            f"{tokenizer.name_or_path} has no chat template, which turns go through: set "
            "task.chat=false, or choose a chat model (as a judge, always)"
        )
    for tried in (turns, merge_system_turn(turns)):
        try:
            asked = [turn._asdict() for turn in tried]
            return tokenizer.apply_chat_template(asked, add_generation_prompt=True, **how)
        except TemplateError as error:
            reason = error
    raise UserError(f"{tokenizer.name_or_path}: its chat template refuses the turns: {reason}")


def merge_system_turn(turns: Sequence[Message]) -> list[Message]:
    """The turns without a system: what it says stands in the first turn of the user."""
    said = [turn.content for turn in turns if turn.role == "system"]
    rest = [turn for turn in turns if turn.role != "system"]
    first = rest.pop(0).content if rest and rest[0].role == "user" else None
    whole = [text for text in (*said, first) if text is not None]
    return [Message("user", "\n\n".join(whole)), *rest] if whole else rest


def encode_choice(tokenizer: Any, prompt: Any, choice: str) -> list[int]:
    """The token ids of a choice, as it is written after its prompt.

    Where the two would share a token ("1" and "2" as "12"), the choice's by itself.
    """
    if isinstance(prompt, str) and prompt:
        start, whole = encode_prompt(tokenizer, prompt), list(tokenizer(prompt + choice).input_ids)
        if whole[: len(start)] == start:
            return whole[len(start) :]
    return list(tokenizer(choice, add_special_tokens=False).input_ids)


def count_tokens_read(tokenizer: Any, request: Request) -> int:
    """How many tokens a model reads to answer: the prompt, and choices but for their last token."""
    choices = [encode_choice(tokenizer, request.prompt, choice) for choice in request.choices]
    return len(encode_prompt(tokenizer, request.prompt)) + count_choice_tokens(choices)


def count_choice_tokens(choices: list[list[int]]) -> int:
    """How many tokens are read beyond the prompt to score these choices."""
    return sum(max(len(choice) - 1, 0) for choice in choices)


def end_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token id that ends a text, of the model's and of the tokenizer's."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    ends = stated if isinstance(stated, list) else [stated]
    return frozenset(e for e in [*ends, tokenizer.eos_token_id] if e is not None)


def context_length_of(model: Any) -> float:
    """How many tokens a model's positions reach; infinity where its configuration says nothing."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found or math.inf


def clip_new_tokens(
    context: float,
    request: Request,
    prompt: int,
    longest: int,
    limit: str = "max_position_embeddings",
) -> Request:
    """A request with no more new tokens than fit into the model's context.

    Args:
        context: See `context_of`.
        prompt, longest: Tokens of the prompt, and of the longest choice.
        limit: What says how many tokens there may be.

    Raises:
        UserError: Not even one fits.
    """
    if (needed := prompt + max(1, longest)) > context:
        what = f"a choice of {longest}" if longest else "one to answer"
        raise UserError(
            f"{prompt} tokens and {what} make {needed}, and the model can have {context} "
            f"({limit}): shorten what it is asked"
        )
    return replace(request, max_new_tokens=int(min(request.max_new_tokens, context - prompt)))


def stop_check(request: Request) -> Callable[[str], bool] | None:
    """Whether a text so far is at its end, by the request's stop texts and by what settles it."""
    decided, stop = request.decided, request.stop
    if not stop:
        return decided
    return lambda text: any(one in text for one in stop) or bool(decided and decided(text))


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """A text as far as the first of the stop texts."""
    return text[: min([len(text), *(text.find(one) for one in stop if one in text)])]


def decode_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """What a reader sees of generated tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def build_completion(tokenizer: Any, request: Request, row: "DecodingRow") -> Completion:
    """What a row that was continued came to."""
    whole = decode_text(tokenizer, row.new)
    text = cut_at_stop(whole, request.stop)
    stopped = len(text) < len(whole) or len(row.new) < row.limit
    tokens: list[Token] = []
    length = 0
    for place, (logprob, top) in enumerate(row.draw.told[: len(row.new)] if row.draw else ()):
        if len(text) < len(whole) and length >= len(text):
            break
        before = row.new[max(0, place - 1) : place]
        likeliest = tuple((_token_text(tokenizer, before, token), value) for token, value in top)
        tokens.append(Token(_token_text(tokenizer, before, row.new[place]), logprob, likeliest))
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
    """What a token adds to the one before it; a special one by its name, half a character as
    U+FFFD."""
    # Some tokenizers write a word's space only where something stands before it.
    start, whole = (
        tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        for ids in ([*before], [*before, token])
    )
    return str(whole[len(start) :])


class TokenCache:
    """Token ids of what was asked for; all are forgotten when there are more than `most`.

    The prompts of a task come again with every particle; those that quote an answer never do, and
    would fill the memory.

    Args:
        most: Tokens that may be kept before another text is prepared.
    """

    def __init__(self, most: int = 4_000_000) -> None:
        self.most = most
        self.held = 0
        self._found: dict[object, list[int]] = {}

    def get_ids(self, text: object, prepare: Callable[[], list[int]]) -> list[int]:
        """The token ids of a text, or of whatever else names them; prepared if not kept."""
        # Several threads may ask a model at once: what is found must not be gone when it is given.
        if (found := self._found.get(text)) is None:
            if self.held > self.most:
                self._found.clear()
                self.held = 0
            found = self._found[text] = prepare()
            self.held += len(found)
        return found
