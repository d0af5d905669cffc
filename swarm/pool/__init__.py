"""Pool of LoRA experts of one base model, the basis of the search space."""

from swarm.pool.pool import Pool as Pool
