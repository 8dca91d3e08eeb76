# SPDX-License-Identifier: Apache-2.0
"""What the demo prints when all answers are there."""

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from chat import Reply, Request

LINE_WIDTH = 80
MIN_PICTURE_LINES = 8

BOLD, DIM, RED, GREEN = "1", "2", "31", "32"
RANK_COLOURS = ("36", "33", "35", "34", "32", "31")
# A full block and three shades.
RANK_GLYPHS = "\u2588\u2593\u2592\u2591"


@dataclass(frozen=True, slots=True)
class Run:
    """All requests served with one PCP size.

    Attributes:
        size: ``--prefill-context-parallel-size``.
        replies: In the order of the requests.
        counters: Of each rank, see the worker method ``pcp_stats``. Empty at size 1, where nothing
            of the package runs in the workers.
    """

    size: int
    replies: Sequence[Reply]
    counters: Sequence[dict[str, int]]

    @property
    def num_partitioned_steps(self) -> int:
        """Steps in which the ranks shared the work."""
        return self.counters[0]["num_partitioned_steps"] if self.counters else 0

    @property
    def is_in_step(self) -> bool:
        """Whether all ranks counted the same steps."""
        shared = ("num_steps", "num_partitioned_steps", "num_scheduled_tokens")
        return len({tuple(rank[name] for name in shared) for rank in self.counters}) <= 1


def style(text: str, code: str) -> str:
    """Return ``text`` in an ANSI style if standard output is a terminal."""
    return f"\x1b[{code}m{text}\x1b[0m" if sys.stdout.isatty() else text


def print_report(requests: Sequence[Request], runs: Sequence[Run]) -> bool:
    """Print answers, partition and figures.

    Returns:
        Whether every run gave the tokens of the first one, and those with P > 1 by sharing work.
    """
    print(f"\n{style('Answers', BOLD)}")
    for position, request in enumerate(requests):
        _print_answers(request, [(run.size, run.replies[position]) for run in runs])
    story = runs[0].replies[0]
    for run in runs:
        if run.size > 1:
            print(f"\n{style(f'Who computes which tokens of the story, P = {run.size}', BOLD)}")
            for line in draw_partition(story.num_prompt_tokens, story.num_cached_tokens, run.size):
                print(f"  {line}")
    print()
    _print_figures(runs)
    verdicts = [_print_verdict(runs[0], run) for run in runs[1:]]
    return all(verdicts)


def _print_answers(request: Request, replies: Sequence[tuple[int, Reply]]) -> None:
    expected = replies[0][1]
    tokens = f"{request.kind}: {expected.num_prompt_tokens:,} tokens"
    if expected.num_cached_tokens:
        tokens += f", {expected.num_cached_tokens:,} cached"
    print(f"  {request.question}  {style(tokens, DIM)}")
    for size, reply in replies:
        text = textwrap.shorten(reply.text, LINE_WIDTH - 12, placeholder=" ...")
        if reply.token_ids != expected.token_ids:
            pairs = enumerate(zip_longest(expected.token_ids, reply.token_ids))
            differing = next(position for position, (a, b) in pairs if a != b)
            text = style(f"{text} (differs from token {differing} on)", RED)
        print(f"    P = {size:<2}  {text}")


def draw_partition(num_tokens: int, num_computed_tokens: int, size: int) -> list[str]:
    """Draw a prefill that is alone in its step, as the ranks' own layout code partitions it.

    The picture is the causal triangle: tokens from top to bottom, and to the right how many
    tokens each of them attends to. A rank's ink is its share of the attention work.

    Args:
        num_tokens: Tokens of the prompt.
        num_computed_tokens: Those of them that the prefix cache holds.
        size: PCP ranks, >= 2.

    Returns:
        Lines of text.
    """
    # Imports vLLM, which takes seconds, and says what plugins it finds: not before there is
    # something to draw, and not into the picture.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm.v1.worker.gpu.pcp.layout import plan_partition

    plan = plan_partition(
        np.array([num_tokens - num_computed_tokens], dtype=np.int32),
        np.array([num_computed_tokens], dtype=np.int32),
        np.array([True]),
        pcp_world_size=size,
    )
    if plan is None:
        return [f"{num_tokens} tokens are too few to share: every rank computes all of them"]
    chunks = sorted(
        (num_computed_tokens + int(plan.row_offset[rank, row]), int(plan.row_len[rank, row]), rank)
        for rank, row in np.ndindex(plan.row_len.shape)
    )
    lines, work = [], [0] * size
    lines_per_chunk = max(1, MIN_PICTURE_LINES // len(chunks))
    for start, length, rank in chunks:
        # Token i attends to i + 1 tokens.
        work[rank] += length * (2 * start + length + 1) // 2
        glyph = RANK_GLYPHS[rank % len(RANK_GLYPHS)]
        for i in range(lines_per_chunk):
            label = "" if i else f"{start:>6,} to {start + length - 1:<6,} rank {rank}"
            attended = (start + length * (i + 0.5) / lines_per_chunk) / num_tokens
            ink = glyph * max(1, round(attended * (LINE_WIDTH - 26)))
            lines.append(f"{label:<24}{style(ink, RANK_COLOURS[rank % len(RANK_COLOURS)])}")
    for rank, pairs in enumerate(work):
        share = f"{plan.num_local_tokens[rank]:,} tokens, {pairs / sum(work):.1%} of the attention"
        lines.append(f"rank {rank}: {share}")
    return lines


def _print_figures(runs: Sequence[Run]) -> None:
    def row(title: str, columns: Iterable[str], note: str = "") -> str:
        return f"  {title:<29}{''.join(f'{column:>16}' for column in columns)}   {note}".rstrip()

    print(style(row("", (f"P = {run.size}" for run in runs)), BOLD))
    for title, position in (("first token, story alone", 0), ("first token, beside chats", -1)):
        seconds = [run.replies[position].ttft_s for run in runs]
        faster = ", ".join(f"{seconds[0] / value:.2f}x" for value in seconds[1:])
        print(row(title, (f"{value:.2f} s" for value in seconds), faster))
    steps, tokens = [], []
    for run in runs:
        ranks = run.counters
        steps.append(f"{run.num_partitioned_steps} of {ranks[0]['num_steps']}" if ranks else "0")
        most = max((rank["num_local_tokens"] for rank in ranks), default=0)
        tokens.append(f"{most:,} of {ranks[0]['num_scheduled_tokens']:,}" if ranks else "-")
    print(row("partitioned steps", steps))
    print(row("their tokens, on a rank", tokens))
    print(style("  times are of one request each; benchmarks/ repeats and compares", DIM))


def _print_verdict(reference: Run, run: Run) -> bool:
    pairs = list(zip(reference.replies, run.replies, strict=True))
    num_wrong = sum(expected.token_ids != reply.token_ids for expected, reply in pairs)
    num_empty = sum(not reply.token_ids for reply in run.replies)
    problem = ""
    if num_empty:
        problem = f"{num_empty} of {len(pairs)} answers came without tokens"
    elif num_wrong:
        problem = f"{num_wrong} of {len(pairs)} answers differ from P = {reference.size}"
    elif not run.is_in_step:
        problem = f"the ranks counted different steps: {run.counters}"
    elif run.size > 1 and run.num_partitioned_steps == 0:
        problem = "no step was partitioned, so each rank did all of the work"
    if problem:
        print(style(f"  P = {run.size}: {problem}", RED))
        return False
    num_tokens = sum(len(reply.token_ids) for reply in run.replies)
    same = f"all {num_tokens} tokens of {len(pairs)} answers are those of P = {reference.size}"
    print(style(f"  P = {run.size}: {same}", GREEN))
    return True
