"""Values to bytes and back. Decoders raise WireError only, whatever the bytes."""

from pdplane.wire.cache_json import check_manifest, decode_layout, decode_manifest, encode_layout, encode_manifest
from pdplane.wire.frames import (
    decode_preallocation,
    decode_registration,
    decode_route,
    decode_status,
    encode_preallocation,
    encode_registration,
    encode_status,
    is_registration,
    preallocation_route,
)
from pdplane.wire.notice import decode_notice, encode_notice, is_notice

__all__ = [
    "check_manifest",
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
]
