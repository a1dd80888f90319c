"""One question, one whole answer in time, or an error that says which server and why."""

import time

import pytest
from metadata_server import Asked, nobody, raw, serving

from megatron_bamboo.cloud.asking import MOST_BYTES, BadAnswer, NoAnswer

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n"


def test_an_answer_has_its_status_headers_and_text() -> None:
    def answering(asked: Asked) -> tuple[int, str, dict[str, str]]:
        return 200, f"{asked.method} {asked.headers['x-one']}\n", {"X-Two": "2"}

    with serving(answering) as server:
        answer = server.client().ask("/some/path", {"X-One": "1"}, method="PUT")
    assert (answer.status, answer.text(), answer.headers["x-two"]) == (200, "PUT 1", "2")
    assert server.paths() == ["/some/path"]


def test_who_redirects_is_not_followed() -> None:
    with serving(lambda asked: (302, "", {"Location": "/login"})) as server:
        assert server.client().ask("/", {}).status == 302
    assert server.paths() == ["/"]


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://{nobody()}")
    with serving(lambda asked: (200, "here")) as server:
        assert server.client().ask("/", {}).text() == "here"


def test_an_absent_server_is_named() -> None:
    server = nobody()
    with pytest.raises(NoAnswer, match=str(server)):
        server.ask("/", {})


@pytest.mark.parametrize(
    "chunks",
    [(), (b"HTTP/1.1 200",), (HEAD, b"too short"), (HEAD, *[b"x"] * 20), (*[b"H"] * 20,)],
    ids=["silent", "half a line", "half a body", "a body by drops", "a line by drops"],
)
def test_an_answer_that_is_not_whole_in_time_is_none(chunks: tuple[bytes, ...]) -> None:
    began = time.monotonic()
    # The time counts for the whole answer, not from byte to byte.
    with (
        raw(*(chunks or (b"",)), pause_seconds=0.2 if len(chunks) > 2 else 1.0) as server,
        pytest.raises((NoAnswer, BadAnswer)),
    ):
        server.ask("/", {})
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "chunk",
    [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"\x00\xff" * 40 + b"\r\n", b"HTTP/1.1 \r\n\r\n"],
)
def test_who_speaks_no_http_gives_a_bad_answer(chunk: bytes) -> None:
    with raw(chunk) as server, pytest.raises((BadAnswer, NoAnswer)):
        server.ask("/", {})


def test_an_answer_without_end_is_refused() -> None:
    with (
        serving(lambda asked: (200, "x" * (MOST_BYTES + 1))) as server,
        pytest.raises(BadAnswer, match="more than"),
    ):
        server.client().ask("/", {})


def test_what_is_no_text_or_no_json_is_refused() -> None:
    with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xff") as server:
        answer = server.ask("/", {})
    with pytest.raises(BadAnswer, match="no text"):
        answer.text()
    with (
        serving(lambda asked: (200, "[" * 100_000)) as known,
        pytest.raises(BadAnswer, match="it is no JSON"),
    ):
        known.client().ask("/", {}).json("it")
