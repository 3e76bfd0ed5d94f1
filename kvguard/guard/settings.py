"""How a guard behaves, apart from its policy."""

from __future__ import annotations

from pathlib import Path

from kvguard.shadow.settings import Settings as ShadowSettings
from kvguard.vocabulary import Frozen

SHADOW_OFF = "off"
SHADOW_IN_ENGINE = "in-engine"


class Settings(Frozen):
    """Times in seconds.

    `settle`: after SIGTERM, how long requests are still accepted while routers take note (default 5, because
    Kubernetes keeps sending for a few seconds). `grace`: from SIGTERM to the end of everything (default 25,
    under Kubernetes' 30). `engine_reserve`: the part of the grace kept for the engine's own stop.
    `start_timeout`: from the engine's start to its first healthy answer; None waits, as an orchestrator's startup
    probe does. `refresh`: how often the engine's metrics are read.
    `shadow`: which reference probes live traffic: off (the default, because a pass stalls every stream for its
    duration), in-engine, or the URL or Unix socket of a 16-bit engine behind kvguard.
    """

    settle: float = 5.0
    grace: float = 25.0
    engine_reserve: float = 4.0
    start_timeout: float | None = None
    refresh: float = 5.0
    record_directory: Path
    termination_log: Path | None = None
    shadow: str = SHADOW_OFF
    shadow_settings: ShadowSettings = ShadowSettings()
