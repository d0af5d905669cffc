"""The one exception that is meant for people."""

from swarm.printing import harmless


class UserError(Exception):
    """A mistake the user can mend; entries print it as one line and exit with `code`.

    Say which key or file it is about, what is allowed there and what to do. Control characters,
    which a file's name or a service's words may hold, become visible.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(harmless(" ".join(message.split())))
        self.code = code
