# Sourced by ./tools/train and ./tools/test: sets up .venv, goes to the repository's folder and names its Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/set_up
python="$PWD/.venv/bin/python"
export PATH="$PWD/.venv/bin:$PATH"
# Set-up compiles nothing: who imports a module first leaves its bytecode to all others. Without it each start of an
# engine compiles thousands of modules again, which costs 20 CPU-seconds and more.
unset PYTHONDONTWRITEBYTECODE
# One thread a process: many processes share the cores, and two threads each were seen to be far slower than one.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export MKL_NUM_THREADS="${MKL_NUM_THREADS:-1}"
