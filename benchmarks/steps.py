# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that start several engines: a subprocess each, and every result kept at once.

A *step* is one engine, its *tasks* are what is measured on it. A benchmark that is run again does
what its JSON file lacks; delete the file to measure anew.

``--together 3`` starts three engines at a time, and measures on one after the other when all have
started. They must fit into memory, hence ``--kv-gib``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from harness import REPO_ROOT, environment, write_json
from turns import Turn

Row = dict[str, Any]
# (step, tasks) -> each task with its rows
Measure = Callable[[str, Sequence[str]], Iterator[tuple[str, list[Row]]]]
# rows -> what else stands in the JSON file
Summarise = Callable[[Sequence[Row]], dict[str, Any]]


def step_parser(
    doc: str | None, name: str, *, may_start_together: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with the arguments that ``run_steps`` reads.

    Args:
        doc: Of the benchmark; its first line is printed as help.
        name: The benchmark's.
        may_start_together: Whether engines take ``kv_gib`` and wait for their turn.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    default = REPO_ROOT / "benchmarks" / "results" / f"{name}.json"
    parser.add_argument("--json", default=default, help="results, and what is done already")
    parser.add_argument("--step-timeout", type=float, metavar="S", help="give a step up after S s")
    parser.set_defaults(together=1)
    if may_start_together:
        parser.add_argument("--together", type=int, help="engines to start at a time")
        parser.add_argument("--kv-gib", type=float, help="KV cache of a rank")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--tasks", nargs="+", help=argparse.SUPPRESS)
    return parser


def run_steps(
    args: argparse.Namespace,
    name: str,
    steps: Mapping[str, Sequence[str]],
    measure: Measure,
    summarise: Summarise,
    environ: Callable[[str], Mapping[str, str]] = lambda step: {},
) -> list[Row]:
    """Measure what the JSON file lacks, and return all of its rows.

    Args:
        args: From a ``step_parser``.
        name: The benchmark's.
        steps: Tasks of each step, in the order to run them.
        measure: Starts the engine of a step and measures tasks on it.
        summarise: Gives what readers look for, from all rows.
        environ: Gives variables to set for a step, beside those of this process.
    """
    if args.step is not None:
        _run_tasks(args, name, measure, summarise)
        sys.exit()
    missing = {step: _missing_tasks(args, step, tasks) for step, tasks in steps.items()}
    waiting = [step for step in steps if missing[step]]
    while waiting:
        group, waiting = waiting[: args.together], waiting[args.together :]
        deadline = None
        if args.step_timeout is not None:
            deadline = time.monotonic() + args.step_timeout * len(group)
        turns = {}
        for step in group:
            print(f"{step}: {', '.join(missing[step])}", flush=True)
            command = [sys.executable, *sys.argv, "--step", step, "--tasks", *missing[step]]
            variables = {**os.environ, **environ(step)}
            turns[step] = Turn(command, variables, start_new_session=True)
        try:
            for turn in turns.values():
                turn.wait_until_ready(deadline)
            for step, turn in turns.items():
                turn.give()
                _wait(step, turn, deadline)
        finally:
            for turn in turns.values():
                _end(turn)
    return read_rows(args.json)


def read_rows(path: str | Path) -> list[Row]:
    """Return the rows of a JSON file, none if there is no file."""
    if not Path(path).exists():
        return []
    rows: list[Row] = json.loads(Path(path).read_text())["rows"]
    return rows


def _run_tasks(args: argparse.Namespace, name: str, measure: Measure, summarise: Summarise) -> None:
    # The command to repeat is the one that started all steps.
    sys.argv = sys.argv[: sys.argv.index("--step")]
    origin = {key: environment()[key] for key in ("date", "commit")}
    for task, new_rows in measure(args.step, args.tasks):
        rows = read_rows(args.json)
        rows += [{"step": args.step, "task": task, **origin, **row} for row in new_rows]
        write_json(args.json, name, rows, **summarise(rows))


def _missing_tasks(args: argparse.Namespace, step: str, tasks: Sequence[str]) -> list[str]:
    done = {row["task"] for row in read_rows(args.json) if row["step"] == step}
    return [task for task in tasks if task not in done]


def _wait(step: str, turn: Turn, deadline: float | None) -> None:
    """Wait for a step; one that fails or takes too long leaves the others alone."""
    try:
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        status: int | str = turn.process.wait(seconds)
    except TimeoutExpired:
        status = "none in time"
    if status != 0:
        print(f"{step}: failed, status {status}", file=sys.stderr, flush=True)
    _end(turn)


def _end(turn: Turn) -> None:
    if turn.process.poll() is None:
        os.killpg(turn.process.pid, signal.SIGKILL)
        turn.process.wait()
