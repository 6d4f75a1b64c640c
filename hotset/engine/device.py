"""Where an engine computes."""

import logging
import warnings

import torch

from hotset.base.errors import ConfigError

LOGGER = logging.getLogger("hotset.engine")
OLDEST = (8, 0)  # compute capability that the kernels are written for: bfloat16 in the matrix units


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or the GPU if there is one that serves, or the CPU: with one line of warning, unless torch
    was installed for the CPU alone.

    ConfigError if a device was asked for by name and does not serve.
    """
    if name is None:
        reason = why_no_gpu(0)
        if reason is not None and torch.version.cuda is not None:
            LOGGER.warning("%s: computing on the CPU, by the reference kernels", reason)
        return torch.device("cuda" if reason is None else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is not a device; use 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r} is not supported; use 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda":
        reason = why_no_gpu(device.index or 0)
        if reason is not None:
            raise ConfigError(f"--device {name!r}: {reason}; use --device cpu")
    return device


def why_no_gpu(index: int) -> str | None:
    """In a few words, why GPU `index` cannot be computed on; None: it can."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available and torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not available and any("driver" in str(warning.message) for warning in said):
        return f"the GPU's driver is too old for CUDA {torch.version.cuda}"
    if not available or torch.cuda.device_count() == 0:
        return "no GPU was found"
    if index >= torch.cuda.device_count():
        return f"there is no GPU {index}, only {torch.cuda.device_count()}"
    capability = torch.cuda.get_device_capability(index)
    if capability < OLDEST:
        return f"{torch.cuda.get_device_name(index)} is older than compute capability {OLDEST[0]}.{OLDEST[1]}"
    return None
