"""The program in docs/library.md: it runs, and type checkers pass it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/library.md"


def program() -> str:
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_the_page_runs_as_one_program(tmp_path: Path) -> None:
    path = tmp_path / "library_page.py"
    path.write_text(program())
    told = subprocess.run(
        [sys.executable, "-W", "error", str(path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (told.returncode, told.stderr) == (0, ""), told.stderr
    assert told.stdout.splitlines() == [
        "None",
        *["RoomOffered", "RoomDelivered"] * 2,
        "{'kv': range(0, 2)}",
        "{'kv': range(2, 7)}",
    ]
