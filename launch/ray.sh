#!/usr/bin/env bash
# A Ray cluster for one run: start the same command on every node, with ssh, pdsh, srun or an MPI launcher.
#
#   HEAD=10.0.0.1 NODES=3 launch/ray.sh experiment=grpo name=my_run ...
#
# The node with the address HEAD trains, on all of its GPUs; the others serve engines. All end together, with the run's exit
# code on the head. `checkpoint_root_dir` must be shared. A token of the cluster's own keeps others out: set the same
# RAY_AUTH_TOKEN everywhere (RAY_AUTH_MODE=disabled: none). PYTHON: one that can import rft and has `ray` beside it.
set -euo pipefail
PYTHON=${PYTHON:-python}
: "${HEAD:?set HEAD to the address of the node that trains}" "${NODES:?set NODES to the number of nodes}"
if [[ ${RAY_AUTH_MODE:=token} == token ]]; then
    : "${RAY_AUTH_TOKEN:?set RAY_AUTH_TOKEN to one long random word, the same on every node}"
fi
export RAY_AUTH_MODE
PATH=$(dirname "$(command -v "$PYTHON")"):$PATH

share=()
if [[ " $(hostname -I) " == *" $HEAD "* ]]; then
    share=(--num-cpus=0 --num-gpus=0) # what the ranks use must not be given to engines
elif [[ -n ${CPUS:-} ]]; then
    share=(--num-cpus="$CPUS")
fi
address=$HEAD:${PORT:-6379}
exec ray symmetric-run --address "$address" --min-nodes "$NODES" --disable-usage-stats "${share[@]}" -- \
    "$PYTHON" -m rft.train "cluster.ray_address=$address" "$@"
