"""What a checkpoint's files are and declare, as data."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from kvguard.vocabulary import Claim, Frozen, ScaleState


class TensorInfo(Frozen):
    """One tensor of a safetensors file: dtype as the format spells it ("BF16"), shape, and its bytes' place.

    `start` and `end` count from the end of the header, as in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsHeader(Frozen):
    """The header of one safetensors file. `header_bytes` includes the eight length bytes; data follows it."""

    file: str
    size: int
    header_bytes: int
    tensors: dict[str, TensorInfo]


class CheckpointFiles(Frozen):
    """The bytes of a model directory that say something about its KV cache.

    `scale_values` holds the values of the KV scale tensors that could be decoded; `other_weights` names weight files
    in other formats, whose tensors are not seen. `params_json` is Mistral's own config, when vLLM reads that.
    """

    directory: str
    config_json: bytes | None
    params_json: bytes | None = None
    hf_quant_config_json: bytes | None = None
    index_json: bytes | None = None
    has_chat_template: bool = False
    safetensors: tuple[SafetensorsHeader, ...] = ()
    scale_values: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    other_weights: tuple[str, ...] = ()


class Quantization(Frozen):
    """The quantization block that vLLM takes, and what it needs to name the method.

    `file` is "config.json", "params.json", "hf_quant_config.json" or "--hf-overrides"; `block` its key in vLLM's config (""
    for the whole sidecar), `written` its key in the file. `method` is `quant_method` as written, lower case, or None.
    `producer`, `quant_algo` and `legacy_modelopt` are what the ModelOpt inference reads.
    """

    file: str
    block: str
    written: str
    method: str | None
    producer: str | None = None
    producer_version: str | None = None
    quant_algo: str | None = None
    legacy_modelopt: bool = False

    @property
    def where(self) -> str:
        """The place as shown to people: "config.json: quantization_config"."""
        return f"{self.file}: {self.written}" if self.written else self.file

    def key(self, name: str) -> str:
        """The place of a key inside the block: "config.json: quantization_config.kv_cache_scheme"."""
        return f"{self.file}: {self.written}.{name}" if self.written else f"{self.file}: {name}"


class KVScheme(Frozen):
    """A KV cache declaration. `producer` is the quantization method it belongs to; `raw` its JSON value.

    The typed fields are None when the declaration is a name ("FP8") or lacks them.
    """

    producer: str
    raw: Any
    where: str
    num_bits: int | None = None
    type: str | None = None
    dynamic: bool | None = None
    strategy: str | None = None
    symmetric: bool | None = None


class DeclaredScales(Frozen):
    """The KV scale tensors in the files, one tuple of values per layer and side.

    `state`: `checkpoint`, `unit_declared` (all exactly 1.0), `unit_default` (none), `partial`, `invalid`, or `unknown`
    where the weights are in files whose tensors are not seen.
    `missing_layers` reads "model.layers.3 (k, v)", `invalid_layers` "model.layers.3 (k = nan)", `ambiguous`
    "model.layers.3 (k)", which several tensors give differently. `forms` are the ids of
    the name forms found, `tensors` counts key and value scale tensors, `query` tells whether query scales exist.
    """

    state: ScaleState
    k: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    v: dict[int, tuple[float, ...]] = Field(default_factory=dict)
    missing_layers: tuple[str, ...] = ()
    invalid_layers: tuple[str, ...] = ()
    ambiguous: tuple[str, ...] = ()
    tensors: int = 0
    files: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    query: bool = False
    where: str = ""

    @property
    def per_head(self) -> bool:
        """Whether some layer has more than one value: a scale for each KV head."""
        return any(len(values) > 1 for values in (*self.k.values(), *self.v.values()))


class RecurrentState(Frozen):
    """The Mamba-2 state of one sequence in one layer, in values: the convolution's and the state space's.

    `ssm_dtype` is the state space's dtype, None for that of the model.
    """

    layers: int
    conv_values: int
    ssm_values: int
    ssm_dtype: str | None = None


class Geometry(Frozen):
    """What one token costs. `kv_heads` and `head_size` are of the whole model (MLA: 1 and the latent size).

    `layers` are all decoder layers. `layer_indices` are those with attention whose keys and values are their own, None when
    the config does not say which they are. `sliding_layers` is how
    many of them see only a window of `sliding_window` tokens: for those, bytes per token hold within the window and
    the engine frees what lies before it. `indexer_bytes` is what a sparse-attention index adds to each token and layer,
    whatever the dtype. `state` is what recurrent layers keep for a sequence beside it. `unknown_reason`: why the bytes
    are not modelled.
    """

    layers: int | None = None
    attention_layers: int | None = None
    kv_heads: int | None = None
    head_size: int | None = None
    mla: bool = False
    sliding_window: int | None = None
    sliding_layers: int = 0
    layer_types: tuple[str, ...] = ()
    layer_indices: tuple[int, ...] | None = None
    hybrid: bool = False
    indexer_bytes: int = 0
    state: RecurrentState | None = None
    unknown_reason: str | None = None


class Declared(Frozen):
    """What the checkpoint's files ask for, with where each thing was read.

    `other_schemes` are KV declarations in places that vLLM does not take: the sidecar beside a quantization_config, or
    a nested config. They come into force when what stands before them is removed.

    `model_dtype` is canonical ("bfloat16"), None when the files do not say it; `model_dtype_inferred`: not from its key or the
    text config's, but from where only some versions look next, a vision or encoder config and the tensors' own types.
    `quant_method` is the method as written or
    as the newest examined vLLM infers it. `traits` are architecture features that vLLM has rules of its own for.
    """

    directory: str
    architecture: str | None = None
    model_type: str | None = None
    model_dtype: str | None = None
    model_dtype_inferred: bool = False
    quant_method: str | None = None
    quantization: Quantization | None = None
    kv_scheme: KVScheme | None = None
    other_schemes: tuple[KVScheme, ...] = ()
    geometry: Geometry
    scales: DeclaredScales
    has_chat_template: bool = False
    max_position_embeddings: int | None = None
    traits: frozenset[str] = frozenset()
    claims: tuple[Claim, ...] = ()
    findings: tuple[str, ...] = ()
