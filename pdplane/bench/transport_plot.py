"""The picture of `pdplane bench transport`: rate over block size. Importing it needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG with one panel an arrangement and one line a contender."""
    points = results["conditions"]["quiet"]["points"]
    arrangements = list(dict.fromkeys(point["arrangement"] for point in points))
    figure, panels = plt.subplots(
        1, len(arrangements), sharey=True, squeeze=False, figsize=(6 * len(arrangements), 4.5)
    )
    for panel, arrangement in zip(panels[0], arrangements, strict=True):
        for name in dict.fromkeys(point["name"] for point in points):
            line = [point for point in points if (point["name"], point["arrangement"]) == (name, arrangement)]
            panel.plot([point["block"] >> 10 for point in line], [point["gib_s"] for point in line], "o-", label=name)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("block, KiB")
        panel.set_title(f"blocks {arrangement}")
        panel.grid(visible=True, alpha=0.3)
    panels[0][0].set_ylabel("GiB/s")
    panels[0][-1].legend()
    figure.suptitle(f"{results['nbytes'] / (1 << 20):g} MiB a push, medians of {results['rounds']} rounds")
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
