"""A pod's container as the kubelet would set it up, as far as one machine without a container engine can.

A root that is read-only, the volumes of the spec and nothing else to write to, the spec's user, who is in no passwd file, no
capabilities, no new privileges, and only the spec's environment. The programs are this machine's, and so is the network.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from charts import ROOT, container, environment

_LIKE_HERE = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "sys")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def why_not() -> str:
    """Why there are no sandboxes here, "" where there are."""
    if os.geteuid() != 0:
        return "mounting needs root"
    for program in ("unshare", "chroot", "setpriv", "mount"):
        if shutil.which(program) is None:
            return f"no {program} on this machine"
    for place in (ROOT, Path(sys.base_prefix), Path(sys.prefix)):
        if place.stat().st_mode & 0o005 != 0o005:
            return f"{place} is not for every user to read"
    steps = ["set -e", "mount --make-rprivate /", "mount -t tmpfs none /mnt", "cd /mnt", "mkdir usr sys proc"]
    steps += [f"mount --rbind /{top} {top}" for top in ("usr", "sys", "proc")]
    steps += ["mount -o remount,ro,bind usr", "mount -o remount,ro,bind sys", "mount -o remount,ro /mnt"]
    steps += ["setpriv --no-new-privs --inh-caps=-all --bounding-set=-all true"]
    trial = ["unshare", "--mount", "sh", "-c", "\n".join(steps)]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else f"mounting is not allowed here: {done.stderr.strip()}"


def command(
    spec: dict[str, Any],
    name: str,
    words: Sequence[str],
    *,
    volumes: Mapping[str, Path],
    seen: Sequence[Path],
    log: Path,
    more: Mapping[str, str],
) -> list[str]:
    """Runs `words` as the container `name` of a pod spec.

    `volumes` are what read-only volumes hold, by name; `seen` further directories of this machine, read-only at their own
    paths; `log` the file behind /dev/termination-log; `more` are variables beside the container's own.
    """
    one = container(spec, name)
    security = spec["securityContext"]
    user, group = security["runAsUser"], security["fsGroup"]
    assert one["securityContext"]["readOnlyRootFilesystem"] is True
    lines = ["set -eu", "mount --make-rprivate /", "mount -t tmpfs none /mnt", "cd /mnt"]
    for top in _LIKE_HERE:
        here = Path("/") / top
        if here.is_symlink():
            lines.append(f"ln -s {os.readlink(here)} {top}")
        elif here.is_dir():
            lines += [f"mkdir {top}", f"mount --rbind /{top} {top}", f"mount -o remount,ro,bind {top}"]
    lines += ["mkdir etc proc dev", "cp -a /etc/. etc", "mount --rbind /proc proc"]
    lines += [f"touch dev/{device} && mount --bind /dev/{device} dev/{device}" for device in _DEVICES]
    lines += [f"touch dev/termination-log && mount --bind {shlex.quote(str(log))} dev/termination-log"]
    for mount in sorted(one["volumeMounts"], key=lambda item: str(item["mountPath"])):
        inside = mount["mountPath"].lstrip("/")
        lines.append(f"mkdir -p {inside}")
        if mount.get("readOnly"):
            source = volumes.get(mount["name"])
            if source is not None:
                lines += [f"mount --bind {shlex.quote(str(source))} {inside}", f"mount -o remount,ro,bind {inside}"]
        else:  # as the kubelet makes an emptyDir: everybody's, of the pod's group
            lines.append(f"mount -t tmpfs -o mode=2777,gid={group} none {inside}")
    for place in (ROOT, Path(sys.base_prefix), Path(sys.prefix), *seen):
        inside = shlex.quote(str(place).lstrip("/"))
        lines += [f"mkdir -p {inside}", f"mount --rbind /{inside} {inside}", f"mount -o remount,ro,bind {inside}"]
    variables = {key: str(value) for key, value in environment(one).items()} | dict(more)
    run = [
        *("env", "-i", *(f"{key}={value}" for key, value in variables.items())),
        *("setpriv", "--reuid", str(user), "--regid", str(security["runAsGroup"]), "--groups", str(group)),
        *("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all", *words),
    ]
    lines += ["mount -o remount,ro /mnt", f"exec chroot /mnt {shlex.join(run)}"]
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines)]
