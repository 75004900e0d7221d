"""Certificates of a CA that is made when it is first asked for, as files that end with the process."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import trustme

from pdplane.security import Tls


@functools.cache
def member(ca: str = "ours", host: str = "127.0.0.1") -> Tls:
    """A certificate of the named CA for a host."""
    folder, authority = _authority(ca)
    issued = authority.issue_cert(host)
    cert, key = folder / f"{host}.pem", folder / f"{host}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(key)
    return Tls(cert, key, folder / "ca.pem")


@functools.cache
def _authority(name: str) -> tuple[Path, trustme.CA]:
    folder, authority = Path(tempfile.mkdtemp(prefix=f"ca-{name}-")), trustme.CA()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return folder, authority
