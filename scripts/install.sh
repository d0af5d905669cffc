# Sourced by the other scripts: makes the virtual environment $VENV (.venv) and installs the project
# with the extras named in $1 (or none). A second call does nothing unless pyproject.toml has changed.
install() {
    local extras=${1-} venv=${VENV:-.venv} python stamp options=()
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "error: $python is older than Python 3.11; name another one with PYTHON=..." >&2
        exit 1
    fi
    stamp="$(cat pyproject.toml constraints-cpu.txt | cksum) $extras"
    if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$stamp" ]; then
        return
    fi
    if ! command -v nvidia-smi >/dev/null || ! nvidia-smi >/dev/null 2>&1; then
        options=(-c constraints-cpu.txt)
    fi
    echo "installing into $venv (one to five minutes: PyTorch is large) ..."
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    # uv, where it can be had, takes half of pip's time.
    if "$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv 2>/dev/null; then
        VIRTUAL_ENV="$(cd "$venv" && pwd)" "$venv/bin/uv" pip install --quiet "${options[@]}" \
            --editable ".${extras:+[$extras]}"
    else
        # -qq: show errors, but not 580 lines of setuptools warnings about yaml folders.
        "$venv/bin/python" -m pip install -qq "${options[@]}" --no-compile \
            --editable ".${extras:+[$extras]}"
    fi
    echo "$stamp" >"$venv/.installed"
}
# Installs Debian's Chromium for the tests of pages, where there is no browser and this is root with a
# package manager and a network (a CI container). Anything else leaves those tests skipped.
install_chromium() {
    if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then
        return
    fi
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing chromium for the tests of pages ..."
        export DEBIAN_FRONTEND=noninteractive
        # Mirrors may hang: five minutes each.
        timeout 300 apt-get -qq update >/dev/null 2>&1 || true
        timeout 300 apt-get -qq -y install --no-install-recommends chromium fonts-liberation \
            </dev/null >/dev/null 2>&1 || true
    fi
    command -v chromium >/dev/null || echo "no chromium: the tests of pages are skipped"
}
