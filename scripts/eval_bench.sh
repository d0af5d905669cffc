#!/usr/bin/env bash
# A benchmark in three steps: MODEL answers, JUDGE scores each answer, and the averages are shown;
# eval_mt_bench.sh and eval_flask.sh select the benchmark:
#   MODEL=moa/lite JUDGE=gpt-4o bash scripts/eval_bench.sh flask --questions FILE
# Without FILE, on our own small set. Existing answers are not requested again. Arguments go to
# both generate and judge. Results are in OUT (outputs/BENCH).
set -euo pipefail
[ $# -ge 1 ] || { echo 'error: bash scripts/eval_bench.sh mt_bench|flask [OPTION ...]' >&2; exit 2; }
bench=$1
shift
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
model=${MODEL:-local/base}
out=${OUT:-outputs/$bench}
answers="$out/answers/${model//[\/:]/_}.jsonl"
"$python" -m swarm.judge "$bench" generate --model "$model" --output "$answers" "$@"
"$python" -m swarm.judge "$bench" judge --answers "$answers" --judge "${JUDGE:-$model}" \
    --out "$out" "$@"
"$python" -m swarm.judge "$bench" show --out "$out"
