"""The flags that both daemons share, and the value objects made of them."""

from __future__ import annotations

import argparse
import os
from typing import Any

import attrs

from pdplane.cli.log import LEVELS
from pdplane.engine.blas import AUTO, WHEEL
from pdplane.engine.options import KV_BITS, KV_GROUP_SIZES, PAGE_LAYOUTS, EngineOptions
from pdplane.errors import ConfigError
from pdplane.options import count, duration, port, size, size_or_nothing, whole
from pdplane.plane.config import is_loopback
from pdplane.security import Secret, Tls
from pdplane.transport.framing import XXH3
from pdplane.transport.registry import LOOPBACK, TRANSPORTS, is_one_sided
from pdplane.transport.reports import MOONCAKE_PROTOCOLS, TransportOptions

TOY = "toy"
_LEGACY_LACKS = "legacy peers move the cache with Mooncake alone: start this side with --legacy-transport mooncake"
API_KEY = "PDPLANE_API_KEY"
"""The variable of the environment that holds a key, so that no list of processes shows it."""


_SCHEMES = sorted(TRANSPORTS.keys() - {LOOPBACK})


@attrs.frozen(kw_only=True)
class DaemonOptions:
    """What a daemon is started with beside its engine's and its plane's own options."""

    engine: EngineOptions
    host: str
    http_port: int
    served_model_name: str
    max_waiting: int
    drain_timeout_s: float
    exit_with_parent: bool
    log_level: str
    log_json: bool
    blas: str
    tls: Tls | None
    api_key: str | None


def add_model_flags(parser: argparse.ArgumentParser, *, required: bool = True) -> argparse._ArgumentGroup:
    """Add the flags of the model and of its cache's layout; return their group."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        required=required,
        help="the model: an mlx-lm directory, a hub id, a .gguf file, smollm2, tiny:FAMILY (a tiny random model), "
        f"or {TOY} (hashes instead of a model, needs no MLX)" + ("" if required else " (default: running daemons)"),
    )
    model.add_argument(
        "--prefill-step-size",
        type=count,
        default=2048,
        metavar="N",
        help="tokens of one chunk of the prompt (default: %(default)s)",
    )
    model.add_argument(
        "--block-tokens", type=count, default=16, metavar="N", help="tokens of one cache block (default: %(default)s)"
    )
    model.add_argument(
        "--arena-bytes",
        type=size,
        default="1GiB",
        metavar="SIZE",
        help="size of the arena, which holds the caches on their way (default: %(default)s)",
    )
    model.add_argument(
        "--page-layout",
        choices=PAGE_LAYOUTS,
        default="hnd",
        help="order of a page's values: hnd for every cache, nhd as legacy engines publish it (default: %(default)s)",
    )
    model.add_argument(
        "--layerwise-interval",
        type=whole,
        default=1,
        metavar="N",
        help="layers that prefill sends together while it computes the next ones; 0 sends all at the end "
        "(default: %(default)s)",
    )
    model.add_argument(
        "--context-length",
        type=count,
        metavar="N",
        help="longest sequence in tokens, prompt and answer together (default: the model's own, rope scaling included)",
    )
    add_number_flags(model)
    return model


def add_daemon_flags(parser: argparse.ArgumentParser, *, http_port: int) -> None:
    """Add every flag that `pdplane prefill` and `pdplane decode` have in common."""
    model = add_model_flags(parser)
    model.add_argument(
        "--served-model-name", metavar="NAME", help="name of the model in /v1/models (default: that of --model)"
    )
    addresses = parser.add_argument_group("addresses")
    addresses.add_argument(
        "--host", default="127.0.0.1", help="address on which every socket listens (default: %(default)s)"
    )
    addresses.add_argument(
        "--advertise-host", metavar="HOST", help="address that peers are told (default: that of --host)"
    )
    addresses.add_argument(
        "--port", type=port, default=http_port, help="port of the HTTP API; 0 takes a free one (default: %(default)s)"
    )
    addresses.add_argument(
        "--bootstrap-port",
        type=port,
        default=8998,
        help="port of prefill's rendezvous; 0 takes a free one (default: %(default)s)",
    )
    peers = parser.add_argument_group("peers")
    peers.add_argument(
        "--secret-file",
        metavar="FILE",
        help="file with the secret by which all daemons encrypt control and know each other (default: no secret)",
    )
    add_insecure_flag(peers, "--secret-file")
    add_tls_flags(parser.add_argument_group("encryption"), ca=True)
    peers.add_argument(
        "--api-key", metavar="KEY", help=f"key that HTTP clients must send (default: ${API_KEY}, else none)"
    )
    _add_legacy_flags(parser.add_argument_group("peers of the older generation"))
    peers.add_argument(
        "--peer-timeout",
        type=duration,
        default="10s",
        metavar="TIME",
        help="longest wait for the first word of a request's other half; not longer than --bootstrap-timeout "
        "(default: %(default)s)",
    )
    peers.add_argument(
        "--bootstrap-timeout",
        type=duration,
        default="120s",
        metavar="TIME",
        help="longest wait for a peer of the older generation, and for the other ranks after the first "
        "(default: %(default)s)",
    )
    peers.add_argument(
        "--waiting-timeout",
        type=duration,
        default="300s",
        metavar="TIME",
        help="longest wait for the whole cache (default: %(default)s)",
    )
    peers.add_argument(
        "--ping-interval",
        type=duration,
        default="2s",
        metavar="TIME",
        help="time between two pings; a peer that misses three is lost (default: %(default)s)",
    )
    _add_transport_flags(parser.add_argument_group("moving the cache"))
    limits = parser.add_argument_group("running")
    limits.add_argument(
        "--prompt-cache-bytes",
        type=size_or_nothing,
        default="1GiB",
        metavar="SIZE",
        help="caches to keep for prompts that begin alike, prefill's of prompts, decode's of whole sequences; "
        "0 for none (default: %(default)s)",
    )
    limits.add_argument(
        "--max-waiting",
        type=count,
        default=256,
        metavar="N",
        help="requests that may stand in line for blocks (default: %(default)s)",
    )
    limits.add_argument(
        "--max-rooms",
        type=count,
        default=4096,
        metavar="N",
        help="requests that may be live at one time, the others' unmatched halves too (default: %(default)s)",
    )
    limits.add_argument(
        "--drain-timeout",
        type=duration,
        default="30s",
        metavar="TIME",
        help="time that running requests have when the daemon is told to stop (default: %(default)s)",
    )
    limits.add_argument(
        "--exit-with-parent", action="store_true", help="end when standard input, a pipe from the parent, ends"
    )
    add_log_flags(limits)


def add_tls_flags(group: argparse._ActionsContainer, *, ca: bool) -> None:
    """Add the files of TLS: a certificate and its key for HTTPS, and with `ca` the CA of the daemons."""
    group.add_argument(
        "--tls-cert", metavar="FILE", help="certificate chain with which HTTPS is served (default: HTTP)"
    )
    group.add_argument("--tls-key", metavar="FILE", help="key of the certificate, not encrypted (default: none)")
    if ca:
        group.add_argument(
            "--tls-ca",
            metavar="FILE",
            help="CA of the daemons alone: the cache travels over TLS, and both sides must show a certificate of it "
            "(default: not encrypted)",
        )


def tls_files(args: argparse.Namespace) -> Tls | None:
    """Return the files of TLS, None without any. Raises ConfigError for files that cannot be used."""
    ca = getattr(args, "tls_ca", None)
    if bool(args.tls_cert) != bool(args.tls_key) or (ca and not args.tls_cert):
        raise ConfigError("TLS needs --tls-cert and --tls-key together, and --tls-ca needs both")
    if not args.tls_cert:
        return None
    tls = Tls(args.tls_cert, args.tls_key, ca)
    tls.api()
    if ca:
        tls.member(server_side=True)
    return tls


def api_key(args: argparse.Namespace) -> str | None:
    """Return the key that HTTP clients must send."""
    return args.api_key or os.environ.get(API_KEY) or None


def add_insecure_flag(group: argparse._ActionsContainer, secret: str) -> None:
    """Add the consent to listening on a public address without the flag that keeps strangers away."""
    group.add_argument(
        "--insecure",
        action="store_true",
        help=f"listen where other machines can connect without {secret} too (default: that is refused)",
    )


def check_public(host: str, secret: str, *, has_secret: bool, insecure: bool) -> None:
    """Raise ConfigError for a public address without a secret, unless that was asked for."""
    if not (has_secret or insecure or is_loopback(host)):
        raise ConfigError(
            f"other machines can reach {host}: give {secret}, or --insecure to let anybody in who reaches it"
        )


def add_number_flags(model: argparse._ActionsContainer) -> None:
    """Add the flags of the cache's numbers and of how they are computed, and the seed of tiny models."""
    model.add_argument(
        "--kv-bits", type=int, choices=KV_BITS, help="bits to which the KV cache is quantised (default: not quantised)"
    )
    model.add_argument(
        "--kv-group-size",
        type=int,
        choices=KV_GROUP_SIZES,
        default=64,
        help="values that share one scale in a quantised KV cache (default: %(default)s)",
    )
    add_blas_flag(model)
    add_seed_flag(model)


def add_blas_flag(model: argparse._ActionsContainer) -> None:
    """Add the choice of the library with which MLX multiplies matrices on Linux."""
    model.add_argument(
        "--blas",
        default=AUTO,
        metavar=f"{AUTO}|{WHEEL}|FILE",
        help=f"BLAS library on Linux: {AUTO} takes OpenBLAS if it is installed, {WHEEL} the one that mlx comes with "
        "(default: %(default)s)",
    )


def add_seed_flag(model: argparse._ActionsContainer) -> None:
    """Add the seed of tiny models."""
    model.add_argument(
        "--seed", type=int, default=0, help="seed of a tiny random model's weights (default: %(default)s)"
    )


def add_log_flags(running: argparse._ActionsContainer) -> None:
    """Add the flags of the log."""
    running.add_argument(
        "--log-level",
        choices=LEVELS,
        default="info",
        help="least severe messages that are logged (default: %(default)s)",
    )
    running.add_argument("--log-json", action="store_true", help="log JSON objects instead of lines")


def _add_transport_flags(data: argparse._ArgumentGroup) -> None:
    data.add_argument(
        "--transport",
        default="auto",
        metavar="NAME",
        help="how the cache travels: tcp; unix or pull when the peer is on this host and agrees, else tcp; "
        "auto: the shortest of these; mooncake writes one-sided (default: %(default)s)",
    )
    data.add_argument(
        "--streams",
        type=count,
        default=1,
        metavar="N",
        help="connections over which large pushes are striped (default: %(default)s)",
    )
    data.add_argument(
        "--socket-buffer",
        type=size,
        metavar="SIZE",
        help="buffer of each data socket (default: 256KiB on one host, else the kernel's own choice)",
    )
    data.add_argument(
        "--checksum",
        choices=[XXH3],
        help="checksum that prefill adds to each segment and decode demands and verifies (default: none)",
    )


def _add_legacy_flags(legacy: argparse._ArgumentGroup) -> None:
    legacy.add_argument(
        "--legacy",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="serve them too (default: unless --secret-file is given, since they cannot prove that they know it)",
    )
    legacy.add_argument(
        "--legacy-transport",
        metavar="NAME",
        help="how their caches travel; theirs is mooncake (default: as --transport)",
    )
    legacy.add_argument(
        "--mooncake-protocol",
        choices=MOONCAKE_PROTOCOLS,
        default="tcp",
        help="protocol that Mooncake uses (default: %(default)s)",
    )
    legacy.add_argument(
        "--mooncake-device", default="", metavar="NAME", help="RDMA device that Mooncake uses (default: its own choice)"
    )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Return the model's flags as a value. Raises ConfigError."""
    return EngineOptions(
        model=args.model,
        prefill_step_size=args.prefill_step_size,
        block_tokens=args.block_tokens,
        arena_bytes=args.arena_bytes,
        kv_bits=args.kv_bits,
        kv_group_size=args.kv_group_size,
        seed=args.seed,
        page_layout=args.page_layout,
        layerwise_interval=args.layerwise_interval,
        context_length=args.context_length,
    )


def daemon_options(args: argparse.Namespace) -> DaemonOptions:
    """Return the shared flags as values. Raises ConfigError."""
    if not args.host:
        raise ConfigError("--host is empty: that would be every interface")
    check_public(args.host, "--secret-file", has_secret=bool(args.secret_file), insecure=args.insecure)
    return DaemonOptions(
        engine=attrs.evolve(engine_options(args), prompt_cache_bytes=args.prompt_cache_bytes),
        host=args.host,
        http_port=args.port,
        served_model_name=args.served_model_name or args.model,
        max_waiting=args.max_waiting,
        drain_timeout_s=args.drain_timeout,
        exit_with_parent=args.exit_with_parent,
        log_level=args.log_level,
        log_json=args.log_json,
        blas=args.blas,
        tls=tls_files(args),
        api_key=api_key(args),
    )


def plane_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the shared flags as keyword arguments of either plane's config. Raises ConfigError for the secret file."""
    for flag, scheme in (("--transport", args.transport), ("--legacy-transport", args.legacy_transport)):
        if scheme is not None and scheme not in _SCHEMES:
            raise ConfigError(f"{flag} {scheme} is none of {', '.join(_SCHEMES)}")
    reaches_legacy = is_one_sided(args.legacy_transport or args.transport)
    if args.legacy and not reaches_legacy:
        raise ConfigError("--legacy needs --legacy-transport mooncake: their caches travel in no other way")
    options = TransportOptions(
        streams=args.streams,
        socket_buffer_bytes=args.socket_buffer,
        checksum=args.checksum or "",
        tls=tls if (tls := tls_files(args)) is not None and tls.ca is not None else None,
        mooncake_protocol=args.mooncake_protocol,
        mooncake_device=args.mooncake_device,
    )
    return {
        "host": args.host,
        "advertise_host": args.advertise_host,
        "secret": Secret.from_file(args.secret_file) if args.secret_file else None,
        "peer_timeout_s": args.peer_timeout,
        "bootstrap_timeout_s": args.bootstrap_timeout,
        "waiting_timeout_s": args.waiting_timeout,
        "ping_interval_s": args.ping_interval,
        "max_rooms": args.max_rooms,
        "transport": args.transport,
        "transport_options": options,
        "legacy": args.legacy,
        "legacy_transport": args.legacy_transport,
        "legacy_lacks": "" if reaches_legacy else _LEGACY_LACKS,
    }
