"""Trains one local job and ends: python -m swarm.compare.finetuning.worker ID --data-dir FOLDER."""

import argparse
import sys
import traceback
from collections.abc import Sequence

from swarm.compare.finetuning.store import JobStore
from swarm.compare.finetuning.training import run_job
from swarm.errors import UserError


def run_worker(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m swarm.compare.finetuning.worker")
    parser.add_argument("id")
    parser.add_argument("--data-dir", default="llmcomp_models")
    given = parser.parse_args(arguments)
    try:
        run_job(JobStore(given.data_dir), given.id)
        return 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(run_worker())
