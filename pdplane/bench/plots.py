"""Pictures of what the benchmarks measured. Importing it needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt

matplotlib.use("Agg")


def draw_transport(results: Mapping[str, Any], path: Path) -> None:
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


# ---- The picture of `pdplane bench control`. Importing it needs the extra `plot`


matplotlib.use("Agg")


def draw_control(results: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG: rate and latency over the rooms in flight, processor time over the rooms that stay open."""
    figure, panels = plt.subplots(1, 3, figsize=(15, 4.5))
    points = results["points"]
    for channel in dict.fromkeys(point["channel"] for point in points):
        ours = [point for point in points if point["channel"] == channel]
        flying, resting = ([p for p in ours if bool(p["open_rooms"]) is rests] for rests in (False, True))
        xs = [point["in_flight"] for point in flying]
        panels[0].plot(xs, [point["rooms_s"] for point in flying], "o-", label=channel)
        panels[1].plot(xs, [point["p50_ms"] for point in flying], "o-", label=f"{channel}, p50")
        panels[1].plot(xs, [point["p99_ms"] for point in flying], "o--", label=f"{channel}, p99")
        cpu = [point["decode_cpu_ms"] + point["prefill_cpu_ms"] for point in resting]
        panels[2].plot([point["open_rooms"] for point in resting], cpu, "o-", label=channel)
    labels = [("rooms in flight", "rooms a second"), ("rooms in flight", "ms a room"), ("open rooms", "CPU ms a room")]
    for panel, (across, up) in zip(panels, labels, strict=True):
        panel.set_xlabel(across)
        panel.set_ylabel(up)
        panel.set_ylim(bottom=0)
        panel.grid(visible=True, alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
