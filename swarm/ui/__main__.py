"""Open the page in a browser: python -m swarm.ui."""

from pathlib import Path

import click

from swarm._util.cli import run_program
from swarm._util.options import run_click
from swarm.errors import UserError, require_packages

DESCRIPTION = """\
Web application for searches, models, conversations and comparisons.

\b
python -m swarm.ui                                 http://127.0.0.1:8080/?token=...
python -m swarm.ui --port 0 --no-browser           any free port, no browser
python -m swarm.ui --pool my_experts --base local  other experts of another base
python -m swarm.ui --config-dir mine               also the tasks in mine/task/

The printed address contains an access token: everyone who has it can start processes here.

It shows the runs in search/ of the current folder. It is reachable from this machine only, and
sends no data elsewhere. Ctrl-C stops it; searches that it started continue.
"""


@click.command(help=DESCRIPTION, context_settings={"max_content_width": 100})
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port of the server; 0 selects a free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Loopback address to bind.")
@click.option("--no-browser", is_flag=True, help="Do not open the browser.")
@click.option(
    "--no-token",
    is_flag=True,
    help="Require no token: every user of this machine can start searches.",
)
@click.option(
    "--pool",
    metavar="FOLDER",
    default="initial_experts",
    show_default=True,
    help="Folder of the experts of local/ names.",
)
@click.option(
    "--base",
    metavar="MODEL",
    help="Base model of local/ names: an option of conf/model or "
    "a folder; default: the base named by the experts.",
)
@click.option("--device", metavar="DEVICE", help="Device of local models: cpu, cuda, cuda:1.")
@click.option(
    "--config-dir",
    metavar="FOLDER",
    help="Folder of further configuration options, such as FOLDER/task/riddles.yaml; passed on "
    "to the searches.",
)
def ui(
    port: int,
    host: str,
    no_browser: bool,
    no_token: bool,
    pool: str,
    base: str | None,
    device: str | None,
    config_dir: str | None,
) -> None:
    """Serve the web application; the help text is `DESCRIPTION`."""
    texts = {"host": host, "pool": pool, "base": base, "device": device}
    for name, value in {**texts, "config-dir": config_dir}.items():
        if value is not None and not value.strip():
            raise UserError(f"--{name}: the value is empty; give one or leave the option out", 2)
    require_packages("ui", "fastapi", "nicegui", "uvicorn")
    from swarm.serve.server import is_loopback

    if not is_loopback(host):
        raise UserError(
            f"--host {host}: everyone who can reach the page can start searches, so it is "
            "served on loopback addresses only, such as 127.0.0.1; from another machine use "
            f"ssh -L {port}:127.0.0.1:{port} THIS_MACHINE",
            2,
        )
    folder = None if config_dir is None else Path(config_dir).expanduser().resolve()
    if folder and not folder.is_dir():
        raise UserError(f"--config-dir {config_dir}: no such folder", 2)
    from swarm.ui.app import serve_pages
    from swarm.ui.state import AppState

    home = AppState(Path.cwd(), pool, base, device, folder)
    serve_pages(home, host, port, not no_browser, not no_token)


if __name__ == "__main__":
    run_program(lambda: run_click(ui, None, "python -m swarm.ui"))
