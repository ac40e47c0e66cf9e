#!/usr/bin/env bash
# Trainer ranks under torchrun: your own flags, profilers and restarts.
#
#   RANKS=8 launch/torchrun.sh experiment=grpo name=my_run ...                                     one node
#   RANKS=8 NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun.sh experiment=sft name=my_run ...  the same on each node
#
# RANKS: of one node. Engines get what is left of node 0's GPUs; with more than one node they live in a Ray cluster that every
# node belongs to: add cluster.ray_address=HOST:PORT. TORCHRUN: more options for torchrun. PYTHON: one that can import rft.
set -euo pipefail
PYTHON=${PYTHON:-python}
NNODES=${NNODES:-1}
: "${RANKS:?set RANKS to the number of trainer ranks on one node}"

start=(rft.run.loopback)
if ((NNODES > 1)); then
    : "${NODE_RANK:?set NODE_RANK to the number of this node, from 0}" "${MASTER_ADDR:?set MASTER_ADDR to the host of node 0}"
    start=(torch.distributed.run --nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi
read -ra more <<<"${TORCHRUN:-}"
exec "$PYTHON" -m "${start[@]}" --nproc-per-node="$RANKS" "${more[@]}" \
    -m rft.train "trainer.num_ranks=$((NNODES * RANKS))" "$@"
