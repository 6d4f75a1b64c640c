"""Names of devices, and whether this machine has a GPU driver and its multi-process service. Needs no torch."""

import ctypes
import os
import re
from pathlib import Path

from hotset.base.errors import ConfigError

DEVICE_NAME = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
GPU_NUMBERS = re.compile(r"[0-9]{1,4}(,[0-9]{1,4})*")
GPU_DRIVER = "libcuda.so.1"
GPU_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg")  # of the driver on servers, on Tegra, and on WSL


def check_device_name(name: str) -> None:
    """Raises ConfigError if no device has this name on any machine."""
    if not DEVICE_NAME.fullmatch(name):
        raise ConfigError(f"--device {name!r} is not supported; use 'cpu', 'cuda' or 'cuda:N'")


def parse_gpus(text: str) -> tuple[int, ...]:
    """Returns the numbers in a text like "0,1,2,3". Raises ConfigError for any other text and repeated numbers."""
    if not GPU_NUMBERS.fullmatch(text):
        raise ConfigError(f"--gpus takes the numbers of GPUs, like 0,1,2,3, got {text!r}")
    numbers = tuple(int(number) for number in text.split(","))
    for number in numbers:
        if numbers.count(number) > 1:
            raise ConfigError(
                f"--gpus {text} has GPU {number} twice; name each GPU once, and use --ranks-per-gpu to put several "
                "workers on each"
            )
    return numbers


def mps_pipe_directory() -> Path:
    """Returns the folder in which the driver's multi-process service (MPS) has its pipes while it runs."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")


def pci_address(gpu: int) -> str | None:
    """Returns the PCI address of a GPU, like "0000:3b:00.0", or None if the driver does not report it.

    `gpu` is the number of the GPU among those that CUDA_VISIBLE_DEVICES leaves visible.
    """
    try:
        driver = ctypes.CDLL(GPU_DRIVER)
    except OSError:
        return None
    device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), gpu):
        return None
    if driver.cuDeviceGetPCIBusId(address, len(address), device):
        return None
    return address.value.decode().lower()


def gpu_driver_version(root: Path = Path("/")) -> str | None:
    """Returns the version of the loaded GPU driver, like "580.95.05". None if the folder `proc` of `root` has none."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"[0-9]+(\.[0-9]+)+", text)
    return found and found.group()


def has_gpu_driver() -> bool:
    """Returns whether this machine has the library or the files of a GPU driver. Without them, torch finds no GPU."""
    try:
        ctypes.CDLL(GPU_DRIVER)
    except OSError:
        return any(map(os.path.exists, GPU_FILES))
    return True
