"""The settings of an engine, without the checks of `EngineConfig`, and what follows from them."""

import json
from dataclasses import dataclass
from typing import Any, Literal

from hotset.base.address import EventsEndpoint, control_port, events_endpoints
from hotset.base.devices import parse_gpus
from hotset.base.errors import ConfigError
from hotset.base.listeners import transfer_interface
from hotset.base.settings import setting

CollectivesChoice = Literal["auto", "nccl"]
EMBEDDED = "embedded"
DEFAULT_STAGING_MIB = 256
MODEL_HELP = (
    "Model directory, .gguf file, name of a model that is in the Hugging Face cache, or 'embedded' for the small "
    "built-in chat model."
)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Every setting of an engine, with the help text and the limits of its flag. Properties raise ConfigError if a
    setting is invalid."""

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
    )
    load_format: Literal["auto", "dummy"] = setting(
        "auto",
        "'auto': read the checkpoint's weights; 'dummy': random weights, to measure speed; needs only config.json.",
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
        "Share of each GPU's memory that the engine may use, above 0 and up to 1. The KV cache gets what "
        "remains after weights and steps. Lower it if other programs use the GPU.",
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
        "--data-parallel-size, rank n uses this port plus n. Default: no events are published.",
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
    )
    index_dtype: Literal["auto", "fp8"] = setting(
        "auto",
        "Data type of index keys. 'auto': as the model computes them; 'fp8': 8 bits per value, to save memory.",
    )
    plans_in_flight: int | None = setting(
        None,
        "Maximum number of steps submitted at the same time. Default: 1 on a CPU, 2 on a GPU, at least one per "
        "pipeline stage.",
        minimum=1,
    )
    speculate: int | None = setting(
        None,
        "Speculative decoding: number of tokens to draft for each request and step; 0: none. Drafts change no token, "
        "except with --accept distribution. With more requests, fewer tokens are drafted. Default: 3 on a GPU, if the "
        "model has a layer for multi-token prediction and a measurement at start-up shows that drafts pay; else 0.",
        minimum=0,
    )
    speculate_by: Literal["mtp", "lookup"] = setting(
        "mtp",
        "How tokens are drafted. 'mtp': by the model's own layer for multi-token prediction. 'lookup': copied from "
        "what follows the newest tokens at another place in the prompt or answer.",
    )
    accept: Literal["exact", "distribution"] = setting(
        "exact",
        "Which drafts are accepted. 'exact': drafts that equal the token sampled at their position, so that drafts "
        "change no token. 'distribution': by rejection sampling, which changes tokens but not their probabilities, and "
        "accepts more drafts of requests with a high temperature.",
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
    )
    ray_address: str | None = setting(
        None,
        "Address of the head of the Ray cluster for --executor ray, like 10.0.0.1:6379. Default: the cluster of this "
        "machine, or the environment variable RAY_ADDRESS.",
    )
    gpus: str | None = setting(
        None,
        "Numbers of the GPUs that the workers use, like 0,1,2,3, among those that CUDA_VISIBLE_DEVICES leaves visible. "
        "Default: the first ones.",
    )
    ranks_per_gpu: int = setting(
        1,
        "Number of workers that share each GPU and its memory. More than 1 is for tests and small models, and is slow "
        "without the driver's multi-process service (nvidia-cuda-mps-control -d).",
        minimum=1,
    )
    collectives: Literal["auto", "nccl"] = setting(
        "auto",
        "How workers on GPUs exchange data within a step. 'auto': symmetric memory where GPUs can address each other, "
        "NCCL elsewhere; 'nccl': only NCCL, also between workers that share a GPU.",
    )
    role: Literal["both", "prefill", "decode"] = setting(
        "both",
        "'both': compute prompts and answers; 'prefill': compute prompts for decode workers; "
        "'decode': continue from prompts that prefill workers computed.",
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
        handoff_only=True,
    )
    staging_mib: int = setting(
        DEFAULT_STAGING_MIB,
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
    )

    @property
    def events_endpoints(self) -> list[EventsEndpoint]:
        """The addresses of each data parallel rank's KV events. Empty if no events are published."""
        ranks = self.data_parallel_size
        return events_endpoints(self.kv_events, self.kv_events_replay, public=self.kv_events_public, ranks=ranks)

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
    def max_drafts(self) -> int:
        """The number of tokens to draft for each request and step. While `speculate` is not set, this is 0: the
        engine chooses the default when it starts (`with_default_drafts`)."""
        return self.speculate or 0

    @property
    def drafts_by_mtp(self) -> bool:
        """Whether the model's MTP layer is loaded, and drafts tokens."""
        return self.max_drafts > 0 and self.speculate_by == "mtp"
