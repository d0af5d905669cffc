#!/usr/bin/env bash
# What is too slow to pass before every change, to be run each night and before a version: the tests
# of vLLM, in an environment of their own, as vLLM goes with no other extra. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/test_vllm.sh "$@"
