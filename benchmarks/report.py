"""What every benchmark prints and writes: a table for people, JSON for programs, the hardware and the command."""

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--json", type=Path, help="also write the results to this file")
    return made


def hardware() -> dict[str, Any]:
    """What the numbers were measured on."""
    listed = (
        subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout if shutil.which("lscpu") else ""
    )
    named = [line.partition(":")[2].strip() for line in listed.splitlines() if line.startswith("Model name")]
    cpu = f"{named[0] if named else 'unknown'} ({platform.machine()})"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def report(title: str, rows: list[dict[str, Any]], json_path: Path | None, notes: str = "") -> None:
    """Prints `rows` (dicts with the same keys) as a table and writes them, with hardware, command and date, as JSON."""
    console = Console(width=120)
    table = Table(title=title, caption=notes or None)
    for key in rows[0]:
        table.add_column(key, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    context = {
        "title": title,
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "hardware": hardware(),
        "results": rows,
    }
    console.print(f"{context['hardware']}", style="dim")
    if json_path is not None:
        json_path.write_text(json.dumps(context, indent=2) + "\n")
