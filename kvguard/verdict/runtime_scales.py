"""How a start gets runtime scales, as it was decided before it."""

from __future__ import annotations

from typing import Literal

from kvguard.vocabulary import Check, CheckResult, Frozen

Way = Literal["flag", "overlay"]


class RuntimeScales(Frozen):
    """The way, and why it is the way.

    `flag`: the engine computes them from kvguard's prompt, the first batch it sees. `overlay`: the engine loads those
    that were measured, from the directory `overlay`; `missing`: none were measured yet. `problem` says why it cannot be
    done, `action` what to do then; `where` is what `found` or `problem` was read from.
    """

    way: Way
    reason: str
    overlay: str = ""
    missing: bool = False
    found: str = ""
    where: str = ""
    problem: str = ""
    action: str = ""

    def check(self) -> Check:
        """As a check of what can be judged before the start."""
        return Check(
            name="kv_scales",
            result=CheckResult.FAIL if self.problem else CheckResult.PASS,
            required="runtime scales",
            found=self.problem or self.found,
            where=self.where,
            action=self.action,
        )
