#!/usr/bin/env bash
# Make the environment .venv from tools/cpu.lock, or do nothing when it is already so. The work is in environment.py;
# here a Python to run it with is found. MONARCH_RL_PYTHON=/path/to/python chooses one.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

fits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

candidates=(python3.11 python3.12 python3.13 python3 python)
if [[ -n "${MONARCH_RL_PYTHON:-}" ]]; then
    candidates=("$MONARCH_RL_PYTHON")
fi
for candidate in "${candidates[@]}"; do
    if fits "$candidate"; then
        exec "$candidate" "$here/environment.py" "$@"
    fi
done
echo "setup: no Python 3.11, 3.12 or 3.13 found (tried: ${candidates[*]})." >&2
echo "setup: install one, or name one: MONARCH_RL_PYTHON=/path/to/python $0" >&2
exit 1
