"""Plain tables of what a benchmark has measured."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a title, a head and rows; numbers stand at the right."""
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
