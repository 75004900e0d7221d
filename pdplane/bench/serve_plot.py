"""The picture of `pdplane bench serve`. Importing it needs the extra `plot`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

_PANELS = (
    ("ms between tokens, p99", "gap_p99_ms", ""),
    ("tokens a second", "tokens_a_s", ""),
    ("seconds to the first token", "", "_s"),
)


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG: waits between tokens, rates, and times to the first token, a bar a server."""
    figure, panels = plt.subplots(1, 3, figsize=(16, 5))
    for panel, (title, wanted, ending) in zip(panels, _PANELS, strict=True):
        bars: dict[str, dict[str, float]] = {}
        for name, found in results["measurements"].items():
            for who, numbers in found.items():
                for key, value in numbers.items():
                    if key == wanted or (ending and key.endswith(ending) and not key.endswith("_a_s")):
                        label = name if key == wanted else f"{name}: {key.removesuffix('_s')}"
                        bars.setdefault(who, {})[label] = value
        width = 0.8 / max(1, len(bars))
        for place, (who, values) in enumerate(bars.items()):
            panel.bar([each + place * width for each in range(len(values))], list(values.values()), width, label=who)
            panel.set_xticks(range(len(values)), list(values), rotation=45, ha="right")
        panel.set_title(title)
        if bars:
            panel.legend()
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
