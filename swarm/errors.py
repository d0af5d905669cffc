"""The one exception that is meant for people."""


class UserError(Exception):
    """A mistake the user can mend; entries print it as one line and exit with `code`.

    Say which key or file it is about, what is allowed there and what to do.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(" ".join(message.split()))
        self.code = code
