"""Renders chat templates in processes that are killed if they take too long.

Templates come with models and are programs. One that never ends, or that fills the memory, must not stop the server.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hotset.base.errors import CheckpointError, RequestError
from hotset.base.fork_server import START_SECONDS, WAIT_FACTOR, JobFailed
from hotset.base.job_pool import JobPool
from hotset.base.units import MIB

RENDER_SECONDS = 5.0  # of CPU time
MAX_TEMPLATE_BYTES = 512 * MIB  # address space of the process that compiles the template, and of a job on top of that


class TemplateRenderer:
    """Renders one chat template in the workers of `jobs`, which also run other jobs. `close` ends them."""

    def __init__(
        self, template: str, special_tokens: Mapping[str, str], source: str, seconds: float = RENDER_SECONDS
    ) -> None:
        """Raises `CheckpointError`, whose message names `source`, if the template does not compile within its limits.

        `seconds` is the limit for the CPU time of each rendering.
        """
        self._seconds = seconds
        self.jobs = JobPool(MAX_TEMPLATE_BYTES)
        try:
            self.jobs.prepare(
                "template",
                "hotset.models.chat_template:ChatTemplate",
                {"template": template, "special_tokens": dict(special_tokens)},
                cpu_seconds=START_SECONDS,
                memory_bytes=MAX_TEMPLATE_BYTES,
            )
        except JobFailed as error:
            self.close()
            raise CheckpointError(f"{source}: the chat template is broken: it {error}") from error
        except RequestError as error:
            self.close()
            raise CheckpointError(f"{source}: the chat template is broken: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Returns the prompt. Waits while all workers have jobs. `variables` are those of the template other than
        `messages` and the special tokens.

        Raises `RequestError` if the template refuses the messages, fails on them, or exceeds its limits.
        """
        arguments = {"messages": [dict(message) for message in messages], "variables": dict(variables or {})}
        try:
            wall_seconds = WAIT_FACTOR * self._seconds
            return str(self.jobs.run("hotset.models.chat_template:render", arguments, self._seconds, wall_seconds))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages must consist of JSON values: {error}", param="messages") from error
        except RequestError as refusal:
            raise RequestError(f"the chat template refuses these messages: {refusal}", param="messages") from refusal
        except JobFailed as failure:
            message = f"the chat template {failure} on these messages; send a prompt instead, or repair the template"
            raise RequestError(message, param="messages", code="chat_template_failed") from failure

    def close(self) -> None:
        """Kills all workers. A rendering in progress fails. Idempotent."""
        self.jobs.close()
