"""The `hotset` command. Nothing heavy is imported before a command needs it: `--help` does not wait for torch."""

import json
import secrets
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotset import __version__
from hotset.base.config import EMBEDDED, EngineConfig, ServeConfig
from hotset.base.errors import ConfigError, HotsetError, MissingDependency
from hotset.base.sampling import SamplingParams
from hotset.cli import evaluation
from hotset.cli.conversation import COMMANDS, KEYS, Conversation
from hotset.cli.flags import OF_SERVERS, Command, CommandGroup, RouterCommand, given, with_flags
from hotset.cli.machine import examine, print_machine
from hotset.cli.terminal import print_stream, read_stdin, remark, typed_lines
from hotset.serve.router.config import RouterConfig

if TYPE_CHECKING:
    from hotset.engine.llm import LLM

SERVE_PACKAGES = {"aiohttp", "fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn", "yarl"}
INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C ended

app = typer.Typer(
    name="hotset",
    cls=CommandGroup,
    epilog="Start here: [bold]hotset serve[/bold] (an OpenAI-compatible server with a small model that ships along), "
    "[bold]hotset chat[/bold] (talk to that model in this terminal), [bold]hotset info[/bold] (what this machine has).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(evaluation.app, name="eval")

Temperature = Annotated[float | None, typer.Option(help="0 picks the likeliest token. Default: the model's own.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this total probability.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def main() -> None:
    """Runs the command line and exits: 0 done, 1 refused or failed (one line on stderr), 2 wrong usage, 130 Ctrl-C."""
    try:
        app()
    except HotsetError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hotset {__version__}")
        raise typer.Exit


@app.callback()
def hotset(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Hotset serves sparse-attention language models."""


@app.command(
    cls=Command,
    epilog="[bold]hotset serve[/bold]  the embedded model, on http://127.0.0.1:8000\n\n"
    "[bold]hotset serve /models/GLM-5.1 --host 0.0.0.0 --api-key KEY[/bold]  a checkpoint, for other machines too\n\n"
    "[bold]hotset serve /models/GLM-5.1 --load-format dummy[/bold]  random weights, to try a set-up\n\n"
    "[bold]hotset serve /models/GLM-5.1 --disaggregate 1P1D[/bold]  prefill and decode in processes of their own",
)
@with_flags(EngineConfig, ServeConfig, without=("model",))
def serve(
    model: Annotated[str, typer.Argument(help="Model directory, .gguf file, or 'embedded'.")] = EMBEDDED,
    disaggregate: Annotated[
        str | None,
        typer.Option(help="Like '1P1D': so many prefill and decode workers, and a router, all on this machine."),
    ] = None,
    **values: Any,
) -> None:
    """Serve a model over the OpenAI API."""
    serve_config = ServeConfig(**given(ServeConfig, values))
    if disaggregate is not None:
        raise typer.Exit(_serve_apart({**values, "model": model}, serve_config, disaggregate))
    engine_config = EngineConfig(**given(EngineConfig, {**values, "model": model}))
    from hotset.engine.process import EngineProcess

    process = EngineProcess(engine_config)  # loads the model while this process imports its own half
    try:
        with _serve_packages("server"):
            from hotset.serve.server import run
    except BaseException:
        process.end(0.0)
        raise
    raise typer.Exit(run(engine_config, serve_config, process))


def _serve_apart(values: dict[str, Any], serve_config: ServeConfig, layout: str) -> int:
    if values["role"] != "both":
        raise ConfigError("--disaggregate starts workers of both roles; leave --role out")
    of_all = {"handoff_secret": secrets.token_hex(16)} | given(EngineConfig, {**values, "role": "prefill"})
    with _serve_packages("server"):
        from hotset.cli.disaggregate import Layout, run
    return run(EngineConfig(**of_all), serve_config, Layout.parse(layout))


@app.command(
    cls=RouterCommand,
    epilog="[bold]hotset router --prefill http://a:8001 --decode http://b:8001 http://c:8001 --api-key KEY[/bold]\n\n"
    "Workers are started with [bold]hotset serve MODEL --role prefill[/bold] or [bold]decode[/bold]; later ones join "
    "by [bold]POST /workers[/bold] and leave by [bold]DELETE /workers[/bold], with the API key and "
    '{"url": "http://host:port"}.',
)
@with_flags(RouterConfig, without=("prefill", "decode"))
def router(
    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL...", help="Prefill workers.", show_default=False)
    ] = None,
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL...", help="Decode workers.", show_default=False)
    ] = None,
    **values: Any,
) -> None:
    """Answer the OpenAI API with prefill and decode workers."""
    urls = {"prefill": tuple(prefill or ()), "decode": tuple(decode or ())}
    config = RouterConfig(**given(RouterConfig, {**values, **urls}))
    with _serve_packages("router"):
        from hotset.serve.router.server import run
    raise typer.Exit(run(config))


@contextmanager
def _serve_packages(who: str) -> Iterator[None]:
    """Around imports: a package of the `serve` extra that is missing is named with the command that adds it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing.partition(".")[0] not in SERVE_PACKAGES:
            raise
        raise MissingDependency(f'the {who} needs {missing}; run: pip install "hotset[serve]"') from error


@app.command(
    cls=Command,
    epilog='[bold]hotset generate "The capital of France is" --temperature 0[/bold]\n\n'
    "[bold]cat notes.txt | hotset generate - --max-tokens 64 --json[/bold]",
)
@with_flags(EngineConfig, without=("seed", *OF_SERVERS))  # with a single request, --seed is that request's own
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; '-' reads it from standard input.")],
    max_tokens: Annotated[int, typer.Option(help="Longest continuation, in tokens.")] = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Annotated[int | None, typer.Option(help="Makes the draws repeatable.")] = None,
    as_json: AsJson = False,
    **values: Any,
) -> None:
    """Continue a text and stream the continuation to standard output."""
    wanted = _wanted(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    text = read_stdin() if prompt == "-" else prompt
    with _open_llm(values) as llm:
        params = SamplingParams(**{**llm.defaults, **wanted})
        if as_json:
            _print_json(_generated(llm, text, params))
        elif print_stream(llm.stream(text, params)).finish_reason == "abort":
            raise typer.Exit(INTERRUPTED)


def _generated(llm: "LLM", text: str, params: SamplingParams) -> dict[str, object]:
    request = llm.generate([text], params)[0]
    answer = request.outputs[0]
    usage = {"prompt_tokens": len(request.prompt_token_ids), "completion_tokens": len(answer.token_ids)}
    return {"prompt": text, "text": answer.text, "finish_reason": answer.finish_reason, "usage": usage}


@app.command(
    cls=Command,
    epilog=f'Inside: {COMMANDS}; {KEYS}.\n\n[bold]hotset chat --system "Answer in French." --temperature 0[/bold]',
)
@with_flags(EngineConfig, without=OF_SERVERS)
def chat(
    system: Annotated[str | None, typer.Option(help="System message at the start.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer, in tokens. Default: what fits.")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    **values: Any,
) -> None:
    """Talk to a model in this terminal."""
    wanted = _wanted(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    with _open_llm(values) as llm:
        params = SamplingParams(**{**llm.defaults, "max_tokens": None, **wanted})
        if sys.stdin.isatty():
            remark(f"{COMMANDS}; {KEYS}")
        Conversation(llm, params, system).run(typed_lines())


@app.command(cls=Command)
def info(as_json: AsJson = False) -> None:
    """Show versions, devices, memory, and what is missing with the command that adds it."""
    machine = examine()
    if as_json:
        _print_json(asdict(machine))
    else:
        print_machine(machine)


def _wanted(**values: Any) -> dict[str, Any]:
    """Sampling options that were given. RequestError for a wrong one now, not after the model has loaded."""
    options = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**options)
    return options


@contextmanager
def _open_llm(values: dict[str, Any]) -> Iterator["LLM"]:
    config = EngineConfig(**given(EngineConfig, values))
    from hotset.engine.llm import LLM

    with closing(LLM(**asdict(config), progress=sys.stderr.isatty())) as llm:
        yield llm


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
