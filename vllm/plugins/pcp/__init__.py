# SPDX-License-Identifier: Apache-2.0
"""Entry point of prefill context parallelism: ``register`` runs in every vLLM process.

seams      the one table of vLLM functions that are wrapped, and the guard that installs all of them or none
routing    what a configuration with P > 1 is turned into: our worker, our executor
admission  what runs with P > 1, and every refusal
"""

from __future__ import annotations


def register() -> None:
    """Install the seams, once a process.

    Raises:
        UpstreamMismatchError: the installed vLLM is not the one that this package extends.
    """
    # Imported here: vLLM only logs an error raised while a plugin is imported, and goes on without it.
    from vllm.plugins.pcp.seams import SEAMS, install

    install(SEAMS)
