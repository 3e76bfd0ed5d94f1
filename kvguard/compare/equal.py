"""What makes a comparison unfair, or none at all. Each check raises PolicyRefusal, naming both arms and what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvguard.canonical import canonical_json
from kvguard.compare.models import AGAIN, CONTROLS, REFERENCE, ArmFile, is_sixteen_bit
from kvguard.record.diff import diff_records
from kvguard.record.equality import beyond_the_cache, describe_differences
from kvguard.vocabulary import Confidence, Effective, PolicyRefusal, ScaleState, is_quantized


def check_record(name: str, record: Mapping[str, Any], reference_name: str, reference: Mapping[str, Any]) -> None:
    """The two starts differ in nothing but the KV cache."""
    if differences := beyond_the_cache(reference, record):
        raise PolicyRefusal(
            f"arms {reference_name} and {name} differ in more than their KV cache, by their records: "
            f"{describe_differences(differences)}; a loss would have more than one possible cause"
        )


def check_limits(name: str, limits: Mapping[str, int | None], reference_name: str, reference: Mapping[str, int | None]) -> None:
    """The scheduler's limits are equal."""
    for key in sorted({*limits, *reference}):
        if limits.get(key) != reference.get(key):
            flag = "--" + key.replace("_", "-")
            raise PolicyRefusal(
                f"arms {reference_name} and {name} differ in {key} ({reference.get(key)}, there {limits.get(key)}), read in "
                f"the engines; state it after `--` with {flag}"
            )


def check_backends(name: str, effective: Effective, reference_name: str, reference: Effective) -> None:
    """The attention backend is the same, so that kernels do not explain what the cache is blamed for."""
    ours, theirs = effective.attention_backends, reference.attention_backends
    if ours != theirs:
        backend = ours[0] if ours else "BACKEND"
        raise PolicyRefusal(
            f"arms {reference_name} and {name} run other attention backends ({', '.join(theirs) or 'unknown'}, there "
            f"{', '.join(ours) or 'unknown'}); compare on one of them: "
            f"--arms {REFERENCE}@{backend},{name.partition('@')[0]}@{backend}"
        )


def check_pinned(name: str, effective: Effective) -> None:
    """The engine runs on the attention backend that the arm's name pins."""
    required = name.partition("@")[2]
    if required and effective.attention_backends != (required,):
        found = ", ".join(effective.attention_backends) or "unknown"
        raise PolicyRefusal(
            f"arm {name}: required is attention backend {required}, its record shows {found}; pin one that this vLLM takes, "
            f"for all arms: --arms {REFERENCE}@BACKEND,…"
        )


def moved_backend(effective: Effective, reference_name: str, reference: Effective) -> str:
    """The one attention backend that an arm's cache moves it to, "" where it is the reference's, or not to be followed.

    A reference whose name pins its backend is not followed: then the user has chosen.
    """
    ours, theirs = effective.attention_backends, reference.attention_backends
    return ours[0] if reference_name == REFERENCE and len(ours) == 1 and ours != theirs else ""


def check_differ(name: str, effective: Effective, reference_name: str, reference: Effective) -> None:
    """The arms are shown to differ: the reference is 16-bit, the other is quantized, both proven or corroborated."""
    for arm, found in ((reference_name, reference), (name, effective)):
        if not found.confidence.reaches(Confidence.CORROBORATED):
            raise PolicyRefusal(
                f"arm {arm}: its KV cache is {found.dtype} by {found.confidence} evidence only; "
                "arms that cannot be shown to differ are not compared"
            )
    if (effective.dtype, effective.scales) == (reference.dtype, reference.scales):
        raise PolicyRefusal(
            f"arms {reference_name} and {name} run the same KV cache ({effective.dtype}, scales {effective.scales}); "
            "a comparison of equals proves nothing: look for a checkpoint scheme that overrides --kv-cache-dtype"
        )
    if is_quantized(reference.dtype) is not False:
        raise PolicyRefusal(f"arm {reference_name}: required is a 16-bit KV cache, its record shows {reference.dtype}")
    if is_quantized(effective.dtype) is False:
        raise PolicyRefusal(f"arm {name}: required is a quantized KV cache, its record shows {effective.dtype}")
    if effective.scales in (ScaleState.INVALID, ScaleState.PARTIAL):
        raise PolicyRefusal(f"arm {name}: its scales are {effective.scales}; {effective.scales_detail}")


def check_arms(arms: Sequence[ArmFile]) -> None:
    """Everything above, for finished arms; and that they answered the same questions through the same endpoint."""
    reference = arms[0]
    for arm in arms[1:]:
        for what, ours, theirs in (
            ("questions", arm.plan.digest, reference.plan.digest),
            ("chat template", arm.template_digest, reference.template_digest),
            ("lm-eval questions", _harness(arm), _harness(reference)),
            ("endpoint", arm.chat_template, reference.chat_template),
        ):
            if ours != theirs:
                raise PolicyRefusal(f"arms {reference.arm} and {arm.arm} differ in their {what} ({theirs}, there {ours})")
        if is_sixteen_bit(arm.arm):  # on the backend that the quantized cache moves away from, with texts of its own
            check_record(arm.arm, arm.record, reference.arm, reference.record)
            check_limits(arm.arm, arm.limits, reference.arm, reference.limits)
            check_same_cache(arm, reference)
            continue
        theirs_forced = {row.text: len(row.logprobs) for row in reference.forced if not row.problem}
        for row in arm.forced:
            if not row.problem and theirs_forced.get(row.text, len(row.logprobs)) != len(row.logprobs):
                raise PolicyRefusal(f"arms {reference.arm} and {arm.arm} were scored over other tokens of {row.text}")
        check_record(arm.arm, arm.record, reference.arm, reference.record)
        check_limits(arm.arm, arm.limits, reference.arm, reference.limits)
        check_backends(arm.arm, arm.effective, reference.arm, reference.effective)
        if arm.arm == AGAIN:
            check_same_cache(arm, reference)
            continue
        check_differ(arm.arm, arm.effective, reference.arm, reference.effective)
        if arm.arm not in CONTROLS:
            check_outputs(arm, reference)


def check_same_cache(arm: ArmFile, reference: ArmFile) -> None:
    """Both are the same 16-bit cache, by their records."""
    if (arm.effective.dtype, arm.effective.scales) != (reference.effective.dtype, reference.effective.scales):
        raise PolicyRefusal(f"arms {reference.arm} and {arm.arm} run other KV caches, by their records")


def _harness(arm: ArmFile) -> tuple[str, str] | None:
    return (arm.harnessed.version, arm.harnessed.digest) if arm.harnessed else None


def identical_share(arm: ArmFile, reference: ArmFile, *, whole: bool = False) -> tuple[int, int]:
    """(outputs that are equal letter for letter, outputs), over answers, continuations and teacher-forced logprobs.

    `whole` leaves out answers that ended by their length: the first words of two answers are often the same.
    """
    rows = [row for row in reference.scored_answers if not row.problem and not (whole and row.finish == "length")]
    theirs = {(row.task, row.item, row.sample): row.text for row in rows}
    pairs: list[tuple[Any, Any]] = [
        (row.text, theirs[key])
        for row in arm.scored_answers
        if not row.problem and (key := (row.task, row.item, row.sample)) in theirs
    ]
    decodes = {row.text: (row.ids, row.logprobs) for row in reference.generated if not row.problem}
    pairs += [((r.ids, r.logprobs), decodes[r.text]) for r in arm.generated if not r.problem and r.text in decodes]
    forced = {row.text: row.logprobs for row in reference.forced if not row.problem}
    pairs += [(row.logprobs, forced[row.text]) for row in arm.forced if not row.problem and row.text in forced]
    return sum(one == other for one, other in pairs), len(pairs)


def check_outputs(arm: ArmFile, reference: ArmFile) -> None:
    """Not all outputs are identical: that would be one cache twice, not a cache without loss."""
    same, total = identical_share(arm, reference, whole=True)
    if total and same == total:
        raise PolicyRefusal(
            f"arms {reference.arm} and {arm.arm}: all {total} outputs are identical, which a quantized cache does not do; "
            "the comparison is invalid, not free of loss"
        )


def cache_differences(arm: ArmFile, reference: ArmFile) -> list[dict[str, str]]:
    """What differs between the two records, each on one line: the comparison's single cause, and what follows from it."""
    return [
        {"path": found.path, "reference": _short(found.a), "arm": _short(found.b)}
        for found in diff_records(reference.record, arm.record)
    ]


def _short(value: Any) -> str:
    if isinstance(value, list):
        text = "; ".join(map(_plain, value))
    else:
        text = "—" if value is None else _plain(value)
    return text if len(text) <= 160 else text[:159] + "…"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value).decode()
