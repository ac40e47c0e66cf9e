#!/usr/bin/env bash
# One run on several machines, without a scheduler: a Ray cluster of its own, started from one of them by ssh.
#
#   HOSTS="node0 node1 node2" launch/ray.sh experiment=grpo name=my_run ...
#   HOSTS="node0 node1 node2 node3" TRAINERS=2 RANKS=8 launch/ray.sh ...       a trainer of two nodes, 8 ranks each
#
# The first TRAINERS (1) hosts train, the others serve engines; all end with the run, whose exit code is this script's. Python
# and `checkpoint_root_dir` are at the same place on all. With pdsh, srun or mpirun instead of ssh, start the same on each node:
#
#   HEAD=10.0.0.1 NODES=3 RAY_AUTH_TOKEN=... launch/ray.sh ...                 HEAD: the address of the first, where rft starts
#
# with NODE_RANK, the number of the node from 0, if TRAINERS is more than 1. RAY_AUTH_TOKEN: one long random word, the same on
# every node (RAY_AUTH_MODE=disabled: none). CONTAINER_IMAGE: run in it, by DOCKER (docker). PYTHON: one with rft, and `ray` beside.
set -euo pipefail
PYTHON=${PYTHON:-python}
TRAINERS=${TRAINERS:-1}
own=$(realpath "$0")

# carried: what of this environment the other machines and the container are to have.
carried() {
    compgen -e | grep -E '^((NCCL|GLOO|RAY_AUTH|CONTAINER)_.*|HEAD|NODES|NODE_RANK|TRAINERS|RANKS|PORT|CPUS|PYTHON|PYTHONPATH)$'
}

if [[ -n ${HOSTS:-} ]]; then
    read -ra hosts <<<"$HOSTS"
    [[ -n ${CONTAINER_IMAGE:-} ]] || PYTHON=$(command -v "$PYTHON")
    export PYTHON TRAINERS NODES=${#hosts[@]} RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
    export HEAD=${HEAD:-$(ssh "${hosts[0]}" hostname -I | awk '{ print $1 }')}
    export RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
    mapfile -t names < <(carried)
    runs=()
    for number in "${!hosts[@]}"; do # through stdin: nobody reads the token in a list of processes
        {
            declare -p "${names[@]}"
            printf 'export NODE_RANK=%d; cd %q; exec bash' "$number" "$PWD"
            printf ' %q' "$own" "$@"
            echo ' </dev/null'
        } | ssh "${hosts[number]}" bash &
        runs+=($!)
    done
    code=0
    wait "${runs[0]}" || code=$?
    wait
    exit "$code"
fi

: "${HEAD:?set HEAD to the address of the node that trains}" "${NODES:?set NODES to the number of nodes}"
if [[ ${RAY_AUTH_MODE:=token} == token ]]; then
    : "${RAY_AUTH_TOKEN:?set RAY_AUTH_TOKEN to one long random word, the same on every node}"
fi
if ((TRAINERS > 1)); then
    : "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}" "${RANKS:?set RANKS to the number of trainer ranks on one node}"
fi
export RAY_AUTH_MODE TRAINERS RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
if [[ -n ${CONTAINER_IMAGE:-} ]]; then # the host's network and shared memory, memory that may be locked, and its RDMA devices
    options=(--rm --gpus all --network host --ipc host --ulimit memlock=-1 --ulimit nofile=1048576 --cap-add IPC_LOCK)
    if [[ -e /dev/infiniband ]]; then options+=(--device /dev/infiniband); fi
    mounts=("$PWD:$PWD" "$(dirname "$own"):$(dirname "$own"):ro" ${CONTAINER_MOUNTS:+${CONTAINER_MOUNTS//,/ }})
    mapfile -t names < <(carried | grep -v CONTAINER_)
    exec "${DOCKER:-docker}" run "${options[@]}" "${mounts[@]/#/--volume=}" --workdir "$PWD" "${names[@]/#/--env=}" \
        "$CONTAINER_IMAGE" bash "$own" "$@"
fi
PATH=$(dirname "$(command -v "$PYTHON")"):$PATH

number=${NODE_RANK:-$([[ " $(hostname -I) " == *" $HEAD "* ]] && echo 0 || echo "$TRAINERS")}
address=$HEAD:${PORT:-6379}
run=("$PYTHON" -m rft.train)
if ((TRAINERS > 1)); then # the ranks of each trainer node under a torchrun of its own
    export NODE_RANK NNODES=$TRAINERS MASTER_ADDR=$HEAD
    run=(bash "$(dirname "$own")/torchrun.sh")
fi
share=(${CPUS:+--num-cpus="$CPUS"})
if ((number < TRAINERS)); then
    share=(--num-cpus=0 --num-gpus=0) # what the ranks use must not be given to engines
fi
ray=(ray symmetric-run --address "$address" --min-nodes "$NODES" --disable-usage-stats "${share[@]}" --)
if ((number == 0 || number >= TRAINERS)); then
    exec "${ray[@]}" "${run[@]}" "cluster.ray_address=$address" "$@"
fi
"${run[@]}" "cluster.ray_address=$address" "$@" &
ranks=$!
"${ray[@]}" true || true # a trainer node's Ray is the ranks' way to the others, and ends with the head
kill "$ranks" 2>/dev/null || true
wait "$ranks"
