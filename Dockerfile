# An image for machines with NVIDIA GPUs; without one it trains on CPUs. docs/scaling.md#a-container has the commands.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# Triton compiles with gcc and Python's headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends build-essential git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

USER 1000
WORKDIR /home/ubuntu/grpo
COPY --chown=1000:1000 . .

# No GPU is seen while an image is built. VLLM=yes adds vLLM.
ARG VLLM=no
RUN make install GPU=NVIDIA \
    && if [ "$VLLM" = yes ]; then make vllm GPU=NVIDIA; fi \
    && rm -rf /home/ubuntu/.cache
ENV PATH=/home/ubuntu/grpo/.venv/bin:$PATH

CMD ["make", "demo"]
