"""Overlays as documents: what is stripped, what is attached, in which form, and where the loader would drop it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from checkpoint_fakes import COMPRESSED_TENSORS, MODELOPT, f32, files, refusal
from checkpoint_fakes import scales as scale_tensors
from kvguard.checkpoint.declared import declare
from kvguard.checkpoint.safetensors_header import decode_floats, parse_header
from kvguard.engine.checkpoint_files import INDEX
from kvguard.reference.overlay import SCALES_FILE, attach, attention_modules, safetensors_bytes, strip, why_dropped
from kvguard.vocabulary import PolicyRefusal, ScaleState
from overlay_fakes import CONFIG, LAYERS, checkpoint, scales, weights

NEW = "0.32.0"
FP8 = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
AWQ = {"quantization_config": {"quant_method": "awq"}}
NESTED = {
    "quantization_config": {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
}
SIDECAR = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


def made(config: dict[str, Any], version: str = NEW, sidecar: Any = None, tensors: Any = None):
    checkpoint_files = files({**CONFIG, **config}, tensors or weights(), sidecar)
    names = ["config.json", "hf_quant_config.json", "model.safetensors", "tokenizer.json", ".git", "kvguard-report.json"]
    return attach(version, checkpoint_files, declare(checkpoint_files), names, scales()), checkpoint_files


def document(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(content)
    return found


def reread(overlay: Any, source: Any) -> Any:
    """The checkpoint as vLLM would find it in the overlay."""
    header = parse_header(overlay.files[SCALES_FILE], SCALES_FILE, len(overlay.files[SCALES_FILE]))
    body = overlay.files[SCALES_FILE][header.header_bytes :]
    values = {name: decode_floats(info, body[info.start : info.end]) for name, info in header.tensors.items()}
    return declare(
        source.model_copy(
            update={
                "config_json": overlay.files.get("config.json", source.config_json),
                "hf_quant_config_json": overlay.files.get("hf_quant_config.json", source.hf_quant_config_json),
                "index_json": overlay.files[INDEX],
                "safetensors": (*source.safetensors, header),
                "scale_values": values,
            }
        )
    )


# --- attaching ---


@pytest.mark.parametrize(
    ("config", "sidecar", "where", "method"),
    [
        ({}, None, "config.json: quantization_config.kv_cache_scheme", "compressed-tensors"),
        (COMPRESSED_TENSORS, None, "config.json: quantization_config.kv_cache_scheme", "compressed-tensors"),
        (MODELOPT, None, "config.json: quantization_config.kv_cache_scheme", "modelopt"),
        (NESTED, None, "config.json: quantization_config.quantization.kv_cache_quant_algo", "modelopt"),
        ({}, SIDECAR, "hf_quant_config.json: quantization.kv_cache_quant_algo", "modelopt"),
    ],
)
def test_the_overlay_declares_an_e4m3_cache_with_these_scales(
    config: dict[str, Any], sidecar: Any, where: str, method: str
) -> None:
    overlay, source = made(config, sidecar=sidecar)
    declared = reread(overlay, source)
    assert declared.kv_scheme is not None
    assert declared.kv_scheme.where == where
    assert declared.quant_method == method
    assert declared.scales.state is ScaleState.CHECKPOINT
    assert declared.scales.k == {index: pytest.approx((0.05,)) for index in range(LAYERS)}
    assert declared.scales.v == {index: pytest.approx((0.02,)) for index in range(LAYERS)}
    assert "tokenizer.json" in overlay.links
    assert not {".git", "kvguard-report.json", *overlay.files} & set(overlay.links)


def test_native_fp8_gets_tensors_and_has_to_be_typed() -> None:
    overlay, source = made(FP8)
    assert "config.json" in overlay.links
    assert any("--kv-cache-dtype fp8_e4m3" in note for note in overlay.notes)
    assert reread(overlay, source).scales.state is ScaleState.CHECKPOINT


@pytest.mark.parametrize(("config", "value", "said"), [(MODELOPT, 0.05, 1), (MODELOPT, 0.0478515625, 0), ({}, 0.05, 0)])
def test_a_loader_that_rounds_scales_is_named_where_it_matters(config: dict[str, Any], value: float, said: int) -> None:
    source = files({**CONFIG, **config}, weights())
    overlay = attach(NEW, source, declare(source), [], scales(k=value, v=0.5))
    assert len([note for note in overlay.notes if "in bfloat16 they are these to within 2^-8" in note]) == said


def test_the_scheme_of_another_kind_is_replaced_and_the_rest_of_the_block_kept() -> None:
    block = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 4}, "config_groups": {"g": {"a": 1}}}
    overlay, _ = made({"quantization_config": block})
    written = document(overlay.files["config.json"])["quantization_config"]
    assert written["config_groups"] == {"g": {"a": 1}}
    assert written["kv_cache_scheme"]["num_bits"] == 8
    assert written["kv_cache_scheme"]["strategy"] == "tensor"


def test_an_index_is_made_or_extended(tmp_path: Path) -> None:
    overlay, _ = made({})
    index = document(overlay.files[INDEX])
    assert index["weight_map"]["model.embed_tokens.weight"] == "model.safetensors"
    assert index["weight_map"]["model.layers.2.self_attn.v_scale"] == SCALES_FILE
    assert index["metadata"]["total_size"] == 4 + LAYERS * 8 + 2 * LAYERS * 4
    sharded = {"metadata": {"total_size": 28, "x": 1}, "weight_map": dict.fromkeys(weights(), "model.safetensors"), "more": 2}
    found, declared, _ = checkpoint(tmp_path / "m", **{"model__safetensors__index__json": json.dumps(sharded)})
    index = document(attach(NEW, found, declared, [], scales()).files[INDEX])
    assert (index["more"], index["metadata"]["x"]) == (2, 1)
    assert len(index["weight_map"]) == len(weights()) + 2 * LAYERS


def test_the_modules_name_comes_from_the_weights() -> None:
    nested = files({**CONFIG}, weights("language_model.model.layers", "qkv_proj"))
    assert attention_modules(NEW, nested, declare(nested))[2] == "language_model.model.layers.2.self_attn"
    vision = files({**CONFIG}, {**weights(), "vision_tower.layers.0.self_attn.k_proj.weight": f32(1.0)})
    assert attention_modules(NEW, vision, declare(vision))[0] == "model.layers.0.self_attn"
    short = files({**CONFIG}, weights(layers=2))
    with pytest.raises(PolicyRefusal, match=r"no self_attn\.k_proj or qkv_proj weight of layers 2"):
        attention_modules(NEW, short, declare(short))


def test_scales_for_other_layers_are_refused() -> None:
    source = files({**CONFIG}, weights())
    said = refusal(lambda: attach(NEW, source, declare(source), [], scales(layers=2)))
    assert "scales for 0–1 were given; /models/m has attention layers 0–2" in said


# --- where the loader would drop them ---


@pytest.mark.parametrize(
    ("config", "version", "words"),
    [
        (AWQ, NEW, "quantization method awq loads no KV scales, so they would be dropped"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, NEW, "under which names DeepseekV3ForCausalLM loads KV scales"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "0.20.0", "was not read, so they might be dropped"),
        ({}, "0.16.0", "FlashInfer writes with the checkpoint's scale and reads with 1.0"),
        (COMPRESSED_TENSORS, "0.19.1", "reads with 1.0"),
        ({"quantization_config": {"quant_method": "modelopt_mixed"}}, "0.16.0", "loads no KV scales"),
        (
            {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            NEW,
            "a dense checkpoint loads no KV scales for MLA layers",
        ),
        ({}, "0.99.0", "vLLM 0.99.0 was not examined"),
        ({}, "abc", "vLLM abc was not examined"),
    ],
)
def test_a_loader_that_would_drop_the_scales_is_named(config: dict[str, Any], version: str, words: str) -> None:
    source = files({**CONFIG, **config}, weights())
    assert words in why_dropped(version, source, declare(source))
    with pytest.raises(PolicyRefusal, match="/models/m: "):
        attach(version, source, declare(source), [], scales())


@pytest.mark.parametrize(("version", "config"), [("0.20.0", {}), ("0.27.1", {}), ("0.16.0", MODELOPT), ("0.12.0", FP8)])
def test_and_one_that_loads_them_is_not_refused(version: str, config: dict[str, Any]) -> None:
    source = files({**CONFIG, **config}, weights())
    assert why_dropped(version, source, declare(source)) == ""


def test_other_weights_own_scales_and_overrides_are_refused(tmp_path: Path) -> None:
    bare = files({**CONFIG}, weights()).model_copy(update={"safetensors": (), "other_weights": ("pytorch_model.bin",)})
    assert "not safetensors" in why_dropped(NEW, bare, declare(bare))
    mixed = files({**CONFIG, **COMPRESSED_TENSORS}, {**weights(), **scale_tensors(range(LAYERS))})
    assert "model.safetensors holds KV scales of its own beside weights" in why_dropped(NEW, mixed, declare(mixed))
    source = files({**CONFIG}, weights())
    overridden = declare(source, {"quantization_config": {"quant_method": "fp8"}})
    assert "--hf-overrides" in why_dropped(NEW, source, overridden)


def test_a_file_of_scales_alone_is_left_out(tmp_path: Path) -> None:
    own = {"old.safetensors": safetensors_bytes({f"model.layers.{i}.self_attn.k_scale": 9.0 for i in range(LAYERS)})}
    directory = tmp_path / "m"
    directory.mkdir()
    (directory / "old.safetensors").write_bytes(own["old.safetensors"])
    found, declared, _ = checkpoint(directory, {**CONFIG, **COMPRESSED_TENSORS})
    names = ["config.json", "model.safetensors", "old.safetensors"]
    overlay = attach(NEW, found, declared, names, scales())
    assert "old.safetensors" not in overlay.links
    assert "old.safetensors" not in document(overlay.files[INDEX])["weight_map"].values()
    stripped = strip(found, names)
    assert stripped.links == ("model.safetensors",)
    assert "kv_cache_scheme" not in document(stripped.files["config.json"])["quantization_config"]


# --- stripping ---


@pytest.mark.parametrize(
    ("config", "sidecar", "removed"),
    [
        (COMPRESSED_TENSORS, None, ["config.json: quantization_config.kv_cache_scheme"]),
        (NESTED, None, ["config.json: quantization_config.quantization.kv_cache_quant_algo"]),
        ({}, SIDECAR, ["hf_quant_config.json: quantization.kv_cache_quant_algo"]),
        (MODELOPT, SIDECAR, ["config.json: quantization_config.kv_cache_scheme", "hf_quant_config.json: quantization."]),
        ({"text_config": COMPRESSED_TENSORS}, None, ["config.json: text_config.quantization_config.kv_cache_scheme"]),
        (
            {"quantization_config": {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj"]}}},
            None,
            ["config.json: quantization_config.export.kv_cache_group"],
        ),
    ],
)
def test_the_directive_is_taken_out_of_both_files(config: dict[str, Any], sidecar: Any, removed: list[str]) -> None:
    """Of both, because hf_quant_config.json comes into force when config.json has none."""
    source = files({**CONFIG, **config}, weights(), sidecar)
    overlay = strip(source, ["config.json", "hf_quant_config.json", "model.safetensors"])
    told = " ".join(overlay.notes)
    assert all(place in told for place in removed)
    stripped = declare(
        source.model_copy(
            update={
                "config_json": overlay.files.get("config.json", source.config_json),
                "hf_quant_config_json": overlay.files.get("hf_quant_config.json", source.hf_quant_config_json),
            }
        )
    )
    assert stripped.kv_scheme is None
    assert stripped.quant_method == declare(source).quant_method, "the weights stay as they are"


def test_where_there_is_no_directive_there_is_nothing_to_strip() -> None:
    assert "neither config.json nor hf_quant_config.json holds a KV directive" in refusal(lambda: strip(files(CONFIG), []))


def test_the_tensors_are_written_as_the_format_says() -> None:
    content = safetensors_bytes({"a": 0.5, "b": 0.25})
    (length,) = struct.unpack("<Q", content[:8])
    assert (8 + length) % 8 == 0
    assert struct.unpack("<2f", content[8 + length :]) == (0.5, 0.25)
