"""An all-clear needs the whole package: code in a file that no fix reads may take the place of what it rests on."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from edited import Change, before, edited_source, stock_source, swap
from make_manifest import extension_modules
from stock import release_root
from vllm_graphfix import manifest
from vllm_graphfix.fix import Diagnosis, Slice, Verdict
from vllm_graphfix.fixes import BY_NAME, module_of
from vllm_graphfix.source.elsewhere import Search
from vllm_graphfix.source.files import Source, SourceError, open_source
from vllm_graphfix.source.known_code import KNOWN_FILES, code_digest, digest, known

OWN = "vllm/workspace.py"
PARTS = (Slice(OWN, "Manager.lock", "locked"), Slice(OWN, "lock_all", "locked"))
HARMLESS = ("self.locked = None",)
STOCK = "class Manager:\n    def lock(self):\n        self.locked = True\ndef lock_all(): manager.locked = True\n"


def replaced(text: str, path: str = "vllm/fork.py", **subclasses: list[str]) -> list[str]:
    """The functions that *text* replaces."""
    files = {OWN: STOCK.encode(), path: text.encode()}
    sizes = {path: len(content) for path, content in files.items()}
    search = Search(Source("test", files.get, lambda: None, list_sizes=lambda: sizes))
    return sorted(part.function for part, _ in search.replacements(PARTS, HARMLESS, subclasses))


@pytest.mark.parametrize(
    ("text", "functions"),
    [
        ("class Own(Manager):\n def lock(self): self.locked = False", ["Manager.lock"]),
        ("class Own(workspace.Manager[int]):\n def lock(self): self.locked = False", ["Manager.lock"]),
        ("class Own(Manager): pass\nclass Two(Own):\n def lock(self): self.locked = False", ["Manager.lock"]),
        ("class Own(Known):\n def lock(self): self.locked = False", ["Manager.lock"]),
        ("class Own(Manager):\n lock = nothing", ["Manager.lock"]),
        ("class Manager:\n def lock(self): self.locked = False", ["Manager.lock"]),
        ("from a import Other as Manager", ["Manager.lock"]),
        ("try:\n from a import b\nexcept ImportError:\n Manager = Other", ["Manager.lock"]),
        ("def apply():\n workspace.Manager.lock = lambda self: None", ["Manager.lock"]),
        ("def apply(): setattr(Manager, 'lock', nothing)", ["Manager.lock"]),
        ("def lock_all(): manager.locked = False", ["lock_all"]),
        ("from a import nothing as lock_all", ["lock_all"]),
        ("def apply(): workspace.lock_all = nothing", ["lock_all"]),
    ],
)
def test_code_that_takes_the_place_of_a_slice_is_seen(text: str, functions: list[str]) -> None:
    assert replaced(text, Manager=["Known"]) == functions


@pytest.mark.parametrize(
    "text",
    [
        "class Own(Manager):\n def unlock(self): self.locked = False",
        "class Own(Manager):\n def lock(self): return super().lock()",
        "class Own(Manager):\n def lock(self): self.locked = None",
        "class Other:\n def lock(self): self.locked = False",
        "from vllm.workspace import Manager, lock_all",
        "class Other:\n def __init__(self, lock_all): self.lock_all = lock_all",
        "def other():\n lock_all = 1",
    ],
)
def test_code_that_has_other_data_or_another_class_is_not(text: str) -> None:
    assert replaced(text) == []


def test_code_that_cannot_be_read_may_be_anything() -> None:
    assert replaced("class Own(Manager):\n def lock(self: self.locked = False") == ["Manager.lock", "lock_all"]


def test_the_code_of_a_replacement_counts_and_not_its_place() -> None:
    def values(text: str) -> set[str]:
        source = Source("test", {"vllm/x.py": text.encode()}.get, lambda: None, list_sizes=lambda: {"vllm/x.py": 1})
        return {each.value for _, each in Search(source).replacements(PARTS, HARMLESS, {})}

    code = "class Own(Manager):\n    def lock(self):\n        self.locked = False\n"
    assert values(code) == values(f"import os\n{code}".replace("Own", "Another")) != values(code.replace("Fals", "Tru"))


def test_more_code_than_any_vllm_has_is_not_searched() -> None:
    with pytest.raises(SourceError, match="larger than that of any vLLM"):
        Search(Source("test", lambda _: None, lambda: None, list_sizes=lambda: {"vllm/x.py": 2**30}))


@pytest.mark.parametrize("release", ["0.18.1", "0.33.0"])
def test_of_a_stock_release_no_file_is_searched(release: str) -> None:
    source = stock_source(release_root(release))
    assert len(source.sizes) > 1500
    assert {digest(path, size) for path, size in source.sizes.items()} <= known(KNOWN_FILES)


def test_an_all_clear_is_refused_where_another_file_replaces_what_it_rests_on() -> None:
    stock, path = stock_source(release_root("0.30.0")), "vllm/fork.py"

    def with_file(text: str) -> Source:
        return Source(
            "fork",
            lambda name: text.encode() if name == path else stock.read(name),
            lambda: None,
            list_sizes=lambda: stock.sizes | {path: len(text)},
        )

    fix = BY_NAME["workspace-growth"]
    harmless = manifest.diagnose(fix, with_file("from vllm.v1.worker import workspace\n"))
    assert (harmless.verdict, harmless.known) == (Verdict.FIXED, True)
    diagnosis = manifest.diagnose(fix, with_file("def f(w):\n    w.WorkspaceManager.lock = lambda self: None\n"))
    assert (diagnosis.verdict, diagnosis.defect_seen, diagnosis.where) == (Verdict.UNRECOGNISED, False, f"{path}:2")
    assert "WorkspaceManager.lock may be replaced by code of no known release" in diagnosis.reason
    unreadable = manifest.diagnose(fix, with_file("lock_workspace(\n"))
    assert unreadable.verdict is Verdict.UNRECOGNISED
    assert "by a file that cannot be parsed" in unreadable.reason


@pytest.mark.parametrize("path", ["vllm/fork.py", "vllm/v1/engine/fork.py"])
@pytest.mark.parametrize(("fix", "is_defect"), [("idle-rank", True), ("mamba-padding", False)])
def test_a_file_of_a_fork_that_cannot_be_read_may_hold_a_remedy(fix: str, is_defect: bool, path: str) -> None:
    stock = stock_source(release_root("0.18.1"))

    def read(name: str) -> bytes | None:
        if name == path:
            raise SourceError("larger than any source file of vLLM")
        return stock.read(name)

    source = Source("fork", read, lambda: None, list_sizes=lambda: stock.sizes | {path: 2**21})
    diagnosis = manifest.diagnose(BY_NAME[fix], source)
    assert (diagnosis.verdict, diagnosis.defect_seen) == (Verdict.UNRECOGNISED, is_defect)
    assert diagnosis.where == f"{path}:1"


@pytest.mark.parametrize("fix", ["capture-state", "draft-decode-mode"])
def test_a_file_that_cannot_be_parsed_refuses_an_all_clear_outside_of_forks(fix: str) -> None:
    """It may replace any slice, also where the first one counts for another verdict alone."""
    stock, path = stock_source(release_root("0.33.0")), "vllm/own/unreadable.py"
    parts = manifest.basis_of_all_clear(module_of(fix).FIX)
    assert parts[0].only_for is Verdict.ABSENT
    names = {name for part in parts for name in part.function.split(".")}
    new = {f"vllm/own/new_{number}.py": b"pass\n" for number in range(700)}

    def diagnosis(unreadable: bytes) -> Diagnosis:
        files = new | {path: unreadable}
        sizes = {name: len(content) for name, content in files.items()}
        source = Source(
            "changed",
            lambda name: files[name] if name in files else stock.read(name),
            lambda: None,
            list_sizes=lambda: stock.sizes | sizes,
        )
        assert not Search(source).is_fork
        return manifest.diagnose(BY_NAME[fix], source)

    assert diagnosis(b"pass\n").verdict is Verdict.FIXED
    refused = diagnosis("".join(f"class {name}:\n def {name}(\n" for name in sorted(names)).encode())
    assert (refused.verdict, refused.where) == (Verdict.UNRECOGNISED, f"{path}:1")


def test_the_extension_modules_of_every_wheel_are_usual(release: str) -> None:
    modules = [f"{module}.abi3.so" for module in extension_modules(release_root(release))]
    assert "vllm/cumem_allocator.abi3.so" in modules
    assert Search(with_files(stock_source(release_root(release)), *modules)).foreign_binary is None


@pytest.mark.parametrize(
    "path", ["vllm/_rocm_C.abi3.so", "vllm/_C_AVX512.cpython-312-x86_64-linux-gnu.so", "vllm/_C.pyd"]
)
def test_the_extension_modules_of_other_builds_are_usual(path: str) -> None:
    assert Search(with_files(stock_source(release_root("0.33.0")), path)).foreign_binary is None


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [
        ("vllm/v1/worker/workspace.cpython-312-x86_64-linux-gnu.so", True),
        ("vllm/v1/worker/__init__.abi3.so", True),
        ("vllm/v1/worker/workspace.pyd", True),
        ("vllm/own.so", True),
        ("vllm/own.pyc", True),
        ("vllm/v1/worker/workspace.pyc", False),  # Python takes the source
    ],
)
def test_code_without_source_is_no_all_clear(path: str, is_refused: bool) -> None:
    diagnosis = manifest.diagnose(BY_NAME["workspace-growth"], with_files(stock_source(release_root("0.33.0")), path))
    assert (diagnosis.verdict is Verdict.UNRECOGNISED) is is_refused
    assert diagnosis.known is not is_refused


def test_code_without_source_is_listed_in_a_folder_and_in_a_wheel(tmp_path: Path) -> None:
    files = ["vllm/__init__.py", "vllm/_C.abi3.so", "vllm/own.pyc", "vllm/__pycache__/own.cpython-312.pyc"]
    for path in files:
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).touch()
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for path in files:
            wheel.write(tmp_path / path, path)
    for source in (open_source(tmp_path), open_source(tmp_path / "vllm.whl")):
        assert (list(source.sizes), sorted(source.compiled)) == (files[:1], files[1:3])


def with_files(stock: Source, *paths: str) -> Source:
    return Source("test", stock.read, lambda: None, list_sizes=lambda: stock.sizes | dict.fromkeys(paths, 4))


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        (lambda text: f"# Copyright of a company\n{text}", True),
        (lambda text: f"{text}\n\ndef own():\n    pass\n", False),
    ],
)
def test_no_release_is_known_by_an_inspected_file_that_was_edited(change: Change, is_known: bool) -> None:
    path = "vllm/v1/worker/workspace.py"
    diagnosis = manifest.diagnose(BY_NAME["workspace-growth"], edited_source(release_root("0.33.0"), {path: change}))
    assert (diagnosis.verdict, diagnosis.known) == (Verdict.FIXED, is_known)


def appended(code: str) -> Change:
    return lambda text: f"{text}\n{code}\n"


FORKS: dict[str, tuple[str, str, str, Change]] = {
    "a field of what it makes is another": (
        "ubatch-max-seq-len",
        "0.22.0",
        "vllm/v1/attention/backend.py",
        before(r"def batch_size\(self\)", "def __post_init__(self) -> None:", "    self.max_seq_len = 1", ""),
    ),
    "its caller hands over something else": (
        "mamba-padding",
        "0.22.0",
        "vllm/v1/worker/gpu_model_runner.py",
        swap(
            r"num_reqs=num_reqs,(?=\n +num_reqs_padded=num_reqs_padded if pad_attn)",
            "num_reqs=num_reqs_padded if pad_attn else num_reqs,",
        ),
    ),
    "others undo it": (
        "workspace-growth",
        "0.30.0",
        "vllm/model_executor/layers/fused_moe/modular_kernel.py",
        before(r"common_workspace, workspace2 = current_workspace_manager", "current_workspace_manager().unlock()"),
    ),
    "a condition of a module undoes it": (
        "workspace-growth",
        "0.30.0",
        "vllm/model_executor/layers/fused_moe/modular_kernel.py",
        appended("if current_workspace_manager().unlock():\n    CHOICE = 1"),
    ),
    "a context of a module undoes it": (
        "workspace-growth",
        "0.30.0",
        "vllm/model_executor/layers/fused_moe/modular_kernel.py",
        appended("with current_workspace_manager().unlock():\n    CHOICE = 1"),
    ),
    "a function that it calls does something else": (
        "encoder-padding",
        "0.31.0",
        "vllm/vllm_flash_attn/flash_attn_interface.py",
        before(r"assert cu_seqlens_k is not None or seqused_k is not None", "out = None"),
    ),
    "it is replaced by its name": (
        "hidden-states-padding",
        "0.25.1",
        "vllm/platforms/cuda.py",
        appended("FASTER = {'extract_hidden_states': {'basic_cache': len}}"),
    ),
    "its base class wraps it": (
        "dcp-context-lens",
        "0.20.0",
        "vllm/v1/attention/backend.py",
        before(
            r"def _init_reorder_batch_threshold\(",
            "def __init_subclass__(cls) -> None:",
            "    cls.build = copied(cls.build)",
            "",
        ),
    ),
}


@pytest.mark.parametrize("what", FORKS)
def test_a_fork_that_acts_on_what_is_right_is_no_all_clear(what: str) -> None:
    fix, release, path, change = FORKS[what]
    diagnosis = manifest.diagnose(BY_NAME[fix], edited_source(release_root(release), {path: change}))
    assert (diagnosis.verdict, diagnosis.defect_seen) == (Verdict.UNRECOGNISED, False)
    assert diagnosis.where is not None
    assert diagnosis.where.startswith(f"{path}:")


@pytest.mark.parametrize(
    ("fix", "release", "path"),
    [
        ("workspace-growth", "0.30.0", "vllm/model_executor/models/llama.py"),
        ("hidden-states-padding", "0.25.1", "vllm/v1/core/sched/scheduler.py"),
        ("encoder-padding", "0.31.0", "vllm/v1/worker/gpu_worker.py"),
    ],
)
def test_a_fork_that_changes_something_else_is_right_as_before(fix: str, release: str, path: str) -> None:
    change = appended("def theme() -> str:\n    return 'dark'\n")
    diagnosis = manifest.diagnose(BY_NAME[fix], edited_source(release_root(release), {path: change}))
    assert diagnosis.verdict is Verdict.FIXED


def test_the_code_of_a_file_is_all_but_its_comments() -> None:
    code = b"def f(x):\n    if x:\n        return (x + 1) * 2\n"
    same = (b"# A licence.\n\n" + code, code.replace(b"x:\n", b"x:  # why\n\n"), code + b"\n\n")
    other = (code.replace(b"(x + 1)", b"x + 1"), code.replace(b"        return", b"    return"))
    assert {code_digest("a.py", each) for each in same} == {code_digest("a.py", code)}
    assert code_digest("a.py", code) not in {code_digest("a.py", each) for each in other}
