"""The secret and what is derived from it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import zmq

from pdplane.errors import ConfigError
from pdplane.security import Secret, x25519, z85

SECRET = Secret(b"correct horse battery staple")


def test_x25519_is_that_of_rfc_7748() -> None:
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    point = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    result = "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    assert x25519(scalar, point).hex() == result


def test_x25519_repeated_is_that_of_rfc_7748() -> None:
    scalar = point = (9).to_bytes(32, "little")
    for _ in range(10):
        scalar, point = x25519(scalar, point), scalar
    assert x25519(scalar, point) != scalar
    once = x25519((9).to_bytes(32, "little"), (9).to_bytes(32, "little"))
    assert once.hex() == "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"


def test_curve_keys_are_a_pair_that_libzmq_accepts() -> None:
    public, private = SECRET.curve_keys()
    assert zmq.curve_public(private) == public
    assert SECRET.curve_keys() == Secret(b"correct horse battery staple").curve_keys()
    assert Secret(b"another horse battery staple").curve_keys()[0] != public


def test_z85_is_that_of_zeromq() -> None:
    assert z85(bytes.fromhex("864fd26fb559f75b")) == b"HelloWorld"


def test_answers_depend_on_secret_role_and_every_part() -> None:
    answer = SECRET.answer("sender", b"ab", b"c")
    assert SECRET.check_answer(answer, "sender", b"ab", b"c")
    assert not SECRET.check_answer(answer, "receiver", b"ab", b"c")
    assert not SECRET.check_answer(answer, "sender", b"a", b"bc")
    assert not Secret(b"another horse battery staple").check_answer(answer, "sender", b"ab", b"c")
    assert not SECRET.check_answer(b"", "sender", b"ab", b"c")


@pytest.mark.parametrize("form", ["{}", "Bearer {}", "bearer  {} "])
def test_a_bearer_is_taken_with_and_without_its_scheme(form: str) -> None:
    assert SECRET.check_bearer(form.format(SECRET.bearer()))


@pytest.mark.parametrize("text", [None, "", "Bearer", "Bearer ", "Basic abc", "\udcff", "é", "Bearer " + "0" * 64])
def test_other_bearers_are_refused(text: str | None) -> None:
    assert not SECRET.check_bearer(text)


def test_a_file_gives_its_bytes_without_the_white_space(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  correct horse battery staple\n")
    assert Secret.from_file(path).bearer() == SECRET.bearer()


@pytest.mark.parametrize("content", [b"", b"short", b" " * 40, b"x" * 5000])
def test_a_bad_file_is_named_without_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="secret") as caught:
        Secret.from_file(path)
    assert "short" not in str(caught.value).replace(str(path), "")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Secret.from_file(tmp_path / "nowhere")


def test_the_secret_is_neither_shown_nor_pickled() -> None:
    assert "horse" not in repr(SECRET) + str(SECRET)
    with pytest.raises(TypeError):
        pickle.dumps(SECRET)
