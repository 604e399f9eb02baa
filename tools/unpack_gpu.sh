#!/bin/sh
# sh unpack.sh FOLDER: FOLDER becomes a virtual environment on top of this machine's packages, with what is packed.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit("%d.%d" % sys.version_info[:2] != "@PYTHON@")' ||
    { echo 'Python @PYTHON@ is needed: PYTHON=python@PYTHON@ sh unpack.sh FOLDER' >&2; exit 2; }
(cd "$here" && sha256sum --check --quiet SHA256SUMS)
"$python" -m venv --without-pip --system-site-packages "$1"
# Of a Python that is in a virtual environment itself, the new one sees no packages: they come after its own.
"$python" - "$1" <<'END'
import pathlib, sys, sysconfig
if sys.prefix != sys.base_prefix:
    (own,) = pathlib.Path(sys.argv[1]).glob("lib/python*/site-packages")
    (own / "machine.pth").write_text(sysconfig.get_path("purelib") + "\n")
END
cat "$here"/wheels.tar* | tar -xf - -C "$1"
# Without their dependencies: whether these are packed or the machine's was decided when the archive was made.
"$python" -m pip --python "$1/bin/python" install --quiet --no-index --no-deps --no-compile --ignore-installed \
    --disable-pip-version-check "$1"/wheels/*.whl
# torch looks for CUDA's libraries beside itself; those that were not packed are the machine's.
"$1/bin/python" - <<'END'
import pathlib, sys, sysconfig
own = pathlib.Path(sysconfig.get_path("purelib"))
for folder in map(pathlib.Path, sys.path if (own / "torch").is_dir() else ()):
    for library in (folder / "nvidia").rglob("*") if folder != own else ():
        beside = own / library.relative_to(folder)
        if not library.is_dir() and not beside.exists():
            beside.parent.mkdir(parents=True, exist_ok=True)
            beside.symlink_to(library)
END
"$1/bin/python" -c 'import torch; print("torch", torch.__version__, "with CUDA", torch.version.cuda)'
