"""Adds benchmarks/ to the import path: benchmarks are scripts, not a package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
