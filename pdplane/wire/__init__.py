"""Values to bytes and back. Decoders raise WireError only, whatever the bytes."""

from pdplane.wire.layout_json import decode_layout, encode_layout
from pdplane.wire.manifest_json import decode_manifest, encode_manifest
from pdplane.wire.notice import decode_notice, encode_notice, is_notice
from pdplane.wire.preallocation import decode_preallocation, encode_preallocation, preallocation_route
from pdplane.wire.registration import (
    decode_registration,
    decode_route,
    encode_registration,
    is_registration,
    session_port,
)
from pdplane.wire.status import decode_status, encode_status

__all__ = [
    "decode_layout",
    "decode_manifest",
    "decode_notice",
    "decode_preallocation",
    "decode_registration",
    "decode_route",
    "decode_status",
    "encode_layout",
    "encode_manifest",
    "encode_notice",
    "encode_preallocation",
    "encode_registration",
    "encode_status",
    "is_notice",
    "is_registration",
    "preallocation_route",
    "session_port",
]
