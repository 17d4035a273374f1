#!/bin/bash
# Trains over two machines of 8 GPUs, one process per machine: docs/ssh.sh [more options]
# Repository, environment, data and --run.out must be on a file system that both share, at the same path.
set -euo pipefail
hosts=(gpu-1 gpu-2) # reached by ssh without a password
port=12345          # free on the first of them, and open to the others

pids=()
for i in "${!hosts[@]}"; do
  ssh -tt "${hosts[i]}" "cd '$PWD' && JAX_COORDINATOR_ADDRESS='${hosts[0]}:$port' JAX_NUM_PROCESSES=${#hosts[@]} \
    JAX_PROCESS_ID=$i .venv/bin/python -m cpjax.train --mesh.fsdp 2 --mesh.cp 8 --run.batch_size 2 \
    --run.out runs/ssh $*" </dev/null &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done # fails with the first that failed
