"""Viewer: browse, search and compare answers in the browser, served on this machine."""

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.errors import InvalidArgument, missing_extra_error

if TYPE_CHECKING:
    from swarm.compare.view.app import ViewerHandle

__all__ = ["view"]


def view(
    data: Any,
    *,
    sort_by: str | None = "__random__",
    sort_ascending: bool = True,
    open_browser: bool = True,
    port: int = 8501,
    host: str = "127.0.0.1",
    block: bool | None = None,
) -> "ViewerHandle":
    """Show answers in the browser.

    Args:
        data: A data frame of `Question.df`, a list of dictionaries, or the path of a .jsonl, .csv
            or .parquet file. The column "answer" is required; "question", "api_kwargs", "model",
            "group", "paraphrase_ix", "error" and judges are used if present.
        sort_by: Initial sort column, "__random__" for a random order, `None` for that of the data.
        sort_ascending: Whether to sort in ascending order.
        open_browser: Whether to open the page.
        port: Port of the server; if it is taken, the next free one. 0: any free one.
        host: Address to bind: by default only this machine has access; with another address,
            everyone who can reach it.
        block: Whether to wait for Ctrl-C; by default unless an event loop is running, as in a
            notebook.

    Returns:
        The viewer, with its `url` and `close()`; already closed if this call waited.

    Raises:
        UserError: The data cannot be shown, or the address cannot be bound.
    """
    _check_packages()
    from swarm._util.terminal import escape_control_chars
    from swarm.compare.view.app import ViewerHandle
    from swarm.compare.view.load import load_columns
    from swarm.compare.view.table import AnswerTable
    from swarm.serve.cli import is_loopback

    name = Path(data).name if isinstance(data, str | Path) else "answers"
    columns = load_columns(data, name)
    if sort_by not in (None, "__random__") and sort_by not in columns:
        raise InvalidArgument(
            f'sort_by="{sort_by}": no such column; there are {", ".join(columns)}, and "__random__"'
        )
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"port={port}: must be from 0 to 65535")
    start = {
        "sort": _sort_parameter(sort_by, sort_ascending, columns),
        "seed": str(secrets.randbelow(10**6)),
    }
    running = ViewerHandle(AnswerTable(columns, name), start, host, port)
    if port not in (0, running.port):
        print(f"port {port} is in use; using {running.port}", flush=True)
    if not is_loopback(host):
        print("everyone who can reach this address can read the answers", flush=True)
    waits = not _is_loop_running() if block is None else block
    ending = "Ctrl-C ends it" if waits else "close() ends it"
    print(escape_control_chars(f"viewing {name} at {running.url} ({ending})"), flush=True)
    if open_browser:
        running.open_browser()
    if waits:
        running.wait()
    return running


def _sort_parameter(column: str | None, ascending: bool, columns: dict[str, list[Any]]) -> str:
    """Return the sort order as a parameter of the page's URL."""
    if column is None or ascending or column == "__random__":
        return column or ""
    return f"-{column}"


def _is_loop_running() -> bool:
    """Return whether an event loop is running in this thread, which must not be blocked."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _check_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise missing_extra_error(error, "compare") from None
