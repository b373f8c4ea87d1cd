"""The names by which the audit knows what no answer needs, and what an honest one may use."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HARMLESS = _words(
    "torch math cmath typing typing_extensions collections itertools functools dataclasses "
    "contextlib copy random time datetime numpy jaxtyping einops abc enum operator numbers "
    "statistics string bisect heapq warnings re fractions decimal textwrap __future__ "
    "matplotlib tqdm json difflib hashlib struct types weakref"
)
# A lesson whose setup imports one of these is about files, and so may its answers be.
FILES = _words("os pathlib tempfile io shutil struct zlib pickle")
# Parts of torch that load code, start processes, or change what torch's functions do.
NOT_OF_TORCH = (
    *("torch._", "torch.hub", "torch.library", "torch.multiprocessing"),
    *("torch.overrides", "torch.package", "torch.testing._internal"),
    *("torch.utils._python_dispatch", "torch.utils.cpp_extension", "torch.utils.benchmark"),
    *("torch.fx.graph", "torch.fx.experimental", "torch.jit.load", "torch.jit.CompilationUnit"),
    *("torch.jit.frontend", "torch.jit._", "torch.jit.jit_module_from_flatbuffer"),
)
# What honest answers ask of it under an underscore.
FINE_OF_TORCH = (
    *("torch._foreach_", "torch._scaled_mm", "torch._assert", "torch._check"),
    *("torch._utils._flatten", "torch._utils._unflatten"),
)
# What reads attributes or runs text by a name that nobody sees, and opens files, in harmless ones.
NOT_OF_OTHERS = (
    *("types.new_class", "string.Formatter", "typing.ForwardRef", "typing_extensions.ForwardRef"),
    *("typing._", "typing_extensions.evaluate_forward_ref"),
    *("typing.get_type_hints", "typing_extensions.get_type_hints", "numpy.testing", "numpy.load"),
    *("pickle.load", "pickle.Unpickler", "pickle._"),
    *("numpy.fromfile", "numpy.memmap", "numpy.save", "numpy.genfromtxt", "numpy.loadtxt"),
)
NOT_OF_ANY = (*NOT_OF_TORCH, *NOT_OF_OTHERS)
NOT_CALLED = ("types.FunctionType", "types.CodeType", "torch.fx.")  # annotations name them
BACKWARD = "_current_graph_task_id"  # of torch._C: a number, which hooks of lesson 13 ask for
TQDM = _words("tqdm trange auto notebook write")  # its other parts start threads
MODULES = _words("os sys subprocess ctypes threading importlib builtins inspect gc atexit platform")
HELD = _words("io traceback linecache pickle types codecs")  # by a module that needs them itself
MADE_BY = ("collections.namedtuple", "typing.NamedTuple", "typing.TypedDict")  # honest bases
CALLS = _words(
    "__import__ exec eval compile open globals locals vars breakpoint input get_ipython exit quit"
)
COMMON = _words(
    "__init__ __call__ __len__ __iter__ __next__ __getitem__ __setitem__ __contains__ __enter__ "
    "__exit__ __repr__ __str__ __getattr__ __setattr__ __post_init__ __name__ __class__ __doc__ "
    "__main__ __version__ __all__ __annotations__ __slots__ __cause__ __context__"
)
FRAMES = _words(
    "tb_frame tb_next f_back f_locals f_globals f_code f_builtins gi_frame gi_code cr_frame "
    "cr_code ag_frame ag_code co_code co_consts currentframe _getframe _evaluate"
)
GETTERS = _words("attrgetter methodcaller")  # honest with a name that can be read
STARTS = ("exec", "spawn", "fork", "kill", "popen", "system", "_exit", "abort")
