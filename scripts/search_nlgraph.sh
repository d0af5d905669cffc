#!/usr/bin/env bash
# The original's first search: NLGraph, twenty particles. GPUs: GPUS=0,1,2 bash scripts/search_nlgraph.sh
# Other settings as key=value arguments; wandb=disabled keeps the run off WandB.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
"$python" scripts/fetch_data.py nlgraph
exec "$python" -m swarm.search task=nlgraph gpus="${GPUS-0,1,2,3,4}" \
    model=gemma_7b pool.folder=initial_experts/gemma_7b experiment=paper wandb=online "$@"
