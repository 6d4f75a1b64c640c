"""Benchmarks are scripts, not a package: their folder joins the import path for these tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
