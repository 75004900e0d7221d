"""The fields of a request's JSON, read one by one and checked; fields that were not read are refused at the end.

So nothing that a client sends is dropped silently. `null` is the same as no field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from pdplane.errors import ConfigError

MAX_TEXT = 1 << 16
"""Characters of a short text: a name, an id, a stop string."""
_MAX_DEPTH = 64
_MAX_VALUES = 200_000
"""Lists, objects and fields of one body: what makes parsing slow, and no conversation has so many."""
_TEXTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


@attrs.frozen(eq=False)
class BadField(ConfigError):
    """A field of a request that is wrong or not supported; the reason names it and is the text."""

    field: str

    def __str__(self) -> str:
        return self.reason


def parse(data: bytes) -> dict[str, Any]:
    """Return the body as an object of bounded depth and number of values.

    Raises BadField for anything else, and for texts that are no Unicode.
    """
    body = load(data, "body", "the body")
    if not isinstance(body, dict):
        raise BadField("the body is not a JSON object", "body")
    for field, value in body.items():
        check_depth(field[:80], value)
    return body


def load(data: bytes, field: str, name: str) -> Any:  # noqa: ANN401  (JSON is what it is)
    """Return JSON that costs little to parse. Raises BadField, which calls the text by its name."""
    if _values(data) > _MAX_VALUES and _values(_TEXTS.sub(b"", data)) > _MAX_VALUES:
        raise BadField(f"{name} holds more than {_MAX_VALUES} lists, objects and fields", field)
    try:
        value = json.loads(data)
        if _HALF_A_PAIR.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadField(f"{name} holds half a surrogate pair", field) from error
    except (ValueError, RecursionError) as error:
        raise BadField(f"{name} is not JSON", field) from error
    return value


def _values(data: bytes) -> int:
    """Count what can begin a list, an object or a field; those in texts count too."""
    return data.count(b"[") + data.count(b"{") + data.count(b":")


def check_depth(field: str, value: object) -> None:
    """Refuse a value that is nested too deep for a template, or for an error that shows it."""
    layer = [value]
    for _depth in range(_MAX_DEPTH):
        layer = [inner for item in layer for inner in _inside(item)]
        if not layer:
            return
    raise BadField(f"{field} is nested deeper than {_MAX_DEPTH}", field)


class Fields:
    """One JSON object. Each method takes a field out and returns its checked value, None or a default without it.

    All of them raise BadField, which names the field. `end` refuses what is left.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def name(self, field: str) -> str:
        """Return the field as an error names it."""
        return f"{self._path}{field[:80]}"

    def refuse(self, field: str, reason: str) -> BadField:
        """Return the error that says what is wrong with a field."""
        return BadField(f"{self.name(field)} {reason}", self.name(field))

    def take(self, field: str) -> Any:  # noqa: ANN401  (JSON is what it is)
        """Return the field's value unchecked."""
        return self._left.pop(field, None)

    def flag(self, field: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(field, f"{short(value)} is not true or false")
        return default if value is None else bool(value)

    def whole(self, field: str, low: int, high: int) -> int | None:
        """Return a whole number within bounds."""
        value = self.take(field)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise self.refuse(field, f"{short(value)} is not a whole number from {low} to {high}")
        return None if value is None else int(value)

    def number(self, field: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        """Return a finite number within bounds."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not _finite(value):
            raise self.refuse(field, f"{short(value)} is not a number")
        if not low <= value <= high:
            raise self.refuse(field, f"{short(value)} is not within {low:g} and {high:g}")
        return float(value)

    def text(self, field: str, longest: int = MAX_TEXT) -> str | None:
        """Return a text of at most so many characters."""
        value = self.take(field)
        if value is not None and (not isinstance(value, str) or len(value) > longest):
            raise self.refuse(field, f"is not a text of at most {longest} characters")
        return None if value is None else str(value)

    def texts(self, field: str, most: int, longest: int = MAX_TEXT) -> tuple[str, ...]:
        """Return one text or a list of texts, none of them empty."""
        value = self.take(field)
        if value is None:
            return ()
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(item, str) and 0 < len(item) <= longest for item in found):
            raise self.refuse(field, f"is not a text of 1 to {longest} characters, or a list of such texts")
        if len(found) > most:
            raise self.refuse(field, f"has more than {most} texts")
        return tuple(found)

    def ids(self, field: str) -> tuple[int, ...] | None:
        """Return a list of token ids."""
        value = self.take(field)
        if value is None:
            return None
        if not is_ids(value):
            raise self.refuse(field, "is not a list of token ids")
        return tuple(value)

    def mapping(self, field: str) -> Mapping[str, Any] | None:
        """Return an object."""
        value = self.take(field)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(field, "is not an object")
        return value

    def list(self, field: str) -> Sequence[Any] | None:
        """Return a list."""
        value = self.take(field)
        if value is not None and not isinstance(value, list):
            raise self.refuse(field, "is not a list")
        return value

    def only(self, field: str, *allowed: object) -> None:
        """Take a field that changes nothing with these values; refuse any other value."""
        value = self.take(field)
        if value is not None and not any(type(value) is type(good) and value == good for good in allowed):
            raise self.refuse(field, f"{short(value)} is not supported")

    def ignore(self, *fields: str) -> None:
        """Take fields that cannot change an answer."""
        for field in fields:
            self.take(field)

    def end(self) -> None:
        """Refuse every field that was not read."""
        for field in self._left:
            raise self.refuse(field, "is not supported")


def is_ids(value: object) -> bool:
    """Return whether this is a list of whole numbers that can be token ids."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**31 for item in value)


def short(value: object) -> str:
    """Return a value as an error shows it."""
    return json.dumps(value)[:60]


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _inside(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return [item for item in value.values() if isinstance(item, dict | list)]
    return [item for item in value if isinstance(item, dict | list)] if isinstance(value, list) else ()
