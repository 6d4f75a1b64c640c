"""Configuration: frozen values whose fields are at once the keywords of `LLM` and the flags of the CLI."""

import difflib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal

from hotset.base.address import control_port
from hotset.base.errors import ConfigError

DTYPES = ("bfloat16", "float32", "float64")
TiersMode = Literal["auto", "off", "always"]
TiersChoice = Literal["auto", "resident", "tiered"]  # of one request
LandingChoice = Literal["auto", "host", "device"]  # of one request: where what a prefill worker computed arrives
EMBEDDED = "embedded"
# Of prefill and decode workers alone.
OF_WORKERS = ("control", "advertise", "handoff_secret", "transfer", "transfer_protocol", "staging_mib")
CHOICES = {
    "load_format": ("auto", "dummy"),
    "tiers": ("auto", "off", "always"),
    "kv_dtype": ("auto", "fp8"),
    "index_dtype": ("auto", "fp8"),
    "cuda_graphs": ("auto", "off"),
    "role": ("both", "prefill", "decode"),
    "transfer": ("nixl", "mooncake"),
    "transfer_protocol": (None, "tcp", "rdma"),
}


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine is told. What it measures at start-up makes another object (`KvBudget`)."""

    model: str = _setting(EMBEDDED, "Model directory, .gguf file, or 'embedded' for the small built-in chat model.")
    tokenizer: str | None = _setting(None, "Directory with a tokenizer.json. Default: the model's directory.")
    device: str | None = _setting(
        None, "Device to compute on: 'cpu', 'cuda' or 'cuda:N'. Default: the GPU if there is one, else the CPU."
    )
    dtype: str | None = _setting(
        None,
        "Data type: bfloat16, float32 or float64. Default: the checkpoint's on a GPU, float32 on a CPU.",
    )
    load_format: Literal["auto", "dummy"] = _setting(
        "auto", "'auto': read the checkpoint's weights; 'dummy': random weights, for which config.json is enough."
    )
    max_model_len: int | None = _setting(
        None, "Maximum context length, in tokens. Default: the model's own limit, or less if memory is short."
    )
    max_num_seqs: int = _setting(256, "Maximum number of requests that run at the same time.")
    max_num_batched_tokens: int = _setting(
        1024, "Maximum number of tokens computed in one step; longer prompts are prefilled in chunks."
    )
    page_rows: int = _setting(64, "Tokens in one page of the KV cache.")
    device_kv_gib: float | None = _setting(
        None, "Size of the KV cache on the device, in GiB. Default: measured at start-up."
    )
    device_kv_tokens: int | None = _setting(
        None, "Size of the KV cache on the device, in tokens; overrides --device-kv-gib."
    )
    host_kv_gib: float | None = _setting(
        None, "Size of the KV cache in host memory, in GiB. Default: measured at start-up."
    )
    host_kv_tokens: int | None = _setting(
        None, "Size of the KV cache in host memory, in tokens; overrides --host-kv-gib."
    )
    tiers: Literal["auto", "off", "always"] = _setting(
        "auto",
        "Where KV is stored. 'auto': all of it on the device while there is room, then only hot rows; "
        "'always': only hot rows on the device, the rest in host memory; 'off': no KV in host memory.",
    )
    hot_slots: int | None = _setting(
        None, "Hot rows that a tiered request keeps on the device, per layer. Default: twice the model's top-k."
    )
    kv_dtype: Literal["auto", "fp8"] = _setting(
        "auto", "Data type of KV rows. 'auto': as the model computes them; 'fp8': 8 bits a value, for less memory."
    )
    index_dtype: Literal["auto", "fp8"] = _setting(
        "auto", "Data type of index keys. 'auto': as the model computes them; 'fp8': 8 bits a value, for less memory."
    )
    plans_in_flight: int | None = _setting(
        None, "Maximum number of steps submitted at the same time. Default: 1 on a CPU, 2 on a GPU."
    )
    cuda_graphs: Literal["auto", "off"] = _setting(
        "auto", "'auto': decode steps on a GPU in bfloat16 are captured as CUDA graphs; 'off': no CUDA graphs."
    )
    tensor_parallel_size: int = _setting(
        1, "Tensor parallelism: number of workers that share the heads, experts and vocabulary of every layer."
    )
    pipeline_parallel_size: int = _setting(
        1, "Pipeline parallelism: number of stages that the layers are divided into."
    )
    pipeline_layers: str | None = _setting(
        None, "Number of layers in each pipeline stage, like 16,15. Default: stages of about equal size."
    )
    data_parallel_size: int = _setting(
        1, "Data parallelism: number of workers that each serve their own requests and share the experts."
    )
    role: Literal["both", "prefill", "decode"] = _setting(
        "both",
        "'both': compute prompts and answers here; 'prefill': compute prompts for decode workers; "
        "'decode': continue from prompts that prefill workers computed.",
    )
    control: str = _setting(
        "127.0.0.1:0", "Address on which a prefill or decode worker listens for its peers; port 0 picks a free port."
    )
    advertise: str | None = _setting(
        None,
        "Address at which peers reach --control, if it differs, like 10.0.0.1:0; port 0 means the port of --control.",
    )
    handoff_secret: str | None = _setting(
        None,
        "Secret shared by all workers; required unless --control is a loopback address. "
        "Default: the environment variable HOTSET_HANDOFF_SECRET.",
    )
    transfer: Literal["nixl", "mooncake"] = _setting("nixl", "Library that transfers KV between workers.")
    transfer_protocol: Literal["tcp", "rdma"] | None = _setting(
        None, "Protocol of --transfer mooncake. Default: tcp. NIXL chooses its own."
    )
    staging_mib: int = _setting(
        64, "Staging memory for handoffs between workers that split KV heads differently, in MiB; 0 disables staging."
    )
    seed: int | None = _setting(None, "Seed for requests that have none, for repeatable output. Default: random.")

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "page_rows",
            "device_kv_tokens",
            "host_kv_tokens",
            "hot_slots",
            "plans_in_flight",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "data_parallel_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{flag_name(name)} must be at least 1, got {value}")
        if self.staging_mib < 0:
            raise ConfigError(f"--staging-mib must be at least 0, got {self.staging_mib}")
        for name in ("device_kv_gib", "host_kv_gib"):
            gib = getattr(self, name)
            if gib is not None and not 0 < gib < float("inf"):
                raise ConfigError(f"--{flag_name(name)} must be above 0, got {gib}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(repr(choice) for choice in choices if choice is not None)
                raise ConfigError(f"--{flag_name(name)} must be one of {listed}, got {getattr(self, name)!r}")
        self._check_role()
        self._check_workers()
        if self.role == "prefill" and self.tiers == "off":
            raise ConfigError("--role prefill sends from the host store, and --tiers off makes none; leave that out")
        if self.tiers == "off":
            for name in ("host_kv_gib", "host_kv_tokens", "hot_slots"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"--{flag_name(name)} would have no effect with --tiers off; leave one of them out"
                    )

    @property
    def workers(self) -> int:
        """Processes that compute."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def stage_layers(self) -> tuple[int, ...] | None:
        """`pipeline_layers`, as numbers."""
        if self.pipeline_layers is None:
            return None
        try:
            return tuple(int(count) for count in self.pipeline_layers.split(","))
        except ValueError:
            wanted = "the layers of each stage, like 16,15"
            raise ConfigError(f"--pipeline-layers must be {wanted}, got {self.pipeline_layers!r}") from None

    def _check_workers(self) -> None:
        stages = self.pipeline_parallel_size
        if self.data_parallel_size > 1 and self.workers > self.data_parallel_size:
            raise ConfigError(
                f"--data-parallel-size {self.data_parallel_size} cannot be joined with tensor or pipeline parallelism "
                f"({self.tensor_parallel_size} and {stages}): every worker holds its requests whole; set those to 1"
            )
        if self.data_parallel_size > 1 and self.role == "prefill":
            raise ConfigError("--role prefill has no use for --data-parallel-size: start as many prefill workers")
        if (counts := self.stage_layers) is not None and len(counts) != stages:
            raise ConfigError(f"--pipeline-layers names {len(counts)} stages, --pipeline-parallel-size {stages}")
        if self.workers > 1 and self.role != "both" and self.tiers == "off":
            raise ConfigError(
                "several workers hand over by way of the host store, and --tiers off makes none; leave that out"
            )
        if self.workers > 1 and self.device is not None and ":" in self.device:
            raise ConfigError(f"--device {self.device} is one device, for {self.workers} workers; say 'cuda' or 'cpu'")

    def _check_role(self) -> None:
        if self.role == "both":
            for setting in fields(self):
                if setting.name in OF_WORKERS and getattr(self, setting.name) != setting.default:
                    flag = flag_name(setting.name)
                    raise ConfigError(f"--{flag} is for --role prefill and decode and has no effect here; leave it out")
            return
        control_port(self.control, self.advertise, self.handoff_secret)
        if self.transfer_protocol is not None and self.transfer != "mooncake":
            raise ConfigError("--transfer-protocol is for --transfer mooncake: NIXL chooses by itself; leave it out")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What the HTTP server is told."""

    host: str = _setting("127.0.0.1", "Address to listen on; 0.0.0.0 accepts connections from other machines.")
    port: int = _setting(8000, "Port to listen on; 0 picks a free one.")
    api_key: str | None = _setting(
        None,
        "Bearer token for /v1, /tokenize and /detokenize. Default: environment variable HOTSET_API_KEY, else no key.",
    )
    served_model_name: str | None = _setting(
        None, "Model name that clients send. Default: the name of the model's directory."
    )
    cors_origin: str | None = _setting(None, "Origin that browsers may call from, or '*' for any. Default: none.")
    max_body_mib: float = _setting(8.0, "Largest request body, in MiB; a larger one is answered with 413.")
    max_queue: int = _setting(
        1024, "Maximum number of choices that wait for their first token; further requests are answered with 429."
    )
    max_concurrency: int = _setting(
        4096, "Maximum number of completion requests in progress; further ones are answered with 429."
    )
    drain_seconds: float = _setting(30.0, "Time that running requests get to finish after SIGTERM.")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must lie in [0, 65535], got {self.port}")
        for name in ("max_body_mib", "max_queue", "max_concurrency", "drain_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"--{flag_name(name)} must be a finite number above 0, got {getattr(self, name)}")
        if self.api_key == "":
            raise ConfigError("--api-key must not be empty; leave it out to serve without a key")


def flag_name(field_name: str) -> str:
    """`device_kv_gib -> device-kv-gib`: the one rule that joins config fields and CLI flags."""
    return field_name.replace("_", "-")


def nearest(unknown: str, known: Iterable[str]) -> str | None:
    """Returns the known name that a misspelt one resembles most, or None if it resembles none of them."""
    plain = {name.replace("_", "-").lower(): name for name in known}
    matches = difflib.get_close_matches(unknown.replace("_", "-").lower(), plain, n=1)
    return plain[matches[0]] if matches else None


def check_setting_names(owner: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises ConfigError for the first name that is not known. The message suggests the nearest one that is."""
    unknown = next((name for name in names if name not in known), None)
    if unknown is None:
        return
    match = nearest(unknown, known)
    advice = f"did you mean {match!r}?" if match else f"the settings are {', '.join(known)}"
    raise ConfigError(f"{owner} has no setting {unknown!r}; {advice}")


def settings(config_type: type[EngineConfig] | type[ServeConfig]) -> tuple["Field[Any]", ...]:
    """The fields from which flags are made, each with its help under `metadata['help']`."""
    return fields(config_type)


def environment_defaults(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Settings that the environment supplies; the one place where Hotset reads it."""
    values = os.environ if environ is None else environ
    names = {"api_key": "HOTSET_API_KEY", "handoff_secret": "HOTSET_HANDOFF_SECRET"}
    return {setting: values[name] for setting, name in names.items() if values.get(name)}
