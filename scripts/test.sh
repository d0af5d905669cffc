#!/usr/bin/env bash
# Installs the project with its test extras and runs the checks and the tests of tests/unit,
# tests/contract and tests/journey; tests/nightly is scripts/nightly.sh's. Arguments go to pytest:
# bash scripts/test.sh -k moa. Three test files at a time; WORKERS=4 for four.
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
types=$(mktemp) memory=
trap 'rm -rf "$types" ${memory:+"$memory"}' EXIT
# Searches wait for the disk (fsync) longer than they compute: their folders are in memory where it has
# room. PYTEST_DEBUG_TEMPROOT=/tmp leaves them on the disk, where they can be looked at afterwards.
if [ -z "${PYTEST_DEBUG_TEMPROOT:-}" ] && [ -w /dev/shm ]; then
    room=$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1 || true)
    free=$(awk '/^MemAvailable/ {print $2}' /proc/meminfo)
    if [ "${room:-0}" -gt 4000000 ] && [ "${free:-0}" -gt 12000000 ]; then
        memory=$(mktemp -d /dev/shm/swarm.XXXXXX)
        printf '#!/bin/sh\n' >"$memory/try"
        chmod +x "$memory/try"
        # Some containers mount it without the permission to execute, which tests need.
        if "$memory/try" 2>/dev/null; then export PYTEST_DEBUG_TEMPROOT="$memory"; fi
    fi
fi
"$bin/mypy" >"$types" 2>&1 &
"$bin/python" -m pytest -n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder \
    tests/unit tests/contract tests/journey "$@" || status=$?
wait $! || status=$?
cat "$types"
exit "$status"
