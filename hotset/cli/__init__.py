"""The `hotset` command. Heavy packages are imported only by the commands that need them, so `--help` is quick."""

import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset import __version__
from hotset.base.config import CHAT_SETTINGS, EngineConfig
from hotset.base.descriptors import raise_descriptor_limit
from hotset.base.engine_settings import EMBEDDED, MODEL_HELP
from hotset.base.errors import ConfigError, HotsetError
from hotset.base.flags import (
    EXIT_INTERRUPTED,
    SERVER_ONLY_SETTINGS,
    ApiKeyFile,
    CliCommand,
    CliGroup,
    config_values,
    with_flags,
    with_key_from_file,
)
from hotset.base.listeners import bound_socket, listening_address
from hotset.base.logs import print_note
from hotset.base.packages import check_packages
from hotset.base.parent_death import terminate_if_parent_dies
from hotset.base.sampling import SamplingParams
from hotset.base.serve_config import ServeConfig
from hotset.cli.terminal import CHAT_COMMANDS, CHAT_KEYS, Conversation, print_stream, read_stdin, typed_lines
from hotset.cli.top import add_top
from hotset.engine.local import open_llm
from hotset.fleet.cluster import command as cluster
from hotset.fleet.router.command import add_router
from hotset.lab.bench.command import add_bench
from hotset.lab.doctor.command import add_doctor
from hotset.lab.evaluate import command as evaluation
from hotset.lab.plan.command import add_plan
from hotset.lab.simulate.command import add_simulate

if TYPE_CHECKING:
    from hotset.engine.llm import LLM

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)

app = typer.Typer(
    name="hotset",
    cls=CliGroup,
    epilog="To start: [bold]hotset serve[/bold] runs an OpenAI-compatible server with a small built-in model, "
    "[bold]hotset chat[/bold] talks to that model in this terminal, and [bold]hotset info[/bold] shows this machine. "
    "[bold]hotset COMMAND --help[/bold] explains the flags of a command.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cluster.app, name="cluster")
app.add_typer(evaluation.app, name="eval")
add_bench(app)
add_top(app)
add_plan(app)
add_simulate(app)
add_doctor(app)

Temperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 always takes the most likely token. Default: the model's.")
]
TopP = Annotated[
    float | None,
    typer.Option(help="Sample from the most likely tokens with this total probability. Default: the model's."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


def main() -> None:
    """Runs the command line and exits with 0 on success, 1 on an error (one line on stderr), 2 on wrong usage, or 130
    after Ctrl-C.
    """
    terminate_if_parent_dies()
    try:
        with _complete_output():
            app()
    except HotsetError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)


@contextmanager
def _complete_output() -> Iterator[None]:
    """Writes everything that the block prints. Raises HotsetError if standard output does not take it."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:  # it is None if the shell has closed it (`>&-`)
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # at exit, Python writes again what is left
        raise HotsetError(f"cannot write the output: {error.strerror}") from None


def _show_version(requested: bool) -> None:
    if requested:
        print(f"hotset {__version__}")
        raise typer.Exit


@app.callback()
def hotset(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve sparse-attention language models, with most of the KV cache in host memory."""


@app.command(
    cls=CliCommand,
    epilog="Examples:\n\n"
    "[bold]hotset serve[/bold]  serves the built-in model at http://127.0.0.1:8000\n\n"
    "[bold]hotset serve /models/GLM-5.1 --host 0.0.0.0 --api-key-file key.txt[/bold]  serves a checkpoint to other "
    "machines\n\n"
    "[bold]hotset serve /models/GLM-5.1 --load-format dummy[/bold]  uses random weights, to test a configuration\n\n"
    "[bold]hotset serve /models/GLM-5.1 --disaggregate 1P1D --prefill-args '--tensor-parallel-size 4' --decode-args "
    "'--data-parallel-size 4'[/bold]  runs prefill and decode in separate engines, on 8 GPUs",
)
@with_flags(EngineConfig, ServeConfig, without=("model",))
def serve(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = EMBEDDED,
    disaggregate: Annotated[
        str | None,
        typer.Option(
            help="Start separate prefill and decode engines and a router on this machine. '2P1D' starts two prefill "
            "engines and one decode engine. Default: one engine does both.",
        ),
    ] = None,
    prefill_args: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FLAGS",
            help="Flags of the prefill engines, like '--tensor-parallel-size 4'. They replace flags that all engines "
            "share. Give it once for all prefill engines, or once for each.",
            show_default=False,
        ),
    ] = None,
    decode_args: Annotated[
        list[str] | None,
        typer.Option(metavar="FLAGS", help="Flags of the decode engines, in the same form.", show_default=False),
    ] = None,
    api_key_file: ApiKeyFile = None,
    **values: Any,
) -> None:
    """Serve a model over the OpenAI API (chat completions, completions, models)."""
    values = with_key_from_file(values, api_key_file)
    serve_config = ServeConfig(**config_values(ServeConfig, values))
    values["model"] = model
    if disaggregate is not None:
        from hotset.fleet.local.roles import serve_disaggregated

        role_args = prefill_args or (), decode_args or ()
        raise typer.Exit(serve_disaggregated(values, serve_config, disaggregate, *role_args))
    if prefill_args or decode_args:
        raise ConfigError("--prefill-args and --decode-args are for --disaggregate; add it, or leave them out")
    engine_config = EngineConfig(**config_values(EngineConfig, values))
    with _check_and_bind(engine_config, serve_config) as listener:
        from hotset.engine.process import EngineProcess

        raise_descriptor_limit()  # the engine inherits the limit
        process = EngineProcess(engine_config)  # loads the model while this process imports the server
        try:
            from hotset.serve.server import run
        except BaseException:
            process.end(0.0)
            raise
        run(engine_config, serve_config, process, listener)


def _check_and_bind(engine_config: EngineConfig, serve_config: ServeConfig) -> socket.socket:
    """Returns a socket that is bound to the server's address. Raises StartupError for mistakes that can be noticed
    before processes are started and torch is imported."""
    from hotset.engine.model_checks import check_model

    check_packages("server", "serve")
    check_model(engine_config)
    listener = bound_socket(serve_config.host, serve_config.port)
    try:
        for endpoint in engine_config.events_endpoints:
            endpoint.check_other(listening_address(listener), "--port")
    except ConfigError:
        listener.close()
        raise
    return listener


add_router(app)


@app.command(
    cls=CliCommand,
    epilog='Examples:\n\n[bold]hotset generate "The capital of France is" --temperature 0[/bold]\n\n'
    "[bold]cat notes.txt | hotset generate - --max-tokens 64 --json[/bold]",
)
# --seed is the request's seed here.
@with_flags(EngineConfig, without=("seed", *CHAT_SETTINGS, *SERVER_ONLY_SETTINGS))
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue, or '-' to read it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Maximum length of the continuation, in tokens.")] = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the sampling, for repeatable output. Default: random.")
    ] = None,
    as_json: AsJson = False,
    **values: Any,
) -> None:
    """Continue a text and stream the continuation to standard output."""
    options = _sampling_options(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = read_stdin() if prompt == "-" else prompt
    with open_llm(values) as llm:
        params = SamplingParams(**{**llm.defaults, **options})
        if as_json:
            _print_json(_generate_json(llm, text, params))
        elif print_stream(llm.stream(text, params)).finish_reason == "abort":
            raise typer.Exit(EXIT_INTERRUPTED)


def _generate_json(llm: "LLM", text: str, params: SamplingParams) -> dict[str, object]:
    request = llm.generate([text], params)[0]
    output = request.outputs[0]
    usage = {"prompt_tokens": len(request.prompt_token_ids), "completion_tokens": len(output.token_ids)}
    return {"prompt": text, "text": output.text, "finish_reason": output.finish_reason, "usage": usage}


@app.command(
    cls=CliCommand,
    epilog=f"In the chat, {CHAT_COMMANDS}; {CHAT_KEYS}.\n\n"
    'Example:\n\n[bold]hotset chat --system "Answer in French." --temperature 0[/bold]',
)
@with_flags(EngineConfig, without=SERVER_ONLY_SETTINGS)
def chat(
    system: Annotated[
        str | None, typer.Option(help="System message, which sets the model's behaviour. Default: none.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum length of an answer, in tokens. Default: what fits into the context.")
    ] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    **values: Any,
) -> None:
    """Talk to a model in this terminal."""
    options = _sampling_options(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    with open_llm(values) as llm:
        params = SamplingParams(**{**llm.defaults, "max_tokens": None, **options})
        if sys.stdin.isatty():
            print_note(f"{CHAT_COMMANDS}; {CHAT_KEYS}")
        Conversation(llm, params, system).run(typed_lines())


@app.command(cls=CliCommand)
def info(as_json: AsJson = False) -> None:
    """Show versions, devices, memory, and how to install optional packages that are missing."""
    from hotset.cli.machine import inspect_machine, print_machine

    machine = inspect_machine()
    if as_json:
        _print_json(asdict(machine))
    else:
        print_machine(machine)


def _sampling_options(**values: Any) -> dict[str, Any]:
    """Returns the sampling options that were given. Raises RequestError for an invalid one before the model loads."""
    options = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**options)
    return options


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
