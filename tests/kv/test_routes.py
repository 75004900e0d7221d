"""Who feeds whom, against the legacy planner."""

from __future__ import annotations

import pytest

from pdplane.errors import LayoutMismatch, RemoteProtocolError, WireError
from pdplane.ids import Room
from pdplane.kv.copies import (
    Fragment,
    RankRoute,
    contact_order,
    decode_ranks_served,
    dp_group,
    dummy_ranks,
    expected_prefill_ranks,
    plan_route,
)
from pdplane.kv.layout import Layout
from tests.golden import Case, each, layout_of, refused
from tests.samples import two_group_layout


def _layouts(case: Case) -> tuple[Layout, Layout, int, int]:
    given = case["input"]
    prefill, decode = layout_of(given["prefill_layout"]), layout_of(given["decode_layout"])
    return prefill, decode, given["prefill_tp_size"], given["decode_tp_size"]


def _row(fragment: Fragment) -> list[object]:
    return [
        fragment.group_id,
        fragment.field_id,
        fragment.source_offset,
        fragment.destination_offset,
        fragment.source_stride,
        fragment.destination_stride,
        fragment.row_bytes,
        fragment.rows,
    ]


def _whole_pages(layout: Layout) -> list[list[object]]:
    """The legacy planner has no fragments at equal tp; ours are the whole pages that it then copies."""
    fields = [field for spec in layout.group_specs for field in layout.fields_of(spec.group_id)]
    return [[f.group_id, f.field_id, 0, 0, *[f.payload_bytes] * 3, 1] for f in fields]


def _fragments(route: RankRoute, case: Case, expected: list[list[object]], decode: Layout) -> None:
    found = [_row(fragment) for fragment in route.fragments]
    equal = case["input"]["prefill_tp_size"] == case["input"]["decode_tp_size"]
    assert found == (_whole_pages(decode) if equal else expected)


@each("legacy/tp_planner", lambda case: not refused(case))
def test_planned_for_decode(case: Case) -> None:
    prefill, decode, prefill_tp, decode_tp = _layouts(case)
    for expected in case["expected"]["decode_ranks"]:
        rank = expected["decode_rank"]
        feeders = expected_prefill_ranks(prefill, decode, prefill_tp, decode_tp, rank)
        assert list(feeders) == expected["expected_prefill_ranks"]
        dummies = dummy_ranks(prefill, decode, prefill_tp, decode_tp)
        assert (list(dummies) if rank == 0 else []) == expected["dummy_prefill_ranks"]
        assert list(contact_order(prefill, decode, prefill_tp, decode_tp, rank)) == expected["contact_order"]
        for prefill_rank, fragments in expected["fragments"].items():
            route = plan_route(prefill, decode, prefill_tp, int(prefill_rank), decode_tp, rank)
            _fragments(route, case, fragments, decode)


@each("legacy/tp_planner", lambda case: not refused(case))
def test_planned_for_prefill(case: Case) -> None:
    prefill, decode, prefill_tp, decode_tp = _layouts(case)
    for prefill_rank, decode_ranks in case["expected"]["decode_ranks_by_prefill_rank"].items():
        served = decode_ranks_served(prefill, decode, prefill_tp, int(prefill_rank), decode_tp)
        assert list(served) == decode_ranks


_REFUSED: dict[str, tuple[type[RemoteProtocolError], str]] = {
    "tp_size": (WireError, "tp_size"),
    "rank": (WireError, "decode_rank"),
    "equal_tp_geometry": (WireError, "layer.0.k.shape"),
    "tp_mapping": (WireError, "layer.0.k.partition"),
    "peer_layout": (LayoutMismatch, "field_order[full]"),
}


@each("legacy/tp_planner", refused)
def test_refused(case: Case) -> None:
    kind, field = _REFUSED[case["expected"]["error"]["category"]]
    rank = case["input"].get("decode_rank", 0)
    with pytest.raises(kind) as caught:
        expected_prefill_ranks(*_layouts(case), rank)
    assert caught.value.field.endswith(field)
    with pytest.raises(kind):
        plan_route(*_layouts(case)[:3], 0, _layouts(case)[3], rank)


def _registered(case: Case) -> RankRoute:
    prefill, decode, prefill_tp, decode_tp = _layouts(case)
    given = case["input"]
    return plan_route(prefill, decode, prefill_tp, given["prefill_rank"], decode_tp, given["decode_rank"])


@each("legacy/registration_routes", lambda case: not refused(case))
def test_registered(case: Case) -> None:
    route, expected = _registered(case), case["expected"]
    assert (route.dummy, bool(route.fragments)) == (expected["is_dummy"], not expected["is_dummy"])
    assert list(route.decode_ranks) == expected["expected_decode_ranks"]
    _fragments(route, case, expected["fragments"], _layouts(case)[1])


@each("legacy/registration_routes", refused)
def test_registered_with_the_wrong_rank(case: Case) -> None:
    with pytest.raises(WireError) as caught:
        _registered(case)
    assert str(caught.value) == case["expected"]["error"]["message"]


def test_prefill_rank_out_of_range() -> None:
    layout = two_group_layout()
    with pytest.raises(WireError, match=r"prefill_rank must be 0\.\.0"):
        plan_route(layout, layout, 1, 1, 1, 0)


@each("legacy/topology", lambda case: case["name"].startswith("room_dp_"))
def test_the_group_of_a_room(case: Case) -> None:
    group = dp_group(Room(int(case["input"]["room_s"])), case["input"]["dp_size"])
    assert {"target_dp_group": group} == case["expected"]
