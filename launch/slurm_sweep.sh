#!/usr/bin/env bash
# A sweep as a Slurm array: task k is one run, with the overrides in line k of a file (the first line is 0).
#
#   sbatch --array=0-3%2 --nodes=1 launch/slurm_sweep.sh trials.txt experiment=grpo name=my_sweep ...
#
# Every trial is a run of its own, `name=my_sweep_<k>`, that is preempted, requeued and resumed like one; submitting the sweep
# again runs what is not finished. A line may quote like a shell, and wins over what all trials have in common.
#SBATCH --job-name=rft-sweep
#SBATCH --output=%x-%A_%a.log
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:USR1@180
set -euo pipefail
trials=$1
shift
mapfile -t trial < <(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$trials" | xargs printf '%s\n')
if [[ -z ${trial[*]} ]]; then
    echo "rft: $trials has no line $SLURM_ARRAY_TASK_ID; submit with --array=0-$(($(wc -l <"$trials") - 1))" >&2
    exit 2
fi
name=
common=()
for argument in "$@"; do
    if [[ $argument == name=* ]]; then name=${argument}_$SLURM_ARRAY_TASK_ID; else common+=("$argument"); fi
done
if [[ -z $name ]]; then
    echo "rft: give name=..., or all trials would be one run" >&2
    exit 2
fi
# Slurm runs a copy of this script: its own place is in the job's record.
own=$(scontrol show job --oneliner "$SLURM_JOB_ID" | sed -nE '1s/.* Command=([^ ]+).*/\1/p')
exec bash "$(dirname "$own")/slurm.sh" "$name" "${common[@]}" "${trial[@]}"
