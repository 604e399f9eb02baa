"""Stands in for `shadow_faults_engine.py`: no vLLM.

``SHADOW_FAULTS_STAND_IN`` says what becomes of the engine of each fault.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

parent = Connection(int(sys.argv[1]))
order = parent.recv()
parent.send(time.monotonic())
parent.send({})
asked = parent.recv()
right = [[len(prompt)] * asked["tokens"] for prompt in asked["prompts"]]
plant = asked["plant"]
if plant is None:
    parent.send({"answers": right, "found": []})
else:
    behaviour = json.loads(os.environ["SHADOW_FAULTS_STAND_IN"])[plant["fault"]]
    rank = subprocess.Popen(["/bin/sleep", "60"])
    parent.send([rank.pid])
    if behaviour != "never comes to it":
        (Path(plant["folder"]) / "fault-at").write_text(str(time.time() - 31 * (behaviour == "stops late")))
    if behaviour == "hangs":
        time.sleep(60)
    if behaviour.startswith("stops"):
        rank.kill()
        rank.wait()
    if behaviour.startswith("stops") or behaviour == "leaves a rank behind":
        parent.send({"died": "EngineDeadError: EngineCore encountered an issue"})
    else:
        wrong = [[0], *right[1:]]
        parent.send({"answers": wrong if behaviour == "is wrong" else right, "found": []})
    parent.poll(60)
