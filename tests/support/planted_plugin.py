"""A file of this folder as an installed plugin of vLLM's."""

from __future__ import annotations

import shutil
from pathlib import Path


def install(folder: Path, module: str) -> Path:
    """Makes *folder* one to put on the Python path, in which vLLM finds ``plant`` of *module*, and returns it."""
    metadata = folder / f"{module}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\nplanted = {module}:plant\n")
    shutil.copy(Path(__file__).with_name(f"{module}.py"), folder)
    return folder
