import importlib
import pkgutil
import subprocess
import sys

import pytest

HEAVY = ("torch", "megatron.core", "numpy")
SCRIPT = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print(",".join(name for name in sys.argv[2].split(",") if name in sys.modules))
"""


@pytest.mark.parametrize("package", ["megatron_bamboo.schedule", "megatron_bamboo.planner"])
def test_pure_packages_import_without_torch(package: str) -> None:
    folder = importlib.import_module(package).__path__
    names = [package, *(module.name for module in pkgutil.iter_modules(folder, f"{package}."))]
    command = [sys.executable, "-c", SCRIPT, ",".join(names), ",".join(HEAVY)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
