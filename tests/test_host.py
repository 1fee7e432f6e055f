"""gspmd.host: devices are set before a backend starts, or the error says why not."""

import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from gspmd import host


def test_eight_devices_stand():
    assert len(jax.devices("cpu")) == 8


def test_same_number_again_is_no_error():
    host.use_host_devices(8)


def test_too_late_is_one_clear_error():
    jax.devices()
    with pytest.raises(host.HostError, match="JAX has already started a backend"):
        host.use_host_devices(4)


def test_number_must_be_positive():
    with pytest.raises(host.HostError, match="cannot make -1 host devices: their number must be a whole number"):
        host.use_host_devices(-1)


def test_start_gives_what_was_asked():
    assert len(host.start(8)) == 8
    assert host.describe(host.start(8)).startswith("8 fake host devices sharing ")
    assert not host.is_fake(host.start(8)[:1])


def test_devices_are_those_of_all_processes(monkeypatch):
    host.share_devices(2)
    try:
        with pytest.raises(host.HostError, match="cannot divide 9 devices evenly among 2 processes"):
            host.start(9)
        everywhere = [SimpleNamespace(platform="cpu")] * 16
        monkeypatch.setattr(jax, "devices", lambda: everywhere)
        assert host.start(16) == everywhere  # 8 of them are here
        monkeypatch.setattr(jax, "devices", lambda: everywhere + everywhere)
        with pytest.raises(
            host.HostError, match="cannot use 16 of 32 devices in 2 processes: each process uses all its devices"
        ):
            host.start(16)
    finally:
        host.share_devices(1)


def test_threads_are_set_before_the_backend_starts():
    code = "import os; from gspmd import host; print(len(host.start(3, 'cpu')), os.environ['NPROC'])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["3", "32"]


def test_absent_platform_is_named():
    code = "from gspmd import host; host.start(1, 'rocm')"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "cannot start platform 'rocm'" in out.stderr


def test_gpu_is_left_to_jax_and_then_required():
    code = "from gspmd import host; host.start(None, 'gpu')"
    for environment, remedy in ((None, "Install JAX for CUDA or ROCm"), ("cpu", "JAX_PLATFORMS is 'cpu'; unset it.")):
        variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
        variables |= {} if environment is None else {"JAX_PLATFORMS": environment}
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables)
        if out.returncode == 0 and environment is None:
            continue  # this host has a GPU
        assert "HostError: cannot start platform 'gpu': the best that JAX finds here is 'cpu'." in out.stderr
        assert remedy in out.stderr


def test_one_gpu_is_used_whatever_its_kind(monkeypatch):
    card = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [card])
    assert host.start(None, "gpu") == [card]
    with pytest.raises(host.HostError) as error:
        host.start(8, "gpu")
    assert str(error.value).splitlines() == [
        "cannot use 8 devices: platform 'gpu' has 1.",
        "  Leave --devices (or --mesh) out to use what is there, or use --platform cpu for fake devices.",
    ]
