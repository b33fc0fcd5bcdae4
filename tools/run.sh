# Sourced by ./tools/train and ./tools/test: sets up .venv, goes to the repository's folder and names its Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh
python="$PWD/.venv/bin/python"
export PATH="$PWD/.venv/bin:$PATH"
# One thread a process: many processes share the cores, and two threads each were seen to be far slower than one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}"
