#!/usr/bin/env bash
# A run as a job of a Ray cluster that is already there.
#
#   RAY_API=http://head:8265 RANKS=4 launch/ray_job.sh experiment=grpo name=my_run ...
#
# Ray keeps RANKS GPUs (RANKS=0: none, trained on CPU) for the supervisor and its ranks, and gives engines others. The cluster's
# own `python` must be able to import rft, and `checkpoint_root_dir` must be shared by its nodes. `ray job stop` saves and ends
# the run, if the cluster was started with RAY_JOB_STOP_WAIT_TIME_S=120. PYTHON: one with Ray, on this machine.
set -euo pipefail
PYTHON=${PYTHON:-python}
: "${RAY_API:?set RAY_API to the address of the dashboard, like http://head:8265}"
: "${RANKS:?set RANKS to the number of trainer ranks, 0 for a run on CPU}"

share=()
if ((RANKS > 0)); then
    share=(--entrypoint-num-gpus "$RANKS")
    set -- "trainer.num_ranks=$RANKS" "$@"
fi
# of this environment, what NCCL and gloo were told: the run passes it on to its engines
network='import json, os; print(json.dumps({"env_vars": {n: v for n, v in os.environ.items() if n.startswith(("NCCL_", "GLOO_"))}}))'
share+=(--runtime-env-json "$("$PYTHON" -c "$network")")
exec "$PYTHON" -m ray.scripts.scripts job submit --address "$RAY_API" "${share[@]}" -- \
    "${JOB_PYTHON:-python}" -m rft.train cluster.ray_address=auto "$@"
