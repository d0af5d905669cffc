"""Open the page in a browser: python -m swarm.ui."""

from swarm.ui.cli import ui

if __name__ == "__main__":
    ui(prog_name="python -m swarm.ui", complete_var="_SWARM_UI_COMPLETE")
