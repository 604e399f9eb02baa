"""One module a fix: every module of this folder has a `FIX`, but for those whose names begin with ``_``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from vllm_graphfix.fix import Fix, Mode

FIXES: tuple[Fix, ...] = tuple(
    sorted(
        (
            import_module(f"{__name__}.{module.name}").FIX
            for module in iter_modules(__path__)
            if not module.name.startswith("_")
        ),
        key=lambda fix: fix.number,
    )
)
"""In the order of application and of every table."""
BY_NAME: dict[str, Fix] = {fix.name: fix for fix in FIXES}
FLAGS = frozenset(flag for fix in FIXES for flag in fix.flags)
"""Flags of `vllm serve` that fixes ask for, besides those that a `Deployment` needs."""
OBSERVED_BY_DEFAULT = frozenset(fix.name for fix in FIXES if fix.default is Mode.OBSERVE)
