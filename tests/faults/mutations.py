"""Inputs that are almost right: valid messages with something changed, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

NUMBERS = (0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**400, 0.5, 1e308)
TEXTS = ("", "\x00", "\ud800", "é" * 300, "[" * 5000, "../..", "None", "1e9", "007", "\u0661", "pdplane/1")
VALUES: tuple[Any, ...] = (*NUMBERS, *TEXTS, None, True, [], {}, [[[]]], {"": None})
PIECES = (b"", b"\0", b"\xff" * 8, b"-1", b"9" * 400, b"{}", b"null", b"\r\n", b"pdplane/1", b"None", b"[" * 3000)


EMPTY: Mapping[int, Sequence[bytes]] = {}


class Mutations:
    """A source of changed messages; the same seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def frames(self, bases: Sequence[Sequence[bytes]], kept: Mapping[int, Sequence[bytes]] = EMPTY) -> list[bytes]:
        """A multipart message. Frames in `kept` are only replaced by values from there: addresses must stay local."""
        found = list(self.chance.choice(bases))
        for _ in range(self.chance.randint(1, 3)):
            at = self.chance.randrange(len(found)) if found else 0
            if len(found) > 5 and at in kept:
                found[at] = self.chance.choice(kept[at])
            elif found and self.chance.random() < 0.7:
                found[at] = self.data(found[at])
            else:
                self._reorder(found, at)
        return found or [b""]

    def _reorder(self, found: list[bytes], at: int) -> None:
        match self.chance.randrange(4):
            case 0 if found:
                del found[at:]
            case 1:
                found.append(self.chance.choice(PIECES))
            case 2 if len(found) > 1:
                found[-1], found[-2] = found[-2], found[-1]
            case _:
                found += [b""] * self.chance.randint(1, 20)

    def data(self, base: bytes) -> bytes:
        """Bytes with a few changed, cut, repeated or put in."""
        found = bytearray(base)
        for _ in range(self.chance.randint(1, 3)):
            at = self.chance.randrange(len(found) + 1)
            match self.chance.randrange(5):
                case 0 if at < len(found):
                    found[at] ^= 1 << self.chance.randrange(8)
                case 1:
                    del found[at:]
                case 2:
                    found[at:at] = self.chance.choice(PIECES)
                case 3:
                    found[at:at] = found[: self.chance.randrange(64)]
                case _:
                    found[at : at + 8] = self.chance.randbytes(8)
        return bytes(found)

    def value(self, base: Any, values: Sequence[Any] = VALUES) -> Any:  # noqa: ANN401  (JSON is what it is)
        """JSON with one value somewhere inside replaced, left out or added."""
        if isinstance(base, dict) and base and self.chance.random() < 0.9:
            found, key = dict(base), self.chance.choice(list(base))
            return self._changed(found, key, lambda: found.update({f"{key}x": self.chance.choice(values)}))
        if isinstance(base, list) and base and self.chance.random() < 0.9:
            row, place = list(base), self.chance.randrange(len(base))
            return self._changed(row, place, lambda: row.append(self.chance.choice(values)))
        return self.chance.choice(values)

    def _changed(self, holder: Any, place: Any, add: Callable[[], None]) -> Any:  # noqa: ANN401
        match self.chance.randrange(6):
            case 0:
                del holder[place]
            case 1:
                add()
            case _:
                holder[place] = self.value(holder[place])
        return holder

    def json(self, base: Any) -> bytes:  # noqa: ANN401
        """A body of changed JSON; one in ten is changed in its bytes too."""
        body = json.dumps(self.value(base)).encode()
        return self.data(body) if self.chance.random() < 0.1 else body
