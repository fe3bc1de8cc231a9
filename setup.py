"""Build apex_mp._C: which sources and flags, CPU or CUDA. Everything else is in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

INSTALL = "pip install --no-build-isolation"

if sys.argv[1:2] in (["install"], ["develop"]):
    sys.exit(f"setup.py {sys.argv[1]} is not supported; run:  {INSTALL} .   (or -e . to develop)")
# Checked before pip resolves anything: it would download a torch of its own choice and use that.
try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        f"apex_mp is compiled against your PyTorch, and this Python cannot import it ({error}).\n"
        f"If it is installed, pip hid it by build isolation; if not, install it. Run:  {INSTALL} ."
    )
if torch.__version__ < (2, 11):
    sys.exit(f"apex_mp needs torch >= 2.11; this Python has torch {torch.__version__}")
if not cpp_extension.is_ninja_available():  # it lies in a virtual environment not activated
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
try:
    cpp_extension.verify_ninja_availability()
    import pybind11
    import setuptools

    if int(setuptools.__version__.split(".")[0]) < 77:  # older ones misread pyproject.toml
        raise ImportError(f"setuptools {setuptools.__version__} is older than 77")
except (ImportError, RuntimeError) as error:
    sys.exit(f"Cannot be built: {error}. Run:  pip install -U setuptools wheel ninja pybind11")

DEBUG = os.environ.get("DEBUG", "0") not in ("", "0")
WINDOWS, MACOS = sys.platform == "win32", sys.platform == "darwin"


def plan_cuda(force, home):
    """Return whether to build for CUDA, and the sentence that stops the build if it cannot be."""
    without = f"build for the CPU alone:  FORCE_CUDA=0 {INSTALL} ."
    if force not in ("", "0", "1"):
        return False, f"FORCE_CUDA is {force!r}; it must be 1, 0 or unset"
    if force == "0" or (force == "" and not (torch.version.cuda and home)):
        return False, ""
    if torch.version.cuda is None:
        return False, f"torch {torch.__version__} has no CUDA. Install one that has, or {without}"
    nvcc = home and shutil.which("nvcc", path=os.path.join(home, "bin"))
    headers = glob(f"{home}/include/cuda.h") + glob(f"{home}/targets/*/include/cuda.h")
    if not (nvcc and headers):
        refusal = f"CUDA_HOME={home} is no CUDA toolkit (it lacks bin/nvcc or include/cuda.h)"
        return False, f"{refusal}. Set it to a CUDA {torch.version.cuda} toolkit, or {without}"
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    toolkit = version.partition("release ")[2].partition(",")[0] or "of unknown version"
    if toolkit.split(".")[0] == torch.version.cuda.split(".")[0]:
        return True, ""
    return False, (
        f"CUDA mismatch: {nvcc} is CUDA {toolkit}, but torch {torch.__version__} was built with "
        f"CUDA {torch.version.cuda}; the major versions must be equal. Ways out:\n"
        f"  - install the CUDA {torch.version.cuda} toolkit and set CUDA_HOME to it,\n"
        f"  - install a torch that was built with CUDA {toolkit},\n"
        f"  - {without}"
    )


def flags(system_includes):
    """Return compiler and linker flags. No -std: each torch appends the one that it needs."""
    level = ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O3", "-g0", "-DNDEBUG"]
    cxx = [*level, "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]
    cxx += ["-fvisibility=hidden", "-Wall", "-Wextra"]
    # As system headers: no warnings from them; and not for nvcc: no .cu file may see torch.
    cxx += [word for path in system_includes for word in ("-isystem", path)]
    nvcc = [level[0], "--fmad=false", "-lineinfo", *level[2:]]
    openmp = link = ["-fopenmp"]
    if WINDOWS:
        cxx = ["/Od", "/Zi", "/UNDEBUG"] if DEBUG else ["/O2", "/DNDEBUG"]
        openmp, link = ["/openmp"], []
    elif MACOS:  # Apple's compiler needs Homebrew's omp.h; torch brings the library.
        brew = glob("/opt/homebrew/opt/libomp/include") + glob("/usr/local/opt/libomp/include")
        openmp = ["-Xpreprocessor", "-fopenmp", "-isystem", brew[0]] if brew else []
        link = ["-lomp"] if brew else []
    return {"extra_compile_args": {"cxx": cxx + openmp, "nvcc": nvcc}, "extra_link_args": link}


def extension(with_cuda):
    folders = ["csrc/*.cpp", "csrc/cpu/*.cpp", "csrc/step/*.cpp"] + [
        "csrc/cuda/*.cpp",
        "csrc/cuda/*.cu",
    ] * with_cuda
    sources = sorted(path for folder in folders for path in glob(folder))
    macros = [("APEX_MP_TORCH_VERSION", torch.__version__)]
    macros += [("APEX_MP_WITH_CUDA", "1")] * with_cuda
    # pip's pybind11 comes before the one inside torch.
    system = [pybind11.get_include(), *cpp_extension.include_paths("cuda" if with_cuda else "cpu")]
    make = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    ext = make("apex_mp._C", sources, define_macros=macros, **flags(system))
    ext.include_dirs = [os.path.abspath("csrc"), *(system if WINDOWS else [])]
    return ext


class Build(cpp_extension.BuildExtension):
    def finalize_options(self):
        # Objects for each torch stay apart, and editable builds find theirs again.
        kind = f"{sys.implementation.cache_tag}-torch-{torch.__version__}-cuda{int(WITH_CUDA)}"
        self.build_temp = self.build_temp or os.path.join("build", kind)
        super().finalize_options()

    def run(self):
        if OBSTACLE:
            sys.exit(OBSTACLE)
        os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))  # ninja would take two more
        super().run()
        # The loader reads this before the dynamic linker fails on a symbol of another torch.
        record = Path(self.get_ext_fullpath("apex_mp._C")).with_name("_C.json")
        record.write_text(f'{{"torch": "{torch.__version__}"}}\n')


WITH_CUDA, OBSTACLE = plan_cuda(os.environ.get("FORCE_CUDA", ""), cpp_extension.CUDA_HOME)
if __name__ == "__main__":
    setuptools.setup(ext_modules=[extension(WITH_CUDA)], cmdclass={"build_ext": Build})
