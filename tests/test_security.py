"""The secret and what is derived from it."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from pdplane.errors import ConfigError
from pdplane.security import Secret

SECRET = Secret(b"correct horse battery staple")


def test_the_curve_key_depends_on_the_secret_alone() -> None:
    assert len(SECRET.curve_key()) == 32
    assert SECRET.curve_key() == Secret(b"correct horse battery staple").curve_key()
    assert SECRET.curve_key() != Secret(b"another horse battery staple").curve_key()


def test_answers_depend_on_secret_role_and_every_part() -> None:
    answer = SECRET.answer("sender", b"ab", b"c")
    assert SECRET.check_answer(answer, "sender", b"ab", b"c")
    assert not SECRET.check_answer(answer, "receiver", b"ab", b"c")
    assert not SECRET.check_answer(answer, "sender", b"a", b"bc")
    assert not Secret(b"another horse battery staple").check_answer(answer, "sender", b"ab", b"c")
    assert not SECRET.check_answer(b"", "sender", b"ab", b"c")


def test_a_file_gives_its_bytes_without_the_white_space(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  correct horse battery staple\n")
    path.chmod(0o600)
    assert Secret.from_file(path).curve_key() == SECRET.curve_key()


@pytest.mark.parametrize("content", [b"", b"short", b" " * 40, b"x" * 5000])
def test_a_bad_file_is_named_without_its_content(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="secret") as caught:
        Secret.from_file(path)
    assert "short" not in str(caught.value).replace(str(path), "")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"correct horse battery staple")
    path.chmod(mode)
    with pytest.raises(ConfigError, match="can be read by others; chmod 600"):
        Secret.from_file(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        Secret.from_file(tmp_path / "nowhere")


def test_the_secret_is_neither_shown_nor_pickled() -> None:
    assert "horse" not in repr(SECRET) + str(SECRET)
    with pytest.raises(TypeError):
        pickle.dumps(SECRET)
