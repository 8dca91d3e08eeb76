# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that start several engines: a subprocess each, and every result kept at once.

A *step* is one engine, its *tasks* are what is measured on it. A benchmark that is run again does
what its JSON file lacks; delete the file to measure anew.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import REPO_ROOT, environment, write_json

Row = dict[str, Any]
# (step, tasks) -> each task with its rows
Measure = Callable[[str, Sequence[str]], Iterator[tuple[str, list[Row]]]]
# rows -> what else stands in the JSON file
Summarise = Callable[[Sequence[Row]], dict[str, Any]]


def step_parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that ``run_steps`` reads."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    default = REPO_ROOT / "benchmarks" / "results" / f"{name}.json"
    parser.add_argument("--json", default=default, help="results, and what is done already")
    parser.add_argument("--step-timeout", type=float, metavar="S", help="give a step up after S s")
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
    for step, tasks in steps.items():
        done = {row["task"] for row in read_rows(args.json) if row["step"] == step}
        missing = [task for task in tasks if task not in done]
        if missing:
            print(f"{step}: {', '.join(missing)}", flush=True)
            arguments = ["--step", step, "--tasks", *missing]
            _run_subprocess(arguments, args.step_timeout, environ(step))
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


def _run_subprocess(
    arguments: list[str], timeout: float | None, environ: Mapping[str, str]
) -> None:
    """Run this script for one step; a step that fails or takes too long leaves the others alone."""
    process = subprocess.Popen(
        [sys.executable, *sys.argv, *arguments],
        start_new_session=True,
        env={**os.environ, **environ},
    )
    try:
        status: int | str = process.wait(timeout)
    except subprocess.TimeoutExpired:
        status = f"none after {timeout} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        print(f"{arguments[1]}: failed, status {status}", file=sys.stderr, flush=True)
