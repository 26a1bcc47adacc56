#!/usr/bin/env bash
#SBATCH --job-name=ctl
#SBATCH --nodes=2-4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# An elastic job: one worker per node, with all GPUs that it sees. Nodes that fail are done without
# as long as two are left, and a worker that fails is started again when it is tried again.
#
#   sbatch slurm_elastic.sh /shared/run --global_batch_size=256
#
# Two minutes before the time is over all workers get SIGTERM, save the same step and exit with 42;
# the job is put back into the queue and resumes. So it is when fewer than two are left, at most
# MAX_RESTARTS times.
set -u
PYTHON=${PYTHON:-python}
MAX_RESTARTS=${MAX_RESTARTS:-3}
model_dir=$1
shift
# Other users of the nodes cannot sign messages of this job.
export CTL_JOB_SECRET=${CTL_JOB_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}

# The launchers meet in a directory of this attempt. A node that fails ends no other.
srun --no-kill --kill-on-bad-exit=0 --wait=0 \
    "$PYTHON" -m ctl.launch --workers="2..${SLURM_NNODES:-2}" \
    --rendezvous="$model_dir/rendezvous/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -- "$PYTHON" -m ctl.train --strategy=multi_worker --model_dir="$model_dir" "$@"
code=$? # the highest of all launchers

lost=$((code == 5 || code > 128)) # 5: too few were left; above 128: killed by a signal
if ((code == 42 || (lost && ${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS))); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
