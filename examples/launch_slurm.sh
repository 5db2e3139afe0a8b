#!/usr/bin/env bash
# Print the batch script and the command of every rank for one row of the paper's Table 2 on four
# Slurm nodes of eight GPUs, without a container. Slurm is not needed. Remove --dry-run on a login
# node to submit the jobs. Each job of the chain resumes from the checkpoint of the one before.
#
# Needs: pip install 'kha-megatron[launch]'
set -euo pipefail

kha-megatron params table2/mlp-v
kha-megatron launch table2/mlp-v --executor slurm --nodes 4 --account acme --time 04:00:00 \
  --chain 6 --output "${OUTPUT:-/tmp/table2-mlp-v}" --dry-run -- --mock-data

# What you should see:
#   active         881,160,192     880,275,456   880M (rounded)
#   #SBATCH --nodes=4
#   #SBATCH --time=04:00:00
#   --exit-duration-in-mins 225
