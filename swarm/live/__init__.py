"""What people see of a search while it runs, and at its end."""

from swarm.live.progress import Progress
from swarm.live.verdict import spent_line
from swarm.live.view import View

__all__ = ["Progress", "View", "spent_line"]
