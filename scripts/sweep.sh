#!/usr/bin/env bash
# A task searched TRIALS times (10) with hyper-parameters drawn as the original's scripts draw them,
# and one table of all; the scripts search_*.sh name a task and the data files that it needs:
#   GPUS=0,1,2 TRIALS=10 bash scripts/sweep.sh nlgraph nlgraph
# The same command resumes a stopped sweep. Other settings are key=value arguments: a key that is set is
# not drawn, name=NAME starts another sweep, tracker=none disables WandB.
set -euo pipefail
[ $# -ge 2 ] || { echo 'error: bash scripts/sweep.sh TASK "FILE ..." [KEY=VALUE ...]' >&2; exit 2; }
task=$1
read -ra files <<<"$2"
shift 2
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
"$python" scripts/fetch_data.py "${files[@]}"
exec "$python" -m swarm.sweep trials="${TRIALS:-10}" task="$task" gpus="${GPUS-0,1,2,3,4}" \
    model=gemma_7b pool.folder=initial_experts/gemma_7b experiment=paper tracker=wandb "$@"
