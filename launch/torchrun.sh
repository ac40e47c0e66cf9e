#!/usr/bin/env bash
# Trainer ranks under torchrun: your own flags, profilers and restarts.
#
#   RANKS=8 launch/torchrun.sh experiment=grpo name=my_run ...                                     one node
#   RANKS=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh experiment=sft name=my_run ...  the same on each node
#   RANKS=8 NNODES=1:2 MASTER_ADDR=node0 launch/torchrun.sh experiment=sft name=my_run ...            the same, while nodes come and go
#
# RANKS: of one node. Engines get what is left of node 0's GPUs; with more than one node they live in a Ray cluster that every
# node belongs to: add cluster.ray_address=HOST:PORT. With NNODES=MIN:MAX the ranks start again when a node is lost, on those that
# are left: how many ranks in which layout, trainer.layouts say. TORCHRUN: more options for torchrun. PYTHON: one that can import rft.
set -euo pipefail
PYTHON=${PYTHON:-python}
NNODES=${NNODES:-1}
: "${RANKS:?set RANKS to the number of trainer ranks on one node}"

start=(rft.run.loopback)
ranks=()
if [[ $NNODES == *:* ]]; then
    : "${MASTER_ADDR:?set MASTER_ADDR to the host of a node: where the nodes meet}"
    start=(torch.distributed.run --nnodes="$NNODES" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" --rdzv-id=rft)
    meet=keep_alive_interval=2,last_call_timeout=10
    # torch knows its host by the machine's name alone, which is often another interface's
    address=$(getent ahosts "$MASTER_ADDR" | awk '{ print $1; exit }') || address=
    own=$(hostname -I) || own=
    [[ -n $address && " $own " == *" $address "* ]] && meet+=,is_host=1
    start+=(--rdzv-conf="$meet" --max-restarts=3)
    # else torch 2.13 tells ranks of nodes that stay where the rank 0 of the first start was, though its node be gone
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
elif ((NNODES > 1)); then
    : "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}" "${MASTER_ADDR:?set MASTER_ADDR to the host of node 0}"
    start=(torch.distributed.run --nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi
[[ $NNODES == *:* ]] || ranks=("trainer.num_ranks=$((NNODES * RANKS))")
start+=(--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1) # passed on to the ranks; torch's own are without the last
read -ra more <<<"${TORCHRUN:-}"
exec "$PYTHON" -m "${start[@]}" --nproc-per-node="$RANKS" "${more[@]}" -m rft.train "${ranks[@]}" "$@"
