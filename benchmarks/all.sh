#!/usr/bin/env bash
# Run every benchmark that needs no GPU at a small size, in ten minutes on two idle cores, and print one page.
#   bash benchmarks/all.sh [FOLDER]       of the JSON files, which are replaced
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${1:-benchmarks/results/all}
status=0
rm -f "$out"/*.json

run() {
  echo "$*" >&2
  "$python" "benchmarks/$1.py" "${@:2}" --out "$out" >/dev/null || status=1
}

run startup --repeats 1
run endpoints --count 1000 --at-once 100 --repeats 1 --endpoints quick,slow,limit,faults,served
run iteration --particles 2 --items 16 --repeats 1 --cases plain
run engines --rows 4,10 --particles 4 --repeats 1 --kinds text,gradient
run optimizer_bowls --repeats 2 --only pso,random,cmaes
run gpu --device cpu --quick --models tiny
run faults --sample 40
"$python" benchmarks/frame.py "$out"
exit "$status"
