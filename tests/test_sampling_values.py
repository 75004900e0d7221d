"""The bounds of what a request may ask of sampling."""

import math

import pytest

from pdplane.api import MAX_TOP_LOGPROBS, Sampling
from pdplane.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.01),
        ("top_k", -1),
        ("min_p", -0.5),
        ("xtc_probability", 2),
        ("xtc_threshold", 0.6),
        ("repetition_penalty", -1),
        ("repetition_context_size", -1),
        ("presence_penalty", math.inf),
        ("presence_context_size", -1),
        ("frequency_penalty", math.nan),
        ("frequency_context_size", -1),
        ("top_logprobs", MAX_TOP_LOGPROBS + 1),
        ("logit_bias", ((3, math.nan),)),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_its_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        Sampling(**{field: value})
