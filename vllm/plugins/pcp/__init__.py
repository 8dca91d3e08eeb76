# SPDX-License-Identifier: Apache-2.0
"""Entry point of prefill context parallelism: ``register`` runs in every vLLM process.

seams      the one table of vLLM functions that are wrapped, and its all-or-nothing guard
routing    what a configuration with P > 1 is turned into: our worker, our executor
options    what --additional-config says to it
admission  what runs with P > 1, and every refusal that a configuration shows
"""

from __future__ import annotations


def register() -> None:
    """Install the seams, once a process.

    Raises:
        UpstreamMismatchError: the installed vLLM is not the one that this package extends.
    """
    # Not at the top: vLLM logs an error raised while it imports a plugin, and goes on without it.
    from vllm.plugins.pcp.seams import SEAMS, install

    install(SEAMS)
