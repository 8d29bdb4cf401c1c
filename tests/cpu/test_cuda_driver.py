"""What the driver is asked about a GPU, with a driver of whose functions a test says what they return."""

import ctypes

import pytest

from torch_bridge import cuda_driver

ATTRIBUTES = {16: 170, 39: 1536, 75: 12, 76: 0, 97: 101_376}  # an RTX 5090's


class Driver:
    """A driver with one GPU. Its functions return the statuses in `fails`, or 0 for success, and are recorded."""

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
                if (count := self.clusters(attribute.value[0])) is None:
                    return 912  # CUDA_ERROR_INVALID_CLUSTER_SIZE
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

    for cached in (cuda_driver.device, cuda_driver._clusters_at_once):
        cached.cache_clear()
    yield use
    for cached in (cuda_driver.device, cuda_driver._clusters_at_once):
        cached.cache_clear()


def test_clusters_are_counted_once_and_not_before_they_are_needed(pretend):
    driver = pretend(Driver(clusters=lambda programs: 160 // programs if programs <= 8 else None))
    device = cuda_driver.device(0)
    assert (device.capability, device.multiprocessors, device.name) == (120, 170, "a GPU")
    assert "cuModuleLoadData" not in driver.called
    assert [device.clusters(programs) for programs in (0, 1, 2, 3, 4, 8, 9, 16, 17)] == [0, 0, 80, 53, 40, 20, 0, 0, 0]
    for name in ("cuModuleLoadData", "cuModuleUnload", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"):
        assert driver.called.count(name) == 1
    for name in ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"):
        assert driver.called.count(name) == 1
    assert driver.called.count("cuThreadExchangeStreamCaptureMode") == 2


def test_gpus_before_hopper_are_not_asked(pretend):
    driver = pretend(Driver(ATTRIBUTES | {75: 8}))
    assert cuda_driver.device(0).clusters(4) == 0 and "cuModuleLoadData" not in driver.called


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_what_a_driver_cannot_tell_is_logged_once_and_there_are_no_clusters(name, pretend, caplog):
    driver = pretend(Driver(clusters=lambda programs: 9, **{name: 221}))
    assert [cuda_driver.device(0).clusters(4) for _ in range(2)] == [0, 0]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"do not run in clusters on a GPU, which costs time: {name} failed: as the test says" in caplog.text
    assert driver.called.count("cuCtxPushCurrent_v2") == driver.called.count("cuCtxPopCurrent_v2") == 1
    assert driver.called.count("cuDevicePrimaryCtxRelease_v2") == 1


def test_gpus_of_one_kind_are_equal_however_many_clusters_run_at_once(pretend):
    pretend(Driver(clusters=lambda programs: 9))
    first, second = cuda_driver.device(0), cuda_driver.device(1)
    assert first == second and hash(first) == hash(second) and first.clusters is not second.clusters


def test_the_structures_have_the_sizes_of_those_of_cuda():
    assert ctypes.sizeof(cuda_driver._LaunchAttribute) == 72 and ctypes.sizeof(cuda_driver._LaunchConfig) == 56
    assert cuda_driver._LaunchConfig.attributes.offset == 40
