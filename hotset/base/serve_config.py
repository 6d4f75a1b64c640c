"""Configuration of HTTP servers. The fields of `ServeConfig` are flags of `hotset serve`."""

import re
from dataclasses import dataclass
from typing import Literal

from hotset.base.errors import ConfigError
from hotset.base.settings import check_settings, setting

MIN_CONNECTIONS = 8
OTLP_URL = re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The settings that servers and routers share."""

    host: str = setting("127.0.0.1", "Address to listen on. Use 0.0.0.0 to accept connections from other machines.")
    port: int = setting(8000, "Port to listen on; 0 picks a free one.", minimum=0, maximum=65535)
    api_key: str | None = setting(
        None,
        "Bearer token for /v1, /tokenize and /detokenize. Other users of this machine can see the flag; prefer "
        "--api-key-file or the environment variable HOTSET_API_KEY. Default: no key is required.",
    )
    cors_origin: str | None = setting(
        None, "Origin whose pages may call the server from a browser, or '*' for any. Default: none."
    )
    page: bool = setting(True, "Serve the live page at / and its data at /live, which `hotset top` shows too.")
    max_body_mib: float = setting(
        8.0, "Largest request body, in MiB; a larger one is answered with 413.", positive=True
    )
    max_concurrency: int = setting(
        4096,
        "Maximum number of completion requests in progress; further ones are answered with 429.",
        positive=True,
    )
    max_connections: int = setting(
        8192,
        "Maximum number of open connections. At the limit, a new connection replaces the one that has been idle for "
        "longest. Lowered at start-up if the limit of open files is too low.",
        minimum=MIN_CONNECTIONS,
    )
    receive_timeout_seconds: float = setting(
        60.0,
        "Time for a client to send the headers of a request, and again for its body, in seconds; then 408.",
        positive=True,
    )
    send_timeout_seconds: float = setting(
        60.0,
        "Time for a client that reads nothing of its response, in seconds; then the connection is closed.",
        positive=True,
    )
    drain_seconds: float = setting(
        30.0, "Time for running requests to finish after SIGTERM, in seconds.", positive=True
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.api_key == "":
            raise ConfigError("--api-key must not be empty; leave it out to serve without a key")


@dataclass(frozen=True, slots=True)
class ServeConfig(HttpSettings):
    """The settings of the HTTP server."""

    served_model_name: str | None = setting(
        None, "Model name that clients send. Default: the name of the model's directory or file."
    )
    tool_format: Literal["auto", "deepseek_v32", "glm", "llama3", "qwen3", "qwen3_coder", "none"] = setting(
        "auto",
        "How the model writes tool calls. 'qwen3': JSON between <tool_call> and </tool_call>, also Hermes; "
        "'qwen3_coder': <function=…> within these; 'glm': <arg_key> and <arg_value> within these; 'deepseek_v32': "
        "<｜DSML｜invoke …>; 'llama3': JSON, also after <|python_tag|>; 'none': tools are refused; 'auto': the format "
        "that the chat template shows, else that of 'qwen3', with the tools described in the system message.",
    )
    otlp: str | None = setting(
        None,
        "Address of an OpenTelemetry collector (OTLP over HTTP, like http://localhost:4318) that gets a trace of every "
        "request. Default: none.",
    )
    max_queue: int = setting(
        1024,
        "Maximum number of choices that wait for their first token; further requests are answered with 429.",
        positive=True,
    )

    def __post_init__(self) -> None:
        HttpSettings.__post_init__(self)
        if self.otlp is not None and not OTLP_URL.fullmatch(self.otlp):
            raise ConfigError(f"--otlp takes the address of a collector, like http://localhost:4318, got {self.otlp!r}")
