#!/usr/bin/env bash
# The legal domain, two tasks at once: GPUS=0,1,2 bash scripts/search_legal.sh
# Other settings as key=value arguments; wandb=disabled keeps the run off WandB.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
"$python" scripts/fetch_data.py hearsay citation_prediction_classification
exec "$python" -m swarm.search task=legal gpus="${GPUS-0,1,2,3,4}" \
    model=gemma_7b pool.folder=initial_experts/gemma_7b experiment=paper wandb=online "$@"
