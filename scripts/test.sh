#!/usr/bin/env bash
# Installs the project with its test extras and runs the checks and all tests, the slow ones too.
# Arguments go to pytest: bash scripts/test.sh -m "not slow". Two test files at a time; WORKERS=4 for four.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh
# Bytecode is cached: the tests start hundreds of processes.
unset PYTHONDONTWRITEBYTECODE
install test,train,data,lm-eval,bayes
bin="${VENV:-.venv}/bin"
status=0
# The tests run after a failed check too, so that one run reports everything.
"$bin/ruff" check . || status=$?
"$bin/ruff" format --check . || status=$?
# In parallel with the tests, which often wait for processes.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$bin/mypy" >"$types" 2>&1 &
"$bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@" || status=$?
wait $! || status=$?
cat "$types"
exit "$status"
