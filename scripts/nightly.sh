#!/usr/bin/env bash
# What is too slow to pass before every change, to be run each night and before a version: the tests
# of tests/nightly, and those of vLLM in an environment of their own, as it goes with no other extra.
# Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh
unset PYTHONDONTWRITEBYTECODE
install test,train,data,lm-eval,bayes
status=0
"${VENV:-.venv}/bin/python" -m pytest -n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder \
    tests/nightly --ignore tests/nightly/vllm "$@" || status=$?
VENV=.venv-vllm bash scripts/test_vllm.sh "$@" || status=$?
exit "$status"
