import jax
import numpy as np
import pytest

from distrib import errors
from distrib.platform import devices


@pytest.mark.parametrize(
    ("spec", "index"),
    [
        ("cpu", 0),
        ("CPU:0", 0),
        ("/cpu:1", 1),
        ("Cpu:7", 7),
        ("device:CPU:2", 2),
        ("/device:cpu:3", 3),
        ("/job:localhost/replica:0/task:0/device:CPU:4", 4),
        ("/job:localhost/device:CPU:5", 5),
        ("/task:0/cpu:6", 6),
    ],
)
def test_resolve_device_reads_every_spelling(spec, index):
    assert devices.resolve_device(spec) is jax.devices("cpu")[index]


def test_resolve_device_returns_a_device_as_it_is():
    device = jax.devices()[3]
    assert devices.resolve_device(device) is device


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "/",
        "CPU:",
        "CPU:x",
        "CPU:-1",
        "CPU:*",
        "CPU 0",
        ":0",
        "/job:worker",
        "//cpu:0",
        "a:b:c:d",
    ]
    + ["/job:localhost/replica:0/task:0CPU:0", "/host:localhost/cpu:0", "CPU:0\n", "CPU:٣"],
)
def test_malformed_string(spec):
    with pytest.raises(errors.DeviceError, match="is not a device string") as caught:
        devices.resolve_device(spec)
    assert repr(spec) in str(caught.value)
    assert "This process has CPU:0, CPU:1" in str(caught.value)


def test_not_a_string():
    with pytest.raises(errors.DeviceError, match=r"^0 is not a device: pass a jax\.Device or"):
        devices.resolve_device(0)  # pyright: ignore[reportArgumentType]


def test_cpu_number_too_large_names_the_value_the_devices_and_the_fix():
    with pytest.raises(errors.DeviceError) as caught:
        devices.resolve_device("/cpu:8")
    assert str(caught.value) == (
        "There is no device '/cpu:8'. This process has CPU:0, CPU:1, CPU:2, CPU:3, CPU:4, CPU:5, "
        'CPU:6, CPU:7. For more CPU devices call distrib.config.set_logical_devices("CPU", 9) '
        "before JAX starts, that is, before the first array or device look-up."
    )


def test_unknown_kind():
    with pytest.raises(errors.DeviceError, match="no device 'abacus:0'.*JAX sees no ABACUS"):
        devices.resolve_device("abacus:0")


@pytest.mark.parametrize(
    "spec",
    ["/job:worker/cpu:0", "/task:1/cpu:0", "/replica:1/cpu:0", "/job:ps/task:0/device:CPU:0"],
)
def test_another_task(spec):
    with pytest.raises(errors.DeviceError, match="names a device of another task.*/task:0"):
        devices.resolve_device(spec)


def test_device_strings_round_trip():
    for index, device in enumerate(jax.devices()):
        assert devices.short_device_string(device) == f"CPU:{index}"
        full = devices.device_string(device)
        assert full == f"/job:localhost/replica:0/task:0/device:CPU:{index}"
        assert devices.resolve_device(full) is device


class FakeDevice:
    """Stands for a GPU, which the machine of the tests lacks."""

    def __init__(self, platform, process_index=0):
        self.platform = platform
        self.process_index = process_index


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm"])
def test_gpu_strings_of_a_worker(monkeypatch, platform):
    gpus = [FakeDevice(platform, process_index=2) for _ in range(2)]
    monkeypatch.setattr(jax, "local_devices", lambda **_: gpus)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    assert devices.device_string(gpus[1]) == "/job:worker/replica:0/task:2/device:GPU:1"
    assert devices.resolve_device("/job:worker/replica:0/task:2/device:GPU:1") is gpus[1]
    assert devices.resolve_device("gpu") is gpus[0]


def test_mixed_platforms(monkeypatch):
    mixed = {"cpu": [FakeDevice("cpu")], "gpu": [FakeDevice("gpu")]}
    monkeypatch.setattr(jax, "local_devices", lambda backend=None, **_: mixed[backend or "gpu"])
    with pytest.raises(errors.DeviceError, match="mixes CPU and GPU devices.*one SPMD program"):
        devices.resolve_devices(["GPU:0", "CPU:0"])


@pytest.mark.parametrize("specs", [None, [], ()])
def test_no_list_means_all_local_devices(specs):
    assert devices.resolve_devices(specs) == tuple(jax.local_devices())


def test_resolve_devices_keeps_the_order():
    cpus = jax.devices()
    assert devices.resolve_devices(["CPU:2", cpus[0], "/cpu:1"]) == (cpus[2], cpus[0], cpus[1])
    assert devices.resolve_devices(np.array(cpus[:2])) == tuple(cpus[:2])  # pyright: ignore[reportArgumentType]


def test_a_single_string_or_device_is_not_a_list():
    with pytest.raises(errors.DeviceError, match=r"devices is 'CPU:0'.*pass \['CPU:0'\]"):
        devices.resolve_devices("CPU:0")
    with pytest.raises(errors.DeviceError, match=r"pass \['CPU:1'\]"):
        devices.resolve_devices(jax.devices()[1])  # pyright: ignore[reportArgumentType]


def test_duplicates():
    with pytest.raises(errors.DeviceError, match="task:0/device:CPU:1 is listed twice in "):
        devices.resolve_devices(["CPU:0", "CPU:1", "/cpu:1"])


def test_a_missing_device_in_a_list():
    with pytest.raises(errors.DeviceError, match="There is no device 'CPU:99'"):
        devices.resolve_devices(["CPU:0", "CPU:99"])
