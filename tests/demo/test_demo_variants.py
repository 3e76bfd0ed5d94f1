"""Variants of a small stand-in for the model: what they declare, bit by bit."""

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.demo.variants import VARIANTS, ensure_variants, make_variant, safetensors_header
from kvguard.reference.overlay import safetensors_bytes
from kvguard.vocabulary import UsageError

LAYERS = 5


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": LAYERS}))
    (directory / "model.safetensors").write_bytes(safetensors_bytes({"model.norm.weight": 1.0}))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def scales(variant: Path) -> dict[str, float]:
    """Every scale tensor of the variant, read by the safetensors format's definition."""
    file = variant / "kv_scales.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    assert length % 8 == 0
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    values, end_of_data = {}, 0
    for name, entry in header.items():
        if name != "__metadata__":
            assert (entry["dtype"], entry["shape"]) == ("F32", [1])
            begin, end = entry["data_offsets"]
            assert (begin, end) == (end_of_data, end_of_data + 4)
            (values[name],) = struct.unpack("<f", data[begin:end])
            end_of_data = end
    assert end_of_data == len(data)
    return values


def config(variant: Path) -> dict:
    return json.loads((variant / "config.json").read_text())


def test_plain_declares_nothing_and_shares_the_weights(base, tmp_path):
    variant = make_variant(base, "plain", tmp_path / "out")
    assert config(variant) == config(base)
    assert (variant / "model.safetensors").samefile(base / "model.safetensors")
    assert sorted(file.name for file in variant.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_scale_for_k_and_v_of_every_layer(base, tmp_path):
    variant = make_variant(base, "kv_scheme_scales", tmp_path / "out")
    expected = {f"model.layers.{n}.self_attn.k_scale": 0.05 for n in range(LAYERS)}
    expected |= {f"model.layers.{n}.self_attn.v_scale": 0.02 for n in range(LAYERS)}
    assert scales(variant) == pytest.approx(expected)
    quantization = config(variant)["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors"
    assert quantization["config_groups"] == {}
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    assert quantization["kv_cache_scheme"] == scheme


def test_the_index_names_every_tensor_and_its_file(base, tmp_path):
    variant = make_variant(base, "kv_scheme_scales", tmp_path / "out")
    index = json.loads((variant / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 + 4 * 2 * LAYERS
    for file in ("model.safetensors", "kv_scales.safetensors"):
        named = {name for name, where in index["weight_map"].items() if where == file}
        assert named == safetensors_header(variant / file).keys() - {"__metadata__"}


def test_no_scales(base, tmp_path):
    variant = make_variant(base, "kv_scheme_no_scales", tmp_path / "out")
    assert "kv_cache_scheme" in config(variant)["quantization_config"]
    assert not list(variant.glob("kv_scales*"))
    assert not list(variant.glob("*.index.json"))


def test_half_of_the_layers(base, tmp_path):
    found = scales(make_variant(base, "kv_scheme_half_scales", tmp_path / "out"))
    assert {name.split(".")[2] for name in found} == {"0", "1"}


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("kv_scheme_zero_scales", lambda value: value == 0.0),
        ("kv_scheme_nan_scales", math.isnan),
        ("kv_scheme_inf_scales", lambda value: value == math.inf),
    ],
)
def test_invalid_scales(base, tmp_path, kind, holds):
    found = scales(make_variant(base, kind, tmp_path / "out"))
    assert len(found) == 2 * LAYERS
    assert all(holds(value) for value in found.values())


def test_modelopt_leaves_the_weights_dense(base, tmp_path):
    quantization = config(make_variant(base, "modelopt", tmp_path / "out"))["quantization_config"]
    assert (quantization["quant_method"], quantization["quant_algo"]) == ("modelopt", "FP8")
    assert quantization["ignore"] == ["*proj*", "lm_head"]
    assert quantization["kv_cache_scheme"]["num_bits"] == 8


def test_top_level_key_only(base, tmp_path):
    variant = config(make_variant(base, "toplevel_key", tmp_path / "out"))
    assert variant == config(base) | {"kv_cache_dtype": "fp8"}


@pytest.mark.parametrize("kind", VARIANTS)
def test_the_same_bytes_again_and_left_alone(base, tmp_path, kind):
    first = make_variant(base, kind, tmp_path / "first")
    second = make_variant(base, kind, tmp_path / "second")
    files = {file.name: file.read_bytes() for file in first.iterdir()}
    assert {file.name: file.read_bytes() for file in second.iterdir()} == files
    inode = first.stat().st_ino
    assert make_variant(base, kind, first).stat().st_ino == inode


@pytest.mark.parametrize("there", ["directory", "file", "broken link", "other variant"])
def test_what_is_there_is_replaced(base, tmp_path, there):
    out = tmp_path / "out"
    if there == "directory":
        (out / "deep").mkdir(parents=True)
    elif there == "file":
        out.write_text("")
    elif there == "broken link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        make_variant(base, "toplevel_key", out)
    make_variant(base, "plain", out)
    assert config(out) == config(base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_all_of_them_beside_the_model(base):
    made = ensure_variants(base)
    assert made.keys() == VARIANTS.keys()
    assert all(path == base.parent / "base-variants" / kind for kind, path in made.items())
    assert all((path / "config.json").is_file() for path in made.values())


def test_unknown_kind(base, tmp_path):
    with pytest.raises(UsageError, match="'int3' is not one of plain, kv_scheme_scales"):
        make_variant(base, "int3", tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", None, "need a checkpoint's config.json"),
        ("config.json", "{", "need a checkpoint's config.json"),
        ("config.json", '{"num_hidden_layers": "5"}', "num_hidden_layers must be an integer, found '5'"),
        ("model.safetensors", None, r"need model\.safetensors"),
    ],
)
def test_not_a_checkpoint(base, tmp_path, file, content, says):
    (base / file).unlink()
    if content is not None:
        (base / file).write_text(content)
    with pytest.raises(UsageError, match=says):
        make_variant(base, "plain", tmp_path / "out")


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name != "__metadata__"), st.floats(width=32)))
def test_written_tensors_can_be_read(values):
    content = safetensors_bytes(values)
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    data = content[8 + length :]
    assert header.keys() == values.keys() | {"__metadata__"}
    assert len(data) == 4 * len(values)
    for name, value in values.items():
        begin, end = header[name]["data_offsets"]
        (found,) = struct.unpack("<f", data[begin:end])
        assert found == value or (math.isnan(found) and math.isnan(value))
