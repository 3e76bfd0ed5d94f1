"""What the set-up leaves: a vLLM that knows its name and platform, and a model that its libraries read."""

import json
import subprocess
from pathlib import Path

from kvguard.demo import model as model_module
from kvguard.demo.environment import ENGINE_VERSION, ensure_engine
from kvguard.demo.variants import VARIANTS
from kvguard.engine.find import describe, interpreter_of

READ_SCALES = """
import json, sys
from safetensors import safe_open
found = {}
for directory in sys.argv[1:]:
    index = json.load(open(directory + "/model.safetensors.index.json"))["weight_map"]
    for file in set(index.values()):
        with safe_open(directory + "/" + file, "np") as tensors:
            assert {n for n, f in index.items() if f == file} == set(tensors.keys())
            if file == "kv_scales.safetensors":
                found[directory] = {n: str(tensors.get_tensor(n).item()) for n in tensors.keys()}
print(json.dumps(found))
"""

UNPERMUTE = """
import sys, types
gguf, quants = types.ModuleType("gguf"), types.ModuleType("gguf.quants")
gguf.GGUFReader = quants.dequantize = object
sys.modules |= {"gguf": gguf, "gguf.quants": quants}
sys.path.insert(0, sys.argv[1])
import numpy, make_model
heads, head_dim, inputs = 3, 8, 5
weight = numpy.arange(heads * head_dim * inputs).reshape(-1, inputs)
interleaved = numpy.empty_like(weight)
for head in range(heads):
    for pair in range(head_dim // 2):
        row = head * head_dim
        interleaved[row + 2 * pair] = weight[row + pair]
        interleaved[row + 2 * pair + 1] = weight[row + head_dim // 2 + pair]
assert (make_model.unpermute(interleaved, heads) == weight).all()
assert make_model.hugging_face_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
assert make_model.hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
"""


def run(python: Path, code: str, *arguments: str) -> str:
    command = [str(python), "-I", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_engine_is_found_as_what_it_is(engine_bin):
    engine = describe(str(engine_bin), interpreter_of(str(engine_bin)))
    assert (engine.package, engine.version) == ("vllm", ENGINE_VERSION)
    assert engine.full_version == f"{ENGINE_VERSION}+cpu"


def test_the_engines_environment_has_nothing_of_ours(engine_python):
    listed = run(engine_python, "import importlib.metadata as m; print(*[d.name for d in m.distributions()])").split()
    assert "vllm" in listed
    assert not {"kvguard", "gguf", "torchvision-broken"} & set(listed)


def test_set_up_again_downloads_nothing(engine_bin, engine_cache, monkeypatch):
    def no_process(*arguments, **options):
        raise AssertionError(arguments)

    monkeypatch.setattr(subprocess, "run", no_process)
    assert ensure_engine(ENGINE_VERSION, engine_cache) == engine_bin


def test_every_scale_is_read_by_the_engines_own_library(engine_python, variant):
    kinds = [kind for kind in VARIANTS if (variant(kind) / "model.safetensors.index.json").exists()]
    found = json.loads(run(engine_python, READ_SCALES, *[str(variant(kind)) for kind in kinds]))
    assert {len(found[str(variant(kind))]) for kind in kinds if "half" not in kind} == {60}
    assert len(found[str(variant("kv_scheme_half_scales"))]) == 30
    assert set(found[str(variant("kv_scheme_nan_scales"))].values()) == {"nan"}
    assert set(found[str(variant("kv_scheme_inf_scales"))].values()) == {"inf"}


def test_query_and_key_rows_come_back_in_order(engine_python):
    run(engine_python, UNPERMUTE, str(Path(model_module.__file__).parent))
