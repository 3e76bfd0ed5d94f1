"""The question a prediction answers: version, request and declaration, reduced to what decides."""

from __future__ import annotations

from packaging.version import Version

from kvguard.checkpoint.models import Declared, KVScheme, Quantization
from kvguard.checkpoint.quantization import SIDECAR, effective_method
from kvguard.facts.devices import Device, ModelDtypeRule, model_dtype_rule
from kvguard.facts.kv_resolution import COMPRESSED_TENSORS, infers_model_dtype, sidecar_is_read
from kvguard.facts.scale_names import owns_kv_scales
from kvguard.vocabulary import Frozen, canonical_dtype

AUTO = "auto"
UNKNOWN = "unknown"


class Question(Frozen):
    """All that decides the answer.

    `requested` is canonical or "auto", `typed` the spelling on the command line or None. `quantization`, `method` and
    `scheme` are what this version reads of the checkpoint. `model_dtype_typed`: `--dtype` names it. `platform`: "cpu",
    another name, or None. `device`: the accelerator when it is known.
    `cast`: what made the model's dtype another than the declared one.
    """

    version: str
    requested: str
    typed: str | None
    declared: Declared
    model_dtype: str | None
    model_dtype_typed: bool
    quantization: Quantization | None
    method: str | None
    scheme: KVScheme | None
    platform: str | None
    calculate_kv_scales: bool
    device: Device | None = None
    cast: ModelDtypeRule | None = None

    @property
    def compressed_tensors_scheme(self) -> bool:
        """Whether a compressed-tensors scheme meets attention layers that apply it (MLA layers never do)."""
        return self.scheme is not None and self.method == COMPRESSED_TENSORS and not self.declared.geometry.mla

    @property
    def owns_scales(self) -> bool:
        """Whether the checkpoint's quantization method loads KV scales."""
        mla, declared = self.declared.geometry.mla, self.scheme is not None
        return owns_kv_scales(self.version, self.method, mla=mla, algorithm_declared=declared)


def model_dtype_declared(version: str, declared: Declared, device: Device | None) -> tuple[str | None, ModelDtypeRule | None]:
    """The model's dtype under `--dtype auto`, None when it is not known, and the device's rule where that decided."""
    dtype = declared.model_dtype
    if declared.model_dtype_inferred and not infers_model_dtype(version):
        dtype = None
    cast = model_dtype_rule(version, device, dtype, declared.model_type)
    if cast is not None:
        dtype = None if cast.dtype == UNKNOWN else cast.dtype
    return dtype, cast


def ask(
    version: str,
    requested: str | None,
    declared: Declared,
    *,
    model_dtype: str | None,
    calculate_kv_scales: bool,
    platform: str | None,
    device: Device | None = None,
) -> Question:
    """The question for `predict`'s arguments."""
    typed = None if requested in (None, "", AUTO) else requested
    asked = canonical_dtype(model_dtype.lower()) if model_dtype and model_dtype.lower() != AUTO else None
    own, cast = model_dtype_declared(version, declared, device)
    quantization = declared.quantization
    if quantization is not None and quantization.file == SIDECAR and not sidecar_is_read(version):
        quantization = None
    return Question(
        version=version,
        requested=canonical_dtype(typed) if typed else AUTO,
        typed=typed,
        declared=declared,
        model_dtype=asked or own,
        model_dtype_typed=asked is not None,
        quantization=quantization,
        method=effective_method(quantization, version),
        scheme=declared.kv_scheme if quantization else None,
        platform=platform or (device.platform if device else _platform_of(version)),
        calculate_kv_scales=calculate_kv_scales,
        device=device,
        cast=None if asked else cast,
    )


def _platform_of(version: str) -> str | None:
    """ "cpu" for a version such as 0.32.0+cpu, else None."""
    try:
        local = Version(version).local or ""
    except ValueError:
        return None
    return "cpu" if "cpu" in local else None
