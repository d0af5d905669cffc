"""Tasks: what a model is asked and how its answers are scored."""

from swarm.tasks.base import Item as Item
from swarm.tasks.base import Score as Score
from swarm.tasks.base import Task as Task
