#!/usr/bin/env bash
# Sets up, then checks style and types and runs the tests. Arguments go to pytest:
#   bash scripts/test.sh tests/schedule -k takeover
#   bash scripts/test.sh -n 0 tests/scenarios    # one after another
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$BAMBOO_ROOT"
set_up requirements.txt requirements-dev.txt
install_in_ci etcd etcd-server
install_in_ci slurmctld slurmctld
install_in_ci slurmd slurmd
install_in_ci sbatch slurm-client
install_in_ci munged munge

# The packages that decide, without torch and without effects, are typed strictly.
PURE=(
    megatron_bamboo/schedule
    megatron_bamboo/planner
    megatron_bamboo/recovery
    megatron_bamboo/simulator
    megatron_bamboo/evaluation
    megatron_bamboo/config
    megatron_bamboo/checkpoint/folder.py
    megatron_bamboo/checkpoint/moments.py
    megatron_bamboo/checkpoint/writers.py
    megatron_bamboo/membership/decision.py
    megatron_bamboo/membership/greeting.py
    megatron_bamboo/membership/keys.py
    megatron_bamboo/membership/lobby.py
    megatron_bamboo/membership/sealing.py
    megatron_bamboo/membership/strangers.py
    megatron_bamboo/data/samples.py
    megatron_bamboo/data/json_lines.py
    megatron_bamboo/observe/events.py
    megatron_bamboo/errors.py
)

ruff check .
ruff format --check .
mypy "${PURE[@]}"
# Tests of whole runs often wait: three files at once keep two processors busy.
pytest -rs -n 3 --dist loadfile "$@"
