"""What a model thinks before it answers, told apart from its answer, even as it comes in pieces."""

from swarm.models import Delta

BEGINS, ENDS = ("<think>", "<thinking>"), ("</think>", "</thinking>")


class Thoughts:
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
            tag = next(filter(begun.startswith, BEGINS), "")
            if not tag and any(tag.startswith(begun) for tag in BEGINS):
                return Delta()
            self._in = bool(tag)
            if not tag:
                return self.rest()
            self._held = begun.removeprefix(tag)
        return self._thought()

    def rest(self) -> Delta:
        """What has been held back for the end of a tag that did not come."""
        held, self._held = self._held, ""
        return Delta(reasoning=held) if self._in else Delta(held)

    def _thought(self) -> Delta:
        places = [(self._held.find(tag), tag) for tag in ENDS if tag in self._held]
        if places:
            place, tag = min(places)
            thought, self._held = self._held[:place], self._held[place + len(tag) :]
            self._in = False
            return Delta(self.rest().text, thought)
        # A tag may have begun.
        place = self._held.rfind("<")
        if place < 0 or not any(tag.startswith(self._held[place:]) for tag in ENDS):
            place = len(self._held)
        thought, self._held = self._held[:place], self._held[place:]
        return Delta(reasoning=thought)


def split(text: str) -> Delta:
    """A whole text and its thoughts."""
    if "<" not in text:
        return Delta(text)
    splitter = Thoughts()
    first, rest = splitter.feed(text), splitter.rest()
    return Delta(first.text + rest.text, first.reasoning + rest.reasoning)
