"""What a person can set about shadow probes, with the meaning, unit, default and reason of each."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pydantic import Field, ValidationError, model_validator

from kvguard.files import printable
from kvguard.vocabulary import Frozen, UsageError

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class Settings(Frozen):
    """How live requests are sampled, replayed and scored. Whether anything is sampled at all is the reference's choice."""

    rate: float = Field(0.05, ge=0, le=1, allow_inf_nan=False)
    """Base probability that a request is included, before the multipliers of its stratum.

    Default 0.05: a replica that answers four requests a second offers what the budget lets through, and one
    that answers four a minute still shows 30 clusters (the least for an alarm) within three hours.
    """

    prompt_multipliers: tuple[float, float, float, float] = (1.0, 1.0, 4.0, 16.0)
    """Factors on `rate` for prompts of 0-256, 257-1024, 1025-4096 and 4097+ tokens; the product is cut at 1.

    Default 1, 1, 4, 16: quantization hurts long contexts first, and they are rare, so that equal rates
    would leave their stratum empty. Estimates weigh each probe by the inverse of its probability.
    """

    turn_multipliers: tuple[float, float, float] = (1.0, 1.0, 4.0)
    """Factors on `rate` for chats of 1, 2-4 and 5+ turns; the product is cut at 1.

    Default 1, 1, 4: some families answer the first turn well and fail later ones.
    """

    greedy: bool = False
    """Whether replays decode greedily in place of the request's own sampling parameters.

    Default false: greedy replay keeps to the tokens the model is surest of, and understates the difference.
    """

    max_tokens: int = Field(64, ge=1, le=4096)
    """Tokens that one replay generates at most, or the request's own limit when that is smaller.

    Default 64: tokens of one request are correlated, so more requests tell more than longer ones.
    """

    require_opt_in: bool = False
    """Whether only requests with the header `x-kvguard-shadow: on` are probed. `off` in that header always holds.

    Default false: prompts never leave memory. Where users must agree first, set it.
    """

    probes_per_minute: float = Field(12, gt=0, le=6000, allow_inf_nan=False)
    """Probes started in any 60 seconds at most; below 1, one probe in 60/value seconds.

    Default 12: 30 clusters in under three minutes of busy traffic, and each probe's replay takes one place in
    the engine's batch for a second or so.
    """

    engine_share: float = Field(0.003, gt=0, le=1, allow_inf_nan=False)
    """Share of the engine's time that probes may take: reference passes, and a replay's part of the batch it ran in.

    Default 0.003: a request that arrives during a pass waits for its end, so this is also the share of first tokens that
    can be late. It must stay well below the hundredth that a 99th percentile is about.
    """

    gap_share: float = Field(0.001, gt=0, le=1, allow_inf_nan=False)
    """Share of the gaps between clients' tokens that probes may lengthen, by passes and by replays.

    A pass and a replay's prefill count as one gap of each running request, each further step of a replay as a tenth of one.
    Default 0.001: the 99th percentile of gaps becomes at most what the 99.1th was. Moments in which nothing runs cost no
    gap, and are waited for; where there are none, this sets the pace: one probe of 64 tokens in about
    10,000 steps of the engine.
    """

    max_stall_ms: float = Field(200, gt=0, le=60_000, allow_inf_nan=False)
    """Milliseconds that one reference pass may stall the engine's streams, predicted from passes measured so far.

    Default 200: about one chunk of a long prefill, which streams meet anyway.
    """

    prior_ms_per_token: float = Field(0.2, gt=0, le=1000, allow_inf_nan=False)
    """Milliseconds a token of a reference pass is expected to take before any was measured.

    Default 0.2 (5,000 tokens a second): a guess that decides only which requests go first. Set it higher on CPUs.
    """

    kv_pinned_max: float = Field(0.8, gt=0, le=1, allow_inf_nan=False)
    """Share of KV blocks held by running requests (0 to 1) above which no probe and no pass starts.

    Default 0.8: a replay must not be what makes the engine preempt a client's request.
    """

    queue_items: int = Field(32, ge=1, le=10_000)
    """Requests that wait to be probed at most; another one is dropped as `queue_full`.

    Default 32: almost three minutes of work at the default budget, more than `max_age_s` lets live.
    """

    queue_bytes: int = Field(16 * 2**20, ge=1, le=2**32)
    """Bytes of request bodies that wait at most, together; parsed, they take a few times that.

    Default 16 MiB: 32 prompts of 128 K tokens.
    """

    max_body_bytes: int = Field(2 * 2**20, ge=1, le=2**30)
    """Bytes of one request's body above which it is not read for a probe.

    Default 2 MiB: a text prompt of half a million tokens. Larger bodies carry images.
    """

    max_age_s: float = Field(60, gt=0, le=3600, allow_inf_nan=False)
    """Seconds after which a request that waits is dropped, under the name of what it waited for.

    Default 60: probes then speak of the traffic of this minute, and prompts do not linger in memory. Once replayed, a request
    has cost engine time, and each of its passes waits for up to ten minutes.
    """

    retry_after_s: float = Field(300, gt=0, le=86_400, allow_inf_nan=False)
    """Seconds without probes after a failed pass; twice as long after each further failure, up to 64 times.

    Default 300: whatever broke the pass probably breaks the next one, and clients pay for trying.
    """

    @model_validator(mode="after")
    def _multipliers_are_positive(self) -> Settings:
        for value in (*self.prompt_multipliers, *self.turn_multipliers):
            if not (math.isfinite(value) and 0 < value <= 1e6):
                raise ValueError("multipliers must be above 0 and at most 1000000; a stratum is never left out")
        return self


def parse_settings(values: Iterable[str]) -> Settings:
    """Settings from `name=value` texts as a command line gives them; a name's `-` and `_` are the same.

    Lists are comma-separated (`prompt-multipliers=1,1,4,16`), booleans true/false, yes/no, on/off or 1/0. Raises
    UsageError that names the setting, what was found and what is allowed.
    """
    given: dict[str, object] = {}
    for text in values:
        name, equals, value = text.partition("=")
        field = name.strip().replace("-", "_")
        if not equals:
            raise UsageError(f"shadow setting {printable(text)!r}: expected name=value, for example rate=0.05")
        if field not in Settings.model_fields:
            raise UsageError(f"shadow setting {printable(name)!r}: no such setting; there are {', '.join(_names())}")
        if field in given:
            raise UsageError(f"shadow setting {_name(field)}: given twice")
        given[field] = _value(field, value.strip())
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        where = f"shadow setting {_name(field)}={printable(_shown(given.get(field)))}" if field else "shadow settings"
        raise UsageError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None


def _value(field: str, text: str) -> object:
    annotation = Settings.model_fields[field].annotation
    if annotation is bool:
        if text.lower() not in _BOOLEANS:
            raise UsageError(f"shadow setting {_name(field)}={printable(text)}: must be true or false")
        return _BOOLEANS[text.lower()]
    if field.endswith("_multipliers"):
        return tuple(part.strip() for part in text.split(","))
    return text


def _names() -> list[str]:
    return [_name(field) for field in Settings.model_fields]


def _name(field: str) -> str:
    return field.replace("_", "-")


def _shown(value: object) -> str:
    return ",".join(str(part) for part in value) if isinstance(value, tuple) else str(value)
