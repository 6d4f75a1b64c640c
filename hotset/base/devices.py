"""Names of devices, and whether this machine has a GPU driver. Both are found out without torch."""

import ctypes
import re

from hotset.base.errors import ConfigError

DEVICE_NAME = re.compile(r"cpu|cuda(:[0-9]{1,4})?")
GPU_DRIVER = "libcuda.so.1"


def check_device_name(name: str) -> None:
    """Raises ConfigError if no device has this name on any machine."""
    if not DEVICE_NAME.fullmatch(name):
        raise ConfigError(f"--device {name!r} is not supported; use 'cpu', 'cuda' or 'cuda:N'")


def has_gpu_driver() -> bool:
    """Returns False if the library of the GPU's driver is missing, without which torch finds no GPU either."""
    try:
        ctypes.CDLL(GPU_DRIVER)
    except OSError:
        return False
    return True
