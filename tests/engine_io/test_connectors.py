"""Where blocks may come from besides the engine, as the command says it."""

from __future__ import annotations

from typing import Any

import pytest

from kvguard.engine.connectors import connectors_of
from launches import command


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        ((), []),
        (
            ("--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_ip": "10.0.0.7"}'),
            [{"flag": "--kv-transfer-config", "kv_connector": "NixlConnector", "kv_role": "kv_both"}],
        ),
        (
            ("--kv-transfer-config.kv_connector", "LMCacheConnectorV1", "--kv-transfer-config.kv_role=kv_both"),
            [{"flag": "--kv-transfer-config", "kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}],
        ),
        (("--kv-transfer-config", "{"), [{"flag": "--kv-transfer-config", "kv_connector": "unreadable"}]),
        (("--kv-transfer-config", "7"), []),
        (
            ("--kv-offloading-size", "4", "--kv-offloading-backend", "native"),
            [{"flag": "--kv-offloading-size", "kv_offloading_size": "4", "kv_offloading_backend": "native"}],
        ),
        (("--kv-offloading-backend", "native"), []),
        (("--ec-transfer-config", '{"ec_connector": "E"}'), [{"flag": "--ec-transfer-config", "ec_connector": "E"}]),
    ],
)
def test_connectors(argv: tuple[str, ...], found: list[Any]) -> None:
    assert list(connectors_of(command(*argv))) == found
