"""Coming to the first process: who waits for it goes on waiting, and says what is in the way."""

import socket
import threading
import time

import pytest

from gspmd.training.processes import arrival, joining
from gspmd.training.syntax import Processes
from gspmd.training.toml import ConfigError


@pytest.fixture
def listening():
    with socket.create_server(("127.0.0.1", 0), backlog=8) as door:
        yield door, Processes(f"127.0.0.1:{door.getsockname()[1]}", 2, 1)


def test_who_has_greeted_waits_for_a_first_process_that_is_stopped(listening, monkeypatch, capsys):
    door, at = listening
    monkeypatch.setattr(arrival, "TELL", 0.4)
    monkeypatch.setattr(arrival, "_CONNECTING", 0.2, raising=False)
    came = []
    knocking = threading.Thread(target=lambda: came.append(arrival.knock(at, 60)), daemon=True)
    knocking.start()
    time.sleep(0.8)
    first, _ = door.accept()
    with first:
        assert first.recv(64) == b"here 2 1\0"
        door.settimeout(0.3)
        with pytest.raises(TimeoutError):  # it greets once
            door.accept()
        first.sendall(b"wel")
        time.sleep(0.3)
        first.sendall(b"come\0")
        knocking.join(10)
        assert len(came) == 1
        came[0].close()
    waiting = (
        f"Waiting for process 0 of 2 at {at.address}, for at most 300 seconds: the listener there does not answer.\n"
    )
    assert capsys.readouterr().err == waiting


@pytest.mark.parametrize("words", [b"\x00\x00\x12\x04\x00", b""])
def test_another_program_at_the_port_is_named(listening, monkeypatch, capsys, words):
    door, at = listening
    monkeypatch.setattr(arrival, "TELL", 0.1)

    def answer():
        while True:
            try:
                caller, _ = door.accept()
            except OSError:
                return
            caller.recv(64)
            caller.sendall(words)
            caller.close()

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(ConfigError) as error:
        arrival.knock(at, 0.5)
    found = "something else answers there; name another port."
    assert f"process 0 did not listen there within 0 seconds: {found}" in str(error.value)
    assert f"for at most 300 seconds: {found}\n" in capsys.readouterr().err
    door.shutdown(socket.SHUT_RDWR)


def test_a_refused_connection_and_an_unknown_host_are_named(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with pytest.raises(ConfigError, match="did not listen there within 0 seconds: Connection refused"):
        arrival.knock(Processes(f"127.0.0.1:{port}", 2, 1), 0.1)

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(arrival.socket, "create_connection", unknown)
    with pytest.raises(ConfigError, match="did not listen there within 0 seconds: Name or service not known"):
        arrival.knock(Processes("nowhere:1", 2, 1), 0.1)


@pytest.mark.parametrize("address", ["a..b:1", f"{'a' * 64}:1", "node1", "node1:", "node1:one", "node1:99999", ":8476"])
@pytest.mark.parametrize("process", [0, 1])
def test_an_address_that_is_none_is_refused(address, process):
    at = Processes(address, 2, process)
    with pytest.raises(ConfigError) as error:
        arrival.knock(at, 0.1) if process else arrival.door(at)
    fault = f"{address!r} is not HOST:PORT, the name of a machine and a port from 1 to 65535."
    assert str(error.value).endswith(f"as process {process} of 2:\n  {fault}")


@pytest.mark.parametrize("expected", ["a..b:1,processes=2,process=1", "auto"])
def test_a_fault_is_said_where_the_others_cannot_be_reached(monkeypatch, capsys, expected):
    def undetected(*_):
        raise ValueError("a cluster without an address")

    monkeypatch.setattr("gspmd.jax_internals.detected_processes", undetected)
    monkeypatch.setattr(joining, "_expected", expected)
    assert joining._come_to_tell(2, "the steps are none")
    assert capsys.readouterr().err == "the steps are none\n"
