#!/usr/bin/env bash
# A task searched TRIALS times (10) with hyper-parameters drawn from the values that the original's scripts
# draw from, and one table of all; the scripts search_*.sh name a task and the data files that it needs:
#   GPUS=0,1,2 TRIALS=10 bash scripts/sweep.sh nlgraph nlgraph
# DEV (200) dev items and BUDGET (400) positions each. The same command resumes a stopped sweep. Other settings
# are key=value arguments of python -m swarm.study or of a search; tracker=none disables WandB.
set -euo pipefail
[ $# -ge 2 ] || { echo 'error: bash scripts/sweep.sh TASK "FILE ..." [KEY=VALUE ...]' >&2; exit 2; }
task=$1
read -ra files <<<"$2"
shift 2
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
"$python" -m swarm.fetch_data "${files[@]}"
mkdir -p search
sed -e "s/nlgraph_mini/$task/g; s/dev: .*/dev: ${DEV:-200}/; s/trials: .*/trials: ${TRIALS:-10}/" \
    -e "s/budgets: .*/budgets: [${BUDGET:-400}]/" conf/study/sweep.yaml >"search/sweep_$task.yaml"
exec "$python" -m swarm.study "search/sweep_$task.yaml" gpus="${GPUS-0,1,2,3,4}" \
    model=gemma_7b pool=gemma_7b tracker=wandb "$@"
