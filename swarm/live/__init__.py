"""What people see of a search while it runs, and at its end."""

from swarm.live.progress import SearchProgress
from swarm.live.verdict import scoring_cost_line
from swarm.live.view import LiveView

__all__ = ["SearchProgress", "LiveView", "scoring_cost_line"]
