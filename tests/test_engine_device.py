"""Choice of the device of a proof, by a query of torch in a process of its own."""

from __future__ import annotations

import io
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edited import edited
from stock import release_root
from vllm_graphfix.fixes import BY_NAME, FIXES
from vllm_graphfix.source.files import Source, open_source
from vllm_graphfix.verify import VerifyError, run
from vllm_graphfix.verify import cpu_proof as double
from vllm_graphfix.verify import gpu_proof as engine
from vllm_graphfix.verify.engine import device as devices
from vllm_graphfix.verify.engine.device import Device
from vllm_graphfix.verify.report import Report
from vllm_graphfix.verify.trial import further_cases, trial_of

TORCH_DOUBLE = """
__version__ = "2.11.0+cu130"

class version:
    cuda = "13.0"

class cuda:
    is_available = staticmethod(lambda: True)
    mem_get_info = staticmethod(lambda: (100 << 30, 140 << 30))
    get_device_capability = staticmethod(lambda: (9, 0))
    device_count = staticmethod(lambda: 2)

    @staticmethod
    def get_device_name():
        {name}
"""
H200 = Device("Double of an H200", "", (9, 0), 100.0, 140.0, "unknown", "2.11.0+cu130", "13.0", "3.11.7")
NO_GPU = replace(H200, name=None, why_not="torch sees no GPU")


def with_torch(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process that is asked, torch is a double whose GPU has the name that the statement *name* gives."""
    (folder / "torch.py").write_text(TORCH_DOUBLE.format(name=name))
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_without_a_gpu_torch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real torch, which is not to see what this machine may have."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    gpu = devices.find()
    assert gpu.name is None
    assert gpu.why_not in ("torch was built without CUDA", "torch sees no GPU")
    assert (gpu.capability, gpu.free_gib, gpu.total_gib) == ((0, 0), 0, 0)
    assert gpu.torch.startswith("2.")
    assert sys.version.startswith(gpu.python)


def test_models_are_made_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    devices.find(tmp_path, ("eagle", "mamba2"))
    made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    assert made == [f"{name}/{file}" for name in ("eagle", "mamba2") for file in ("config.json", "model.safetensors")]


def test_a_gpu_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch(tmp_path, "return 'Double of an H200'", monkeypatch)
    gpu = devices.find()
    assert replace(gpu, driver="unknown", python="3.11.7") == replace(H200, count=2)
    assert gpu.driver


@pytest.mark.parametrize(
    ("statement", "why_not"),
    [
        ("raise RuntimeError('CUDA driver version is insufficient\\n\\nmore')", "CUDA driver version is insufficient"),
        ("raise RuntimeError", "RuntimeError"),
    ],
    ids=["a message", "none"],
)
def test_a_gpu_that_cannot_be_used_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, why_not: str
) -> None:
    with_torch(tmp_path, statement, monkeypatch)
    gpu = devices.find()
    assert (gpu.name, gpu.why_not) == (None, why_not)


def test_without_torch_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(VerifyError) as caught:
        devices.find()
    assert str(caught.value) == (
        "torch could not look for a GPU: ModuleNotFoundError: No module named 'torch'. "
        f"Use the Python that runs vLLM; this one is {sys.executable}"
    )


def test_a_process_that_dies_without_a_word_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os; os._exit(11)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(VerifyError, match=r"exit code 11\. Use the"):
        devices.find()


@pytest.fixture
def compiled(tmp_path: Path) -> Source:
    """A vLLM with compiled kernels, as far as one can see without importing it."""
    root = edited(release_root("0.18.1"), tmp_path / "vllm", {}, anonymous=False)
    (root / "vllm" / "_C.abi3.so").write_bytes(b"compiled for a GPU")
    return open_source(root)


@pytest.fixture
def python_alone() -> Source:
    return open_source(release_root("0.18.1"))


def wheel_in(folder: Path) -> Path:
    path = folder / "vllm-0.18.1-cp38-abi3-manylinux1_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.abi3.so", b"compiled for a GPU")
    return path


class Chosen:
    """Records of queries and of the device of a proof, which is not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu: Device | VerifyError) -> None:
        self.queries = 0
        self.ran: list[str] = []
        self._gpu = gpu
        monkeypatch.setattr(devices, "find", self._find)
        monkeypatch.setattr(double, "run", self._on("CPU double"))
        monkeypatch.setattr(engine, "run", self._on("GPU"))

    def _find(self) -> Device:
        self.queries += 1
        if isinstance(self._gpu, VerifyError):
            raise self._gpu
        return self._gpu

    def _on(self, device: str) -> Any:
        def ran(source: Source, *rest: Any, **how: Any) -> Report:
            self.ran.append(device)
            return Report(source.version, source.label, device, ())

        return ran


def proof_runs_on(source: Source, device: str | None) -> str:
    return run.run(source, FIXES, device, Console(file=io.StringIO())).device


@pytest.mark.parametrize("device", [None, "gpu"])
def test_a_gpu_that_is_there_is_used(compiled: Source, monkeypatch: pytest.MonkeyPatch, device: str | None) -> None:
    Chosen(monkeypatch, H200)
    assert proof_runs_on(compiled, device) == "GPU"


def test_without_a_gpu_the_double_is_used(compiled: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch, NO_GPU)
    assert proof_runs_on(compiled, None) == "CPU double"
    assert chosen.queries == 1


def test_a_vllm_without_kernels_runs_on_the_double_without_asking_for_a_gpu(
    python_alone: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Chosen(monkeypatch, H200)
    assert proof_runs_on(python_alone, None) == "CPU double"
    assert chosen.queries == 0


def test_a_wheel_file_runs_on_the_double_without_asking_for_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Chosen(monkeypatch, H200)
    assert proof_runs_on(open_source(wheel_in(tmp_path)), None) == "CPU double"
    assert chosen.queries == 0


def test_the_cpu_option_never_looks_for_a_gpu(compiled: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch, VerifyError("no torch"))
    assert proof_runs_on(compiled, "cpu") == "CPU double"
    assert chosen.queries == 0


def test_the_gpu_option_fails_without_a_gpu(compiled: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = Chosen(monkeypatch, NO_GPU)
    with pytest.raises(VerifyError) as caught:
        proof_runs_on(compiled, "gpu")
    assert str(caught.value) == (
        "cannot verify on a GPU: torch sees no GPU. `--device cpu` uses the CPU double instead"
    )
    assert chosen.ran == []


def test_the_gpu_option_fails_with_a_vllm_without_kernels(
    python_alone: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    Chosen(monkeypatch, H200)
    with pytest.raises(VerifyError, match=r"cannot verify on a GPU: the vLLM in .* has no compiled kernels\. "):
        proof_runs_on(python_alone, "gpu")


def test_a_vllm_that_no_python_path_can_name_is_not_looked_for_under_another_name(
    compiled: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines would import whatever else there is."""
    Chosen(monkeypatch, H200)
    moved = (compiled.folder or tmp_path).rename(tmp_path / "a:b")
    with pytest.raises(VerifyError, match=r"cannot verify on a GPU: .*/a:b has a ':' in its name"):
        proof_runs_on(open_source(moved), "gpu")


def test_the_gpu_option_fails_with_a_wheel_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Chosen(monkeypatch, H200)
    with pytest.raises(VerifyError, match=r"cannot verify on a GPU: the wheel file is not installed\. "):
        proof_runs_on(open_source(wheel_in(tmp_path)), "gpu")


@pytest.mark.parametrize("device", [None, "gpu"])
def test_a_torch_that_is_missing_is_an_error_where_a_gpu_would_be_used(
    compiled: Source, monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    chosen = Chosen(monkeypatch, VerifyError("torch could not look"))
    with pytest.raises(VerifyError, match=r"torch could not look"):
        proof_runs_on(compiled, device)
    assert chosen.ran == []


CASES = {name: case for name, fix in BY_NAME.items() if (case := trial_of(fix.name).case) is not None}
CASES |= {case.name: case for fix in BY_NAME.values() for case in further_cases(fix.name)}
HOPPER_CASES = [name for name, case in CASES.items() if case.capability is not None]
HOPPER_BACKENDS = ("FLASHMLA", "FLASHMLA_SPARSE", "FLASH_ATTN")
"""FlashAttention 3 is what a case on the last one is about."""


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_skipped_on_a_gpu_that_has_what_is_needed(name: str) -> None:
    assert engine.why_skipped(CASES[name], H200) is None


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_cases_of_hoppers_kernels_alone_are_skipped_on_another_compute_capability(
    name: str, capability: tuple[int, int]
) -> None:
    why = engine.why_skipped(CASES[name], replace(H200, name="Double of another", capability=capability))
    if name in HOPPER_CASES:
        backend = CASES[name].arguments.get("attention_config", {}).get("backend")
        kernels = f"attention backend {backend} needs" if backend else "the kernels of this case need"
        assert why == (
            f"{kernels} compute capability 9.0, Double of another has "
            f"{capability[0]}.{capability[1]}; "
            "`verify --device cpu` proves the fix on the CPU double"
        )
    else:
        assert why is None


def test_a_case_that_names_no_backend_is_skipped_without_naming_one() -> None:
    case = replace(CASES["mamba-padding"], capability=10)
    why = engine.why_skipped(case, H200)
    assert why is not None
    assert why.startswith("the kernels of this case need compute capability 10.0, ")


def test_cases_whose_attention_is_hoppers_need_its_gpu_and_no_others() -> None:
    """DeepSeek V4 has one backend alone, and Qwen3-Next is left to vLLM's own choice, as it ran: neither names one."""
    backends = {name: case.arguments.get("attention_config", {}).get("backend", "") for name, case in CASES.items()}
    of_hopper = [name for name, backend in backends.items() if backend in HOPPER_BACKENDS]
    expected = [name for name in CASES if name in of_hopper or CASES[name].model in ("deepseek-v4", "qwen3-next")]
    assert expected == HOPPER_CASES


@pytest.mark.parametrize("name", CASES)
def test_everything_is_skipped_where_too_little_memory_is_free(name: str) -> None:
    why = engine.why_skipped(CASES[name], replace(H200, free_gib=1.5))
    assert why == "5 GiB of free GPU memory are needed, but only 1.5 GiB are free; stop whatever else uses the GPU"
