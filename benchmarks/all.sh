#!/usr/bin/env bash
# Run every benchmark that needs no GPU, endpoint or other project, at small sizes, and write one page
# with the date, the processor and its features; about ten minutes on two cores.
#   bash benchmarks/all.sh [FILE]
set -euo pipefail
cd "$(dirname "$0")/.."
page=${1:-benchmarks/results/all.md}
python=${PYTHON:-python}
mkdir -p "$(dirname "$page")"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export TIMEFORMAT='%R s (%U + %S CPU s)'
wanted='avx2|avx512f|avx512_bf16|avx512_vnni|amx_bf16|amx_int8|asimd|bf16|i8mm|sve'
status=0

run() {
  local name=$1
  shift
  printf '%s\n' "$name $*" >&2
  if { time "$python" "benchmarks/$name.py" "$@" >"$work/out" 2>"$work/error"; } 2>"$work/time"; then
    printf '| `%s` | %s |\n' "$name $*" "$(tail -1 "$work/time")" >>"$work/table"
  else
    status=1
    tail -1 "$work/error" >&2
    printf '| `%s` | failed |\n' "$name $*" >>"$work/table"
  fi
  { printf '\n## %s\n\n`python benchmarks/%s.py %s`\n\n' "$name" "$name" "$*"; cat "$work/out"; } >>"$work/parts"
}

run startup --repeats 3
run throughput --count 1000 --repeats 1
run iteration --particles 4 --items 16 --repeats 1 --cases plain
run update --repeats 1
run batching --rows 4,10 --particles 4 --repeats 1
run workers --items 8 --repeats 1
run voices --new 10 --repeats 1
run journal --iterations 200
run serving --count 200 --repeats 1
run rate_limit --count 60
run token_swarms --items 5 --particles 4 --repeats 1
run full_models --models 2 --positions 2
run consortium 60
run plan
run faults --sample 40

{
  printf '# All benchmarks at small sizes\n\n%s, %s cores, %s\n\nFeatures: %s\n\n' \
    "$(date +%F)" "$(nproc)" \
    "$(sed -n 's/^model name[[:space:]]*: //p' /proc/cpuinfo | head -1)" \
    "$(grep -m1 -E '^(flags|Features)' /proc/cpuinfo | tr ' ' '\n' | grep -wE "$wanted" | sort -u | paste -sd ' ')"
  printf '| benchmark | wall and CPU seconds of the whole command |\n| --- | --- |\n'
  cat "$work/table" "$work/parts"
} >"$page"
printf 'written: %s\n' "$page"
exit "$status"
