"""Addresses and secrets of other servers: what cannot be sent is refused at the start, by its key."""

import socket

import pytest

from tether.runtime.http import NoAnswer, check_address, check_listening, post_json, read_secret


@pytest.mark.parametrize(
    "secret", ["sk-1\n", "sk-1\r\nX: y", " sk-1", "sk-1 ", "sk-\u20ac1", "sk-\xe91", "sk-\x001", "sk\t1"]
)
def test_a_secret_that_no_header_can_carry_is_refused_and_not_shown(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", {"JUDGE_KEY": secret})
    with pytest.raises(ValueError, match=r"^judge\.api_key_env=JUDGE_KEY: ") as error:
        read_secret("JUDGE_KEY", "judge.api_key_env")
    assert "sk" not in str(error.value)


@pytest.mark.parametrize("written", ["sk-proj-hunter2", "hunter2 ", "9hunter2", "hunter2=x"])
def test_a_key_in_place_of_the_name_of_its_variable_is_not_shown(written: str) -> None:
    with pytest.raises(ValueError, match=r"^judge\.api_key_env: is no name of an environment variable") as error:
        read_secret(written, "judge.api_key_env")
    assert "hunter2" not in str(error.value)


def test_a_secret_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-proj_A.b~c+d/e=")
    assert read_secret("JUDGE_KEY", "k") == "sk-proj_A.b~c+d/e="
    assert read_secret(None, "k") is None


@pytest.mark.parametrize("header", ["sk-1\n", "sk-\u20ac"])
def test_a_header_that_cannot_be_sent_is_not_shown(header: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(NoAnswer) as error:
        post_json(f"http://127.0.0.1:{server.getsockname()[1]}/", {}, {"Authorization": header}, 5.0)
    assert "sk" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h:99999/v1", "Port out of range"),
        ("http://h:abc/v1", "Port could not be"),
        ("http://[::1/v1", "Invalid IPv6"),
        ("http://.x/v1", "label"),
        (f"http://{'x' * 64}/v1", "label"),
        ("http://h/v\u00e9", "percent"),
        ("http://h/v1?a=b c", "percent"),
        ("http://h/v\x7f", "percent"),
        ("http://h\x00/v", ""),
        ("http://a b/v1", ""),
        ("ftp://h/v1", "give http"),
        ("http:///v1", "give http"),
        ("localhost:80", "give http"),
        ("http://user:hunter2@h/v1", "user name or password"),
        ("http://hunter2@h/v1", "user name or password"),
    ],
)
@pytest.mark.parametrize("check", [check_address, check_listening])
def test_what_is_no_address_is_named(check: object, url: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"^judge\.base_url: .* is no address") as error:
        check(url, "judge.base_url")  # type: ignore[operator]
    assert why in str(error.value)
    assert "hunter2" not in str(error.value)
    assert not isinstance(error.value, UnicodeError)


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:8000/v1?x=%20", "http://[::1]:80/v1", "http://m\u00fcller.de/v1"]
)
def test_addresses(url: str) -> None:
    check_address(url, "k")
