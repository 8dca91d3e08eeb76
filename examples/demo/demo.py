# SPDX-License-Identifier: Apache-2.0
"""The same requests to ``vllm serve`` with P = 1 and P = 2: same tokens, sooner.

A small real model answers questions about a story of 3,400 tokens, alone and beside short chats.

    python examples/demo/demo.py [--sizes 1 2]

Exit status: 0 if every size gave the tokens of the first one and every P > 1 partitioned steps,
1 if not, 2 if a server could not be run.
"""

import argparse
import asyncio
import contextlib
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from itertools import cycle
from pathlib import Path

import httpx
import openai
from chat import Request, ask, ask_beside, connect
from demo_report import BOLD, LINE_WIDTH, RED, Run, print_report, style
from smollm2 import smollm2_checkpoint
from vllm_serve import ChildError, Device, child, choose_device, rank_counters, serve

HERE = Path(__file__).resolve().parent
STORY = (HERE / "story.txt").read_text(encoding="utf-8")
LOG_ERRORS = 5
LOG_TAIL_LINES = 12

WARM_UP = Request("What colour was the rose?", "the end of the story", STORY[-5000:], max_tokens=4)
ALONE = Request("What was the name of the cat?", "the story, alone", STORY)
CHATS = [
    Request("What is the capital of France?", "a chat"),
    Request("Name three fruits.", "a chat"),
    Request("Write a short poem about the sea.", "a chat"),
]
BESIDE_CHATS = [
    Request("Which ship was bound for Port Ellery?", "the story again", STORY),
    Request(
        "What is the name of Marta's niece?",
        "another prompt",
        f"Read this story.\n\n{STORY}",
    ),
]


async def run_demo(sizes: Sequence[int], logs: Path) -> bool:
    """Serve every size in turn and report; return whether all gave the same tokens."""
    devices = [choose_device(size) for size in sizes]
    async with waiting_for("the model, downloaded and converted once (93 MB)"):
        checkpoint = await prepare_checkpoint(logs / "model.log")
    runs = []
    for device in devices:
        print(f"\n{style(f'P = {device.num_ranks}', BOLD)} on {device.name}")
        runs.append(
            await run_requests(checkpoint, device, logs / f"server-p{device.num_ranks}.log")
        )
    return print_report([ALONE, *CHATS, *BESIDE_CHATS], runs)


async def prepare_checkpoint(log: Path) -> Path:
    """Return the model's folder; what is missing is made in a process that can be stopped."""
    with child([sys.executable, HERE / "smollm2.py"], log) as process:
        while process.poll() is None:
            await asyncio.sleep(0.2)
    if process.returncode:
        raise ChildError(
            f"The model could not be prepared (status {process.returncode}), see {log}"
        )
    return smollm2_checkpoint()


async def run_requests(checkpoint: Path, device: Device, log: Path) -> Run:
    """Start a server, send it all requests, stop it."""
    async with contextlib.AsyncExitStack() as stack:
        async with waiting_for("vllm serve starts"):
            server = await stack.enter_async_context(serve(checkpoint, device, log))
        client = await stack.enter_async_context(connect(server))
        async with waiting_for("a warm-up"):
            await ask(client, WARM_UP)
        async with waiting_for("a story and a question, alone"):
            alone = await ask(client, ALONE)
        async with waiting_for("three chats, and the story twice beside them"):
            mixed = await ask_beside(client, CHATS, BESIDE_CHATS)
        counters = await rank_counters(server) if device.num_ranks > 1 else []
    return Run(device.num_ranks, [alone, *mixed], counters)


@contextlib.asynccontextmanager
async def waiting_for(what: str) -> AsyncIterator[None]:
    """Show what is being waited for and for how long; leave one line with the time it took."""
    start = time.monotonic()
    is_terminal = sys.stdout.isatty()

    async def tick() -> None:
        for spinner in cycle("|/-\\"):
            seconds = time.monotonic() - start
            if is_terminal:
                print(f"\r\x1b[2K  {spinner} {what} {seconds:.0f} s", end="", flush=True)
            elif seconds > 1:
                print(f"  ... {what}, {seconds:.0f} s", flush=True)
            await asyncio.sleep(0.2 if is_terminal else 15)

    ticker = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticker.cancel()
        if is_terminal:
            print("\r\x1b[2K", end="")
    print(f"  {what:<{LINE_WIDTH - 10}}{time.monotonic() - start:6.1f} s", flush=True)


def print_failure(error: Exception, logs: Path) -> None:
    """Print an error and, from the log that was written last, what looks like its cause."""
    print(style(f"\n{error}", RED))
    written = sorted(logs.iterdir(), key=lambda log: log.stat().st_mtime)
    if written:
        lines = written[-1].read_text(encoding="utf-8", errors="replace").splitlines()
        # vLLM's processes report each other's end: the first error is the cause, the tail is not.
        causes = [line for line in lines if re.search(r"\b\w*(Error|Exception): ", line)]
        print(f"\nErrors in {written[-1]}:", *causes[:LOG_ERRORS], sep="\n  ")
        print("\nIts end:", *lines[-LOG_TAIL_LINES:], sep="\n  ")


async def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=[1, 2],
        help="PCP sizes to compare; the first is the reference (default: 1 2)",
    )
    sizes = parser.parse_args().sizes
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    logs = Path(tempfile.mkdtemp(prefix="pcp-demo-"))
    title = " against ".join(f"P = {size}" for size in sizes)
    print(f"{style(f'Prefill context parallelism, {title}', BOLD)}\nServer logs: {logs}\n")
    start = time.monotonic()
    try:
        same = await run_demo(sizes, logs)
    except (ChildError, ValueError, httpx.HTTPError, openai.APIError) as error:
        print_failure(error, logs)
        return 2
    print(f"  {time.monotonic() - start:.0f} s in all")
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("\nStopped; the server has been ended.")
        sys.exit(130)
