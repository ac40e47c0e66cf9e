#!/usr/bin/env bash
# One run as one Slurm job: trainer ranks on the first TRAINER_NODES nodes, vLLM engines on all others.
#
#   sbatch --nodes=3 [--gpus-per-node=8 --time=8:00:00 ...] launch/slurm.sh experiment=grpo name=my_run ...
#   TRAINER_NODES=2 RANKS_PER_NODE=8 sbatch --nodes=6 launch/slurm.sh ...
#
# On one node rft shares it out by itself. USR1 (Slurm sends it before the time limit, a preemption or `scancel --batch
# --signal=USR1`) saves a checkpoint, puts the job back into the queue, and the next start goes on from there. Ranks, engines
# and buffer need `checkpoint_root_dir` on a file system that all nodes share. PYTHON: one that can import rft. CONTAINER_IMAGE:
# run in it (pyxis and enroot); CONTAINER_MOUNTS=FROM:TO,... beside the working directory and /tmp.
#SBATCH --job-name=rft
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail
PYTHON=${PYTHON:-python}
TRAINER_NODES=${TRAINER_NODES:-1}
RANKS_PER_NODE=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
STEP=(srun --export=ALL --overlap --cpu-bind=none --kill-on-bad-exit=1)
if [[ -n ${CONTAINER_IMAGE:-} ]]; then
    # what is set here wins over what the image sets
    ours=$(compgen -e | grep -E '^(NCCL|GLOO|RAY|RFT)_' | paste -sd, || true)
    STEP+=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD" --container-env="RAY_AUTH_TOKEN,RAY_AUTH_MODE${ours:+,$ours}"
        --container-mounts="/tmp:/tmp,$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}")
fi

# ray_on NODES COUNT OPTION...: Ray gives its own processes 30 seconds, which a cold file system may not keep. Then again.
ray_on() {
    "${STEP[@]}" --nodes="$2" --ntasks="$2" --nodelist="$1" \
        bash -c 'for _ in 1 2 3; do "$@" && break; done' ray "${ray[@]}" "${@:3}" >>"$ray_log" 2>&1 &
}

preempted=
run=
trap 'preempted=yes; [[ -z $run ]] || kill -USR1 "$run" || true' USR1
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trainers=$(IFS=, && echo "${nodes[*]:0:TRAINER_NODES}")
engines=$(IFS=, && echo "${nodes[*]:TRAINER_NODES}")
head=$(scontrol show node --oneliner "${nodes[0]}" | sed -E 's/.* NodeAddr=([^ ]+).*/\1/')
command=("$PYTHON" -m rft.train)
if [[ -n $engines ]]; then
    # A token of this job's own: nobody else on the network may use its Ray.
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
    # Ray on a trainer node is only the ranks' way to the others: buffer, explorer and engines live on the engine nodes.
    ray=("$PYTHON" -m ray.scripts.scripts start --block --disable-usage-stats --temp-dir="/tmp/rft-ray-$SLURM_JOB_ID")
    ray_log=ray-$SLURM_JOB_ID.log
    port=$((30000 + SLURM_JOB_ID % 2500))
    ray_on "${nodes[0]}" 1 --head --port="$port" --include-dashboard=false --num-cpus=0 --num-gpus=0
    timeout 300 bash -c 'until (exec 3<>"/dev/tcp/$0/$1") 2>/dev/null; do sleep 1; done' "$head" "$port"
    ray+=("--address=$head:$port")
    if ((TRAINER_NODES > 1)); then
        ray_on "${trainers#*,}" $((TRAINER_NODES - 1)) --num-cpus=0 --num-gpus=0
    fi
    ray_on "$engines" $((SLURM_NNODES - TRAINER_NODES)) --num-cpus="$SLURM_CPUS_ON_NODE"
    command+=("cluster.ray_address=$head:$port")
fi
ranks=$((TRAINER_NODES * RANKS_PER_NODE))
if ((TRAINER_NODES > 1)); then # ranks are tasks of Slurm's; on one trainer node rft starts them
    step=("${STEP[@]}" --nodes="$TRAINER_NODES" --ntasks="$ranks" --ntasks-per-node="$RANKS_PER_NODE" --nodelist="$trainers")
    command=("${step[@]}" env "MASTER_ADDR=$head" "${command[@]}")
elif [[ -n ${CONTAINER_IMAGE:-} ]]; then
    command=("${STEP[@]}" --nodes=1 --ntasks=1 --nodelist="$trainers" "${command[@]}")
fi
if ((SLURM_NNODES > 1)); then
    command+=("trainer.num_ranks=$ranks")
fi

if [[ -z $preempted ]]; then
    "${command[@]}" "$@" &
    run=$!
    code=0
    wait "$run" || code=$?
fi
if [[ -n $preempted && -n $run ]]; then # the signal has ended the wait, not the run
    code=0
    wait "$run" || code=$?
fi
if [[ -n $preempted && ${code:-1} -ne 0 ]]; then
    echo "preempted: job $SLURM_JOB_ID goes back into the queue"
    kill $(jobs -p) 2>/dev/null || true
    wait
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "${code:-1}"
