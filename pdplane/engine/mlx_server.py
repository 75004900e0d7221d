"""`mlx_lm.server` with the BLAS that the daemons use, for comparisons: `python -m pdplane.engine.mlx_server`.

It ends with its standard input, a pipe from whoever started it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from pdplane.engine.blas import AUTO, blas_in_use, use_blas

_TINY = "tiny:"


def main() -> None:
    """Load the BLAS, print which as one JSON line, and serve the model on the port."""
    parser = argparse.ArgumentParser(description="mlx_lm.server with a BLAS of one's choice.")
    parser.add_argument("--model", required=True, help="the model, named as for the daemons")
    parser.add_argument("--port", required=True, help="port of the API")
    parser.add_argument("--blas", default=AUTO, help="auto, wheel or a library (default: auto)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    use_blas(args.blas)
    from mlx_lm import server

    serve: Any = server.main

    with tempfile.TemporaryDirectory(prefix="pdplane-") as scratch:
        threading.Thread(target=_end_with_input, args=(scratch,), daemon=True).start()
        folder = _folder(args.model, Path(scratch))
        sys.stdout.write(json.dumps({"blas": str(blas_in_use())}) + "\n")
        sys.stdout.flush()
        # mlx-lm reads its flags from there and has no function that takes them.
        sys.argv = ["mlx_lm.server", "--model", str(folder), "--port", args.port, "--log-level", "WARNING"]
        serve()


def _end_with_input(scratch: str) -> None:
    sys.stdin.buffer.read()
    shutil.rmtree(scratch, ignore_errors=True)  # the exit, which waits for no thread of the server, leaves it
    os._exit(0)


def _folder(model: str, scratch: Path) -> Path:
    """Return the model's folder; a tiny model, which is in memory only, is written to `scratch`."""
    from pdplane.engine.model import model_folder

    if not model.startswith(_TINY):
        return model_folder(model)
    from pdplane.engine.tiny import build_tiny
    from pdplane.engine.untyped import save_weights

    tiny = build_tiny(model.removeprefix(_TINY))
    save_weights(scratch / "model.safetensors", tiny.network)
    (scratch / "config.json").write_text(json.dumps(dict(tiny.config)))
    tiny.tokenizer.save(scratch)
    return scratch


if __name__ == "__main__":
    main()
