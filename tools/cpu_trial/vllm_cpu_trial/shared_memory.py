# SPDX-License-Identifier: Apache-2.0
"""Segments of shared memory that do not outlive their engine.

Symptom: "create shm in SHMManager failed. errno: 17" as an engine with TP or PP starts, now and
then. Cause: vLLM names the segments of a group after the engine's port, creates them exclusively
and, its workers being ended by a signal, leaves them behind; sooner or later a port comes again.
It can go when vLLM removes the names of segments that all ranks have opened.
"""

from collections.abc import Sequence
from pathlib import Path

from vllm.distributed.device_communicators import cpu_communicator

_SEGMENTS = Path("/dev/shm")
_Group = cpu_communicator._CPUSHMDistributed
_init_cpu_shm = _Group._init_cpu_shm


def init_cpu_shm(self: "cpu_communicator._CPUSHMDistributed") -> int:
    """Return the handle of the group's segments, this rank's one nameless from here on."""
    segment = _SEGMENTS / f"{self.group_name}_{self.communicator.rank}"
    # This engine holds the port, so another one that made a segment of this name has lost it.
    segment.unlink(missing_ok=True)
    handle = _init_cpu_shm(self)
    segment.unlink(missing_ok=True)
    return handle


REPLACEMENTS: Sequence[tuple[object, str, object]] = ((_Group, "_init_cpu_shm", init_cpu_shm),)
