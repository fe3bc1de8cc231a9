# The compiled module: facts of the build (csrc/module.cpp).

with_cuda: bool
cuda_version: str | None
cuda_archs: str
torch_version: str
compiler: str
debug: bool

def cpu_level() -> str: ...
def cpu_levels() -> list[str]: ...
def set_cpu_level(level: str) -> None: ...
