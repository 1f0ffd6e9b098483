"""What planning may load: neither torch nor a learning library nor a solver nor the doors."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "sklearn", "lightgbm", "xgboost", "scipy", "pandas", "ortools", "transformers")
DOORS = ("fastapi", "starlette", "uvicorn", "typer", "click", "rich", "meshwright.api")

# Records each attempt, so that an import that is tried and forgiven counts also where the library is not installed.
RECORD = """
import sys

class Recorder:
    def find_spec(self, name, path=None, target=None):
        for unwanted in {unwanted!r}:
            if name == unwanted or name.startswith(unwanted + "."):
                print(name)
        return None

sys.meta_path.insert(0, Recorder())
"""
WALK = """
import importlib, pkgutil
package = importlib.import_module({room!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
"""


def attempts(code: str, unwanted: tuple[str, ...]) -> list[str]:
    """Names below ``unwanted`` that a fresh interpreter tries to import while it runs ``code``."""
    script = RECORD.format(unwanted=unwanted) + code
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_the_recorder_sees_forgiven_imports() -> None:
    code = "try:\n    import torch.nn\nexcept ImportError:\n    pass\nimport rich\n"
    assert {"torch", "rich"} <= set(attempts(code, HEAVY + DOORS))


def test_importing_the_planner_loads_nothing_heavy() -> None:
    assert attempts("import meshwright.planner", HEAVY + DOORS) == []


@pytest.mark.parametrize("room", ["specs", "cost_models", "planner", "megatron_export"])
def test_no_module_of_a_planning_room_loads_anything_heavy(room: str) -> None:
    assert attempts(WALK.format(room=f"meshwright.{room}"), HEAVY + DOORS) == []


def test_importing_one_room_loads_none_above_it() -> None:
    above = ("meshwright.planner", "meshwright.megatron_export", "meshwright.api")
    assert attempts("import meshwright.cost_models, meshwright.profiler", above) == []
