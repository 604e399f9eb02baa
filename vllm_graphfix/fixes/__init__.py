"""One module a fix, with its `FIX` and its `ABOUT`; modules whose names begin with ``_`` are something else."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from vllm_graphfix.fix import Fix, Mode
from vllm_graphfix.fixes._about import About

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
OBSERVED_BY_DEFAULT = frozenset(fix.name for fix in FIXES if fix.default is Mode.OBSERVE)


def about(fix: Fix) -> About:
    """What people read of *fix*."""
    found: About = import_module(f"{__name__}.{fix.name.replace('-', '_')}").ABOUT
    return found


def flags() -> frozenset[str]:
    """Flags of `vllm serve` that fixes ask for, besides those that a `Deployment` needs."""
    return frozenset(flag for fix in FIXES for need in fix.needs() for flag in need.flags)
