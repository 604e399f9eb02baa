"""Trials of workspace-growth: vLLM changes that its diagnosis must see, and deployments that it concerns or not."""

from __future__ import annotations

from edited import after, before, both, swap
from trial_rows import LOOKALIKE, REMEDY, Edit, Served, Wording, affects, does_not
from vllm_graphfix.fix import Verdict
from vllm_graphfix.fixes.workspace_growth import _GRAPHS, _LAYER, _RUNNER, _WARM_UP, _WORKER, _WORKSPACE

cleared = r"^( *)(self\._current_workspaces\[ubatch_id\] = None\n)"
lock = r" {8}if not profile_only:\n(?: +#.*\n)* +lock_workspace\(\)\n"
captured = r"^( {8})(end_time = .*\n {8}end_free)"
fixed = Verdict.FIXED

EDITS = (
    Edit(
        "remedy cut out",
        "0.30.0",
        _RUNNER,
        r"lock_workspace, (?=use_workspace_lane)",
        "",
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
    Edit("kept by nobody", "0.20.0", _WORKSPACE, cleared, r"\1kept.append(current_workspace)\n\1\2"),
    Edit(
        "kept now and then",
        "0.19.1",
        _WORKSPACE,
        cleared,
        r"\1if self._odd:\n\1    self._outgrown.append(current_workspace)\n\1\2",
    ),
    Edit(
        "another workspace put in",
        "0.22.1",
        _WORKSPACE,
        r"^( {8})(return self\._locked)",
        r"\1self._current_workspaces[0] = self._spare\n\1\2",
    ),
    Edit("memory from elsewhere", "0.28.0", _WORKSPACE, r"= torch\.empty\(", "= self._take("),
    Edit("a copy of it", "0.16.0", _WORKSPACE, r"return current_workspace\n", "return current_workspace.clone()\n"),
    Edit("graphs profiled", "0.18.1", _RUNNER, r"^( {8})return 0\n\n", r"\1return self._profiled()\n\n"),
    Edit(
        "locked before the captures",
        "0.21.0",
        _RUNNER,
        r"^( {8})(start_time = .*\n {8}gc)",
        r"\1lock_workspace()\n\1\2",
    ),
    Edit("locked by its manager", "0.21.0", _RUNNER, captured, r"\1current_workspace_manager().lock()\n\1\2"),
    Edit(
        "locked now and then",
        "0.30.0",
        _RUNNER,
        r"if not profile_only:\n(?= +# Lock)",
        "if not profile_only and self.odd:\n",
    ),
    Edit(
        "a layer has memory of its own that grows",
        "0.30.0",
        _LAYER,
        r"^( +)\(attn_logits,\) = current_workspace_manager\(\)\.get_simultaneous\(\n.*\n +\)\n",
        r"\1attn_logits = scratch(logits_shape, torch.float32, q.device)\n",
    ),
)

behind = r"elapsed_time = end_time - start_time\n +cuda_graph_size"
workspace_module = "from vllm.v1.worker import workspace"
made = r"self\._locked: bool = False"
emptied = r"self\._current_workspaces\[workspace_id\] = None"

WORDINGS = (
    Wording(
        REMEDY,
        "0.28.0",
        _WORKSPACE,
        {
            "locked by its manager": {
                _RUNNER: before(behind, workspace_module, "workspace.current_workspace_manager().lock()")
            },
            "locked by the lock of another module": {
                _RUNNER: before(behind, workspace_module, "workspace.lock_workspace()")
            },
            "locked by who captures": {
                _GRAPHS: after(
                    r"self\._graphs_captured = True",
                    workspace_module,
                    "workspace.current_workspace_manager()._locked = True",
                )
            },
            "kept by a sum": both(
                after(made, "self._outgrown = []"), before(emptied, "self._outgrown += [current_workspace]")
            ),
            "kept by its slot": both(
                after(made, "self._outgrown = {}"),
                before(emptied, "self._outgrown.setdefault(workspace_id, []).append(current_workspace)"),
            ),
            "kept in a list of the module": both(
                before(r"class WorkspaceManager:", "_OUTGROWN = []", "", ""),
                before(emptied, "_OUTGROWN.append(current_workspace)"),
            ),
            "kept by a method": both(
                after(made, "self._outgrown = []"),
                before(emptied, "self._keep(current_workspace)"),
                before(
                    r"def is_locked\(self\)", "def _keep(self, workspace):", "    self._outgrown.append(workspace)", ""
                ),
            ),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.28.0",
        _WORKSPACE,
        {
            "kept, and emptied": both(
                after(made, "self._outgrown = []"),
                before(emptied, "self._outgrown.append(current_workspace)"),
                before(r"def is_locked\(self\)", "def trim(self):", "    self._outgrown.clear()", ""),
            ),
            "kept in a list of the call": before(emptied, "outgrown = []", "outgrown.append(current_workspace)"),
            "kept anew each time": before(emptied, "self._outgrown = []", "self._outgrown.append(current_workspace)"),
            "kept if debugging": both(
                after(made, "self._outgrown = []"),
                before(emptied, "if envs.VLLM_DEBUG_WORKSPACE:", "    self._outgrown.append(current_workspace)"),
            ),
            "a copy is kept": both(
                after(made, "self._outgrown = []"), before(emptied, "self._outgrown.append(current_workspace.clone())")
            ),
        },
    ),
    Wording(
        LOOKALIKE,
        "0.30.0",
        _RUNNER,
        {
            "unlocked behind the lock": before(behind, workspace_module, "workspace.unlock_workspace()"),
            "unlocked by its manager": before(
                behind, workspace_module, "workspace.current_workspace_manager().unlock()"
            ),
            "unlocked by the worker": {
                _WORKER: after(
                    r".*self\.model_runner\.capture_model\(\)", workspace_module, "workspace.unlock_workspace()"
                )
            },
            "unlocked by a warm-up": {
                _WARM_UP: both(
                    before(
                        r"from vllm\.v1\.request import Request",
                        "from vllm.v1.worker.workspace import unlock_workspace",
                    ),
                    after(r"def _run_decode_step\(.*", "    unlock_workspace()"),
                )
            },
            "locked if debugging": {
                _WORKSPACE: swap(
                    r"^( +)self\._locked = True\n", r"\1if envs.VLLM_DEBUG_WORKSPACE:\n\1    self._locked = True\n"
                )
            },
            "growth is forgiven": {
                _WORKSPACE: swap(r"if self\._locked:\n( +)raise", r"if self._locked and current_size == 0:\n\1raise")
            },
        },
    ),
)

SERVED = (Served("0.21.0", "VLLM_USE_V2_MODEL_RUNNER=1 ./v3", affects, "V2"), Served("0.21.0", "./v3", does_not, "V1"))

OBSERVED = ([4096.0, 1.0], [0.0, 1.0])
"""The values of its probe on stock, and with the fix."""
