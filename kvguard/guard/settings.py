"""How a guard behaves, apart from its policy."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from kvguard.shadow.settings import Settings as ShadowSettings
from kvguard.vocabulary import Frozen

SHADOW_OFF = "off"
SHADOW_IN_ENGINE = "in-engine"
SHADOW_LAUNCH = "launch"


SHADOW_KEY = "KVGUARD_SHADOW_API_KEY"
"""Variable of the API key of the engine at `--shadow URL`."""


class Settings(Frozen):
    """Times in seconds.

    `settle`: after SIGTERM, how long requests are still accepted while routers take note (default 5, because
    Kubernetes keeps sending for a few seconds). `grace`: from SIGTERM to the end of everything (default 25,
    under Kubernetes' 30). `engine_reserve`: the part of the grace kept for the engine's own stop.
    `start_timeout`: from the engine's start to its first healthy answer; None waits, as an orchestrator's startup
    probe does. `refresh`: how often the engine's metrics are read. `reverify`: how often the cache is verified again while
    serving (default 60; 0: only on signs of change). `restart_timeout`: how long an attached engine may be away; None waits.
    `refusal`: where a refusal of this start by its evidence is remembered (see `refusals`); None: nowhere.
    `shadow`: which reference probes live traffic: off (the default, because a pass stalls every stream for its
    duration), in-engine, launch (an engine of our own, handed to the guard), or the URL or Unix socket of a 16-bit engine
    behind kvguard. `shadow_record`: the run record of that one, a file, a directory or a URL; "" when none is named.
    `shadow_key`: its API key, from the environment variable SHADOW_KEY.
    """

    settle: float = 5.0
    grace: float = 25.0
    engine_reserve: float = 4.0
    start_timeout: float | None = None
    refresh: float = 5.0
    reverify: float = 60.0
    restart_timeout: float | None = None
    record_directory: Path
    termination_log: Path | None = None
    refusal: Path | None = None
    shadow: str = SHADOW_OFF
    shadow_record: str = ""
    shadow_key: str = Field(default="", repr=False)
    shadow_settings: ShadowSettings = ShadowSettings()
