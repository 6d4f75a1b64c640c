"""Configuration of engines, and what is read from the environment. The fields of `EngineConfig` are keywords of `LLM`
and command-line flags."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from hotset.base.address import EventsEndpoint, control_port, events_endpoints
from hotset.base.devices import check_device_name, parse_gpus
from hotset.base.errors import ConfigError
from hotset.base.listeners import interface_addresses, transfer_interface
from hotset.base.settings import check_settings, flag_name, setting

TiersMode = Literal["auto", "off", "always"]
TiersChoice = Literal["auto", "resident", "tiered"]  # set by a request: where its KV is stored
LandingChoice = Literal["auto", "host", "device"]  # set by a request: where KV from a prefill worker arrives
EMBEDDED = "embedded"
MODEL_HELP = (
    "Model directory, .gguf file, name of a model that is in the Hugging Face cache, or 'embedded' for the small "
    "built-in chat model."
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine. `KvBudget` holds the sizes that are measured at start-up."""

    model: str = setting(EMBEDDED, MODEL_HELP)
    tokenizer: str | None = setting(
        None, "Directory with a tokenizer.json, if the model has none. Default: the model's directory."
    )
    device: str | None = setting(
        None,
        "Device to compute on: 'cpu', 'cuda' or 'cuda:N'. Default: the GPU if there is a usable one, else the CPU.",
    )
    dtype: str | None = setting(
        None,
        "Data type: bfloat16, float32 or float64. Default: on a GPU the checkpoint's (bfloat16 instead of float16), "
        "on a CPU float32. Choose float64 to compare implementations.",
        choices=("bfloat16", "float32", "float64"),
    )
    weight_dtype: Literal["auto", "bfloat16"] = setting(
        "auto",
        "Data type of weights that the checkpoint stores in fp8. 'auto': they stay in fp8; 'bfloat16': they are "
        "expanded to --dtype when they are loaded, which takes at least twice the memory.",
        choices=("auto", "bfloat16"),
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto",
        "'auto': read the checkpoint's weights; 'dummy': random weights, to measure speed; needs only config.json.",
        choices=("auto", "dummy"),
    )
    pack_weights: bool = setting(
        True,
        "On a CPU in float32, keep a second copy of the weights of linear layers, packed for small batches. It makes "
        "decoding several requests faster and nearly doubles the memory of the weights. Without effect elsewhere.",
    )
    max_model_len: int | None = setting(
        None,
        "Maximum context length, in tokens. Default: the model's own limit, or less if memory is short. "
        "If it is set and memory cannot hold such a context, the engine does not start.",
        minimum=1,
    )
    max_num_seqs: int = setting(
        256,
        "Maximum number of requests that run at the same time. Raise it for more throughput with short contexts.",
        minimum=1,
    )
    max_num_batched_tokens: int = setting(
        1024,
        "Maximum number of tokens computed in one step; longer prompts are prefilled in chunks. "
        "Raise it for faster prompts, lower it for smoother streams.",
        minimum=1,
    )
    page_rows: int = setting(
        64, "Tokens in one page of the KV cache. Smaller pages waste less memory on short contexts.", minimum=1
    )
    gpu_memory_utilization: float = setting(
        0.92,
        "Share of each GPU's memory that the engine may use, above 0 and up to 1. The KV cache gets what weights and "
        "steps leave of it. Lower it if other programs use the GPU.",
        minimum=0,
        maximum=1,
        positive=True,
    )
    device_kv_gib: float | None = setting(
        None,
        "Size of the KV cache on the device, in GiB. Default: measured at start-up. "
        "Set it if other programs use the device.",
        positive=True,
    )
    device_kv_tokens: int | None = setting(
        None, "Size of the KV cache on the device, in tokens; overrides --device-kv-gib.", minimum=1
    )
    host_kv_gib: float | None = setting(
        None,
        "Size of the KV cache in host memory, in GiB. Default: measured at start-up. "
        "Raise it for more or longer contexts.",
        positive=True,
    )
    host_kv_tokens: int | None = setting(
        None, "Size of the KV cache in host memory, in tokens; overrides --host-kv-gib.", minimum=1
    )
    tiers: Literal["auto", "off", "always"] = setting(
        "auto",
        "Where KV is stored. 'auto': all of it on the device while there is room, then only hot rows; "
        "'always': only hot rows on the device, the rest in host memory; 'off': no KV in host memory.",
        choices=("auto", "off", "always"),
    )
    prefix_cache: bool = setting(
        True,
        "Keep the KV of ended requests in host memory until that memory is needed, so that a prompt that begins like "
        "an earlier one is not computed again. Without effect with --tiers off, which keeps no KV in host memory.",
    )
    kv_events: str | None = setting(
        None,
        "Address at which changes of the prefix cache are published in vLLM's format of KV events, like "
        "tcp://127.0.0.1:5557; port 0 picks a free port. The events contain the tokens of all prompts. With "
        "--data-parallel-size, rank n uses the port that is n higher. Default: none are published.",
    )
    kv_events_replay: str | None = setting(
        None,
        "Address at which subscribers request KV events that they have missed, like tcp://127.0.0.1:5558. Needs "
        "--kv-events. Default: none.",
    )
    kv_events_topic: str = setting("", "Topic of KV events. llm-d expects kv@POD@MODEL. Default: an empty topic.")
    kv_events_public: bool = setting(
        False,
        "Allow addresses of KV events that other machines can reach. Everyone who can connect can then read the tokens "
        "of all prompts.",
    )
    hot_slots: int | None = setting(
        None,
        "Hot rows that a tiered request keeps on the device, per layer. Default: twice the model's top-k. "
        "More slots mean fewer copies from the host, and fewer requests on the device.",
        minimum=1,
    )
    kv_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        "Data type of KV rows. 'auto': as the model computes them; 'fp8': 8 bits per value, to save memory.",
        choices=("auto", "fp8"),
    )
    index_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        "Data type of index keys. 'auto': as the model computes them; 'fp8': 8 bits per value, to save memory.",
        choices=("auto", "fp8"),
    )
    plans_in_flight: int | None = setting(
        None,
        "Maximum number of steps submitted at the same time. Default: 1 on a CPU, 2 on a GPU, at least one per "
        "pipeline stage.",
        minimum=1,
    )
    speculate: int = setting(
        0,
        "Speculative decoding: number of tokens to draft for each request and step; 0: none. Drafts change no token. "
        "With more requests, fewer tokens are drafted.",
        minimum=0,
    )
    speculate_by: Literal["mtp", "lookup"] = setting(
        "mtp",
        "How tokens are drafted. 'mtp': by the model's own layer for multi-token prediction. 'lookup': as they follow "
        "the newest tokens elsewhere in the prompt or answer.",
        choices=("mtp", "lookup"),
    )
    step_timeout: float = setting(
        60.0,
        "Time without a sign of life after which a process of the engine counts as stopped, in seconds. A step that "
        "finishes no layer for this time, plus 5 s, plus the longest time that a layer took in the last 100 steps, "
        "counts as hung; the first step, which compiles kernels, has 600 s more. The server then fails its requests "
        "and exits with 1.",
        minimum=1,
        positive=True,
    )
    cuda_graphs: Literal["auto", "off"] = setting(
        "auto",
        "'auto': on GPUs in bfloat16, decode steps are captured as CUDA graphs, which also compute short prompts; "
        "'off': no CUDA graphs, for a faster start or for profiling.",
        choices=("auto", "off"),
    )
    tensor_parallel_size: int = setting(
        1,
        "Tensor parallelism: number of workers that share the heads, experts and vocabulary of every layer. "
        "Raise it if the model does not fit on one GPU, or for lower latency.",
        minimum=1,
    )
    pipeline_parallel_size: int = setting(
        1,
        "Pipeline parallelism: number of stages that the layers are divided into. Raise it if the model does not fit "
        "on one GPU and the links between GPUs are slow.",
        minimum=1,
    )
    pipeline_layers: str | None = setting(
        None, "Number of layers in each pipeline stage, like 16,15. Default: stages of about equal size."
    )
    data_parallel_size: int = setting(
        1,
        "Data parallelism: number of workers that each serve their own requests and share the experts. "
        "Raise it for more throughput with a mixture-of-experts model.",
        minimum=1,
    )
    executor: Literal["processes", "ray"] = setting(
        "processes",
        "Where the workers run. 'processes': all of them on this machine; 'ray': on the nodes of the Ray cluster that "
        "this machine belongs to (pip install 'hotset[cluster]').",
        choices=("processes", "ray"),
    )
    ray_address: str | None = setting(
        None,
        "Address of the head of the Ray cluster for --executor ray, like 10.0.0.1:6379. Default: the cluster of this "
        "machine, or the environment variable RAY_ADDRESS.",
    )
    gpus: str | None = setting(
        None,
        "Numbers of the GPUs that the workers use, like 0,1,2,3, among those that CUDA_VISIBLE_DEVICES leaves. "
        "Default: the first ones.",
    )
    ranks_per_gpu: int = setting(
        1,
        "Number of workers that share each GPU and its memory. More than 1 is for tests and small models, and is slow "
        "without the driver's multi-process service (nvidia-cuda-mps-control -d).",
        minimum=1,
    )
    role: Literal["both", "prefill", "decode"] = setting(
        "both",
        "'both': compute prompts and answers; 'prefill': compute prompts for decode workers; "
        "'decode': continue from prompts that prefill workers computed.",
        choices=("both", "prefill", "decode"),
    )
    control: str = setting(
        "127.0.0.1:0",
        "Address on which a prefill or decode worker listens for its peers; port 0 picks a free port. "
        "Set it if peers are on other machines.",
        handoff_only=True,
    )
    advertise: str | None = setting(
        None,
        "Address at which peers reach this worker, if it differs from --control, like 10.0.0.1:0. Port 0 means the "
        "port of --control.",
        handoff_only=True,
    )
    handoff_secret: str | None = setting(
        None,
        "Secret shared by all workers; required unless --control is a loopback address. "
        "Default: the environment variable HOTSET_HANDOFF_SECRET.",
        handoff_only=True,
    )
    transfer: Literal["nixl", "mooncake"] = setting(
        "nixl",
        "Library that transfers KV between workers. All workers must use the same one.",
        choices=("nixl", "mooncake"),
        handoff_only=True,
    )
    transfer_interface: str | None = setting(
        None,
        "Network interface on which the transfer engine listens, like eth0, or RDMA device, like mlx5_0:1. Default: lo "
        "if --control is a loopback address; required otherwise. Every program that can reach it can "
        "write to the memory of the worker, so choose a network in which you trust every machine.",
        handoff_only=True,
    )
    transfer_protocol: Literal["tcp", "rdma"] | None = setting(
        None,
        "Protocol of --transfer mooncake. Default: tcp. Choose rdma if the machines support it. NIXL chooses its "
        "protocol itself.",
        choices=("tcp", "rdma"),
        handoff_only=True,
    )
    staging_mib: int = setting(
        64,
        "Staging memory for handoffs between workers that split KV heads differently, in MiB; 0 disables staging.",
        minimum=0,
        handoff_only=True,
    )
    extend_locally: int = setting(
        1024,
        "A decode worker that has the beginning of a prompt in its prefix cache computes the rest itself, without a "
        "prefill worker, if the rest has at most this many tokens; 0: never.",
        minimum=0,
        handoff_only=True,
    )
    seed: int | None = setting(None, "Seed for requests without a seed, for repeatable output. Default: random.")
    chat_template: str | None = setting(
        None, "File with a Jinja chat template. Default: the model's own, or the built-in one for its architecture."
    )
    default_chat_template_kwargs: str | None = setting(
        None,
        "JSON object with variables for the chat template, like '{\"enable_thinking\": false}'. Requests can override "
        "them with chat_template_kwargs.",
    )
    reasoning_parser: Literal["auto", "think", "none"] = setting(
        "auto",
        "How reasoning is separated from an answer. 'think': at <think> and </think>; 'none': not at all; "
        "'auto': like 'think' if the tokenizer has these two as tokens.",
        choices=("auto", "think", "none"),
    )

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
        if self.speculate_by == "lookup" and self.speculate == 0:
            raise ConfigError(f"--speculate-by {self.speculate_by} needs --speculate N, the number of tokens to draft")
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

    @property
    def events_endpoints(self) -> list[EventsEndpoint]:
        """The addresses of each data parallel rank's KV events. Empty if none are published."""
        ranks = self.data_parallel_size
        return events_endpoints(self.kv_events, self.kv_events_replay, public=self.kv_events_public, ranks=ranks)

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

    @property
    def workers(self) -> int:
        """The number of workers that compute each step together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def split_name(self) -> str:
        """How the model is divided over workers, like 'TP2 x PP4'. Empty with one worker."""
        sizes = (
            ("TP", self.tensor_parallel_size),
            ("PP", self.pipeline_parallel_size),
            ("DP", self.data_parallel_size),
        )
        return " x ".join(f"{name}{size}" for name, size in sizes if size > 1)

    @property
    def gpu_numbers(self) -> tuple[int, ...] | None:
        """The numbers in `gpus`; None if that is not set."""
        return None if self.gpus is None else parse_gpus(self.gpus)

    @property
    def chat_template_variables(self) -> dict[str, Any]:
        """The variables in `default_chat_template_kwargs`."""
        text = self.default_chat_template_kwargs or "{}"
        try:
            variables = json.loads(text)
        except (ValueError, RecursionError):
            variables = None
        if not isinstance(variables, dict):
            raise ConfigError(f"--default-chat-template-kwargs must be a JSON object, got {text!r}")
        return variables

    @property
    def listening_interface(self) -> str:
        """The interface on which the transfer engine of a prefill or decode worker listens."""
        control = control_port(self.control, self.advertise, self.handoff_secret)
        return transfer_interface(control, self.transfer_interface, self.handoff_secret)

    @property
    def stage_layers(self) -> tuple[int, ...] | None:
        """The number of layers in each pipeline stage, read from `pipeline_layers`; None if that is not set."""
        if self.pipeline_layers is None:
            return None
        try:
            return tuple(int(count) for count in self.pipeline_layers.split(","))
        except ValueError:
            raise ConfigError(
                f"--pipeline-layers must be the number of layers in each stage, like 16,15, got "
                f"{self.pipeline_layers!r}"
            ) from None

    @property
    def drafts_by_mtp(self) -> bool:
        """Whether the model's MTP layer is loaded, and drafts tokens."""
        return self.speculate > 0 and self.speculate_by == "mtp"

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
                "--role prefill does not support --data-parallel-size; start several prefill engines instead, like 2P1D"
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
        """Checks what can be known without looking at the machine."""
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
# Settings that must be the same for all engines behind one router, or that the program that starts the engines chooses.
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


def environment_defaults(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns the settings that environment variables supply. No other function reads settings from the environment."""
    values = os.environ if environ is None else environ
    names = {"api_key": "HOTSET_API_KEY", "handoff_secret": "HOTSET_HANDOFF_SECRET"}
    return {setting: values[name] for setting, name in names.items() if values.get(name)}


def hub_cache(environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder in which Hugging Face's tools keep the models that they download."""
    values = os.environ if environ is None else environ
    home = values.get("HF_HOME") or os.path.join(values.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = values.get("HF_HUB_CACHE") or values.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(cache)).expanduser()
