"""Models as text in, text out: endpoints, local models, caches and traces."""

from swarm.models.base import Completion as Completion
from swarm.models.base import Model as Model
from swarm.models.base import Request as Request
