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

    model: str = _setting(
        EMBEDDED, "Model directory, .gguf file, or 'embedded' for the small chat model that ships along."
    )
    tokenizer: str | None = _setting(None, "Directory with tokenizer.json, where the model's own has none.")
    device: str | None = _setting(None, "'cpu', 'cuda' or 'cuda:N'. Default: the GPU if there is one.")
    dtype: str | None = _setting(
        None, "bfloat16, float32 or float64. Default: the checkpoint's on a GPU, float32 on a CPU."
    )
    load_format: Literal["auto", "dummy"] = _setting("auto", "'dummy': random weights from config.json alone.")
    max_model_len: int | None = _setting(
        None, "Longest context in tokens. Default: what the model was made for, if memory holds it."
    )
    max_num_seqs: int = _setting(256, "Most requests that run at once.")
    max_num_batched_tokens: int = _setting(
        1024, "Most tokens computed in one step; longer prompts are prefilled in chunks."
    )
    page_rows: int = _setting(64, "Rows (tokens) in one page of KV.")
    device_kv_gib: float | None = _setting(None, "KV memory on the device, in GiB. Default: measured.")
    device_kv_tokens: int | None = _setting(None, "KV memory on the device, in tokens; overrides --device-kv-gib.")
    host_kv_gib: float | None = _setting(None, "KV memory of the host store, in GiB. Default: measured.")
    host_kv_tokens: int | None = _setting(None, "KV memory of the host store, in tokens; overrides --host-kv-gib.")
    tiers: Literal["auto", "off", "always"] = _setting(
        "auto",
        "'auto': on the device while there is room, then hot rows only; 'always': hot rows only; 'off': no host store.",
    )
    hot_slots: int | None = _setting(None, "Rows that a tiered request keeps on the device. Default: twice its top-k.")
    kv_dtype: Literal["auto", "fp8"] = _setting("auto", "How rows are stored: as the model computes, or in fp8.")
    index_dtype: Literal["auto", "fp8"] = _setting("auto", "How index keys are stored: likewise.")
    plans_in_flight: int | None = _setting(
        None, "Steps submitted ahead of their results. Default: 1 on a CPU, 2 on a GPU."
    )
    cuda_graphs: Literal["auto", "off"] = _setting(
        "auto", "'auto': on a GPU, in bfloat16, steps that only decode are captured once and replayed; 'off': never."
    )
    tensor_parallel_size: int = _setting(
        1, "Workers among which the heads, experts and vocabulary of every layer are divided."
    )
    pipeline_parallel_size: int = _setting(1, "Stages, one after another, among which the layers are divided.")
    pipeline_layers: str | None = _setting(None, "Layers of each stage, like 16,15. Default: of about equal weight.")
    data_parallel_size: int = _setting(
        1, "Workers that each hold some requests whole; the experts are divided among them."
    )
    role: Literal["both", "prefill", "decode"] = _setting(
        "both", "'prefill': computes prompts for decode workers; 'decode': takes over from prefill workers."
    )
    control: str = _setting(
        "127.0.0.1:0", "Where a prefill or decode worker talks to its peers; port 0 picks a free one."
    )
    advertise: str | None = _setting(
        None, "Where peers reach --control, if that is another address, like 10.0.0.1:0; port 0 is that of --control."
    )
    handoff_secret: str | None = _setting(
        None, "Shared by all workers; needed where --control is not on this machine (or set HOTSET_HANDOFF_SECRET)."
    )
    transfer: Literal["nixl", "mooncake"] = _setting("nixl", "What moves KV between workers.")
    transfer_protocol: Literal["tcp", "rdma"] | None = _setting(
        None, "What Mooncake moves it by. Default: tcp. NIXL chooses by itself."
    )
    staging_mib: int = _setting(
        64, "Memory through which KV travels packed where peers divide its heads otherwise, in MiB; 0: never packed."
    )
    seed: int | None = _setting(None, "Makes the seeds of requests that bring none repeatable.")

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

    host: str = _setting("127.0.0.1", "Address to listen on.")
    port: int = _setting(8000, "Port to listen on; 0 picks a free one.")
    api_key: str | None = _setting(None, "Bearer token for /v1, /tokenize and /detokenize (or set HOTSET_API_KEY).")
    served_model_name: str | None = _setting(None, "Name clients use for the model. Default: the directory's name.")
    cors_origin: str | None = _setting(None, "Origin that browsers may call from, or '*'. Default: none.")
    max_body_mib: float = _setting(8.0, "Largest request body.")
    max_queue: int = _setting(1024, "Most choices without a first token yet; further requests get 429.")
    max_concurrency: int = _setting(4096, "Most generating requests handled at once; further ones get 429.")
    drain_seconds: float = _setting(30.0, "How long SIGTERM lets running requests finish.")

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
