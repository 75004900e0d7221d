"""What examples/deploy holds: manifests that fit the schemas, units that systemd takes, flags that daemons have."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml

from pdplane.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "examples" / "deploy"
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "pdplane.yaml").read_text()))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ARGUMENTS = "--model /srv/models/llama --host 0.0.0.0 --advertise-host 10.0.0.1"


def parse(role: str, words: list[str]) -> argparse.Namespace:
    """What the daemon's own command line makes of these words."""
    parser = argparse.ArgumentParser()
    import_module(COMMANDS[role][0]).add_arguments(parser)
    return parser.parse_args(words)


def containers() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container and the pod that it runs in."""
    for manifest in MANIFESTS:
        pod = manifest["spec"].get("template", {}).get("spec", {})
        for container in pod.get("containers", ()):
            yield container, pod


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda m: f"{m['kind']}-{m['metadata']['name']}")
def test_a_manifest_fits_the_schema(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_pods_run_daemons_with_flags_that_they_have() -> None:
    seen = {}
    for container, pod in containers():
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert all(container[probe]["httpGet"]["port"] in ports for probe in container if probe.endswith("Probe")), (
            container["name"]
        )
        assert "limits" in container["resources"]
        if container["command"][0] != "pdplane":
            continue
        role = container["command"][1]
        options = seen[role] = parse(role, container["args"])
        assert options.port == ports["http"]
        assert pod["terminationGracePeriodSeconds"] > options.drain_timeout
        (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        assert secret["defaultMode"] == 0o400
    assert seen["prefill"].bootstrap_port == 8998
    assert seen["prefill"].model == seen["decode"].model
    assert seen["prefill"].served_model_name == seen["decode"].served_model_name


def test_the_gateway_names_every_pod() -> None:
    (gateway,) = [container for container, _pod in containers() if container["name"] == "gateway"]
    pods = {
        f"http://{m['metadata']['name']}-{index}.{m['spec']['serviceName']}"
        for m in MANIFESTS
        if m["kind"] == "StatefulSet"
        for index in range(m["spec"]["replicas"])
    }
    assert {word.rsplit(":", 1)[0] for word in gateway["args"] if word.startswith("http://")} == pods


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_is_one_that_systemd_takes(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed here")
    here = tmp_path / unit.name  # with programs that exist
    here.write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text(), flags=re.MULTILINE))
    told = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(here)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_units_flags_are_the_daemons(role: str) -> None:
    text = (DEPLOY / "systemd" / f"pdplane-{role}.service").read_text()
    (line,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    program, command, *words = shlex.split(line.replace("$PDPLANE_ARGS", ARGUMENTS))
    assert (program, command) == ("/opt/pdplane/bin/pdplane", role)
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop) > parse(role, words).drain_timeout
    (example,) = re.findall(r"^#   PDPLANE_ARGS=(.*)$", text, re.MULTILINE)
    assert parse(role, shlex.split(example)).advertise_host


def test_alerts_of_the_page_are_queries() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    table = page.partition("| Alert |")[2]
    queries = [text.replace("\\|", "|") for text in re.findall(r"`([^`]*pdplane_[^`]*)`", table)]
    assert len(queries) == 6
    metrics = (ROOT / "examples" / "grafana" / "pdplane.json").read_text()
    for query in queries:
        promql_parser.parse(query)
        assert all(name in metrics for name in re.findall(r"pdplane_\w+", query)), query


def test_the_scrape_configuration_is_read() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"] for job in jobs} == {"prefill", "decode", "gateway", "pods"}
    assert json.loads((ROOT / "examples" / "grafana" / "pdplane.json").read_text())["title"] == "pdplane"
