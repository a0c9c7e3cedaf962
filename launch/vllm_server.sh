#!/usr/bin/env bash
# Starts a vLLM server for `generation=vllm_server` and waits until it answers: launch/vllm_server.sh +gpu=h100
# Takes the arguments of `python -m grpo.train`, and behind a -- more options for `vllm serve`. Give it GPUs of its own:
#   CUDA_VISIBLE_DEVICES=1 launch/vllm_server.sh +gpu=h100
#   CUDA_VISIBLE_DEVICES=0 python -m grpo.train +gpu=h100 generation=vllm_server
set -euo pipefail
python="$(dirname "$0")/../.venv/bin/python"
[ -x "$python" ] || python=python3
exec "$python" -m grpo.serve "$@"
