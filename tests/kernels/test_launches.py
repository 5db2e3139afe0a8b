"""Compare repeated launches with Triton's own, on a driver that records them.

Kernels are compiled, but not run. ``test_gpu.py`` repeats its calls, so it runs both kinds.
"""

import itertools
import sys
from contextlib import contextmanager

import pytest
import torch

from kha_megatron.heads.kernels.rows import Rows
from tests.kernels.cases import weight_of

pytestmark = [pytest.mark.usefixtures("usable_triton"), pytest.mark.versions]
compiles = pytest.mark.skipif(sys.platform != "linux", reason="Triton has ptxas on Linux only")

HEAD_DIM = 64


class Driver:
    """A driver of an H100 for Triton. Launches are appended to :attr:`records`."""

    devices = itertools.count(1000)

    def __init__(self):
        self.records = []
        self.stream = 7
        self.utils = self
        self.device = next(self.devices)  # Triton keeps compiled kernels for each device

    def launcher_cls(self, source, metadata):
        def run(*arguments):
            *grid, stream, function, _packed, _launch, _enter, _exit = arguments[:9]
            description = [_describe(argument) for argument in arguments[9:]]
            self.records.append((source.fn.__name__, function, grid, stream, description))

        return run

    def load_binary(self, name, binary, *_):
        handle = hash(binary)  # one for each compiled kernel
        return 1, handle, 32, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": 227 * 1024}

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return self.stream

    def get_active_torch_device(self):
        return torch.device("cpu")


def _describe(argument):
    """Return what a kernel gets. Outputs have an address of their own at each launch."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.shape, argument.stride(), argument.data_ptr() % 16
    if hasattr(argument, "block_shape"):
        return vars(argument) | {"base": _describe(argument.base)}
    return argument


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("triton"))


@pytest.fixture
def driver(monkeypatch, cache):
    from triton.runtime import driver as triton_driver

    from kha_megatron.heads.kernels import knock_launch, launches

    monkeypatch.setenv("TRITON_CACHE_DIR", cache)
    monkeypatch.setattr(knock_launch, "processors", lambda device: 3)
    monkeypatch.setattr(launches, "_launches", {})
    knock_launch._count_splits.cache_clear()
    recorder = Driver()
    monkeypatch.setattr(triton_driver, "_active", recorder)
    yield recorder
    knock_launch._count_splits.cache_clear()


def rows_by_layout(dtype):
    """Return tensors whose compiled kernels, or their arguments, differ."""

    def rows(*shape):
        return torch.empty(shape, dtype=dtype)

    one_row = rows(1, 1, HEAD_DIM)
    shifted = rows(43 * 3 * HEAD_DIM + 1)[1:]
    return {
        "contiguous": rows(43, 3, HEAD_DIM),
        "more rows": rows(1005, 3, HEAD_DIM),
        "one row": rows(1, HEAD_DIM),
        "heads apart": rows(21, 3, 2 * HEAD_DIM)[..., HEAD_DIM:],
        "tokens and heads apart": rows(21, 4, HEAD_DIM)[:, :3],
        "odd strides": rows(21, 3, HEAD_DIM + 1)[..., :HEAD_DIM],
        "expanded": one_row.expand(21, 3, HEAD_DIM),
        "copied": rows(5, 2, 3, 7, HEAD_DIM)[:, :, :, 3].transpose(0, 1),
        "not aligned": shifted.view(43, 3, HEAD_DIM),
    }


@contextmanager
def triton_launches():
    """Count the launches through Triton's own interface."""
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    calls = []

    def counted(self, *args, **kwargs):
        calls.append(self)
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", counted)
        yield calls


def launch_all(x, weight):
    """Launch every kernel, like a forward and a backward pass."""
    from kha_megatron.heads.kernels import knock_launch

    dy = torch.empty(x.shape, dtype=x.dtype)
    knock_launch.knock_forward(x, weight, "gate")
    knock_launch.knock_backward_input(x, dy, weight, "gate")
    knock_launch.knock_backward_weight(x, dy, weight, "gate")


@compiles
def test_repeated_launches_equal_those_of_triton(driver):
    records = {}
    with triton_launches() as calls:
        for dtype in (torch.bfloat16, torch.float32):
            weight = weight_of("gate", HEAD_DIM, dtype)
            for name, x in rows_by_layout(dtype).items():
                driver.records = []
                launch_all(x, weight)
                records[dtype, name] = driver.records
    assert len(calls) >= 3 * len(records)  # equal numbers of partial sums share a launch
    assert all(len(kernels) == 4 for kernels in records.values())
    functions = {kernels[0][1] for kernels in records.values()}
    assert len(functions) > 6  # kernels that Triton has compiled for these layouts
    with triton_launches() as calls:
        for dtype in (torch.bfloat16, torch.float32):
            weight = weight_of("gate", HEAD_DIM, dtype)
            for name, x in rows_by_layout(dtype).items():
                driver.records = []
                launch_all(x, weight)
                assert driver.records == records[dtype, name], name
    assert calls == []


@compiles
def test_repeated_launches_follow_the_stream(driver):
    x = torch.empty(43, 3, HEAD_DIM, dtype=torch.bfloat16)
    weight = weight_of("gate", HEAD_DIM, torch.bfloat16)
    for stream in (7, 7, 9):
        driver.stream = stream
        driver.records = []
        launch_all(x, weight)
        assert [record[3] for record in driver.records] == [stream] * 4


@compiles
def test_no_tensor_is_kept_alive(driver):
    import gc
    import weakref

    x = torch.empty(43, 3, HEAD_DIM, dtype=torch.bfloat16)
    weight = weight_of("gate", HEAD_DIM, torch.bfloat16)
    for _ in range(2):
        launch_all(x, weight)
    driver.records = []
    references = [weakref.ref(x), weakref.ref(weight)]
    del x, weight
    gc.collect()
    assert [reference() for reference in references] == [None, None]


class Layout:
    """What :func:`launches.launch` reads of a tensor."""

    def __init__(self, *, device="cuda:0", dtype=torch.bfloat16, row=HEAD_DIM, rows=7, address=64):
        self.device = torch.device(device)
        self.dtype = dtype
        self.shape = torch.Size((rows, HEAD_DIM))
        self.strides = (row, 1)
        self.address = address

    def stride(self):
        return self.strides

    def data_ptr(self):
        return self.address


@pytest.mark.parametrize(
    ("change", "is_new"),
    [
        ({"address": 128}, False),
        ({"address": 66}, True),
        ({"rows": 8}, True),
        ({"row": 65}, True),
        ({"dtype": torch.float16}, True),
        ({"device": "cuda:1"}, True),
    ],
    ids=str,
)
def test_launches_are_repeated_for_the_same_layout_only(monkeypatch, change, is_new):
    from kha_megatron.heads.kernels import launches

    current_devices = [0]

    @contextmanager
    def on_device(device):
        current_devices.append(device.index)
        yield
        current_devices.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current_devices[-1])
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(launches, "_launches", {})
    prepared = []
    launched = []

    def prepare(setting, *rows):
        assert setting == "setting"
        assert all(isinstance(tensor_rows, Rows) for tensor_rows in rows)
        prepared.append(rows)
        return lambda *tensors: launched.append((current_devices[-1], tensors))

    first = Layout()
    second = Layout(**change)
    first_output = Layout()
    second_output = Layout(device=second.device)
    launches.launch(prepare, ("setting",), (first,), first_output)
    for _ in range(2):
        launches.launch(prepare, ("setting",), (second,), second_output)
    assert len(prepared) == 1 + is_new
    second_launch = (second.device.index, (second, second_output))
    assert launched == [(0, (first, first_output)), second_launch, second_launch]
    launches.launch(prepare, ("setting",), (second, second), second_output)
    assert len(prepared) == 2 + is_new


@pytest.mark.parametrize("change", [{"address": 66}, {"dtype": torch.float32}], ids=str)
def test_alignment_and_dtype_of_the_output_matter(monkeypatch, change):
    from kha_megatron.heads.kernels import launches

    monkeypatch.setattr(launches, "_launches", {})
    prepared = []

    def prepare(*rows):
        prepared.append(rows)
        return lambda *tensors: None

    for output in (Layout(device="cpu"), Layout(device="cpu", **change)):
        launches.launch(prepare, (), (Layout(device="cpu"),), output)
    assert len(prepared) == 2


def test_layouts_are_forgotten_if_there_are_too_many(monkeypatch):
    from kha_megatron.heads.kernels import launches

    monkeypatch.setattr(launches, "MAX_LAUNCHES", 3)
    monkeypatch.setattr(launches, "_launches", {})
    output = Layout(device="cpu")
    for rows in range(1, 10):
        layout = Layout(device="cpu", rows=rows)
        launches.launch(lambda *rows: lambda *tensors: None, (), (layout,), output)
        assert len(launches._launches) <= 3
