"""Keeping secrets out of what is written, shown or passed on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

MASK = "***"

# vLLM's flags that carry a secret, with the shortest prefix its parser takes for that flag alone
# (argparse resolves unique prefixes). --api-key takes several values (0.32.0 openai/cli_args.py).
_FLAGS = {"--api-key": "--api-k", "--hf-token": "--hf-t", "--ssl-keyfile-password": "--ssl-keyfile-"}
_SECRET_WORD = re.compile(r"(?:^|[-_.])(?:api[-_]?key|access[-_]?key|token(?![-_]id)|secret|password|passwd)(?:$|[-_.])", re.I)
_SECRET_ENVIRONMENT = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|^AWS_", re.I)
_USER_INFO = re.compile(r"(?<=://)[^/?#\s'\"]*@")
_QUERY = re.compile(r"([?&][^=&\s]{0,64}?(?:key|token|secret|password|signature)[^=&\s]{0,64}=)[^&\s'\"]+", re.I)
_MEMBER = re.compile(
    r"""(["'][\w.-]{0,64}?(?:api[-_]?key|access[-_]?key|(?<![a-z])(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)token|secret|password)"""
    r"""["']\s{0,8}:\s{0,8})("(?:[^"\\]|\\.)*"|'[^']*')""",
    re.I,
)


def redact_argv(argv: Sequence[str]) -> list[str]:
    """The command with every secret value replaced by `***`, item for item; flags and all other values stay.

    Understood: `--flag=value` and `--flag value`, underscores for dashes, unique prefixes, the several values
    of --api-key, any other flag with token, secret, password or api-key as a word of its name, such members
    of JSON values, and `user:password@` in URLs.
    """
    items = list(argv)
    for index, start, _ in _argv_secrets(items):
        items[index] = items[index][:start] + MASK
    return [_redact_shapes(item) for item in items]


def redact_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with the values of AWS_* and of names that contain KEY, TOKEN, SECRET or PASSWORD masked."""
    return {name: MASK if _SECRET_ENVIRONMENT.search(name) and value else _redact_shapes(value) for name, value in env.items()}


def redact_text(text: str, secrets: Sequence[str] = ()) -> str:
    """`text` without the known `secrets`, plain or as JSON or a URL spells them, and without `user:password@`.

    Secrets shorter than 6 characters are replaced only where they stand as a word, so that a key "1" does not
    eat every number.
    """
    spellings = {spelling for secret in secrets if secret for spelling in _spellings(secret)}
    for secret in sorted(spellings, key=len, reverse=True):
        pattern = re.escape(secret) if len(secret) >= 6 else rf"(?<![\w*]){re.escape(secret)}(?![\w*])"
        text = re.sub(pattern, MASK, text)
    return _redact_shapes(text)


def find_secrets(argv: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """The secret values themselves, for `redact_text` on logs: each once, longest first.

    Of the environment, a value shorter than 8 characters counts only under VLLM_API_KEY and HF_TOKEN: "true"
    in some *_TOKEN_* setting is no secret.
    """
    found = {value for _, _, value in _argv_secrets(argv)}
    for name, value in env.items():
        if _SECRET_ENVIRONMENT.search(name) and (len(value) >= 8 or name in ("VLLM_API_KEY", "HF_TOKEN")):
            found.add(value)
    return tuple(sorted(found - {""}, key=lambda value: (-len(value), value)))


def _argv_secrets(argv: Sequence[str]) -> Iterator[tuple[int, int, str]]:
    """(index, offset in the item, value) of each secret value."""
    many: bool | None = None  # the flag before takes one value (False), several (True) or is no secret (None)
    for index, item in enumerate(argv):
        if item.startswith("--") and len(item) > 2:
            flag, equals, value = item.partition("=")
            name = flag.replace("_", "-")
            many = None
            if _is_secret(name):
                if equals:
                    yield index, len(flag) + 1, value
                else:
                    many = name.startswith("--api-k")
        elif many is not None and not _is_option(item):
            yield index, 0, item
            many = True if many else None
        else:
            many = None


def _is_secret(name: str) -> bool:
    if any(name.startswith(shortest) and flag.startswith(name) for flag, shortest in _FLAGS.items()):
        return True
    return _SECRET_WORD.search(name.removeprefix("--")) is not None


def _is_option(item: str) -> bool:
    """As argparse sees it: a dash and more, unless the rest is a negative number."""
    return len(item) > 1 and item[0] == "-" and not re.fullmatch(r"-\d+|-\d*\.\d+", item)


def _redact_shapes(text: str) -> str:
    text = _USER_INFO.sub(f"{MASK}@", text)
    text = _QUERY.sub(rf"\1{MASK}", text)
    return _MEMBER.sub(lambda match: f"{match[1]}{match[2][0]}{MASK}{match[2][0]}", text)


def _spellings(secret: str) -> set[str]:
    return {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret, safe="")}
