"""`torch_bridge.cuda_driver` reads the facts about a GPU from NVIDIA's driver, which a fake replaces here."""

import ctypes

import pytest

from torch_bridge import cuda_driver

ATTRIBUTES = {16: 170, 39: 1536, 75: 12, 76: 0, 97: 101_376}  # an RTX 5090's


class Driver:
    """A fake driver of one GPU. It records calls, which return the statuses in `fails`, or 0 for success."""

    def __init__(self, attributes=ATTRIBUTES, clusters=lambda programs: 0, **fails):
        self.attributes, self.clusters, self.fails, self.called = attributes, clusters, fails, []

    def __getattr__(self, name):
        def function(*arguments):
            self.called.append(name)
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = self.attributes[arguments[1]]
            if name == "cuDeviceGetName":
                arguments[0].value = b"a GPU"
            if name == "cuOccupancyMaxActiveClusters":
                found, _, config = arguments
                (attribute,) = config._obj.attributes[: config._obj.num_attributes]
                assert (attribute.id, *attribute.value[1:3]) == (4, 1, 1)
                assert config._obj.shared_memory == self.attributes[97] and [*config._obj.grid][1:] == [1, 1]
                count = self.clusters(attribute.value[0])
                if count in (1, 912):  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_CLUSTER_SIZE
                    return count
                found._obj.value = count
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"as the test says"
            return self.fails.get(name, 0)

        return function


@pytest.fixture
def pretend(monkeypatch):
    """Returns a function that makes a driver that of this process."""

    def use(driver):
        monkeypatch.setattr(cuda_driver, "_library", lambda: driver)
        return driver

    cuda_driver.device.cache_clear()
    yield use
    cuda_driver.device.cache_clear()


PAIRS = (
    ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"),
    ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
    ("cuModuleLoadData", "cuModuleUnload"),
)


@pytest.mark.parametrize("status", [1, 912])
def test_the_driver_is_asked_once_how_many_clusters_run_at_once(status, pretend):
    driver = pretend(Driver(clusters=lambda programs: 160 // programs if programs <= 8 else status))
    device = cuda_driver.device(0)
    assert (device.capability, device.multiprocessors, device.name) == (120, 170, "a GPU")
    assert device.clusters == (0, 160, 80, 53, 40, 32, 26, 22, 20, *[0] * 8)
    assert [device.clusters_at_once(programs) for programs in (1, 4, 16, 17)] == [160, 40, 0, 0]
    assert cuda_driver.device(0) is device
    for name in sum(PAIRS, ()):
        assert driver.called.count(name) == 1
    assert driver.called.count("cuThreadExchangeStreamCaptureMode") == 2


def test_gpus_before_hopper_are_not_asked(pretend):
    driver = pretend(Driver(ATTRIBUTES | {75: 8}))
    assert cuda_driver.device(0).clusters == () and "cuModuleLoadData" not in driver.called


@pytest.mark.parametrize(
    "name",
    [
        "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuModuleLoadData", "cuModuleGetFunction",
        "cuFuncSetAttribute", "cuOccupancyMaxActiveClusters",
    ],
)  # fmt: skip
def test_a_driver_that_cannot_tell_is_logged_once_and_there_are_no_clusters(name, pretend, caplog):
    driver = pretend(Driver(**{name: 700}))
    assert [cuda_driver.device(0).clusters for _ in range(2)] == [(), ()]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"do not run in clusters on a GPU in this process, which costs time: {name} failed: as" in caplog.text
    for begin, end in PAIRS:
        assert driver.called.count(end) == (driver.called.count(begin) if name != begin else 0)
    assert driver.called.count("cuThreadExchangeStreamCaptureMode") in (0, 2)


def test_a_function_that_the_driver_lacks_is_named(pretend):
    class Old(Driver):
        def __getattr__(self, name):
            if name == "cuDeviceGetName":
                raise AttributeError(name)
            return super().__getattr__(name)

    pretend(Old())
    with pytest.raises(cuda_driver.DriverError, match=r"NVIDIA's driver has no cuDeviceGetName: install a newer one"):
        cuda_driver.device(0)


def test_the_structures_have_the_sizes_of_those_of_cuda():
    assert ctypes.sizeof(cuda_driver._LaunchAttribute) == 72 and ctypes.sizeof(cuda_driver._LaunchConfig) == 56
    assert cuda_driver._LaunchConfig.attributes.offset == 40
