"""The command as it is run: what changes, why, and that nothing else does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_fakes import COMPRESSED_TENSORS, SMOLLM2
from kvguard.engine.command import Command, parse_command, split_words
from kvguard.engine.plan import Plan, listen_of, make_plan
from kvguard.engine.resolve import resolve
from kvguard.policy.models import Policy
from kvguard.vocabulary import UsageError
from launches import command, declared, dtype

RUN = Path("/run/g/0123abcd")
EXECUTABLE = ("/e/bin/vllm", "serve")
OURS = (
    ("--uds", "/run/g/0123abcd/engine.sock"),
    ("--port", "4321"),
    ("--worker-extension-cls", "kvguard_inside.WorkerExtension"),
    ("--middleware", "kvguard_inside.EvidenceMiddleware"),
)


def plan_of(
    typed: Command,
    *,
    config: dict[str, Any] | None = None,
    required: Policy | None = None,
    env: dict[str, str] | None = None,
    colour: bool = False,
) -> Plan:
    checkpoint = config or SMOLLM2
    files = declared(checkpoint)
    return make_plan(
        typed,
        resolve(typed, typed.version, files, required, checkpoint.get("quantization_config", {})),
        files,
        executable=EXECUTABLE,
        run_directory=RUN,
        free_port=4321,
        env=env or {},
        colour=colour,
    )


def pairs(plan: Plan) -> list[tuple[str, str]]:
    return [(plan.argv[index], plan.argv[index + 1]) for index in range(len(plan.argv) - 1)]


def changes(plan: Plan) -> str:
    return "\n".join(change.what for change in plan.changes)


def test_everything_else_stays_verbatim_and_in_order() -> None:
    theirs = ["--max_model_len=2048", "-tp", "1", "--served-model-name", "a", "b", "--enforce-eager", "--kv-cache-dtype", "fp8"]
    plan = plan_of(command(*theirs))
    assert list(plan.argv[:3]) == [*EXECUTABLE, "m"]
    assert list(plan.argv[3 : 3 + len(theirs)]) == theirs
    assert list(plan.argv[3 + len(theirs) :]) == [word for pair in OURS for word in pair]


def test_every_change_is_listed_with_its_reason() -> None:
    plan = plan_of(
        command(
            "--host",
            "::1",
            "--port",
            "9",
            "--ssl-keyfile",
            "k",
            "--ssl-certfile",
            "c",
            "--api-key",
            "only-one",
            "--worker-ext",
            "a.B",
        ),
        required=dtype("fp8_e4m3"),
    )
    assert all(change.why for change in plan.changes)
    assert [change.what for change in plan.changes] == [
        "listens on /run/g/0123abcd/engine.sock",
        "--ssl-keyfile, --ssl-certfile removed",
        "--api-key moved to VLLM_API_KEY",
        "--kv-cache-dtype fp8_e4m3",
        "worker extension a.B wrapped",
        "--worker-extension-cls and --middleware added",
    ]
    assert (plan.listen.host, plan.listen.port) == ("::1", 9)
    assert plan.argv == (*EXECUTABLE, "m", *OURS[0], *OURS[1], "--kv-cache-dtype", "fp8_e4m3", *OURS[2], *OURS[3])


def test_the_addresses_move_to_kvguard() -> None:
    listen = plan_of(command("--host=10.0.0.1", "--port", "8443", "--port", "9443", "--uds", "/theirs")).listen
    assert (listen.host, listen.port, listen.uds) == ("10.0.0.1", 9443, "/theirs")
    plain = listen_of(command())
    assert (plain.host, plain.port, plain.uds, plain.ssl_certfile) == ("0.0.0.0", 8000, None, None)


def test_tls_moves_to_kvguard_whole() -> None:
    tls = ["--ssl-keyfile", "k", "--ssl-certfile=c", "--ssl_ca_certs", "ca", "--ssl-cert-reqs", "2", "--ssl-ciphers", "X"]
    plan = plan_of(command(*tls, "--enable-ssl-refresh"))
    assert not [word for word in plan.argv if "ssl" in word]
    listen = plan.listen
    assert (listen.ssl_keyfile, listen.ssl_certfile, listen.ssl_ca_certs) == ("k", "c", "ca")
    assert (listen.ssl_cert_reqs, listen.ssl_ciphers) == (2, "X")


@pytest.mark.parametrize("port", ["0", "65536", "http", "", "²", "-1", "9" * 5000])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(UsageError, match="--port"):
        listen_of(command(f"--port={port}"))


def test_cert_reqs_that_is_none() -> None:
    with pytest.raises(UsageError, match="--ssl-cert-reqs '3'"):
        listen_of(command("--ssl-cert-reqs", "3"))


@pytest.mark.parametrize(
    ("argv", "env", "keys", "in_argv", "in_env"),
    [
        ((), {}, (), False, None),
        ((), {"VLLM_API_KEY": "from-env"}, ("from-env",), False, "from-env"),
        (("--api-key", "typed"), {"VLLM_API_KEY": "from-env"}, ("typed",), False, "typed"),
        (("--api-key", "one", "--api-key", "two"), {}, ("two",), False, "two"),
        (("--api-key", "one", "two"), {}, ("one", "two"), False, None),
        (("--api-key", ""), {}, (), True, None),
    ],
)
def test_api_keys_leave_the_arguments(
    argv: tuple[str, ...], env: dict[str, str], keys: tuple[str, ...], in_argv: bool, in_env: str | None
) -> None:
    plan = plan_of(command(*argv), env=env)
    assert plan.api_keys == keys
    assert ("--api-key" in plan.argv) is in_argv
    assert plan.env.get("VLLM_API_KEY") == in_env
    assert "typed" not in repr(plan)
    if in_argv:
        assert plan.argv[3 : 3 + len(argv)] == argv


def test_several_api_keys_go_into_a_private_config_file() -> None:
    plan = plan_of(command("--api-key", "one", "two", "--max-num-seqs", "8"))
    assert yaml.safe_load(plan.files["config.yaml"]) == {"api-key": ["one", "two"]}
    assert ("--config", "/run/g/0123abcd/config.yaml") in pairs(plan)
    assert "one" not in plan.argv
    beside = plan_of(command("--api-key", "one", "two", "--config", "/etc/vllm.yaml", config=b"max-num-seqs: 8\n"))
    assert yaml.safe_load(beside.files["config.yaml"]) == {"max-num-seqs": 8, "api-key": ["one", "two"]}
    assert [flag for flag, _ in pairs(beside)].count("--config") == 1


def test_with_a_file_of_ours_the_model_is_found_wherever_it_stood() -> None:
    words = split_words(("vllm", "serve", "--enforce-eager", "m", "--api-key", "one", "two"))
    plan = plan_of(parse_command(words, "0.32.0", lambda _: b""))
    assert yaml.safe_load(plan.files["config.yaml"]) == {"model": "m", "api-key": ["one", "two"]}


def test_tls_without_a_certificate_is_refused() -> None:
    for argv in (("--ssl-keyfile", "k"), ("--ssl-ca-certs", "c"), ("--enable-ssl-refresh",)):
        with pytest.raises(UsageError, match="--ssl-certfile"):
            listen_of(command(*argv))


CONFIG = b"""\
host: 127.0.0.1
port: 9000
api_key: [from-yaml]
worker-extension-cls: a.B
kv_cache_dtype: auto
ssl-certfile: /c.pem
enable-ssl-refresh: true
served-model-name: [x, y]
speculative-config: {model: d}
"""


def test_a_config_file_is_copied_without_what_moves() -> None:
    plan = plan_of(command("--config", "/etc/vllm.yaml", "--max-num-seqs", "8", config=CONFIG))
    assert yaml.safe_load(plan.files["config.yaml"]) == {"served-model-name": ["x", "y"], "speculative-config": {"model": "d"}}
    assert ("--config", "/run/g/0123abcd/config.yaml") in pairs(plan)
    assert (plan.listen.host, plan.listen.port, plan.api_keys) == ("127.0.0.1", 9000, ("from-yaml",))
    assert plan.env["KVGUARD_INSIDE_EXTENSION"] == "a.B"
    assert "from-yaml" not in repr(plan)
    removed = "api_key, enable-ssl-refresh, host, kv_cache_dtype, port, ssl-certfile, worker-extension-cls"
    assert f"/etc/vllm.yaml copied without {removed}" in changes(plan)


def test_a_config_file_with_nothing_that_moves_is_left_alone() -> None:
    plan = plan_of(command("--config", "/etc/vllm.yaml", config=b"max-num-seqs: 8\n"))
    assert plan.files == {}
    assert ("--config", "/etc/vllm.yaml") in pairs(plan)
    assert "copied" not in changes(plan)


def test_keys_written_short_are_removed_from_the_copy_too() -> None:
    plan = plan_of(command("--config", "c.yaml", config=b"worker-ext: a.B\nssl_keyf: k\nssl_certf: c\nmax-num-seqs: 8\n"))
    assert yaml.safe_load(plan.files["config.yaml"]) == {"max-num-seqs": 8}
    assert plan.env["KVGUARD_INSIDE_EXTENSION"] == "a.B"


def test_both_readers_are_composed_with_the_commands_own() -> None:
    plan = plan_of(
        command("--worker-extension-cls", "a.B", "--middleware", "c.D", "--middleware", "e.F"), env={"PYTHONPATH": "/x"}
    )
    middleware = [value for flag, value in pairs(plan) if flag == "--middleware"]
    assert middleware == ["c.D", "e.F", "kvguard_inside.EvidenceMiddleware"]
    assert [value for flag, value in pairs(plan) if flag == "--worker-extension-cls"] == ["kvguard_inside.WorkerExtension"]
    assert plan.env["KVGUARD_INSIDE_EXTENSION"] == "a.B"
    assert plan.env["PYTHONPATH"] == "/run/g/0123abcd/inside:/x"
    assert plan.env["KVGUARD_INSIDE_SECRET_FILE"] == "/run/g/0123abcd/secret"


def test_the_engines_environment() -> None:
    plan = plan_of(command(), env={"HOME": "/h"})
    assert plan.env == {
        "HOME": "/h",
        "PYTHONPATH": "/run/g/0123abcd/inside",
        "KVGUARD_INSIDE_SECRET_FILE": "/run/g/0123abcd/secret",
        "PYTHONUNBUFFERED": "1",
        "VLLM_RPC_BASE_PATH": "/run/g/0123abcd",
    }
    assert plan_of(command(), colour=True).env["VLLM_LOGGING_COLOR"] == "1"
    assert "VLLM_LOGGING_COLOR" not in plan_of(command(), colour=True, env={"NO_COLOR": "1"}).env
    assert plan_of(command(), colour=True, env={"VLLM_LOGGING_COLOR": "0"}).env["VLLM_LOGGING_COLOR"] == "0"


def test_the_dtype_is_stated_once() -> None:
    plan = plan_of(command("--kv_cache_dtype=auto", "--kv-cache-dtype", "auto"), required=dtype("fp8_e4m3"))
    assert [word for word in plan.argv if "cache" in word] == ["--kv-cache-dtype"]
    assert ("--kv-cache-dtype", "fp8_e4m3") in pairs(plan)
    assert "--kv-cache-dtype fp8_e4m3" in changes(plan)


def test_a_scheme_is_stripped_through_hf_overrides() -> None:
    typed = command("--hf-overrides", '{"a": 1}', "--hf-overrides.b.c", "2", version="0.20.2")
    plan = plan_of(typed, config={**SMOLLM2, **COMPRESSED_TENSORS}, required=dtype("bfloat16"))
    overrides = [value for flag, value in pairs(plan) if flag.startswith("--hf-overrides")]
    assert [json.loads(text) for text in overrides] == [
        {"b": {"c": 2}, "quantization_config": {"quant_method": "compressed-tensors"}}
    ]
    assert "--hf-overrides without config.json: quantization_config.kv_cache_scheme" in changes(plan)


def test_the_parsers_warnings_are_shown() -> None:
    assert any("--config=FILE" in warning for warning in plan_of(command("--config=c.yaml")).warnings)


FLAGS = st.sampled_from(
    [
        ("--max-model-len", "2048"),
        ("--enforce-eager",),
        ("--served-model-name", "a", "b"),
        ("--host", "127.0.0.1"),
        ("--port=9"),
        ("--api-key", "kkkk"),
        ("--middleware", "x.Y"),
        ("--no-enable-prefix-caching",),
        ("--ssl-certfile=c",),
        ("--kv-cache-dtype", "auto"),
    ]
)
MOVED = ("--host", "--port", "--api-key", "--ssl-certfile", "--kv-cache-dtype")


@given(st.lists(FLAGS.map(lambda flag: (flag,) if isinstance(flag, str) else flag), max_size=6))
def test_what_is_not_moved_is_kept_whatever_stands_beside_it(flags: list[tuple[str, ...]]) -> None:
    kept = [word for flag in flags if not flag[0].startswith(MOVED) for word in flag]
    plan = plan_of(command(*(word for flag in flags for word in flag)))
    assert list(plan.argv[3 : 3 + len(kept)]) == kept
    assert list(plan.argv[3 + len(kept) :]) == [
        *OURS[0], *OURS[1], "--kv-cache-dtype", "bfloat16", *OURS[2], *OURS[3]
    ]  # fmt: skip
