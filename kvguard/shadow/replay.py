"""The request that a probe sends, and what the engine's answer to it says: token ids, logprobs, the most probable others.

Field names are those of vLLM 0.32.0's entrypoints/openai/{chat_completion,completion}/protocol.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from kvguard.shadow.candidate import PATHS, Candidate, Kind, own_limit
from kvguard.shadow.models import Decode
from kvguard.vocabulary import Json

TOP_K = 20
"""Most probable tokens asked for at each position: vLLM's own default limit (`--max-logprobs`)."""

MAX_TOKENS = 2**22
"""Token ids of one prompt or answer that are read at most."""

MASKED = -9999.0
"""What vLLM's HTTP API writes for a logprob of minus infinity, and for one that is missing (0.32.0 serving.py)."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "watermarking",
    "stop",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
)
_PROMPT: Mapping[Kind, tuple[str, ...]] = {
    "chat": (
        "messages",
        "tools",
        "tool_choice",
        "documents",
        "reasoning_effort",
        "chat_template",
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "truncation_side",
    ),
    "completion": ("prompt", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"),
}
# What greedy decoding ignores; a seed or a cut-off beside temperature 0 only invites another code path.
_DRAWING = frozenset({"top_p", "top_k", "min_p", "seed"})

_TOKEN = re.compile(r"token_id:(0|[1-9][0-9]{0,9})")
_NOT_FINITE = "Out of range float values are not JSON compliant"


class Problem(StrEnum):
    """Why an answer is no probe. The first is a finding about the engine, the others about the answer."""

    NAN = "nan logprob"
    """A logprob is not a number: the model's output is broken."""
    ERROR = "error"
    """The engine answered with an error."""
    NO_TOKEN_IDS = "no token ids"
    """vLLM before 0.10.2 knows no `return_token_ids`."""
    NO_LOGPROBS = "no logprobs"
    """Logprobs are missing, or not those of the generated tokens."""
    NO_TOKENS = "no tokens"
    """Nothing was generated."""
    MALFORMED = "malformed"
    """Not the answer of a completion or chat with one choice."""


class _Unreadable(Exception):
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


def probe_body(
    candidate: Candidate, *, served_model: str, max_tokens: int, greedy: bool, salt: str
) -> tuple[str, dict[str, Json]]:
    """(path, body) of the replay. Only fields that shape the prompt or the drawing are taken over.

    `salt` keeps the replay out of the clients' prefix cache, and them out of its own: a fresh random text for each
    probe, at most 128 characters without `@`, `/`, `\\` (0.32.0 generate/base/protocol.py, validate_cache_salt). Write the body
    with `json.dumps` as it is (ASCII), since a client's text may hold lone surrogates, which have no UTF-8.
    Logprobs are comparable under --logprobs-mode raw_logprobs, vLLM's default, alone.
    """
    request = candidate.body
    names = (*_PROMPT[candidate.kind], *_SAMPLING)
    probe: dict[str, Json] = {name: request[name] for name in names if request.get(name) is not None}
    if greedy:
        probe = {name: value for name, value in probe.items() if name not in _DRAWING} | {"temperature": 0}
    limit = min(max_tokens, own_limit(request, candidate.kind) or max_tokens)
    probe |= {
        "model": candidate.adapter or served_model,
        "stream": False,
        "n": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": salt,
    }
    # vLLM refuses a least number of tokens above the greatest.
    if isinstance(least := request.get("min_tokens"), int) and least > 0:
        probe["min_tokens"] = min(least, limit)
    if candidate.kind == "chat":
        # include_reasoning false, which the client may have sent, would leave out ids and logprobs (0.32.0 chat serving.py).
        probe |= {"max_completion_tokens": limit, "logprobs": True, "top_logprobs": TOP_K, "include_reasoning": True}
    else:
        probe |= {"max_tokens": limit, "logprobs": TOP_K}
    return next(path for path, kind in PATHS.items() if kind == candidate.kind), probe


def read_decode(kind: Kind, answer: Json) -> Decode | Problem:
    """What the engine decoded, from its parsed JSON answer; a Problem (a str) when it cannot be scored. Never raises.

    vLLM (read in 0.32.0) puts `prompt_token_ids` at the top of a chat's answer and into the choice of a completion's.
    Pass error answers too: vLLM cannot write NaN as JSON and answers with an error that says so, which is Problem.NAN.
    """
    try:
        if not isinstance(answer, dict):
            raise _Unreadable(Problem.MALFORMED)
        if "error" in answer or "choices" not in answer:
            raise _Unreadable(_error(answer))
        choices = answer["choices"]
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise _Unreadable(Problem.MALFORMED)
        return _decode(kind, answer, choices[0])
    except _Unreadable as unreadable:
        return unreadable.problem


def _error(answer: Mapping[str, Json]) -> Problem:
    error = answer.get("error", answer)
    text = error.get("message") if isinstance(error, dict) else error
    return Problem.NAN if isinstance(text, str) and _NOT_FINITE in text else Problem.ERROR


def _decode(kind: Kind, answer: Mapping[str, Json], choice: Mapping[str, Json]) -> Decode:
    prompt_ids = _ids((answer if kind == "chat" else choice).get("prompt_token_ids"))
    ids = _ids(choice.get("token_ids"))
    if not prompt_ids:
        raise _Unreadable(Problem.NO_TOKEN_IDS)
    if not ids:
        raise _Unreadable(Problem.NO_TOKENS)
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise _Unreadable(Problem.NO_LOGPROBS)
    tokens, own, top = (_chat_columns if kind == "chat" else _completion_columns)(logprobs)
    if not len(ids) == len(tokens) == len(own) == len(top):
        raise _Unreadable(Problem.NO_LOGPROBS)
    values = tuple(_logprob(value) for value in own)
    if [_token_id(token) for token in tokens] != list(ids) or min(values) <= MASKED:
        raise _Unreadable(Problem.NO_LOGPROBS)
    reason = choice.get("finish_reason")
    return Decode(prompt_ids, ids, values, tuple(map(_top, top)), reason if isinstance(reason, str) else "")


_Columns = tuple[Sequence[Json], Sequence[Json], Sequence[Iterable[tuple[Json, Json]]]]


def _chat_columns(logprobs: Mapping[str, Json]) -> _Columns:
    """(token, its logprob, (token, logprob) of the most probable) by position, from `content`."""
    content = _list(logprobs.get("content"))
    entries = [_object(entry) for entry in content]
    top = [[_object(pair) for pair in _list(entry.get("top_logprobs"))] for entry in entries]
    return (
        [entry.get("token") for entry in entries],
        [entry.get("logprob") for entry in entries],
        [[(pair.get("token"), pair.get("logprob")) for pair in pairs] for pairs in top],
    )


def _completion_columns(logprobs: Mapping[str, Json]) -> _Columns:
    """The same, from the parallel lists of a completion."""
    top = [_object(pairs).items() for pairs in _list(logprobs.get("top_logprobs"))]
    return _list(logprobs.get("tokens")), _list(logprobs.get("token_logprobs")), top


def _top(pairs: Iterable[tuple[Json, Json]]) -> tuple[tuple[int, float], ...]:
    """By falling logprob, at most TOP_K. vLLM puts the drawn token first, and beside them when it is not among them."""
    seen: dict[int, float] = {}
    for token, value in pairs:
        seen.setdefault(_token_id(token), _logprob(value))
    if not seen:
        raise _Unreadable(Problem.NO_LOGPROBS)
    return tuple(sorted(seen.items(), key=lambda pair: -pair[1])[:TOP_K])


def _ids(value: Json) -> tuple[int, ...]:
    if value is None:
        raise _Unreadable(Problem.NO_TOKEN_IDS)
    if not isinstance(value, list) or len(value) > MAX_TOKENS:
        raise _Unreadable(Problem.MALFORMED)
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31 for one in value):
        raise _Unreadable(Problem.MALFORMED)
    return tuple(value)


def _token_id(token: Json) -> int:
    match = _TOKEN.fullmatch(token) if isinstance(token, str) else None
    if match is None:
        raise _Unreadable(Problem.NO_LOGPROBS)
    return int(match[1])


def _logprob(value: Json) -> float:
    """A JSON writer that keeps NaN writes null, NaN or "NaN" in its place."""
    if value is None or value in ("NaN", "Infinity", "-Infinity"):
        raise _Unreadable(Problem.NAN)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _Unreadable(Problem.MALFORMED)
    try:
        number = float(value)
    except OverflowError:
        raise _Unreadable(Problem.MALFORMED) from None
    if not math.isfinite(number):
        raise _Unreadable(Problem.NAN)
    return number


def _list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise _Unreadable(Problem.NO_LOGPROBS)
    return value


def _object(value: Json) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise _Unreadable(Problem.NO_LOGPROBS)
    return value
