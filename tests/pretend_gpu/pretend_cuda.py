"""torch.cuda and "nccl" for a torch without CUDA, over the module that build.py compiles.

`install()` once, right after torch is imported: sitecustomize.py in this folder does it in every
process that has this folder on PYTHONPATH and PRETEND_GPUS in its environment.
"""

import datetime
import importlib.machinery
import importlib.util
import os
import time
import types

import build


def load():
    """The compiled module; its registrations happen now."""
    path = str(build.library())
    loader = importlib.machinery.ExtensionFileLoader("pretend_cuda", path)
    spec = importlib.util.spec_from_file_location("pretend_cuda", path, loader=loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def install() -> None:
    """Give this process's torch its pretend GPUs."""
    import torch

    if getattr(torch, "_pretends", None):
        return
    native = load()
    torch._pretends = native
    torch.version.cuda = "13.0"
    _low_level(torch, native)
    _torch_cuda(torch, native)
    _storages(torch, native)
    _fast_products(torch)
    _nccl(torch, native)


def _low_level(torch, native) -> None:
    c = torch._C

    def get_device_count():
        _poison()
        return native.count()

    def _poison():
        if not getattr(torch, "_pretend_poisoned", False):
            torch._pretend_poisoned = True
            os.register_at_fork(after_in_child=lambda: setattr(torch, "_pretend_bad_fork", True))

    def cuda_init():
        _poison()
        native.begin()
        torch.cuda.default_generators = tuple(
            native.default_generator(i) for i in range(native.count())
        )

    def stats(device=0):
        now, peak, allocated, freed = native.memory(device)
        numbers = {"current": now, "peak": peak, "allocated": allocated, "freed": freed}
        one = {"all": numbers, "small_pool": dict(numbers), "large_pool": dict(numbers)}
        names = (
            "allocated_bytes",
            "reserved_bytes",
            "active_bytes",
            "requested_bytes",
            "inactive_split_bytes",
            "allocation",
            "segment",
            "active",
            "inactive_split",
        )
        return dict.fromkeys(names, one) | {"num_alloc_retries": 0, "num_ooms": 0}

    given = {
        "_cuda_getDeviceCount": get_device_count,
        "_cuda_init": cuda_init,
        "_cuda_isInBadFork": lambda: getattr(torch, "_pretend_bad_fork", False),
        "_cuda_setDevice": native.set_device,
        "_cuda_getDevice": native.get_device,
        "_cuda_exchangeDevice": native.exchange_device,
        "_cuda_maybeExchangeDevice": native.exchange_device,
        "_cuda_synchronize": native.synchronize,
        "_cuda_memoryStats": stats,
        "_cuda_resetPeakMemoryStats": native.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_emptyCache": lambda: None,
        "_cuda_hostMemoryStats": lambda: {},
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_canDeviceAccessPeer": lambda a, b: True,
        "_cuda_getArchFlags": lambda: "sm_80 sm_90",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_ipc_collect": lambda: None,
        "_cuda_lock_mutex": lambda: None,
        "_cuda_unlock_mutex": lambda: None,
        "_cuda_record_memory_history": lambda *a, **k: None,
        "_cuda_record_memory_history_legacy": lambda *a, **k: None,
        "_cuda_memorySnapshot": lambda *a: {"segments": [], "device_traces": [[]]},
        "_cuda_sleep": lambda cycles: None,
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_set_sync_debug_mode": lambda mode: None,
        "_cuda_getDriverVersion": lambda: 13000,
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_cuda_getDeviceProperties": lambda index: torch.cuda.get_device_properties(index),
        "_cuda_getCurrentBlasHandle": lambda: 0,
    }
    for name, function in given.items():
        setattr(c, name, function)

    def scatter(tensor, devices, sizes, dim, streams):
        parts = tensor.chunk(len(devices), dim) if sizes is None else tensor.split(sizes, dim)
        return tuple(x.to(f"cuda:{i}") for x, i in zip(parts, devices, strict=False))

    c._scatter = scatter
    c._gather = lambda tensors, dim, to: torch.cat([x.to(f"cuda:{to or 0}") for x in tensors], dim)
    c._broadcast_coalesced = lambda tensors, devices, size: [
        [x if i == x.device.index else x.to(f"cuda:{i}") for x in tensors] for i in devices
    ]


def _torch_cuda(torch, native) -> None:
    cuda = torch.cuda

    class Stream(torch.Stream):
        """torch.Stream on the pretend device, under torch.cuda's name."""

        def __new__(cls, device=None, priority=0, **kwargs):
            if "stream_id" in kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, device=cuda._utils._dummy(device), priority=priority)

        def record_event(self, event=None):
            event = event or Event()
            event.record(self)
            return event

        def wait_event(self, event):
            """Everything is done already."""

        def wait_stream(self, stream):
            """Everything is done already."""

        cuda_stream = property(lambda self: self.stream_id)

    class Event:
        """What torch.cuda.Event offers: all that was queued before it has been done."""

        def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
            self.enable_timing, self.at = enable_timing, None

        def record(self, stream=None):
            self.at = time.perf_counter()

        def wait(self, stream=None):
            """Everything is done already."""

        def query(self):
            return True

        def synchronize(self):
            native.synchronize()

        def elapsed_time(self, other):
            if not (self.enable_timing and other.enable_timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if self.at is None or other.at is None:
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return 1000 * (other.at - self.at)

    def device_of(device=None):
        index = cuda._utils._get_device_index(device, optional=True)
        return torch.device("cuda", native.get_device() if index is None else index)

    cuda._utils._dummy = device_of

    def as_ours(stream):
        return Stream(
            stream_id=stream.stream_id, device_index=stream.device_index,
            device_type=stream.device_type,
        )  # fmt: skip

    def current_stream(device=None):
        return as_ours(torch.accelerator.current_stream(device_of(device)))

    def default_stream(device=None):
        stream = torch.Stream(device=device_of(device))
        return Stream(stream_id=0, device_index=stream.device_index, device_type=stream.device_type)

    def set_stream(stream):
        if stream is not None:
            torch.accelerator.set_stream(stream)

    properties = types.SimpleNamespace(
        name="Pretend GPU", major=9, minor=0, multi_processor_count=132,
        is_integrated=False, is_multi_gpu_board=False, gcnArchName="", warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, L2_cache_size=50 << 20,
        shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448,
        shared_memory_per_block=49152, max_threads_per_block=1024, uuid="pretend",
    )  # fmt: skip

    def get_device_properties(device=None):
        cuda._lazy_init()
        index = device_of(device).index
        if not 0 <= index < native.count():
            raise AssertionError("Invalid device id")
        properties.total_memory = native.limit()  # not before a fork of the warm one has its own
        return properties

    def mem_get_info(device=None):
        total = native.limit()
        return total - native.memory(device_of(device).index)[0], total

    cuda._cudart = types.SimpleNamespace(
        cudaMemGetInfo=lambda i: mem_get_info(i), cudaError=types.SimpleNamespace(success=0)
    )
    cuda._is_in_bad_fork = torch._C._cuda_isInBadFork
    cuda._exchange_device = torch._C._cuda_exchangeDevice
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice
    cuda.device_count = lambda: native.count()
    cuda._device_count_nvml = lambda: native.count()
    cuda.get_device_properties = get_device_properties
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: properties.name
    cuda.mem_get_info = cuda.memory.mem_get_info = mem_get_info
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event
    cuda.current_stream, cuda.default_stream = current_stream, default_stream
    cuda.set_stream = set_stream
    cuda.nccl.version = lambda: (2, 29, 7)
    cuda.nccl.is_available = lambda tensors: False  # DataParallel then adds up by itself
    cuda.is_current_stream_capturing = lambda: False

    class StreamContext:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            if self.stream is not None:
                self.before = current_stream(self.stream.device)
                set_stream(self.stream)

        def __exit__(self, *_):
            if self.stream is not None:
                set_stream(self.before)

    cuda.StreamContext = StreamContext
    cuda.stream = StreamContext
    torch.backends.cuda.is_built = lambda: True
    cuda.nvtx._nvtx = types.SimpleNamespace(
        rangePushA=lambda words: 0, rangePop=lambda: 0, rangeStartA=lambda words: 0,
        rangeEnd=lambda number: None, markA=lambda words: None,
    )  # fmt: skip


def _storages(torch, native) -> None:
    own = torch._C.StorageBase.resize_

    def resize_(self, size):
        if self.device.type != "cuda":
            return own(self, size)
        flat = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        native.resize_storage(flat, int(size))
        return self

    torch.UntypedStorage.resize_ = resize_
    made = torch.UntypedStorage.__new__

    def new(cls, *args, device=None, **kwargs):
        if device is None or torch.device(device).type != "cuda":
            more = {} if device is None else {"device": device}
            return made(cls, *args, **more, **kwargs)
        (given,) = args or (0,)
        if isinstance(given, int):
            return torch.empty(given, dtype=torch.uint8, device=device).untyped_storage()
        return torch.tensor(list(given), dtype=torch.uint8, device=device).untyped_storage()

    torch.UntypedStorage.__new__ = new


def _fast_products(torch) -> None:
    """What measures a GPU's arithmetic would take hours on the CPU behind it."""
    own = torch.Tensor.__matmul__

    def matmul(self, other):
        if self.is_cuda and self.dim() == 2 and min(self.shape) >= 4096:
            return self  # unread
        return own(self, other)

    torch.Tensor.__matmul__ = matmul


def _nccl(torch, native) -> None:
    import torch.distributed as dist

    c10d = dist.distributed_c10d

    class Options:
        def __init__(self, is_high_priority_stream=False, timeout=None):
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timeout
            self.split_from = None
            self.split_color = 0
            self.global_ranks_in_group = []
            self.group_name = ""
            self.config = types.SimpleNamespace()

    class Made(type):
        def __instancecheck__(cls, other):
            return isinstance(other, native.PretendNCCL)

        def __call__(cls, store, rank, size, options):
            gloo = dist.ProcessGroupGloo(
                dist.PrefixStore("pretend", store), rank, size, timeout=options._timeout
            )
            ranks = options.global_ranks_in_group or list(range(size))
            return native.PretendNCCL(gloo, store, rank, size, ranks, str(options.group_name))

    def split_off(store, rank, size, ranks, name):
        options = Options()
        options.global_ranks_in_group, options.group_name = ranks, name
        options._timeout = c10d.default_pg_nccl_timeout
        return Made.__call__(ProcessGroupNCCL, store, rank, size, options)

    native.make_groups_by(split_off)

    class ProcessGroupNCCL(metaclass=Made):
        pass

    ProcessGroupNCCL.Options = Options
    native.PretendNCCL.options = property(lambda self: None)
    native.PretendNCCL._verify_work_timeout = lambda self, work, timeout: True
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = datetime.timedelta(minutes=10)
    dist.is_nccl_available = c10d.is_nccl_available
