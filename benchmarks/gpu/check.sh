#!/usr/bin/env bash
# Checks KVLink on the GPU of this machine, in under five minutes, and prints a short table last.
#
#   benchmarks/gpu/check.sh [--wheels FOLDER] [options of check.py]
#
# --wheels: make a virtual environment from the wheels in FOLDER and build there; no network is used. Without it $PYTHON
# (else python3) must have what `pip install -e .[dev,cuda]` brings.
# Exit codes: 0 all is well, 1 something is wrong or too slow, 2 bad arguments, 3 the machine lacks something.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python3}
if [[ ${1-} == --wheels ]]; then
  wheels=${2:?--wheels needs a folder}
  [[ -d $wheels ]] || { echo "no folder $wheels" >&2; exit 2; }
  shift 2
  "$python" -m venv --system-site-packages build/gpu-check || exit 3
  python=$PWD/build/gpu-check/bin/python
  "$python" -m pip install -q --no-index --find-links "$wheels" cmake ninja nanobind numpy msgspec rich ml_dtypes \
    'libucx-cu12>=1.18' 'nvidia-cuda-nvrtc-cu12>=12.8' >&2 || exit 3
fi
command -v "$python" >/dev/null || { echo "no $python on the path" >&2; exit 3; }
"$python" -c 'import numpy, msgspec' 2>/dev/null || { echo "$python lacks numpy and msgspec: give --wheels" >&2; exit 3; }
path=$PWD
if ! PYTHONPATH=$PWD "$python" -c 'import kvlink._native' 2>/dev/null; then
  if (cd / && "$python" -c 'import kvlink._native') 2>/dev/null; then
    path= # this tree is not built, and kvlink is installed
  else
    PYTHON=$python JOBS=$(nproc) scripts/build-native >&2 || exit 3
  fi
fi
exec env PYTHONPATH="${path:+$path:}$PWD/benchmarks/gpu" "$python" benchmarks/gpu/check.py "$@"
