#!/usr/bin/env bash
# Trains under torchrun. The same command on each machine; it takes the arguments of `python -m grpo.train`:
#   NODES=2 RENDEZVOUS=10.0.0.1:29500 PROCESSES=8 launch/torchrun.sh +gpu=h100
# NODES: machines (1). RENDEZVOUS: host:port of the first one. PROCESSES: on each machine (one per GPU).
# RESTARTS: how often all start again after one has died (0). TIMEOUT: seconds to wait for the other machines (600).
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
options=(--nproc-per-node="${PROCESSES:-gpu}" --max-restarts="${RESTARTS:-0}")
if [ "${NODES:-1}" = 1 ]; then
  options+=(--standalone)
else
  host="${RENDEZVOUS:?host:port of the first machine}" host="${host%:*}"
  # torchrun goes by host names; an address that is this machine's own is certain
  if "$python" -c "import sys; from grpo.launching.rendezvous import is_here; sys.exit(not is_here('$host'))"; then
    first=1 address="$host"
  else
    first=0 address="$("$python" -c "from grpo.utils.distributed import address_towards; print(address_towards('$host'))")"
  fi
  options+=(--nnodes="$NODES" --rdzv-id=grpo --rdzv-backend=c10d --rdzv-endpoint="$RENDEZVOUS" --local-addr="$address")
  options+=(--rdzv-conf="is_host=$first,join_timeout=${TIMEOUT:-600},read_timeout=${TIMEOUT:-600}")
fi
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # processes that start again must not find the addresses of dead ones
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" # else warnings of what is no fault here
exec "$python" -m torch.distributed.run "${options[@]}" -m grpo.train "$@"
