"""Loads a model: chooses the device and the dtype, and reads the weights."""

import gc
import logging
import warnings
from collections.abc import Callable

import torch

from hotset.base.config import EngineConfig
from hotset.base.devices import check_device_name
from hotset.base.errors import ConfigError
from hotset.engine.model_checks import kv_storage
from hotset.engine.sizing import device_memory
from hotset.engine.start_plan import WorkerPlan, estimated_steps, usable_bytes
from hotset.kernels.linear import packed
from hotset.models.checkpoint.files import find_model
from hotset.models.checkpoint.weights import open_weights
from hotset.models.collectives import SINGLE_RANK, Collectives
from hotset.models.decoder import Decoder
from hotset.models.spec import ModelSpec, dtype_name
from hotset.models.split import WHOLE_MODEL, Split
from hotset.models.weight_plan import plan_weights

LOGGER = logging.getLogger("hotset.engine")
MIN_CAPABILITY = (8, 0)  # the oldest compute capability with bfloat16 matrix units, which the kernels require


def choose_device(name: str | None) -> torch.device:
    """Returns the device called `name`. If `name` is None, returns the first GPU if it is usable, else the CPU.

    Falling back to the CPU logs one warning, unless torch was built without CUDA. Raises ConfigError if the named
    device cannot be used.
    """
    if name is None:
        reason = why_no_gpu(0)
        if reason is not None and torch.version.cuda is not None:
            LOGGER.warning("%s; computing on the CPU instead", reason)
        return torch.device("cuda" if reason is None else "cpu")
    check_device_name(name)
    device = torch.device(name)
    if device.type == "cuda":
        reason = why_no_gpu(device.index or 0)
        if reason is not None:
            raise ConfigError(f"--device {name!r}: {reason}; use --device cpu")
    return device


def why_no_gpu(index: int) -> str | None:
    """Returns why GPU `index` cannot be used, or None if it can."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available and torch.version.cuda is None:
        return "this torch was built without CUDA"
    if not available and any("driver" in str(warning.message) for warning in caught):
        return f"the GPU's driver is too old for CUDA {torch.version.cuda}"
    if not available or torch.cuda.device_count() == 0:
        return "no GPU was found"
    if index >= torch.cuda.device_count():
        return f"GPU {index} does not exist: this machine has {torch.cuda.device_count()}, numbered from 0"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        has, needs = (f"{major}.{minor}" for major, minor in (capability, MIN_CAPABILITY))
        return f"{torch.cuda.get_device_name(index)} has compute capability {has}, but Hotset needs {needs} or newer"
    return None


def use_device(device: torch.device) -> torch.device:
    """Makes a GPU the current one of this thread, and creates its CUDA context. Does nothing for a CPU. Returns the
    device with its number, so that other threads can choose the same.

    This must be the first use of CUDA. Calls that name no device (streams, events, pinned memory, launches of kernels)
    use the current GPU, and would otherwise create a context on GPU 0.
    """
    if device.type != "cuda":
        return device
    try:
        numbered = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(numbered)
        torch.cuda.mem_get_info(numbered)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        number = "" if device.index is None else f" {device.index}"
        raise ConfigError(
            f"GPU{number} cannot be used: {reason}; end other programs on it (see nvidia-smi), or choose another with "
            "--gpus"
        ) from error
    return numbered


def choose_dtype(name: str | None, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Returns the torch dtype that `dtype_name` names."""
    dtype = getattr(torch, dtype_name(name, spec, device.type))
    assert isinstance(dtype, torch.dtype)
    return dtype


def release_unused(device: torch.device) -> None:
    """Frees the device memory of all unreachable objects."""
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class ModelLoader:
    """Loads one worker's part of a model: the constructor opens the files and plans, `load` reads the weights."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        split: Split = WHOLE_MODEL,
        collectives: Collectives = SINGLE_RANK,
        ranks_on_gpu: int = 1,
    ) -> None:
        """Raises StartupError if files or tensors are missing. Reads no weights.

        `ranks_on_gpu` workers share this worker's GPU, and divide the memory that the engine may use there. All of them
        must have created their CUDA contexts.
        """
        self._device, self._split, self._collectives = device, split, collectives
        self._ranks_on_gpu = ranks_on_gpu
        self._progress: Callable[[int, int], None] = lambda done, total: None
        self._decoder: Decoder | None = None
        if device.type == "cuda":
            torch.cuda.empty_cache()  # closed engines of this process leave memory that only torch counts as free
        self._memory = device_memory(device)
        self._reserved_before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        self._open(config)

    def _open(self, config: EngineConfig) -> None:
        """Opens the model's files, and plans what this worker loads."""
        self.files = find_model(config.model, config.weight_dtype, with_mtp=config.drafts_by_mtp)
        spec, device = self.files.spec, self._device
        self._pack_weights = config.pack_weights
        self._storage = kv_storage(config, spec)
        self.dtype = choose_dtype(config.dtype, spec, device)
        self._weights = open_weights(
            self.files,
            self.dtype,
            device,
            load_format=config.load_format,
            progress=self._report,
            ranks=self._split.size,
        )
        steps = estimated_steps(config, spec, self._split, device, self.dtype)
        self.plan = WorkerPlan(
            weights=plan_weights(spec, self._weights, self._storage, self._split, pack_weights=config.pack_weights),
            memory=self._memory,
            usable=usable_bytes(config, self._memory, device, steps, self._ranks_on_gpu),
            steps=steps,
            gpu=device.index or 0,
            ranks_on_gpu=self._ranks_on_gpu,
        )

    def load(self, progress: Callable[[int, int], None]) -> Decoder:
        """Reads the weights, unless they are loaded. `progress(done, total)` counts the bytes that are read."""
        if self._decoder is None:
            self._decoder = self._read_weights(progress)
        return self._decoder

    def _read_weights(self, progress: Callable[[int, int], None]) -> Decoder:
        self._progress = progress
        self._report(0)
        on_cpu = self._device.type == "cpu" and self.dtype == torch.float32
        if self._pack_weights and on_cpu and not packed.is_available():
            LOGGER.warning("torch %s cannot pack weights; small batches are slower", torch.__version__)
        decoder = Decoder(
            self.files.spec,
            self._weights,
            self._storage,
            self._split,
            self._collectives,
            pack_weights=self._pack_weights,
        )
        self._weights.finish()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # temporary tensors of loading would count as weights
        self._report(self.plan.weights.read_bytes)
        return decoder

    def drop_mtp(self, config: EngineConfig) -> None:
        """Releases the MTP layer of the loaded model, and plans as if it had never been loaded. The KV memory must have
        been released. `config` has no drafts. Reads no weights."""
        assert self._decoder is not None, "nothing is loaded"
        self._decoder.drop_mtp()
        release_unused(self._device)
        self._open(config)
        self._weights.finish()  # closes the files: nothing more is read

    def free_for_kv(self, measured_steps: int | None = None) -> int:
        """Returns how many bytes of the device KV may take. Called after `load`, it measures what the weights took.

        `measured_steps` replaces the estimated memory of steps. Unlike the estimate, it leaves out libraries and loaded
        kernels, so all memory that was taken since the start is subtracted.
        """
        on_gpu, steps = self._device.type == "cuda", self.plan.steps if measured_steps is None else measured_steps
        if on_gpu:
            torch.cuda.empty_cache()  # reading leaves memory that only torch counts as free
        if on_gpu and measured_steps is None:
            taken = torch.cuda.memory_reserved(self._device) - self._reserved_before
        else:
            taken = self.plan.memory.free - device_memory(self._device).free
        return max(0, self.plan.usable + self.plan.steps - steps - taken)

    def _report(self, done: int) -> None:
        total = self.plan.weights.read_bytes
        self._progress(min(done, total), total)
