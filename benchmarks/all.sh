#!/usr/bin/env bash
# Run every benchmark that needs no GPU, endpoint, finished search or other project, at small sizes, and
# write one page with the date and the processor; a few minutes on two idle cores.
#   bash benchmarks/all.sh [FILE]
#   ONLY="startup gradient" bash benchmarks/all.sh FILE       these alone
set -euo pipefail
cd "$(dirname "$0")/.."
page=${1:-benchmarks/results/all.md}
python=${PYTHON:-python}
mkdir -p "$(dirname "$page")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TIMEFORMAT='%R s (%U + %S CPU s)'
status=0
load=$(cut -d ' ' -f 1 /proc/loadavg)

run() {
  local name=$1 shown
  [[ -z ${ONLY:-} || " $ONLY " == *" $name "* ]] || return 0
  shift
  shown="$name${*:+ $*}"
  shown=${shown//$work/FOLDER}
  printf '%s\n' "$shown" >&2
  if { time "$python" "benchmarks/$name.py" "$@" >"$work/out" 2>"$work/error"; } 2>"$work/time"; then
    printf '| `%s` | %s |\n' "$shown" "$(tail -1 "$work/time")" >>"$work/table"
  else
    status=1
    tail -1 "$work/error" >&2
    printf '| `%s` | failed |\n' "$shown" >>"$work/table"
  fi
  { printf '\n## %s\n\n`python benchmarks/%s`\n\n' "$name" "${shown/#$name/$name.py}"; sed 's/^#/##/' "$work/out"; } >>"$work/parts"
}

run startup --repeats 3
run throughput --count 1000 --at-once 100 --slow 100 --repeats 1
run iteration --particles 4 --items 16 --repeats 1 --cases plain
run batching --rows 4,10 --particles 4 --repeats 1
run gradient --steps 2 --repeats 1
run serving --count 200 --repeats 1
run rate_limit --count 60
run optimizer_bowls --seeds 2 --only pso,random,cmaes
run gpu --device cpu --quick --models tiny --out "$work/gpu"
run faults --sample 40

{
  printf '%s, %s cores of %s, threads per process: %s, load %s when it began and %s when it ended. Quicker type: %s\n\n' \
    "$(date +%F)" "$(nproc --all)" \
    "$(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -1)" "${OMP_NUM_THREADS:-all}" "$load" \
    "$(cut -d ' ' -f 1 /proc/loadavg)" "$dtype"
  printf '| benchmark | wall and CPU seconds of the whole command |\n| --- | --- |\n'
  cat "$work/table"
} >"$work/summary"
{
  printf '# All benchmarks at small sizes\n\n'
  cat "$work/summary" "$work/parts"
} >"$page"
printf 'written: %s\n' "$page"
exit "$status"
