"""Open the page in a browser: python -m swarm.ui."""

from pathlib import Path

import click

from swarm._util.cli import run_program
from swarm._util.options import CONTEXT, SettingType, run_click
from swarm._util.settings import Text
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


@click.command(help=DESCRIPTION, context_settings=CONTEXT | {"show_default": True})
@click.option("--host", default="127.0.0.1", help="Loopback address to bind.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    help="Port of the server; 0 takes a free one.",
)
@click.option("--no-browser", is_flag=True, help="Do not open the browser.")
@click.option(
    "--no-token",
    is_flag=True,
    help="Require no token: every user of this machine can start searches.",
)
@click.option(
    "--pool",
    type=SettingType(Text),
    default="initial_experts",
    help="Folder of the experts of local/ names.",
)
@click.option(
    "--base",
    type=SettingType(Text),
    help="Base of local/ names: an option of conf/model or a folder; usually the experts name it.",
)
@click.option("--device", type=SettingType(Text), help="Device of local models: cpu, cuda, cuda:1.")
@click.option(
    "--config-dir",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    help="Folder of further options, such as FOLDER/task/riddles.yaml, also of the searches.",
)
def ui(
    host: str,
    port: int,
    no_browser: bool,
    no_token: bool,
    pool: str,
    base: str | None,
    device: str | None,
    config_dir: Path | None,
) -> None:
    """Serve the web application; the help text is `DESCRIPTION`."""
    require_packages("ui", "fastapi", "nicegui", "uvicorn")
    from swarm.serve.server import is_loopback

    if not is_loopback(host):
        raise UserError(
            f"--host {host}: everyone who can reach the page can start searches, so it is "
            "served on loopback addresses only, such as 127.0.0.1; from another machine use "
            f"ssh -L {port}:127.0.0.1:{port} THIS_MACHINE",
            2,
        )
    from swarm.ui.app import serve_pages
    from swarm.ui.state import AppState

    home = AppState(Path.cwd(), pool, base, device, config_dir)
    serve_pages(home, host, port, not no_browser, not no_token)


if __name__ == "__main__":
    run_program(lambda: run_click(ui, None, "python -m swarm.ui"))
