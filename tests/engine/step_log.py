"""A scheduler of vLLM's that writes down what it is told and what each step computes. Runs in the engine's interpreter.

`--scheduler-cls step_log.WritingScheduler`, with this folder on PYTHONPATH and a file's path in STEP_LOG. One line of JSON for
each event, `at` on the clock that all processes of a machine share (`time.monotonic`).
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class WritingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's own scheduler in all else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file = open(os.environ["STEP_LOG"], "a", buffering=1)  # noqa: SIM115 - as long as the engine

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps({"at": time.monotonic(), **event}) + "\n")

    def add_request(self, request: Any) -> None:
        """A request came from the API server."""
        self._write(added=request.request_id)
        super().add_request(request)

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """The API server wants no more of these."""
        self._write(left=[request_ids] if isinstance(request_ids, str) else list(request_ids or ()))
        return super().finish_requests(request_ids, finished_status)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step: how many tokens of which requests."""
        output = super().schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            self._write(step=dict(output.num_scheduled_tokens))
        return output
