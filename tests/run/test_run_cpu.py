"""`--device cpu`: what a script says to a GPU works without one; and `--dtype bfloat16`."""

from __future__ import annotations

import importlib
import io
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import apex_mp
from apex_mp._run import cpu, hints
from apex_mp._run.bfloat16 import cast_instead
from apex_mp._run.cpu import libraries
from apex_mp._run.cpu.facts import PROPERTIES
from apex_mp._run.replacements import Replacements
from apex_mp._run.settings import Settings
from apex_mp.fp16_utils import FP16_Optimizer, network_to_half
from apex_mp.parallel import SyncBatchNorm

pytestmark = pytest.mark.cpu_only


CUDA: Any = torch.cuda


CPU = torch.device("cpu")


# The truth, before it is replaced.
IS_AVAILABLE, IS_BUILT = torch.cuda.is_available(), torch.backends.cuda.is_built()


CUDA_VERSION, HAS_CUDNN = torch.version.cuda, torch.backends.cudnn.is_available()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    replacements = Replacements()
    cpu.redirect(replacements)
    yield
    replacements.undo()


def file_of(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


PLACES = {
    "cuda()": lambda x: x.cuda(),
    "cuda(0)": lambda x: x.cuda(0, non_blocking=True),
    "to name": lambda x: x.to("cuda"),
    "to number": lambda x: x.to(0),
    "to named argument": lambda x: x.to(device="cuda:1", dtype=torch.float64),
    "to device": lambda x: x.to(torch.device("cuda", 0)),
    "to device by number": lambda x: x.to(torch.device(0)),
    "type": lambda x: x.type("torch.cuda.HalfTensor"),
    "type class": lambda x: x.type(torch.cuda.FloatTensor),
    "pinned": lambda x: x.pin_memory(),
    "zeros": lambda x: torch.zeros(1, device="cuda"),
    "tensor": lambda x: torch.tensor([1.0], device=0),
    "like": lambda x: torch.zeros_like(x, device="cuda"),
    "new": lambda x: x.new_zeros(1, device="cuda"),
    "class": lambda x: torch.cuda.FloatTensor([1.0]),
    "legacy new": lambda x: x.new(1, device="cuda"),
    "normal": lambda x: torch.normal(0.0, 1.0, (1,), device="cuda"),
    "nested": lambda x: torch.nested.nested_tensor([[1.0], [2.0, 3.0]], device="cuda")[0],
    "device of a generator": lambda x: torch.randn(
        1, generator=torch.Generator(x.device), device=x.device
    ),
    "with a device": lambda x: made_within(torch.device("cuda")),
    "frequencies": lambda x: torch.fft.fftfreq(3, device="cuda"),
    "window": lambda x: torch.signal.windows.hann(3, device="cuda"),
    "pinned where it is made": lambda x: torch.zeros(1, pin_memory=True),
    "module to_empty": lambda x: nn.Linear(1, 1).to_empty(device="cuda").weight,
    "data_parallel": lambda x: nn.parallel.data_parallel(nn.Linear(1, 1), x.view(1, 1), [0]),
    "generator": lambda x: torch.randn(1, generator=torch.Generator(device="cuda"), device="cuda"),
    "module": lambda x: nn.Linear(1, 1).cuda().weight,
    "module to": lambda x: nn.Linear(1, 1).to("cuda").weight,
    "module made there": lambda x: nn.Linear(1, 1, device="cuda").weight,
    "load": lambda x: torch.load(file_of(x), map_location="cuda:0"),
    "load with dict": lambda x: torch.load(file_of(x), map_location={"cuda:0": "cuda:1"}),
    "load with function": lambda x: torch.load(
        file_of(x), map_location=lambda storage, place: storage.cuda(0)
    ),
    "storage": lambda x: torch.tensor([]).set_(x.untyped_storage().cuda()),
}


def made_within(device: Any) -> torch.Tensor:
    with device:
        return torch.ones(1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("place", PLACES)
def test_what_is_put_on_a_gpu_is_on_the_cpu(place: str) -> None:
    moved = PLACES[place](torch.ones(1))
    assert moved.untyped_storage().device == CPU
    assert moved.device == torch.device("cuda", 0)


@pytest.mark.usefixtures("on_cpu")
def test_the_script_sees_one_gpu() -> None:
    assert CUDA.is_available()
    assert (CUDA.device_count(), CUDA.current_device()) == (1, 0)
    assert torch.ones(1).is_cuda
    assert torch.ones(1).get_device() == 0
    assert torch.ones(1).half().type() == "torch.cuda.HalfTensor"
    assert isinstance(torch.ones(1), CUDA.FloatTensor)
    assert "CPU" in CUDA.get_device_name(0)
    assert CUDA.get_device_capability() == (7, 0)
    assert CUDA.get_device_properties(0).total_memory > 0
    assert CUDA.memory_allocated() == CUDA.max_memory_allocated() == 0


# What torch.cuda held in 2018-2019 beside what has a test of its own, each as a script says it.
SAID: dict[str, Any] = {
    "_sleep": lambda: CUDA._sleep(10),
    "can_device_access_peer": lambda: not CUDA.can_device_access_peer(0, 0),
    "check_error": lambda: CUDA.check_error(CUDA.cudart().cudaProfilerStart()),
    "cudart": lambda: CUDA.cudart().cudaProfilerStop(),
    "cudart of the profiler": lambda: CUDA.profiler.cudart().cudaProfilerStart(),
    "cudart's memory": lambda: CUDA.cudart().cudaMemGetInfo(0)[2],
    "current_blas_handle": lambda: CUDA.current_blas_handle(),
    "default_generators": lambda: CUDA.default_generators[0].initial_seed(),
    "default_stream": lambda: CUDA.default_stream(0).cuda_stream,
    "device": lambda: CUDA.device("cuda:0").__enter__().idx,
    "device_of": lambda: CUDA.device_of(torch.ones(1)).__enter__(),
    "get_arch_list": lambda: CUDA.get_arch_list(),
    "ipc_collect": lambda: CUDA.ipc_collect(),
    "memory": lambda: torch.cuda.memory.memory_allocated(0),
    "memory_snapshot": lambda: CUDA.memory_snapshot(),
    "memory_stats": lambda: CUDA.memory_stats()["allocated_bytes.all.peak"],
    "memory_summary": lambda: CUDA.memory_summary(),
    "nccl": lambda: torch.cuda.nccl.version() > (2,),
    "nvtx": lambda: CUDA.nvtx.range("step").__enter__(),
    "nvtx of autograd": lambda: torch.autograd.profiler.emit_nvtx().__enter__(),
    "nvtx range": lambda: CUDA.nvtx.range_end(CUDA.nvtx.range_start("step")),
    "profiler": lambda: (CUDA.profiler.init("f"), CUDA.profiler.start(), CUDA.profiler.stop()),
    "profiler block": lambda: CUDA.profiler.profile().__enter__(),
    "random": lambda: torch.cuda.random.get_rng_state(0),
    "sparse": lambda: issubclass(torch.cuda.sparse.FloatTensor, torch.sparse.FloatTensor),
    "stream": lambda: CUDA.Stream(priority=-1).priority,
    "stream priorities": lambda: CUDA.Stream.priority_range(),
    "torch.random": lambda: torch.random.fork_rng([0]).__enter__(),
    "versions": lambda: (int(torch.version.cuda[:2]), torch.backends.cudnn.version() > 7000),  # type: ignore[index, operator]
    "what is there": lambda: (torch.has_cuda, torch.backends.cudnn.is_available()),
    "what else is there": lambda: torch.distributed.is_nccl_available(),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", SAID)
def test_what_a_script_of_2019_says_to_torch_cuda_is_answered(name: str) -> None:
    answer = SAID[name]()
    assert not any(each is False for each in (answer if isinstance(answer, tuple) else [answer]))


def test_the_properties_of_the_gpu_have_the_fields_that_torch_gives() -> None:
    given: Any = getattr(torch._C, "_CudaDeviceProperties", None)
    if given is None:  # A build without CUDA: those that its documentation of 2.13 names.
        fields = {
            "name", "major", "minor", "is_multi_gpu_board", "is_integrated",
            "multi_processor_count", "total_memory", "max_threads_per_multi_processor",
            "gcnArchName", "warp_size", "uuid", "pci_bus_id", "pci_device_id", "pci_domain_id",
            "L2_cache_size", "regs_per_multiprocessor", "shared_memory_per_block",
            "shared_memory_per_block_optin", "shared_memory_per_multiprocessor", "clock_rate",
            "memory_clock_rate", "memory_bus_width", "max_threads_per_block",
        }  # fmt: skip
    else:
        fields = {name for name in vars(given) if not name.startswith("_")}
    assert fields <= {*vars(PROPERTIES)}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("backend", ["nccl", "NCCL", "cpu:gloo,cuda:nccl", "gloo"])
def test_every_spelling_of_nccl_means_gloo(backend: str, tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        backend=backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        assert torch.distributed.get_backend() == "gloo"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("on_cpu")
def test_torch_and_apex_mp_see_the_truth() -> None:
    names = {"__name__": "torch.nn.anything", "torch": torch}
    assert eval("torch.cuda.is_available()", names) is IS_AVAILABLE
    assert eval("torch.backends.cuda.is_built()", names) is IS_BUILT
    assert eval("torch.version.cuda", names) == CUDA_VERSION
    assert eval("torch.backends.cudnn.is_available()", names) is HAS_CUDNN
    assert not eval("torch.ones(1).is_cuda", names)
    assert eval("torch.ones(1).type()", names) == "torch.FloatTensor"
    torch.manual_seed(1)
    model = nn.DataParallel(nn.Linear(1, 1).cuda(), device_ids=[0])
    assert model(torch.ones(1, 1).cuda()).shape == (1, 1)


@pytest.mark.usefixtures("on_cpu")
def test_events_measure_time_and_streams_wait_for_nothing() -> None:
    start, end = CUDA.Event(enable_timing=True), CUDA.Event(enable_timing=True)
    start.record()
    time.sleep(0.002)
    end.record()
    CUDA.synchronize()
    assert 2.0 <= start.elapsed_time(end) < 2000.0
    side = CUDA.Stream()
    with CUDA.device(0), CUDA.stream(side):
        CUDA.current_stream().wait_stream(side)
        side.synchronize()
    torch.ones(1).record_stream(side)
    assert end.query()
    assert side.record_event().query()
    for name in ("empty_cache", "init", "reset_max_memory_allocated"):
        getattr(CUDA, name)()
    CUDA.set_device(0)
    CUDA.nvtx.range_push("step")
    CUDA.nvtx.range_pop()


@pytest.mark.usefixtures("on_cpu")
def test_what_is_kept_on_the_cpu_does_not_follow_the_training() -> None:
    weight = nn.Linear(1, 1).cuda().weight.detach()
    place = torch.device("cpu")
    kept = [weight.cpu(), weight.to("cpu"), weight.to(place), weight.to(device=place)]
    before = weight.clone()
    weight.add_(1)
    for value in kept:
        assert value.equal(before)
    assert weight.to("cuda") is weight


@pytest.mark.usefixtures("on_cpu")
def test_a_scripted_module_is_loaded_for_a_gpu(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    torch.jit.script(model).save(tmp_path / "model.pt")
    for place in ("cuda", torch.device("cuda"), None):
        assert torch.jit.load(tmp_path / "model.pt", map_location=place)(x).equal(model(x))


@pytest.mark.usefixtures("on_cpu")
def test_the_class_of_devices_is_the_one_of_torch() -> None:
    """torch.fx names devices in the code that it writes, if it knows their class."""
    traced = make_fx(lambda x: x + torch.ones(2))(torch.ones(2))
    assert traced(torch.ones(2)).equal(torch.full((2,), 2.0))
    assert type(torch.device("cuda")) == torch.device  # noqa: E721


@pytest.mark.usefixtures("on_cpu")
def test_a_generator_and_a_stream_are_on_the_device_of_tensors() -> None:
    for place in ("cuda", torch.device("cuda:0"), 0):
        generator = torch.Generator(place)
        first = torch.randn(3, device="cuda", generator=generator.manual_seed(0))
        assert generator.device == first.device == torch.cuda.current_stream().device
        assert first.equal(torch.randn(3, generator=torch.Generator().manual_seed(0)))
    assert torch.Generator().device == CPU


@pytest.mark.usefixtures("on_cpu")
def test_compiled_code_sees_what_the_script_sees(capfd: pytest.CaptureFixture[str]) -> None:
    libraries._note_eager.cache_clear()

    @torch.compile(dynamic=True)
    def where(x: torch.Tensor) -> str:
        return x.device.type if x.is_cuda else "not on a GPU"

    model = nn.Linear(1, 1).cuda()
    model.compile()
    assert torch.compile(model, mode="max-autotune") is model
    assert where(torch.ones(1).cuda()) == "cuda"
    assert capfd.readouterr().err.count("torch.compile returns what it is given") == 1


@pytest.mark.usefixtures("on_cpu")
def test_a_lazy_module_is_moved() -> None:
    model = nn.LazyLinear(2).to("cuda").cuda()
    assert model(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.usefixtures("on_cpu")
def test_a_product_of_float16_is_summed_into_float32() -> None:
    """`out_dtype`, which torch has for CUDA only; TRL multiplies so where it sees a GPU."""
    a, b = torch.full((2, 4), 300.0).half(), torch.full((4, 2), 300.0).half()
    product = torch.mm(a, b, out_dtype=torch.float32)
    assert product.dtype == torch.float32
    assert (product == 360_000).all()  # beyond float16
    added = torch.addmm(torch.ones(2), a, b, out_dtype=torch.float32)
    assert (added == 360_001).all()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:`torch.cuda.amp:FutureWarning")
def test_autocast_and_its_scaler_work_on_the_cpu() -> None:
    model, x = nn.Linear(1, 1).cuda(), torch.ones(1, 1).cuda()
    with torch.cuda.amp.autocast():
        assert model(x).dtype == torch.float16
    with torch.autocast("cuda"):
        assert model(x).dtype == torch.float16
        assert torch.is_autocast_enabled()
    with torch.autocast("cuda", None):
        assert model(x).dtype == torch.get_autocast_dtype("cuda") == torch.float16
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.get_autocast_gpu_dtype() == torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled()
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert torch.cuda.amp.GradScaler().is_enabled()


@pytest.mark.usefixtures("on_cpu")
def test_processes_talk_over_gloo_and_models_forget_their_gpu(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "nccl",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        device_id=torch.device("cuda", 0),
    )
    try:
        assert torch.distributed.get_backend() == "gloo"
        for norm in (SyncBatchNorm(1), nn.SyncBatchNorm(1)):
            model = nn.parallel.DistributedDataParallel(
                nn.Sequential(nn.Linear(1, 1), norm).cuda(), device_ids=[0], output_device=0
            )
            model(torch.ones(2, 1).cuda()).sum().backward()
            assert norm.num_batches_tracked == 1
        assert torch.distributed.new_group(backend="nccl") is not None
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("on_cpu")
def test_a_float16_convolution_is_said_to_be_slow_once(capsys: pytest.CaptureFixture[str]) -> None:
    cpu._warn_of_float16.cache_clear()
    layer, x = nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2)
    layer(x)
    layer.bfloat16()(x.bfloat16())
    with torch.autocast("cuda", torch.bfloat16):
        nn.Conv1d(1, 1, 1)(torch.ones(1, 1, 2))
    assert capsys.readouterr().err == ""
    with torch.autocast("cuda", torch.float16):
        nn.Conv1d(1, 1, 1)(torch.ones(1, 1, 2))
    layer.half()(x.half())
    assert capsys.readouterr().err.count("float16 convolutions take many times") == 1


# What a build with CUDA says where there is no GPU.
NO_GPU = [
    RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"),
    RuntimeError("No CUDA GPUs are available"),
    RuntimeError("Attempting to deserialize object on a CUDA device but torch.cuda.is_available()"),
    ValueError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
]


@pytest.mark.parametrize("error", NO_GPU)
def test_an_error_for_want_of_a_gpu_says_that_the_cpu_may_stand_in(error: Exception) -> None:
    assert hints.line_for(error, Settings()) is not None


BF16 = torch.bfloat16


ROWS = torch.ones(2, 3)


@pytest.fixture(params=[False, True])
def in_bfloat16(request: pytest.FixtureRequest) -> Iterator[None]:
    """With and without `--device cpu`, which replaces some of the same functions after it."""
    replacements = Replacements()
    cast_instead(replacements)
    if request.param:
        cpu.redirect(replacements)
    yield
    replacements.undo()
    apex_mp.uninstall_as_apex()
    assert ROWS.half().dtype == torch.float16


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_autocast(dtype: torch.dtype | None) -> None:
    with torch.autocast("cpu", dtype):
        assert nn.Linear(3, 2)(ROWS).dtype == BF16


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("era", ["2019-03", "2019-08", "2020"])
@pytest.mark.parametrize(
    ("level", "dtypes"),
    [("O1", (torch.float32, BF16)), ("O2", (BF16, torch.float32)), ("O3", (BF16, torch.float32))],
)
def test_levels_of_amp(level: str, dtypes: tuple[torch.dtype, ...], era: str) -> None:
    apex_mp.install_as_apex(era)
    model: Any = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    initialize = importlib.import_module("apex.amp").initialize
    model, optimizer = initialize(model, optimizer, opt_level=level, verbosity=0)
    assert (model.weight.dtype, model(ROWS).dtype) == dtypes
    initialize(nn.Linear(1, 1), enabled=False)


@pytest.mark.usefixtures("in_bfloat16")
def test_fp16_optimizer_trains_masters_of_bfloat16() -> None:
    model = network_to_half(nn.Linear(3, 2))
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=8.0)
    before = optimizer.fp32_from_fp16_groups[0][0].clone()
    optimizer.backward(model(ROWS).float().sum())
    optimizer.step()
    assert {param.dtype for param in model.parameters()} == {BF16}
    assert not torch.equal(before, optimizer.fp32_from_fp16_groups[0][0])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_stands_for_a_gpu_makes_no_noise(
    workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = torch.utils.data.DataLoader([1, 2], 1, True, pin_memory=True, num_workers=workers)
        assert len([*loader]) == 2
        with torch.autograd.profiler.profile(True, True) as profile:
            torch.ones(1).cuda()
    assert profile is not None
    assert "pin_memory" not in capfd.readouterr().err


@pytest.mark.usefixtures("on_cpu")
def test_a_device_is_a_device() -> None:
    device: Any = torch.device("cuda:0")
    assert isinstance(device, torch.device)
    assert issubclass(type(device), torch.device)
    assert (str(device), device.type, device.index) == ("cuda:0", "cuda", 0)
    assert torch.device("cpu") != device
    assert torch.device(type="cuda", index=0) == torch.device(0) == device
    with torch.device("cuda"):
        inside = torch.ones(1)
    assert (inside.device, inside.untyped_storage().device) == (device, CPU)
    assert torch.ones(1, device="meta").device.type == "meta"
    assert torch.ones(1, device="cpu").to(inside.device).device == inside.device
    assert torch._C._nn._parse_to("cuda")[0] == torch.device("cuda")  # type: ignore[attr-defined]
