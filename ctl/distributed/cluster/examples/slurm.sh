#!/usr/bin/env bash
#SBATCH --job-name=ctl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
# One worker per node, with all GPUs that it sees: add #SBATCH --gpus-per-node=8, or what you have.
#
#   sbatch slurm.sh --model_dir=/shared/run --global_batch_size=256
#
# Two minutes before the time is over all workers get SIGTERM, save the same step and exit with 42;
# the job is put back into the queue and resumes. So it is when a worker is lost, at most
# MAX_RESTARTS times. Workers find each other by the variables of srun.
set -u
PYTHON=${PYTHON:-python}
MAX_RESTARTS=${MAX_RESTARTS:-3}
# Other users of the nodes cannot sign messages of this job.
export CTL_JOB_SECRET=${CTL_JOB_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}

# Workers that lose one end by themselves, with a line that says which: Slurm gives them a minute.
srun --distribution=block --kill-on-bad-exit=0 --wait=60 \
    "$PYTHON" -m ctl.train --strategy=multi_worker "$@"
code=$? # the highest of all workers

lost=$((code == 5 || code > 128)) # 5: a peer did not answer, or a port is in use; above 128: killed by a signal
if ((code == 42 || (lost && ${SLURM_RESTART_COUNT:-0} < MAX_RESTARTS))); then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
