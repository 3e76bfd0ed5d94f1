"""Public reports of damage that a cache configuration invites, by architecture, format, device and version."""

from __future__ import annotations

from kvguard.facts.devices import Device
from kvguard.facts.versions import examined, in_range, read_data
from kvguard.vocabulary import Frozen


class Caution(Frozen):
    """One report that fits: what to look out for, and who reported it. It never fails a check by itself."""

    id: str
    text: str
    source: str


def cautions(
    version: str, dtype: str, scales: str, *, architecture: str | None, mla: bool, device: Device | None = None
) -> tuple[Caution, ...]:
    """The reports that fit a canonical dtype and a scale state (a `ScaleState` value) on a version that was examined."""
    found = []
    for entry in read_data("cautions")["cautions"] if examined(version) else ():
        fits = (
            dtype in entry["dtypes"]
            and in_range(version, entry["versions"])
            and ("architectures" not in entry or architecture in entry["architectures"])
            and ("scales" not in entry or scales in entry["scales"])
            and ("mla" not in entry or mla == entry["mla"])
            and ("device" not in entry or (device is not None and device.matches(entry["device"])))
        )
        if fits:
            found.append(Caution(id=entry["id"], text=entry["text"], source=entry["source"]))
    return tuple(found)
