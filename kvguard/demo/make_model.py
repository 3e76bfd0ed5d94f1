"""Turn a llama.cpp model file (GGUF) into a Hugging Face checkpoint. Run by the engine's interpreter, not by kvguard's.

Needs torch, safetensors and transformers (the engine has them) and gguf; imports nothing of kvguard.

Usage: python make_model.py MODEL.gguf OUT_DIR
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

_WHOLE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hugging_face_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; KeyError for a name no Llama has."""
    stem, _, kind = gguf_name.rpartition(".")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{_IN_A_LAYER[part]}.{kind}"
    return f"{_WHOLE_MODEL[stem]}.{kind}"


def unpermute(weight: Any, heads: int) -> Any:
    """Rows of a q or k projection [heads * head_dim, inputs] back from interleaved rope pairs to rotated halves.

    llama.cpp's convert_hf_to_gguf.py (LlamaModel.permute) interleaves the two halves of every head.
    """
    rows, inputs = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(rows, inputs)


def read_config(fields: dict[str, Any]) -> dict[str, Any]:
    """config.json of a Llama with tied or untied embeddings, from the GGUF's metadata."""
    if fields["general.architecture"] != "llama":
        raise SystemExit(f"make_model: need general.architecture llama, found {fields['general.architecture']!r}")
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # The GGUF holds these two as float32; the decimal they were written from has at most 7 digits.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(f"{fields['llama.rope.freq_base']:.6g}"),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def read_weights(reader: GGUFReader, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor in bfloat16 under its Hugging Face name, q and k rows in Hugging Face's order."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpermute(values, heads[part])
        weights[hugging_face_name(tensor.name)] = torch.tensor(values, dtype=torch.bfloat16)
    return weights


def write_tokenizer(gguf: Path, fields: dict[str, Any], out: Path) -> None:
    """tokenizer.json as transformers converts it, and a tokenizer_config.json that transformers 4 and 5 both read."""
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(out)
    (out / "chat_template.jinja").unlink(missing_ok=True)
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        "add_prefix_space": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }
    _write_json(out / "tokenizer_config.json", config)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def main(gguf: Path, out: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and the tokenizer into `out`."""
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = read_config(fields)
    weights = read_weights(reader, config)
    config["tie_word_embeddings"] = "lm_head.weight" not in weights
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    write_tokenizer(gguf, fields, out)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(out / "generation_config.json", special)
    _write_json(out / "config.json", config)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
