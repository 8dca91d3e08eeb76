# SPDX-License-Identifier: Apache-2.0
"""Draw the plot of a result: speed-ups, and the ideal as a dashed line. Needs matplotlib.

python benchmarks/plot.py benchmarks/results/ttft_cpu.json benchmarks/results/ttft_cpu.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt  # type: ignore[import-not-found, unused-ignore]  # optional


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw ``result["plot"]``: lines by label, each of x and y values, and the ideal."""
    plot = result["plot"]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for label, (x, y) in plot["lines"].items():
        axes.plot(x, y, marker="o", label=label)
    axes.plot(*plot["ideal"], linestyle="--", color="grey", label="ideal", zorder=1)
    axes.set_xscale("log", base=2)
    ticks = plot["ideal"][0]
    axes.set_xticks(ticks, [_tick(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1.1 * max(max(y) for _, y in (plot["ideal"], *plot["lines"].values())))
    axes.set(title=plot["title"], xlabel=plot["x_label"], ylabel=plot["y_label"])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _tick(value: float) -> str:
    return f"{value / 1024:.3g}k" if value >= 1024 else f"{value:g}"


def main() -> None:
    """Read and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("png", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.json.read_text()), args.png)


if __name__ == "__main__":
    main()
