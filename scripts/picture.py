"""Draws what a finished run printed, as an SVG: picture.py search/quickstart quickstart.svg"""

import io
import json
import sys
from pathlib import Path

from rich.console import Console

from swarm.errors import UserError
from swarm.live import View


def draw(folder: Path, picture: Path) -> None:
    """Write the iterations and the verdict of the run in `folder` to `picture`.

    Raises:
        UserError: The folder holds no finished run.
    """
    path = folder / "state.json"
    state = json.loads(path.read_text()) if path.is_file() else {"metrics": None}
    if state["metrics"] is None:
        raise UserError(f"{folder} holds no finished run; allowed: a folder of search/")
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    view, best = View(0, console), None
    for number, entry in enumerate(state["rounds"]):
        known = [u for u in entry["utilities"] if u is not None]
        best = max([u for u in (best, *known) if u is not None], default=None)
        cells = "  ".join("  -  " if u is None else f"{u:.3f}" for u in entry["utilities"])
        view.say(f"iteration {number:>2}  best {best:.3f}  particles {cells}")
    view.verdict(state["metrics"], state["experts"])
    picture.write_text(console.export_svg(title=f"python -m swarm.search name={folder.name}"))


if __name__ == "__main__":
    try:
        draw(Path(sys.argv[1]), Path(sys.argv[2]))
    except (UserError, IndexError) as error:
        sys.exit(f"error: {error or 'picture.py RUN_FOLDER PICTURE.svg'}")
