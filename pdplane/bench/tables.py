"""Tables of what the benchmarks have measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a title, a head and rows, with numbers at the right."""
    texts = [list(head), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(head))]
    print(f"\n{title}")
    for number, row in enumerate(texts):
        cells = [
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells))
        if number == 0:
            print("  ".join("-" * width for width in widths))


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if abs(cell) < 10 else f"{cell:.1f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


# ---- The tables of `pdplane bench transport`


# The ratios to reach, with blocks permuted: (ours, theirs) -> by block size.
_BLOCKS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
WANTED: Mapping[tuple[str, str], Mapping[int, float]] = {
    ("tcp", "mooncake"): dict(zip(_BLOCKS, (15, 5, 2, 1.4, 1.7), strict=True)),
    ("pull", "mooncake"): dict(zip(_BLOCKS, (20, 9, 4.5, 3.5, 4.5), strict=True)),
    ("tcp", "raw"): dict(zip(_BLOCKS, (0.75, 0.9, 0.9, 0.9, 0.9), strict=True)),
}
_OURS = ("tcp", "unix", "pull")

Rates = dict[tuple[str, int, str], dict[str, Any]]


def print_tables(results: Mapping[str, Any]) -> None:
    """Print rates, ratios, processor time and latencies, and how much of them is kept under load."""
    console = Console()
    load = results["load_average"]
    console.print(
        f"{results['nbytes'] / (1 << 20):g} MiB a push, medians of {results['rounds']} rounds, "
        f"{results['cpus']} processors, {results['arena']} arena, "
        f"load average {load['before']:.1f} before and {load['after']:.1f} after"
    )
    quiet = _points(results["conditions"]["quiet"])
    arrangements = dict.fromkeys(arrangement for _, _, arrangement in quiet)
    for arrangement in arrangements:
        console.print(_table(f"GiB/s, blocks {arrangement}", quiet, arrangement, "gib_s", ".2f"))
    for arrangement in arrangements:
        console.print(_ratios(quiet, arrangement))
    for field, text in (("sender_cpu_s_gib", "sender"), ("receiver_cpu_s_gib", "receiver")):
        arrangement = next(iter(arrangements))
        console.print(_table(f"CPU seconds a GiB, {text}, blocks {arrangement}", quiet, arrangement, field, ".2f"))
    console.print(_latencies(results["conditions"]))
    for condition in results["conditions"]:
        if condition != "quiet":
            console.print(_kept(quiet, _points(results["conditions"][condition]), condition))


def _points(condition: Mapping[str, Any]) -> Rates:
    return {(point["name"], point["block"], point["arrangement"]): point for point in condition["points"]}


def _blocks(points: Rates) -> list[int]:
    return list(dict.fromkeys(block for _, block, _ in points))


def _names(points: Rates) -> list[str]:
    return list(dict.fromkeys(name for name, _, _ in points))


def _grid(title: str, points: Rates) -> Table:
    table = Table(title=title, title_justify="left", min_width=min(len(title), 100))
    table.add_column("")
    for block in _blocks(points):
        table.add_column(f"{block >> 10}K" if block < 1 << 20 else f"{block >> 20}M", justify="right")
    return table


def _table(title: str, points: Rates, arrangement: str, field: str, spec: str) -> Table:
    table = _grid(title, points)
    for name in _names(points):
        table.add_row(name, *(format(points[name, block, arrangement][field], spec) for block in _blocks(points)))
    return table


def _ratios(points: Rates, arrangement: str) -> Table:
    table = _grid(f"ratios, blocks {arrangement}; in brackets what we want", points)
    for name in _names(points):
        for other in ("mooncake", "raw", "tuned", "zmq"):
            if name not in _OURS or other not in _names(points):
                continue
            wanted = WANTED.get((name, other), {}) if arrangement == "permuted" else {}
            cells = []
            for block in _blocks(points):
                ratio = points[name, block, arrangement]["gib_s"] / points[other, block, arrangement]["gib_s"]
                cells.append(f"{ratio:.2f}" + (f" ({wanted[block]:g})" if block in wanted else ""))
            table.add_row(f"{name} / {other}", *cells)
    return table


def _latencies(conditions: Mapping[str, Any]) -> Table:
    title = "milliseconds for 64 KiB, p50 / p99"
    table = Table(title=title, title_justify="left", min_width=len(title))
    table.add_column("")
    for condition in conditions:
        table.add_column(condition, justify="right")
    for name in conditions["quiet"]["latency"]:
        found = (condition["latency"][name] for condition in conditions.values())
        table.add_row(name, *(f"{each['p50_ms']:.2f} / {each['p99_ms']:.2f}" for each in found))
    return table


def _kept(quiet: Rates, loaded: Rates, condition: str) -> Table:
    arrangement = next(iter(quiet))[2]
    table = _grid(f"share of the quiet rate kept under {condition}, blocks {arrangement}", quiet)
    for name in _names(quiet):
        if name == "memcpy":  # it runs in the other process
            continue
        cells = [
            f"{loaded[name, block, arrangement]['gib_s'] / quiet[name, block, arrangement]['gib_s']:.2f}"
            for block in _blocks(quiet)
        ]
        table.add_row(name, *cells)
    return table
