"""Trials of workspace-growth: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from trial_rows import Edit, Served
from vllm_graphfix.deployment import Concern
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.workspace_growth import _RUNNER, _WORKER, _WORKSPACE

cleared = r"^( *)(self\._current_workspaces\[ubatch_id\] = None\n)"
lock = r" {8}if not profile_only:\n(?: +#.*\n)* +lock_workspace\(\)\n"
captured = r"^( {8})(end_time = .*\n {8}end_free)"
fixed, unknown = Verdict.FIXED, Verdict.UNRECOGNISED

EDITS = (
    Edit(
        "remedy cut out",
        "0.30.0",
        _RUNNER,
        r"lock_workspace, (?=use_workspace_lane)",
        "",
        Verdict.AFFECTED,
        also=((_RUNNER, f"^{lock}", ""),),
    ),
    Edit("locked after the captures", "0.21.0", _RUNNER, captured, r"\1lock_workspace()\n\1\2", fixed),
    Edit(
        "locked by the worker",
        "0.25.1",
        _WORKER,
        r"^( {12})(.* = self\.model_runner\.capture_model\(\)\n)",
        r"\1\2\1lock_workspace()\n",
        fixed,
    ),
    Edit(
        "kept by slot",
        "0.20.0",
        _WORKSPACE,
        cleared,
        r"\1self._outgrown[ubatch_id].append(current_workspace)\n\1\2",
        fixed,
    ),
    Edit(
        "kept",
        "0.19.1",
        _WORKSPACE,
        cleared,
        r"\1self._outgrown.append(current_workspace)\n\1\2",
        fixed,
        also=((_WORKSPACE, r"^( +)self\._locked: bool = False\n", r"\g<0>\1self._outgrown = []\n"),),
    ),
    Edit("kept by nobody", "0.20.0", _WORKSPACE, cleared, r"\1kept.append(current_workspace)\n\1\2", unknown),
    Edit(
        "kept now and then",
        "0.19.1",
        _WORKSPACE,
        cleared,
        r"\1if self._odd:\n\1    self._outgrown.append(current_workspace)\n\1\2",
        unknown,
    ),
    Edit(
        "another workspace put in",
        "0.22.1",
        _WORKSPACE,
        r"^( {8})(return self\._locked)",
        r"\1self._current_workspaces[0] = self._spare\n\1\2",
        unknown,
    ),
    Edit("memory from elsewhere", "0.28.0", _WORKSPACE, r"= torch\.empty\(", "= self._take(", unknown),
    Edit(
        "a copy of it",
        "0.16.0",
        _WORKSPACE,
        r"return current_workspace\n",
        "return current_workspace.clone()\n",
        unknown,
    ),
    Edit("graphs profiled", "0.18.1", _RUNNER, r"^( {8})return 0\n\n", r"\1return self._profiled()\n\n", unknown),
    Edit(
        "locked before the captures",
        "0.21.0",
        _RUNNER,
        r"^( {8})(start_time = .*\n {8}gc)",
        r"\1lock_workspace()\n\1\2",
        unknown,
    ),
    Edit(
        "locked by its manager",
        "0.21.0",
        _RUNNER,
        captured,
        r"\1current_workspace_manager().lock()\n\1\2",
        unknown,
    ),
    Edit(
        "locked now and then",
        "0.30.0",
        _RUNNER,
        r"if not profile_only:\n(?= +# Lock)",
        "if not profile_only and self.odd:\n",
        unknown,
    ),
)

SERVED = (
    Served("0.21.0", "VLLM_USE_V2_MODEL_RUNNER=1 ./v3", Concern.CONCERNS, "V2"),
    Served("0.21.0", "./v3", Concern.DOES_NOT, "V1"),
)
