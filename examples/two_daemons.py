"""Drive a prefill and a decode daemon over plain HTTP: the pair of requests that a gateway sends for one prompt.

    python examples/two_daemons.py

Starts both with a tiny random model (`tiny:llama`), so the text is noise; the shape of the conversation is not.
"""

import http.client
import json
import secrets
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any


@contextmanager
def daemon(role: str) -> Iterator[dict[str, Any]]:
    """Run `pdplane ROLE` on free ports; give its ready line, which names every address."""
    command = [sys.executable, "-m", "pdplane.cli.main", role, "--model", "tiny:llama"]
    command += ["--port", "0", "--bootstrap-port", "0", "--arena-bytes", "16MiB", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise SystemExit(f"the {role} daemon ended before it was ready")
            yield json.loads(line)
        finally:
            process.terminate()  # SIGTERM: it drains and exits with 0


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    with closing(http.client.HTTPConnection(address, timeout=60)) as connection:
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = json.load(response)
    if response.status != 200:
        raise SystemExit(f"{address} answered {response.status}: {answer['error']['message']}")
    return answer


def main() -> None:
    with daemon("prefill") as prefill, daemon("decode") as decode:
        print(f"prefill at {prefill['http']}, its rendezvous at {prefill['bootstrap']}; decode at {decode['http']}")
        host, port = prefill["bootstrap"].rsplit(":", 1)
        body = {
            "text": "the quick brown fox",
            "sampling_params": {"max_new_tokens": 8, "temperature": 0},
            # What makes two requests one room: a number of 63 bits, and where decode finds prefill.
            "bootstrap_room": secrets.randbits(63),
            "bootstrap_host": host,
            "bootstrap_port": int(port),
        }
        with ThreadPoolExecutor() as both:  # at the same time, in any order
            first, answer = both.map(post, (prefill["http"], decode["http"]), (body, body))
        print(f"prefill computed {first['meta_info']['prompt_tokens']} tokens and said {first['output_ids']}")
        print(f"decode went on: {answer['output_ids']}, {answer['meta_info']['finish_reason']['type']}")
        print(f"the first token is prefill's: {answer['output_ids'][:1] == first['output_ids']}")


if __name__ == "__main__":
    main()
