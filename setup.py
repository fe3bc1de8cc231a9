"""Build apex_mp._C: which sources and flags, CPU or CUDA; and compute some of the metadata."""

import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from glob import glob
from pathlib import Path

LEAST_TORCH = "2.11"
TOOLS = '"setuptools>=77" wheel ninja pybind11'
INSTALL = "pip install --no-build-isolation"

if sys.argv[1:2] in (["install"], ["develop"]):
    sys.exit(f"setup.py {sys.argv[1]} is not supported; run:  {INSTALL} .   (or -e . to develop)")
warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's; no numpy is needed here
# Checked before pip resolves anything: it would download a torch of its own choice and use that.
try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        f"apex_mp is compiled against your PyTorch, and this Python cannot import it ({error}): it "
        "is hidden by pip's build isolation, or not installed. Run both:\n"
        f'  pip install "torch>={LEAST_TORCH}" {TOOLS}\n'
        f"  {INSTALL} .\n"
        "A torch that is installed stays as it is. If you want a certain one (another version of "
        "CUDA, or the CPU alone), install that first."
    )
if torch.__version__ < LEAST_TORCH:
    sys.exit(
        f"apex_mp needs torch >= {LEAST_TORCH}; this Python has torch {torch.__version__}. "
        f'Run:  pip install -U "torch>={LEAST_TORCH}"'
    )
if not cpp_extension.is_ninja_available():  # it lies in a virtual environment not activated
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
try:
    cpp_extension.verify_ninja_availability()
    import pybind11
    import setuptools
    from setuptools.command.build_py import build_py

    if int(setuptools.__version__.split(".")[0]) < 77:  # older ones misread pyproject.toml
        raise ImportError(f"setuptools {setuptools.__version__} is older than 77")
except (ImportError, RuntimeError) as error:
    sys.exit(f"Cannot be built: {error}. Run:  pip install -U {TOOLS}")

# Whether the command makes an extension or the metadata of a wheel, which are for this torch alone.
BUILDING = not {
    "bdist", "bdist_wheel", "build", "build_ext", "dist_info", "editable_wheel",
}.isdisjoint(sys.argv)  # fmt: skip

DEBUG = os.environ.get("DEBUG", "0") not in ("", "0")
WINDOWS, MACOS = sys.platform == "win32", sys.platform == "darwin"


def cuda_home():
    """Return the toolkit that CUDA_HOME names, or that the nvcc on the PATH belongs to, if any.

    torch takes the folder above nvcc, which is wrong where that nvcc only calls the real one.
    """
    if os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or not shutil.which("nvcc"):
        return cpp_extension.CUDA_HOME
    command = ["nvcc", "--dryrun", "-x", "cu", os.devnull]  # tells where it is, compiles nothing
    said = subprocess.run(command, capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    return os.path.realpath(top[1]) if top else cpp_extension.CUDA_HOME


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


def arch_obstacle(home):
    """Return the sentence that stops the build for an architecture it cannot be for, if any."""
    nvcc = os.path.join(home, "bin", "nvcc")
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    archs = sorted(int(arch) for arch in re.findall(r"compute_(\d+)", listed) if int(arch) >= 70)
    named = f"TORCH_CUDA_ARCH_LIST is {os.environ.get('TORCH_CUDA_ARCH_LIST', '')!r}"
    known = ";".join(f"{arch // 10}.{arch % 10}" for arch in archs)
    wish = f"Name some of {known}, the last with +PTX if it shall run on later GPUs too"
    try:
        flags = cpp_extension._get_cuda_arch_flags()  # torch takes names, too, such as Turing
    except IndexError:
        return f"{named}, and no GPU is here to build for. {wish}"
    except ValueError as error:
        return f"{named}: {error}. {wish}"
    wrong = sorted({int(arch) for arch in re.findall(r"arch=compute_(\d+)", str(flags))} - {*archs})
    if not wrong:
        return ""
    why = f"{nvcc} does not know it"
    if wrong[0] < 70:
        why = "kernels take over 32,000 bytes of arguments, and GPUs before 7.0 no more than 4,352"
    return (
        f"{named}: it cannot be built for {wrong[0] // 10}.{wrong[0] % 10}, because {why}. {wish}"
    )


def compiler_obstacle(compiler):
    """Return the sentence that stops the build if C++ cannot be compiled here, or nothing."""
    if WINDOWS:  # setuptools finds Visual Studio, or says that there is none.
        return ""
    mend = "Install one (Debian, Ubuntu: apt-get install g++), or set CXX to its path"
    if shutil.which(compiler) is None:
        return f"apex_mp is written in C++, and there is no compiler {compiler!r}. {mend}"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        return (
            f"The headers of Python {version} are missing ({header}). Install them (Debian, "
            f"Ubuntu: apt-get install python{version}-dev)"
        )
    # The C++ standard that this torch compiles with.
    standard = "c++20" if "c++20" in inspect.getsource(cpp_extension) else "c++17"
    options = flags([])
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "probe.cpp"), Path(folder, "probe.so")
        source.write_text("#include <omp.h>\n#include <vector>\n")
        command = [compiler, *options["extra_compile_args"]["cxx"], f"-std={standard}", "-fPIC"]
        command += ["-shared", source, "-o", library, *options["extra_link_args"]]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
    return (
        f"torch {torch.__version__} needs a compiler for {standard} with OpenMP, and {compiler!r} "
        f"is none ({errors[0].strip()}). {mend}"
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


def together(folder):
    """Write a source that includes those of a folder of csrc/; return its path.

    torch's headers and pybind11 take 13 of the 17 seconds for which each of them compiles alone.
    """
    names = sorted(path.name for path in Path("csrc", folder).glob("*.cpp"))
    text = "".join(f'#include "{folder}/{name}"\n' for name in names)
    path = Path("build", f"{folder}.cpp")
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:  # Else it would be compiled again.
        path.write_text(text)
    return path.as_posix()


def extension(with_cuda):
    patterns = ["csrc/*.cpp", "csrc/cpu/**/*.cpp"]
    patterns += ["csrc/cuda/**/*.cpp", "csrc/cuda/**/*.cu"] * with_cuda
    sources = sorted(path for pattern in patterns for path in glob(pattern, recursive=True))
    sources.append(together("plan"))
    macros = [("APEX_MP_TORCH_VERSION", torch.__version__)]
    macros += [("APEX_MP_WITH_CUDA", "1")] * with_cuda
    # pip's pybind11 comes before the one inside torch.
    system = [pybind11.get_include(), *cpp_extension.include_paths("cuda" if with_cuda else "cpu")]
    make = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    ext = make("apex_mp._C", sources, define_macros=macros, **flags(system))
    ext.include_dirs = [os.path.abspath("csrc"), *(system if WINDOWS else [])]
    return ext


class BuildPython(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:  # For `python -m apex_mp explain`.
            page = Path(self.build_lib, "apex_mp", "troubleshooting.md")
            page.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile("docs/troubleshooting.md", page)

    def get_outputs(self, include_bytecode=True):
        page = os.path.join(self.build_lib, "apex_mp", "troubleshooting.md")
        return [*super().get_outputs(include_bytecode), page]


class Build(cpp_extension.BuildExtension):
    def finalize_options(self):
        # Objects for each torch stay apart, and editable builds find theirs again.
        kind = f"{sys.implementation.cache_tag}-torch-{torch.__version__}-cuda{int(WITH_CUDA)}"
        self.build_temp = self.build_temp or os.path.join("build", kind)
        super().finalize_options()

    def run(self):
        os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))  # ninja would take two more
        super().run()
        # The loader reads this before the dynamic linker fails on a symbol of another torch.
        record = Path(self.get_ext_fullpath("apex_mp._C")).with_name("_C.json")
        record.write_text(f'{{"torch": "{torch.__version__}"}}\n')


def long_description():
    """Return README.md with names of files instead of links to them, which would lead nowhere."""

    def name_the_file(link):
        text, target = link.groups()
        if target.startswith("#"):  # A heading, for which an index may have another anchor.
            return text
        return f"`{target}`" if text.strip("`") == target else f"{text} (`{target}`)"

    text = Path("README.md").read_text(encoding="utf-8")
    links = r"!?\[([^]]+)\]\((?!https?:)([^)]+)\)"
    return (
        re.sub(links, name_the_file, text) + "\nFiles named here are in the source distribution.\n"
    )


cpp_extension.CUDA_HOME = cuda_home()
WITH_CUDA, OBSTACLE = plan_cuda(os.environ.get("FORCE_CUDA", ""), cpp_extension.CUDA_HOME)
if __name__ == "__main__":
    # Link with the same compiler: setuptools would link with the one that Python was built with.
    os.environ.setdefault("CXX", cpp_extension.get_cxx_compiler())
    if BUILDING:
        OBSTACLE = OBSTACLE or (arch_obstacle(cpp_extension.CUDA_HOME) if WITH_CUDA else "")
        OBSTACLE = OBSTACLE or compiler_obstacle(os.environ["CXX"])
        if OBSTACLE:  # Now, not after pip has resolved and setuptools has copied everything.
            sys.exit(OBSTACLE)
    # The loader refuses another release of torch; a local version (+cpu, +cu130) fits "==".
    release = torch.__version__.split("+")[0]
    setuptools.setup(
        ext_modules=[extension(WITH_CUDA)],
        cmdclass={"build_ext": Build, "build_py": BuildPython},
        install_requires=[f"torch=={release}" if BUILDING else f"torch>={LEAST_TORCH}"],
        long_description=long_description(),
        long_description_content_type="text/markdown",
    )
