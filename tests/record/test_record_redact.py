from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvguard.record.redact import find_secrets, redact_argv, redact_env, redact_text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("--api-key a b c --port 1", "--api-key *** *** *** --port 1"),
        ("--api_key=a model", "--api_key=*** model"),
        ("--api-k a", "--api-k ***"),
        ("--api-server-count 2", "--api-server-count 2"),
        ("--hf-token a model", "--hf-token *** model"),
        ("--hf_token=a", "--hf_token=***"),
        ("--hf-token --port 1", "--hf-token --port 1"),
        ("--ssl-keyfile-password a --ssl-keyfile b", "--ssl-keyfile-password *** --ssl-keyfile b"),
        ("--ssl_keyfile_p a", "--ssl_keyfile_p ***"),
        ("--api-key -1 x", "--api-key *** ***"),
        ("--api-key a --api-key b", "--api-key *** --api-key ***"),
        ("--tokenizer t --max-num-batched-tokens 9", "--tokenizer t --max-num-batched-tokens 9"),
        ("--return-tokens-as-token-ids model", "--return-tokens-as-token-ids model"),
        ("--kv-transfer-config.redis_password p", "--kv-transfer-config.redis_password ***"),
        ("--model https://user:pw@host/x", "--model https://***@host/x"),
        ("--url=redis://:pw@host:1/0?token=x&a=1", "--url=redis://***@host:1/0?token=***&a=1"),
        ('{"auth_token":"x","eos_token":"</s>","n":1}', '{"auth_token":"***","eos_token":"</s>","n":1}'),
        ("--api-key", "--api-key"),
        ("-- --api-key=", "-- --api-key=***"),
    ],
)
def test_redact_argv(argv: str, expected: str) -> None:
    assert redact_argv(argv.split()) == expected.split()


SECRETS = st.from_regex(r"\A[A-Za-z0-9+/=_.~]{6,40}\Z")


@given(st.lists(SECRETS, min_size=1, max_size=3), st.sampled_from(["--api-key", "--api_key", "--api-ke"]))
def test_no_key_survives(keys: list[str], flag: str) -> None:
    for argv in ([flag, *keys, "--port", "1"], *([f"{flag}={key}"] for key in keys)):
        redacted = redact_argv(argv)
        assert len(redacted) == len(argv)
        assert not any(key in item for key in keys for item in redacted)
        assert redact_argv(redacted) == redacted


def test_redact_env() -> None:
    env = {
        "VLLM_API_KEY": "a",
        "HF_TOKEN": "b",
        "AWS_REGION": "c",
        "My_Secret": "d",
        "DB_PASSWORD": "e",
        "PATH": "/bin",
        "PROXY": "http://u:p@h/",
        "EMPTY_KEY": "",
    }
    redacted = redact_env(env)
    assert [redacted[name] for name in ("VLLM_API_KEY", "HF_TOKEN", "AWS_REGION", "My_Secret", "DB_PASSWORD")] == ["***"] * 5
    assert redacted["PATH"] == "/bin"
    assert redacted["PROXY"] == "http://***@h/"
    assert redacted["EMPTY_KEY"] == ""


def test_redact_text_knows_a_secrets_other_spellings() -> None:
    secret = 'a"b/c\u00e9'
    text = 'plain a"b/c\u00e9 json a\\"b/c\\u00e9 url a%22b%2Fc%C3%A9'
    assert redact_text(text, [secret]) == "plain *** json *** url ***"


def test_short_secrets_are_words_and_longer_ones_go_first() -> None:
    assert redact_text("key 1 of 100, 1.5", ["1"]) == "key *** of 100, ***.5"
    assert redact_text("abcdefghij abcdef", ["abcdef", "abcdefghij"]) == "*** ***"
    assert redact_text("nothing", ["", "x"]) == "nothing"


def test_find_secrets() -> None:
    argv = ["vllm", "serve", "m", "--api-key", "k1", "longer-key", "--hf-token=t", "--port", "1"]
    env = {"VLLM_API_KEY": "e", "SOME_TOKEN_MODE": "true", "AWS_SECRET_ACCESS_KEY": "0123456789"}
    assert find_secrets(argv, env) == ("0123456789", "longer-key", "k1", "e", "t")
    assert find_secrets([], {}) == ()
