"""The server: whom it answers, what it refuses, and that nothing of it is left at the end."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from gspmd.commands.page.command import LONG
from gspmd.page import limits, server, worker
from gspmd.page.guard import HEADERS

PORT = 8899
CONFIGS = Path(__file__).parents[2] / "configs"
HOST = f"127.0.0.1:{PORT}"
ASKED = {"equation": "BE_x, EF_x -> BF_x", "sizes": "B=8,E=8,F=8", "mesh": "x=2"}
WELL = {"Host": HOST, "Origin": f"http://{HOST}", "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client():
    with TestClient(
        server.application(PORT, CONFIGS), base_url=f"http://{HOST}", raise_server_exceptions=False
    ) as made:
        yield made


def test_the_pages_load_only_their_own_files(client):
    for path in server.PAGES:
        page = client.get(path)
        assert page.status_code == 200
        named = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
        assert named
        for name in named:
            assert name.startswith("/"), name
            assert client.get(name).status_code == 200
    for each in Path(server.__file__).with_name("static").iterdir():
        text = each.read_text()
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", ""), each.name
        assert "https://" not in text, each.name
        assert not re.search(r"<script(?! type=\"module\" src=)|<style| style=| on[a-z]+=", text), each.name


@pytest.mark.parametrize("path", ["/", "/page.css", "/nothing", "/api/plan"])
def test_every_answer_carries_the_policy(client, path):
    found = client.get(path).headers
    for name, value in HEADERS.items():
        assert found[name] == value
    assert "access-control-allow-origin" not in found


def test_an_equation_is_answered(client):
    answer = client.post("/api/plan", json=ASKED, headers=WELL)
    assert answer.status_code == 200
    assert answer.json()["plan"]["equation"] == ASKED["equation"]


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1", "127.0.0.1:1", f"evil.example:{PORT}", f"0.0.0.0:{PORT}", ""]
)
def test_another_name_of_this_host_is_refused(client, host):
    for answer in (
        client.get("/", headers={"Host": host}),
        client.post("/api/plan", json=ASKED, headers={"Host": host}),
    ):
        assert answer.status_code == 421
        assert "no other host" in answer.json()["refused"]


@pytest.mark.parametrize("host", [HOST, f"localhost:{PORT}", f"[::1]:{PORT}", f"LOCALHOST:{PORT}"])
def test_the_names_of_this_machine_are_answered(client, host):
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"https://{HOST}"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": f"http://{HOST}", "Sec-Fetch-Site": "cross-site"},
    ],
)
def test_requests_of_other_sites_are_refused(client, given):
    headers = {"Host": HOST, "Content-Type": "application/json"} | given
    assert client.post("/api/plan", json=ASKED, headers=headers).status_code == 403
    assert client.get("/", headers=headers).status_code == 403
    assert client.options("/api/plan", headers=headers).status_code in (403, 405)


def test_a_link_of_another_site_opens_a_page_and_nothing_else(client):
    link = {"Host": HOST, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert client.get("/?equation=BE_x", headers=link).status_code == 200
    assert client.get("/page.css", headers=link).status_code == 403
    assert client.post("/api/plan", json=ASKED, headers=link).status_code == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_forms_of_other_sites_could_not_send_what_it_takes(client, kind):
    assert client.post("/api/plan", content=json.dumps(ASKED), headers=WELL | {"Content-Type": kind}).status_code == 415


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/static/page.css",
        "/equation.html",
        "/server.py",
    ],
)
def test_no_path_leads_to_a_file(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["refused"].startswith("there is nothing at")


def test_a_body_has_a_limit(client):
    for body in (b" " * (limits.BODY + 1), b'{"equation": "' + b"B" * limits.BODY + b'"}'):
        assert client.post("/api/plan", content=body, headers=WELL).status_code == 413
    chunks = (b" " * 1024 for _ in range(limits.BODY // 1024 + 2))
    assert client.post("/api/plan", content=chunks, headers=WELL).status_code == 413


def test_a_field_has_a_limit(client):
    answer = client.post("/api/plan", json=ASKED | {"equation": "B" * (limits.TEXT + 1)}, headers=WELL)
    assert answer.status_code == 400
    assert answer.json()["refused"] == "field equation has 401 characters; it may have at most 400."


def _malformed(draw: random.Random) -> tuple[bytes, dict[str, str]]:
    """Draw a malformed request, which the page itself never sends."""
    good = json.dumps(ASKED).encode()
    at = draw.randrange(len(good))
    wild = [
        "__import__('os')",
        None,
        True,
        3,
        1e308,
        [],
        {},
        ["x"],
        {"a": {}},
        "\0",
        "\ud800",
        "B" * 401,
        "𝔅",
        "..\\..",
        "{{7*7}}",
    ]
    body = draw.choice(
        (
            lambda: good[:at],
            lambda: good[:at] + bytes([draw.randrange(128, 256)]) + good[at:],
            lambda: json.dumps(ASKED | {draw.choice([*ASKED, "chip", "dtype", "via"]): draw.choice(wild)}).encode(),
            lambda: json.dumps(ASKED | {draw.choice(["file", "__class__", "path", ""]): "x"}).encode(),
            lambda: json.dumps(draw.choice(wild)).encode(),
            lambda: b"[" * draw.randrange(1, 100_000),
            lambda: b'{"a":' * draw.randrange(1, 5_000),
            lambda: b"9" * draw.randrange(1, 10_000),
            lambda: bytes(draw.randrange(256) for _ in range(draw.randrange(200))),
            lambda: json.dumps(ASKED | {"equation": "".join(draw.choices("BEF_xyz,->+() {}?\t", k=40))}).encode(),
        )
    )()
    headers = dict(WELL)
    if draw.random() < 0.2:
        headers[draw.choice(("Host", "Origin", "Content-Type", "Sec-Fetch-Site"))] = draw.choice(
            ("x", "null", "a/b", "*")
        )
    return body, headers


def test_a_thousand_malformed_requests_have_a_thousand_clear_answers(client):
    draw, seen = random.Random(7), {}
    for _ in range(1000):
        body, headers = _malformed(draw)
        answer = client.post(
            draw.choice(("/api/plan", "/api/plan", "/api/compare", "/api/none")), content=body, headers=headers
        )
        told = answer.json()
        seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        if answer.status_code == 200:  # Notation may be anything; what is wrong with it is an answer.
            assert told["fault"]["message"].startswith(("cannot", "no ", "mesh", "the ")), told
        else:
            assert answer.status_code in (400, 403, 404, 405, 413, 415, 421), told
            assert 10 < len(told["refused"]) < 400, told
            assert "Traceback" not in told["refused"]
    assert {200, 400, 404, 415, 421} <= set(seen), seen
    assert client.post("/api/plan", json=ASKED, headers=WELL).json()["plan"]["seconds"] > 0


def test_layouts_have_a_process_of_their_own(client):
    assert "tiny" in client.post("/api/shelf", json={}, headers=WELL).json()["configs"]
    for given, status in (({"config": 3}, 400), ({"lines": "x" * 9000}, 400), ({"file": "/etc/passwd"}, 400)):
        answer = client.post("/api/layout", json=given, headers=WELL)
        assert answer.status_code == status
        assert answer.json()["refused"].startswith(("field", "there is no field"))
    named = client.post("/api/layout", json={"config": "tiny", "layout": "/etc/passwd", "mesh": "x=2"}, headers=WELL)
    assert named.json()["fault"]["message"].startswith("no layout is called '/etc/passwd'")


def test_what_takes_too_long_is_ended_and_the_next_is_answered(monkeypatch):
    slow = ASKED | {"equation": "ABCDE, EFGHI -> ABCDFGHI", "mesh": "u=2,v=2,w=2,x=2,y=2,z=2"}
    slow["sizes"] = ",".join(f"{dim}=64" for dim in "ABCDEFGHI")
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    with TestClient(server.application(PORT, CONFIGS), base_url=f"http://{HOST}") as client:
        answer = client.post("/api/plan", json=slow, headers=WELL)
        assert answer.status_code == 504
        assert "took more than 0.3 seconds" in answer.json()["refused"]
        monkeypatch.setattr(limits, "SECONDS", 60)
        assert client.post("/api/plan", json=ASKED, headers=WELL).status_code == 200


def test_a_worker_that_dies_is_replaced():
    made = worker.Worker(server.SHORT)
    assert made.ask("plan", ASKED, 60)[0] == 200
    os.kill(made._process.pid, signal.SIGKILL)
    made._process.wait()
    assert made.ask("plan", ASKED, 60)[0] == 200
    made.close()
    with pytest.raises(worker.Ended, match="shutting down"):
        made.ask("plan", ASKED, 60)


def _free() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _children(pid: int) -> list[int]:
    return [int(each) for file in Path(f"/proc/{pid}/task").glob("*/children") for each in file.read_text().split()]


GARBAGE = (
    b"\x00\xff" * 50 + b"\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /" + b"a" * 70_000,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_it_is_left_running(number, tmp_path):
    port = _free()
    argv = [sys.executable, "-m", "gspmd", "page", "--no-browser", "--port", str(port)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert process.stdout.readline().startswith(f"gspmd page: http://127.0.0.1:{port}/")
        _wait(lambda: _answers(port))
        children = _children(process.pid)
        assert children
        for garbage in GARBAGE:
            assert _raw(port, garbage).startswith(b"HTTP/1.1 4"), garbage[:20]
        assert _answers(port)
        with closing(socket.create_connection(("127.0.0.1", port))) as held:
            held.sendall(b"POST /api/plan HTTP/1.1\r\n")  # A request that never ends does not keep the page.
            process.send_signal(number)
            process.wait(30)
        _wait(lambda: all(_has_ended(pid) for pid in children))
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _raw(port: int, sent: bytes) -> bytes:
    with closing(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
        connection.sendall(sent)
        return connection.recv(4096)


def _answers(port: int) -> bool:
    try:
        return _raw(port, f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def _wait(until, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.1)


LONG_SEARCH = {
    "config": "llama-2-70b", "layout": "zero-3", "mesh": "x=4,y=8,z=8", "batch": "1024", "length": "4096",
    "topology": "tpu-v5p:4x8x8", "meshes": "every", "parts": "every", "recomputed": "every",
}  # fmt: skip
"""A search that takes minutes."""


@contextmanager
def _served(tmp_path):
    """A page in a process of its own, and its port."""
    port = _free()
    argv = [sys.executable, "-m", "gspmd", "page", "--no-browser", "--port", str(port)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        _wait(lambda: _answers(port))
        yield process, port
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def _asked(port: int, task: str, given: dict) -> socket.socket:
    """Ask for an answer that is told part by part, and wait for its first note."""
    body = json.dumps(given).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in WELL.items()).replace(str(PORT), str(port))
    connection = socket.create_connection(("127.0.0.1", port), timeout=90)
    connection.sendall(f"POST /api/{task} HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    heard = b""
    while b'"said"' not in heard:
        more = connection.recv(4096)
        assert more, heard
        heard += more
    return connection


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_search_ends_with_the_page_that_asked_and_with_the_server(tmp_path):
    with _served(tmp_path) as (process, port):
        before = set(_children(process.pid))
        with closing(_asked(port, "search", LONG_SEARCH)):
            (searching,) = set(_children(process.pid)) - before
            body = json.dumps(LONG_SEARCH).encode()
            head = "".join(f"{name}: {value}\r\n" for name, value in WELL.items()).replace(str(PORT), str(port))
            again = f"POST /api/search HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
            assert _raw(port, again).startswith(b"HTTP/1.1 503")
        _wait(lambda: _has_ended(searching), 20)  # The connection was closed, as by Stop.
        with closing(_asked(port, "search", LONG_SEARCH)) as connection:
            children = _children(process.pid)
            assert set(children) - before - {searching}
            process.send_signal(signal.SIGINT)
            told = b"".join(iter(lambda: connection.recv(4096), b""))
            process.wait(30)
        assert b"gspmd page has been ended in its terminal" in told
        _wait(lambda: all(_has_ended(pid) for pid in children), 20)
        assert "Traceback" not in process.stderr.read()


def test_a_search_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(limits, "SEARCH_SECONDS", 2.0)
    with TestClient(server.application(PORT, CONFIGS, None, LONG), base_url=f"http://{HOST}") as client:
        answer = client.post("/api/search", json=LONG_SEARCH, headers=WELL)
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        last = json.loads(answer.text.splitlines()[-1])
        assert last["status"] == 504
        assert "took more than 2 seconds" in last["answer"]["refused"]
        refused = client.post("/api/search", json={"topology": 1}, headers=WELL).text.splitlines()[-1]
        assert json.loads(refused) == {"status": 400, "answer": {"refused": "field topology is 1, not a string."}}
        why = client.post("/api/why", json={"token": "1", "key": "ffn.w_in", "spec": "EF"}, headers=WELL).json()
        assert "this search is no longer kept" in why["fault"]["message"]


@pytest.mark.parametrize("task", ["search", "why"])
def test_a_search_is_for_this_page_alone(task):
    with TestClient(server.application(PORT, CONFIGS, None, LONG), base_url=f"http://{HOST}") as client:
        assert client.post(f"/api/{task}", json={}, headers=WELL | {"Origin": "http://evil.example"}).status_code == 403
        assert (
            client.post(f"/api/{task}", content="{}", headers=WELL | {"Content-Type": "text/plain"}).status_code == 415
        )
        assert client.post(f"/api/{task}", json={}, headers=WELL | {"Host": "evil.example"}).status_code == 421
        assert client.get(f"/api/{task}", headers={"Host": HOST}).status_code == 405


def test_it_listens_to_this_machine_alone():
    from gspmd.commands.page.command import _listen

    with closing(_listen(None)) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"


def test_bad_flags_have_one_message(capsys):
    from gspmd.commands.page import command as page

    for flags, message in (
        (["--port", "x"], "'x' is not a port"),
        (["--port", "70000"], "a whole number from 1 to 65535"),
        (["--layouts", "/nowhere/at/all"], "there is no such folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            page.run(flags)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("given", [True, False])
def test_a_port_in_use_is_one_message_with_the_remedy(given, monkeypatch, capsys):
    from gspmd.commands.page import command as page

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(page, "_PORT", port)
        monkeypatch.setattr(page, "_PORTS", 1)
        assert page.run(["--port", str(port)] if given else []) == 2
    of, remedy = (
        (f"port {port}", "another --port, or none for the first free one")
        if given
        else (f"the ports {port} to {port}", "a free port with --port")
    )
    assert capsys.readouterr().err == (
        f"gspmd page: cannot listen on {of}: Address already in use.\n  Give {remedy}.\n"
    )


def test_without_its_extra_it_names_what_to_install(monkeypatch, capsys):
    from gspmd.commands.page import command as page

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert page.run([]) == 2
    assert "pip install 'gspmd[page]'" in capsys.readouterr().err
