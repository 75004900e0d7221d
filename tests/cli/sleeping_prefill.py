"""`pdplane prefill --model toy` whose thread stands still for good at one token: a fault that no client can cause."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from pdplane.cli.daemon import run_daemon
from pdplane.cli.flags import daemon_options, plane_fields
from pdplane.cli.log import set_up_logging
from pdplane.cli.prefill import add_arguments
from pdplane.control.http_thread import HttpThread
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import PrefillConfig
from pdplane.serving.routes import prefill_app
from pdplane.toy.engine import ToyPrefillEngine
from pdplane.toy.model import ToyOptions

SLEEP = 255


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(words)
    set_up_logging(args.log_level, as_json=False)
    options, config = daemon_options(args), PrefillConfig(**plane_fields(args), bootstrap_port=0)
    engine = ToyPrefillEngine(ToyOptions(sleep=SLEEP))

    def make_node(http: HttpThread, facts: Mapping[str, Any]) -> PrefillNode:
        return PrefillNode(engine, config, http=http, facts=facts)

    return run_daemon("prefill", options, config, make_node, prefill_app)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
