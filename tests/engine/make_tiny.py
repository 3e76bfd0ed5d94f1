"""Run by the engine's own interpreter: a tiny checkpoint with random weights whose attention matters.

make_tiny.py KIND BASE OUT [JSON]: KIND is llama (grouped heads), mistral (sliding window), gemma2 (soft caps, windows in
every other layer) or gptoss (attention sinks, windows in every other layer, experts); the tokenizer is that of BASE. JSON
holds values of the config that replace those below.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig

ALTERNATING = ["sliding_attention", "full_attention"] * 2


def config_of(kind: str, base: dict, own: dict) -> object:
    common = {
        "vocab_size": base["vocab_size"],
        "hidden_size": 192,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "bos_token_id": base["bos_token_id"],
        "eos_token_id": base["eos_token_id"],
        "pad_token_id": 0,
        "tie_word_embeddings": kind != "gptoss",
    }
    if kind == "llama":
        return LlamaConfig(**{**common, **own})
    if kind == "mistral":
        return MistralConfig(**{**common, "sliding_window": 24, **own})
    if kind == "gemma2":
        caps = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 64}
        return Gemma2Config(**{**common, **caps, "sliding_window": 24, "layer_types": ALTERNATING, **own})
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssConfig(**{**common, **experts, "sliding_window": 32, "layer_types": ALTERNATING, **own})


def main(kind: str, base: Path, out: Path, own: str = "{}") -> None:
    torch.manual_seed(0)
    config = config_of(kind, json.loads((base / "config.json").read_text()), json.loads(own))
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if "norm" in name:
                if kind == "gemma2" and name == "model.norm.weight":
                    values.fill_(12.0)
            elif "sinks" in name:
                values.normal_(0, 1.0)
            elif "embed" in name or "lm_head" in name:
                values.normal_(0, 0.02 if kind == "gemma2" else 0.15)
            else:
                values.normal_(0, 1.6 / values.shape[-1] ** 0.5 if values.dim() >= 2 else 0.1)
    model.to(torch.bfloat16).save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / name, out / name)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
