"""Templates of judges' prompts: {question} and {answer} are filled in, other braces may stay."""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from string import Formatter
from typing import Any

from swarm.compare.errors import InvalidArgument
from swarm.compare.questions.arguments import shorten_repr

TEMPLATE_FIELDS = ("question", "answer")
FIELD_PATTERN = re.compile(r"\{(question|answer)\}")
BRACED_WORD_PATTERN = re.compile(r"\{([A-Za-z_]+)\}")


class JudgeTemplate:
    """A judge's prompt.

    A text that `str.format` can fill with the two fields is filled so, and doubled braces become
    single ones. In any other text, such as one that shows JSON, {question} and {answer} are
    filled in and all else stays as it is written.

    Args:
        text: With {answer} in it, and maybe {question}.

    Raises:
        WrongValue: It has no {answer}, or a field that looks like a slip.
    """

    def __init__(self, text: Any) -> None:
        if not isinstance(text, str):
            raise InvalidArgument(f"a judge's template must be one text, not {type(text).__name__}")
        self.text = text
        fields = parse_format_fields(text)
        self.plain = fields is None
        self.fields = set(FIELD_PATTERN.findall(text)) if fields is None else fields
        for word in BRACED_WORD_PATTERN.findall(text):
            near = get_close_matches(word.lower(), TEMPLATE_FIELDS, 1, 0.7)
            if near and word not in TEMPLATE_FIELDS:
                raise InvalidArgument(f"a judge's template has {{{word}}}; did you mean {{{near[0]}}}?")
        if "answer" not in self.fields:
            raise InvalidArgument(
                f"a judge's template must have {{answer}} in it; this has not: {shorten_repr(text)}"
            )

    @property
    def uses_question(self) -> bool:
        """Whether the prompt depends on the question."""
        return "question" in self.fields

    def fill(self, question: str, answer: str) -> str:
        """The prompt."""
        if not self.plain:
            return self.text.format(question=question, answer=answer)
        values = {"question": question, "answer": answer}
        return FIELD_PATTERN.sub(lambda found: values[found[1]], self.text)


def parse_format_fields(text: str) -> set[str] | None:
    """The fields of a text that `str.format` can fill; `None` if it cannot."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
        if not names <= set(TEMPLATE_FIELDS):
            return None
        text.format(question="", answer="")
    except (ValueError, KeyError, IndexError, AttributeError):
        return None
    return names


def content_as_text(content: Any) -> str:
    """What a turn says, for a judge: of parts the texts, and the kinds of the others."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    return "\n".join(
        str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in content
    )
