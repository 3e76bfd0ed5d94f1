"""Which of the clients' requests a probe can replay, and why the others cannot be.

Field names are those of vLLM 0.32.0's entrypoints/openai/{chat_completion,completion}/protocol.py. Nothing here is
logged, and bodies stay out of `repr`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from kvguard.shadow.models import Stratum, stratum
from kvguard.vocabulary import Json

Kind = Literal["chat", "completion"]

PATHS: Mapping[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
"""Where probes come from and go to."""

HEADER = b"x-kvguard-shadow"
"""`on` allows a probe where the policy asks for that. Anything else in it forbids one."""

BYTES_PER_TOKEN = 4
"""How many UTF-8 bytes of a prompt count as one token before the engine has tokenized it."""

COMPLETION_MAX_TOKENS = 16
"""What vLLM generates for a completion that sets no limit (0.32.0 completion/protocol.py, `max_tokens`)."""


class Reason(StrEnum):
    """Why a request is not probed. Each is a label of a metric, so the set is closed."""

    NOT_GENERATION = "not_generation"
    """Another path, or a request that generates nothing (`max_tokens` 0)."""
    OPTED_OUT = "opted_out"
    """The client's header forbids it."""
    NOT_OPTED_IN = "not_opted_in"
    """The settings ask for the client's consent, and there is none."""
    TOO_LARGE = "too_large"
    """The body is larger than `Rules.max_body_bytes`."""
    NOT_JSON = "not_json"
    """No JSON object, or fields of other types than vLLM's; the engine refused it too."""
    SEVERAL_ANSWERS = "n>1"
    """`n` above 1, or several prompts in one completion: the answers share one batch, and one replay is not theirs."""
    BEST_OF = "best_of"
    """`best_of` above 1: the answer was chosen, not drawn."""
    BEAM_SEARCH = "beam_search"
    """The same."""
    ECHO = "echo"
    """The client scores its prompt (an evaluation harness, usually)."""
    TOOLS = "tools"
    """Tool calls the engine forces into a grammar: its logprobs are then those of the masked distribution."""
    STRUCTURED_OUTPUT = "structured_output"
    """A grammar, for the same reason."""
    LOGIT_BIAS = "logit_bias"
    """The tokens are not drawn from the distribution that the logprobs describe."""
    FORCED_TOKENS = "forced_tokens"
    """`allowed_token_ids` or `thinking_token_budget`: the same, and the tokens can be ones the model finds absurd."""
    IMAGES = "images"
    """Images or video: the reference pass sees token ids only."""
    AUDIO = "audio"
    """Audio, for the same reason."""
    PROMPT_EMBEDS = "prompt_embeds"
    """Embedded inputs, for the same reason."""
    OTHER_CONTENT = "other_content"
    """A kind of content that kvguard does not know to be text."""
    KV_TRANSFER = "kv_transfer"
    """The prompt's keys and values came from another engine; a replay would compute them here."""
    CUSTOM_ARGUMENTS = "custom_arguments"
    """`vllm_xargs`: an extension of the engine's decides what they do."""
    ADAPTER = "adapter"
    """A LoRA adapter that the reference does not have; the pass inside the engine scores base weights only."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides besides the request itself.

    base_models      names the engine serves its base model under; empty: every name is taken for the base model
    adapters         LoRA adapters that the reference has too, by name; others are counted as skipped
    require_opt_in   probe only requests with `x-kvguard-shadow: on`
    free_auto_tools  whether `tool_choice: auto` with no strict tool is known to decode without a grammar. That depends on
                     --tool-call-parser (Mistral's always adds one) and --tool-strict-level, so it is false unless established
    max_body_bytes   bodies above it are not parsed
    """

    base_models: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    require_opt_in: bool = False
    free_auto_tools: bool = False
    max_body_bytes: int = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that can be replayed.

    `turns` counts the answers the conversation asks the model for, this one included. `adapter` is the model's name when
    it is not the base model, else "". `prompt_chars` is the prompt's size in UTF-8 bytes of text, or four for each token
    of a prompt given as token ids. `size` is the body's length in bytes.
    """

    kind: Kind
    body: Mapping[str, Json] = field(repr=False)
    turns: int
    adapter: str
    prompt_chars: int
    size: int

    @property
    def estimated_tokens(self) -> int:
        """Tokens of the prompt, guessed before the engine has tokenized it."""
        return max(1, self.prompt_chars // BYTES_PER_TOKEN)

    @property
    def stratum(self) -> Stratum:
        """The stratum that the request is sampled in, from what is known before tokenization."""
        return stratum(self.estimated_tokens, self.turns, self.adapter)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A request that is not probed."""

    reason: Reason


_ANY_REQUEST = Rules()

# Before 0.12.0 vLLM spelled structured outputs as guided_*.
_GRAMMAR = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structural_tag",
)
# 0.32.0 renderers/chat_utils.py: TEXT_PART_TYPES, and MM_PARSER_MAP for the rest.
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
_MEDIA_KEYS: Mapping[str, Reason] = {
    "image_url": Reason.IMAGES,
    "input_image": Reason.IMAGES,
    "image_embeds": Reason.IMAGES,
    "image_pil": Reason.IMAGES,
    "video_url": Reason.IMAGES,
    "video_embeds": Reason.IMAGES,
    "audio_url": Reason.AUDIO,
    "input_audio": Reason.AUDIO,
    "audio_embeds": Reason.AUDIO,
    "prompt_embeds": Reason.PROMPT_EMBEDS,
}


def read_request(
    path: str, body: bytes, headers: Iterable[tuple[bytes, bytes]], rules: Rules = _ANY_REQUEST
) -> Candidate | Skipped:
    """Whether this request can be replayed. Consent and size are decided before the body is looked at; never raises."""
    kind = PATHS.get(path.split("?", 1)[0])
    if kind is None:
        return Skipped(Reason.NOT_GENERATION)
    if refusal := _consent(headers, rules.require_opt_in):
        return Skipped(refusal)
    if len(body) > rules.max_body_bytes:
        return Skipped(Reason.TOO_LARGE)
    request = _json_object(body)
    if request is None:
        return Skipped(Reason.NOT_JSON)
    if reason := _unusual(request, kind) or (_chat if kind == "chat" else _completion)(request, rules):
        return Skipped(reason)
    model = request.get("model")
    adapter = model if isinstance(model, str) and rules.base_models and model not in rules.base_models else ""
    if adapter and adapter not in rules.adapters:
        return Skipped(Reason.ADAPTER)
    return Candidate(kind, request, _turns(request) if kind == "chat" else 1, adapter, _prompt_chars(request, kind), len(body))


def _consent(headers: Iterable[tuple[bytes, bytes]], required: bool) -> Reason | None:
    """A mistyped `off` must not count as consent, so every value but `on` forbids."""
    said = [word.strip().lower() for name, value in headers if name.strip().lower() == HEADER for word in value.split(b",")]
    if any(word != b"on" for word in said):
        return Reason.OPTED_OUT
    return Reason.NOT_OPTED_IN if required and not said else None


def _json_object(body: bytes) -> dict[str, Json] | None:
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _unusual(request: Mapping[str, Json], kind: Kind) -> Reason | None:
    """What forbids a replay of either kind."""
    if not all(_is_count(request.get(name)) for name in ("n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens")):
        return Reason.NOT_JSON
    if own_limit(request, kind) == 0:
        return Reason.NOT_GENERATION
    forbidding: tuple[tuple[Reason, bool], ...] = (
        (Reason.SEVERAL_ANSWERS, (request.get("n") or 1) > 1),
        (Reason.BEST_OF, (request.get("best_of") or 1) > 1),
        (Reason.BEAM_SEARCH, bool(request.get("use_beam_search"))),
        (Reason.ECHO, bool(request.get("echo"))),
        (Reason.LOGIT_BIAS, bool(request.get("logit_bias"))),
        (
            Reason.FORCED_TOKENS,
            bool(request.get("allowed_token_ids")) or request.get("thinking_token_budget") not in (None, -1),
        ),
        (Reason.STRUCTURED_OUTPUT, any(request.get(name) is not None for name in _GRAMMAR)),
        (Reason.STRUCTURED_OUTPUT, _formatted(request.get("response_format"))),
        (Reason.KV_TRANSFER, bool(request.get("kv_transfer_params") or request.get("ec_transfer_params"))),
        (Reason.CUSTOM_ARGUMENTS, bool(request.get("vllm_xargs"))),
        (Reason.PROMPT_EMBEDS, request.get("prompt_embeds") is not None),
    )
    return next((reason for reason, holds in forbidding if holds), None)


def _is_count(value: Json) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _formatted(response_format: Json) -> bool:
    return response_format is not None and not (isinstance(response_format, dict) and response_format.get("type") == "text")


def own_limit(request: Mapping[str, Json], kind: Kind) -> int | None:
    """The client's limit on generated tokens; None: as many as fit."""
    if kind == "completion":
        limit = request.get("max_tokens")
        return COMPLETION_MAX_TOKENS if limit is None else int(limit)
    limit = request.get("max_completion_tokens")
    limit = request.get("max_tokens") if limit is None else limit
    return None if limit is None else int(limit)


def _chat(request: Mapping[str, Json], rules: Rules) -> Reason | None:
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        return Reason.NOT_JSON
    if _constrained_tools(request, rules):
        return Reason.TOOLS
    return next((reason for message in messages if (reason := _content(message))), None)


def _constrained_tools(request: Mapping[str, Json], rules: Rules) -> bool:
    """Whether a grammar may shape this answer: a forced call, a strict tool, or a parser that is not known to add none."""
    tools = request.get("tools")
    if not tools:
        return False
    choice = request.get("tool_choice") or "auto"
    if choice == "none":
        return False
    return choice != "auto" or not rules.free_auto_tools or not isinstance(tools, list) or any(map(_is_strict, tools))


def _is_strict(tool: Json) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return not isinstance(function, dict) or bool(function.get("strict"))


def _content(message: Mapping[str, Json]) -> Reason | None:
    """Why a message cannot be replayed as token ids, or None."""
    if message.get("audio") is not None:
        return Reason.AUDIO
    content = message.get("content")
    if content is None or isinstance(content, str):
        return None
    if not isinstance(content, list):
        return Reason.NOT_JSON
    for part in content:
        if isinstance(part, str):
            continue
        if not isinstance(part, dict):
            return Reason.NOT_JSON
        # vLLM goes by the key where `type` is missing or a `uuid` is given.
        kinds = [str(part.get("type", "text")), *part]
        if media := next((reason for name in kinds if (reason := _MEDIA_KEYS.get(name))), None):
            return media
        if kinds[0] not in _TEXT_PARTS:
            return Reason.OTHER_CONTENT
    return None


def _completion(request: Mapping[str, Json], _: Rules) -> Reason | None:
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        return None if prompt else Reason.NOT_JSON
    if not isinstance(prompt, list) or not prompt:
        return Reason.NOT_JSON
    if _is_token_ids(prompt):
        return None
    if not all(isinstance(one, str) or (isinstance(one, list) and _is_token_ids(one)) for one in prompt):
        return Reason.NOT_JSON
    return Reason.SEVERAL_ANSWERS if len(prompt) > 1 else None


def _is_token_ids(value: list[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in value)


def _turns(request: Mapping[str, Json]) -> int:
    """Earlier answers and this one. A final assistant message is the beginning of this one."""
    earlier: list[dict[str, Json]] = request["messages"][:-1]
    return 1 + sum(1 for message in earlier if message.get("role") == "assistant")


def _prompt_chars(request: Mapping[str, Json], kind: Kind) -> int:
    if kind == "completion":
        return _text_size(request["prompt"], number=BYTES_PER_TOKEN)
    return sum(_text_size(request.get(name), number=0) for name in ("messages", "tools", "documents"))


def _text_size(value: Json, number: int) -> int:
    """UTF-8 bytes of all texts in a JSON value, and `number` for each number."""
    size = 0
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            size += len(item) if item.isascii() else len(item.encode("utf-8", "surrogatepass"))
        elif isinstance(item, dict):
            rest.extend(item.values())
        elif isinstance(item, list):
            rest.extend(item)
        elif isinstance(item, int | float):
            size += number
    return size
