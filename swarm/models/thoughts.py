"""What a model thinks before it answers, told apart from its answer, even as it comes in pieces."""

from swarm.models import Delta

OPENING_TAGS, CLOSING_TAGS = ("<think>", "<thinking>"), ("</think>", "</thinking>")


class ThoughtSplitter:
    """Splits a text that may begin with <think> ... </think>; one that never ends is all thought.

    What stands before the thoughts is dropped if it is blank; elsewhere the tags are text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._in: bool | None = None

    def feed(self, piece: str) -> Delta:
        """What is certain by now."""
        if self._in is False:
            return Delta(piece)
        self._held += piece
        if self._in is None:
            begun = self._held.lstrip()
            tag = next(filter(begun.startswith, OPENING_TAGS), "")
            if not tag and any(tag.startswith(begun) for tag in OPENING_TAGS):
                return Delta()
            self._in = bool(tag)
            if not tag:
                return self.flush_pending()
            self._held = begun.removeprefix(tag)
        return self._split_at_closing_tag()

    def flush_pending(self) -> Delta:
        """What has been held back for the end of a tag that did not come."""
        held, self._held = self._held, ""
        return Delta(reasoning=held) if self._in else Delta(held)

    def _split_at_closing_tag(self) -> Delta:
        places = [(self._held.find(tag), tag) for tag in CLOSING_TAGS if tag in self._held]
        if places:
            place, tag = min(places)
            thought, self._held = self._held[:place], self._held[place + len(tag) :]
            self._in = False
            return Delta(self.flush_pending().text, thought)
        # A tag may have begun.
        place = self._held.rfind("<")
        if place < 0 or not any(tag.startswith(self._held[place:]) for tag in CLOSING_TAGS):
            place = len(self._held)
        thought, self._held = self._held[:place], self._held[place:]
        return Delta(reasoning=thought)


def split_thoughts(text: str) -> Delta:
    """A whole text and its thoughts."""
    if "<" not in text:
        return Delta(text)
    splitter = ThoughtSplitter()
    first, rest = splitter.feed(text), splitter.flush_pending()
    return Delta(first.text + rest.text, first.reasoning + rest.reasoning)
