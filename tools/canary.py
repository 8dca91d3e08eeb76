# SPDX-License-Identifier: Apache-2.0
"""Check that this package refuses a vLLM which it was not written for.

Run it where another version than the pinned one is installed. The exit status is 0 when the
refusal is clean, and 1 when the package installs itself all the same.
"""

import sys

from vllm.plugins.pcp import register
from vllm.plugins.pcp.seams import PINNED_VLLM, UpstreamMismatchError, installed_vllm


def main() -> int:
    """Run the entry point and judge the outcome."""
    installed = installed_vllm()
    if installed == PINNED_VLLM:
        print(f"vllm=={installed} is the pinned version: install another one to try.")
        return 1
    try:
        register()
    except UpstreamMismatchError as error:
        print(f"{error}\n\nRefused, as it should be.")
        return 0 if f"vllm=={installed}, expected vllm=={PINNED_VLLM}" in str(error) else 1
    print(f"Installed itself on vllm=={installed}, expected a refusal.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
