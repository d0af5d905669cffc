"""Tasks: the prompts put to a model and the scoring of its answers."""

from swarm.tasks.base import Item as Item
from swarm.tasks.base import Score as Score
from swarm.tasks.base import Task as Task
