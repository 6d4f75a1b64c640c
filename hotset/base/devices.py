"""Names of devices, and whether this machine has a GPU driver. Both are found out without torch."""

import ctypes
import os
import re

from hotset.base.errors import ConfigError

DEVICE_NAME = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
GPU_DRIVER = "libcuda.so.1"
GPU_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg")  # of the driver on servers, on Tegra, and on WSL


def check_device_name(name: str) -> None:
    """Raises ConfigError if no device has this name on any machine."""
    if not DEVICE_NAME.fullmatch(name):
        raise ConfigError(f"--device {name!r} is not supported; use 'cpu', 'cuda' or 'cuda:N'")


def has_gpu_driver() -> bool:
    """Returns False if this machine has neither the library nor the files of a GPU driver: torch finds no GPU then."""
    try:
        ctypes.CDLL(GPU_DRIVER)
    except OSError:
        return any(map(os.path.exists, GPU_FILES))
    return True
