"""Configuration of engines, and what is read from the environment. The fields of `EngineConfig` are keywords of `LLM`
and command-line flags."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from hotset.base.address import control_port
from hotset.base.devices import check_device_name
from hotset.base.engine_settings import DEFAULT_STAGING_MIB, EngineSettings
from hotset.base.errors import ConfigError
from hotset.base.listeners import interface_addresses
from hotset.base.settings import check_settings, flag_name

TiersMode = Literal["auto", "off", "always"]


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineSettings):
    """The settings of an engine, checked for contradictions. `KvBudget` holds what is measured at start-up."""

    def __post_init__(self) -> None:
        check_settings(self)
        if self.device is not None:
            check_device_name(self.device)
        _ = self.chat_template_variables  # raises ConfigError if they are invalid
        self._check_role()
        self._check_workers()
        self._check_gpus()
        self._check_executor()
        self._check_events()
        if self.speculate_by == "lookup" and not self.max_drafts:
            raise ConfigError(f"--speculate-by {self.speculate_by} needs --speculate N, the number of tokens to draft")
        if self.accept == "distribution" and not self.drafts_by_mtp:
            raise ConfigError(
                "--accept distribution is for drafts of the model's MTP layer: add --speculate N without "
                "--speculate-by lookup, whose drafts are not drawn from a distribution"
            )
        if self.role == "prefill" and self.tiers == "off":
            raise ConfigError(
                "--role prefill sends KV from the host store, which --tiers off disables; leave --tiers out"
            )
        if self.tiers == "off":
            for name in ("host_kv_gib", "host_kv_tokens", "hot_slots"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"--{flag_name(name)} would have no effect with --tiers off; leave one of the two out"
                    )

    def _check_events(self) -> None:
        for name in ("kv_events_replay", "kv_events_topic", "kv_events_public"):
            if self.kv_events is None and getattr(self, name):
                raise ConfigError(f"--{flag_name(name)} needs --kv-events; give an address, or leave it out")
        control = control_port(self.control, self.advertise, self.handoff_secret).listen
        for endpoint in self.events_endpoints:  # raises ConfigError if they are invalid
            endpoint.check_other(control, "--control")
        if self.kv_events is not None and (not self.prefix_cache or self.tiers == "off"):
            flag = "--tiers off" if self.tiers == "off" else "--no-prefix-cache"
            raise ConfigError(
                f"--kv-events publishes the prefix cache, which {flag} disables; leave one of the two out"
            )

    def _check_workers(self) -> None:
        stages = self.pipeline_parallel_size
        if self.data_parallel_size > 1 and self.workers > self.data_parallel_size:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} cannot be combined with tensor or pipeline "
                f"parallelism ({self.tensor_parallel_size} and {stages}), because every worker computes all layers of "
                "its own requests; set the other two to 1"
            )
        if self.data_parallel_size > 1 and self.role == "prefill":
            raise ConfigError(
                "--role prefill does not support --data-parallel-size; use --pipeline-parallel-size, whose stages "
                "compute chunks of a prompt at the same time, or start several prefill engines, like 2P1D"
            )
        if (counts := self.stage_layers) is not None and len(counts) != stages:
            raise ConfigError(
                f"--pipeline-layers has {len(counts)} stages, but --pipeline-parallel-size is {stages}; make them equal"
            )
        if self.workers > 1 and self.role != "both" and self.tiers == "off":
            raise ConfigError(
                "an engine with several workers hands KV over through the host store, which --tiers off disables; "
                "leave --tiers out"
            )
        if self.workers > 1 and self.device is not None and ":" in self.device:
            raise ConfigError(
                f"--device {self.device} is a single device, but there are {self.workers} workers; use 'cuda' or 'cpu'"
            )

    def _check_gpus(self) -> None:
        """Checks the settings for GPUs. Whether the machine has these GPUs is checked later."""
        for flag, is_set in (("--gpus", self.gpus is not None), ("--ranks-per-gpu", self.ranks_per_gpu > 1)):
            if is_set and self.device not in (None, "cuda"):
                raise ConfigError(
                    f"{flag} chooses among all GPUs, but --device is {self.device}; leave one of them out"
                )
        if self.workers % self.ranks_per_gpu:
            fitting = [size for size in range(1, self.workers + 1) if self.workers % size == 0]
            raise ConfigError(
                f"--ranks-per-gpu {self.ranks_per_gpu} does not divide the number of workers, {self.workers}; use "
                f"{' or '.join(map(str, fitting))}"
            )
        _ = self.gpu_numbers  # raises ConfigError if they are invalid

    def _check_executor(self) -> None:
        if self.executor != "ray":
            if self.ray_address is not None:
                raise ConfigError("--ray-address is for --executor ray; leave it out, or add --executor ray")
            return
        if self.workers == 1:
            raise ConfigError(
                "--executor ray divides a model over workers, but there is only one; set --tensor-parallel-size, "
                "--pipeline-parallel-size or --data-parallel-size, or leave --executor out"
            )
        if self.gpus is not None or self.ranks_per_gpu > 1:
            raise ConfigError(
                "--gpus and --ranks-per-gpu are for --executor processes: Ray assigns a GPU to each worker"
            )
        if self.role != "both" and self.transfer != "nixl":
            raise ConfigError(
                f"--role {self.role} with --executor ray needs --transfer nixl: workers on several nodes have endpoints"
            )
        if self.role != "both" and self.staging_mib not in (0, DEFAULT_STAGING_MIB):
            raise ConfigError(
                "--staging-mib is for --executor processes: contexts of workers on several nodes are not staged but "
                "written directly; leave it out"
            )

    def _check_role(self) -> None:
        if self.role == "both":
            for declared in fields(self):
                if declared.metadata["handoff_only"] and getattr(self, declared.name) != declared.default:
                    flag = flag_name(declared.name)
                    raise ConfigError(f"--{flag} is for --role prefill and decode; leave it out with --role both")
            return
        interface = self.listening_interface
        if self.transfer == "mooncake" and interface not in interface_addresses():
            raise ConfigError(
                f"--transfer mooncake listens on a network interface, and {interface!r} is none of this machine's; "
                "give --transfer-interface an interface (Mooncake finds RDMA devices itself)"
            )
        if self.transfer_protocol is not None and self.transfer != "mooncake":
            raise ConfigError(
                "--transfer-protocol is for --transfer mooncake; NIXL chooses its protocol itself; leave it out"
            )


# The settings that only prefill and decode workers have.
HANDOFF_SETTINGS = tuple(declared.name for declared in fields(EngineConfig) if declared.metadata["handoff_only"])
# Settings that have no effect outside a chat.
CHAT_SETTINGS = ("chat_template", "default_chat_template_kwargs", "reasoning_parser")
# Settings that the engines behind one router cannot choose separately: they must be the same for all engines, or the
# program that starts the engines sets them.
COMMON_SETTINGS = (
    "model",
    "tokenizer",
    "dtype",
    "load_format",
    "kv_dtype",
    "index_dtype",
    "role",
    "control",
    "advertise",
    "handoff_secret",
    "transfer",
    "transfer_interface",
    "transfer_protocol",
    *CHAT_SETTINGS,
)
EVENT_SETTINGS = tuple(declared.name for declared in fields(EngineConfig) if declared.name.startswith("kv_events"))


def environment_defaults() -> dict[str, Any]:
    """Returns the settings that environment variables supply. No other function reads settings from the environment."""
    names = {"api_key": "HOTSET_API_KEY", "handoff_secret": "HOTSET_HANDOFF_SECRET"}
    return {setting: os.environ[name] for setting, name in names.items() if os.environ.get(name)}


def hub_cache() -> Path:
    """Returns the folder in which Hugging Face's tools keep the models that they download."""
    values = os.environ
    home = values.get("HF_HOME") or os.path.join(values.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = values.get("HF_HUB_CACHE") or values.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(cache)).expanduser()
