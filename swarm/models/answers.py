"""What is read of a chat completion, which came at once or in pieces, and what is kept of it."""

from collections.abc import Mapping
from typing import Any

from swarm.models import Delta, Token
from swarm.models.failures import NotAgreed, one_line, said
from swarm.models.thoughts import Thoughts, split

UNLIKELIEST = -9999.0
"""The log probability of what cannot be."""

Answer = dict[str, Any]
"""What is kept: the fields of a `Completion` that say anything, as JSON."""

COUNTED = {"prompt_tokens": "prompt_tokens", "new_tokens": "completion_tokens"}
"""Fields of a completion, and what a server calls them."""


def answers_in(content: Any, most: int, seconds: float) -> list[Answer]:
    """What is kept of each of a completion's answers, at most so many.

    The server counts the tokens of all its answers together; each has an equal part.

    Args:
        content: What the server said.
        most: How many were asked for.
        seconds: How long it took.

    Raises:
        ValueError: It is no completion, as where a router answers 200 and an error; or another
            error that says so.
    """
    choices = content.get("choices") if isinstance(content, Mapping) else None
    if not choices:
        raise NotAgreed(one_line(said(content)) or "no choices")
    answers = [read(choice) for choice in list(choices)[:most]]
    usage, model = content.get("usage") or {}, content.get("model")
    for name, counted in COUNTED.items():
        part, over = divmod(int(usage.get(counted) or 0), len(answers))
        for number, answer in enumerate(answers):
            answer[name] = part + (number < over)
    for answer in answers:
        answer["seconds"] = round(seconds, 6)
        if model and isinstance(model, str):
            answer["model"] = model
    return answers


def read(choice: Mapping[str, Any]) -> Answer:
    """One answer, without what belongs to all of them; beside the text, only what says anything."""
    text, thoughts = spoken(choice["message"])
    told = split(text)
    answer: Answer = {"text": told.text}
    if thoughts := (thoughts + told.reasoning).strip():
        answer["reasoning"] = thoughts
    refused = choice["message"].get("refusal") and not answer["text"]
    if finish := "refusal" if refused else choice.get("finish_reason"):
        answer["finish"] = str(finish)
    if tokens := tokens_in(choice):
        answer["tokens"] = tokens
    return answer


def untold(body: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    """Whether an answer has a text, and none of the log probabilities that the body asks for.

    Endpoints leave them out now and then. Such an answer is of no use to who asked, and not kept.
    """
    if not body.get("logprobs") or not answer.get("text"):
        return False
    tokens = answer.get("tokens")
    return not tokens or (bool(body.get("top_logprobs")) and not tokens[0][2])


def spoken(message: Mapping[str, Any]) -> tuple[str, str]:
    """Text and thoughts of a message or of a piece of one, as the server tells them apart.

    Raises:
        ValueError: The content is no text.
    """
    text, thoughts = message.get("content") or "", ""
    for field in ("reasoning_content", "reasoning"):
        if not thoughts and isinstance(message.get(field), str):
            thoughts = message[field]
    if isinstance(text, list):
        thoughts += "".join(inner(part["thinking"]) for part in text if part.get("thinking"))
        text = inner(text)
    if not isinstance(text, str):
        raise NotAgreed("the content is not a text")
    return text, thoughts


def inner(parts: Any) -> str:
    """The text of a list of parts, or of a text."""
    if isinstance(parts, str):
        return parts
    return "".join(str(part["text"]) for part in parts if part.get("type") == "text")


def tokens_in(choice: Mapping[str, Any]) -> list[Token]:
    """The tokens of an answer or of a piece of one, where log probabilities were asked for."""
    told = (choice.get("logprobs") or {}).get("content") or []
    return [
        Token(
            str(token["token"]),
            chance(token["logprob"]),
            tuple((str(t["token"]), chance(t["logprob"])) for t in token.get("top_logprobs") or []),
        )
        for token in told
    ]


def chance(said: Any) -> float:
    """A log probability; what some servers write for none at all, minus infinity, is no JSON."""
    return max(UNLIKELIEST, float(said))


class Pieces:
    """Reads a chat completion from the events of a stream; see `swarm.models.asking.Reader`."""

    def __init__(self) -> None:
        self._thoughts = Thoughts()
        self._texts: list[tuple[str, str]] = []
        self._tokens: list[Any] = []
        self._finish = ""
        self._common: dict[str, Any] = {}
        self._at_once: Any = None

    @property
    def ended(self) -> bool:
        """Whether the server said why the text ends."""
        return bool(self._finish or self._at_once)

    def event(self, content: Any) -> list[Delta]:
        """What one event adds, if anything.

        Raises:
            ValueError: It tells of an error, or is none of a chat completion.
        """
        if content.get("error"):
            raise NotAgreed(one_line(said(content)))
        self._common |= {key: content[key] for key in ("model", "usage") if content.get(key)}
        if not (choices := content.get("choices")):
            return []
        if "message" in choices[0]:
            self._at_once = content
            answer = read(choices[0])
            return [Delta(answer["text"], answer.get("reasoning", ""))]
        text, thoughts = spoken(choices[0].get("delta") or {})
        self._texts.append((text, thoughts))
        self._tokens += (choices[0].get("logprobs") or {}).get("content") or []
        self._finish = choices[0].get("finish_reason") or self._finish
        piece = self._thoughts.feed(text)
        return told(Delta(piece.text, thoughts + piece.reasoning))

    def rest(self) -> list[Delta]:
        """What was held back because it might have been a tag."""
        return told(self._thoughts.rest())

    def whole(self) -> Any:
        """The completion as if it had come at once."""
        if self._at_once or not self._texts:
            return self._at_once
        text, thoughts = ("".join(parts) for parts in zip(*self._texts, strict=True))
        choice = {
            "message": {"content": text, "reasoning_content": thoughts},
            "finish_reason": self._finish,
            "logprobs": {"content": self._tokens},
        }
        return {"choices": [choice], **self._common}


def told(delta: Delta) -> list[Delta]:
    """The piece, if there is anything in it."""
    return [delta] if any(delta) else []


def same_model(asked: str, other: str) -> bool:
    """Whether a server may call the model that was asked so.

    Servers add a date or a tag, and leave out who made it; they resolve "latest".
    """
    mine, theirs = (name.casefold().rsplit("/", 1)[-1] for name in (asked, other))
    mine = mine.removesuffix("-latest")
    return not theirs or mine in theirs or theirs in mine
