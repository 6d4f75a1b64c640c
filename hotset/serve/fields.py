"""The one table of request fields that Hotset does not implement but clients send.

The bodies in `protocol.py`, `responses_api` and `messages_api` declare the fields that Hotset implements. This table
holds all other fields of the OpenAI API, of Anthropic's messages, of vLLM and of SGLang (as of August 2026), and
some of llama.cpp, Ollama and OpenRouter. For every field:

- null counts as not sent, even for an unknown field;
- a hint, which cannot change the answer, is ignored;
- a value that asks for nothing (a default, an empty list) is accepted;
- any other value would change the answer, so the request is refused with the name of the field and what to use instead;
- a name that is not in the table is refused with the nearest known name, because a misspelt field would change the
  answer too.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hotset.base.errors import UnsupportedField
from hotset.base.settings import nearest

MAX_NAME_CHARACTERS = 64  # a longer name is no misspelling of a field, and comparing it would take long
LIST = "docs/api.md and /docs list the fields"

# Hints, and why ignoring them leaves the answer as it is.
IGNORED: Mapping[str, str] = {
    # OpenAI
    "user": "names the end user",
    "safety_identifier": "names the end user",
    "metadata": "labels a stored completion, and nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one tier of service",
    "prompt_cache_key": "a hint for a cache of prompts",
    "prompt_cache_options": "a hint for a cache of prompts",
    "prompt_cache_retention": "a hint for a cache of prompts",
    "parallel_tool_calls": "matters only with tools",
    "reasoning_effort": "matters only in /v1/chat/completions",
    "verbosity": "a hint for the length of the answer",
    "max_tool_calls": "limits the tools that a server runs, and this one runs none",
    "client_metadata": "labels the request (Codex)",
    # Anthropic
    "billing_policy": "nobody is billed",
    "cache_control": "the prefix cache needs no marks",
    "diagnostics": "a hint for debugging",
    "user_profile_id": "names the end user",
    "workspace_id": "names the workspace",
    # vLLM and SGLang
    "priority": "requests are served in the order of their arrival",
    "request_id": "send the header x-request-id instead",
    "rid": "send the header x-request-id instead",
    "session_id": "names the session",
    "custom_labels": "labels for metrics",
    "spaces_between_special_tokens": "concerns tokenizers that are not used",
    "stream_interval": "chunks are sent as they are generated",
    "data_parallel_rank": "the server chooses the worker",
    "routed_dp_rank": "the server chooses the worker",
    "disagg_prefill_dp_rank": "the router chooses the worker",
    # Others
    "cache_prompt": "a hint for a cache of prompts (llama.cpp)",
    "id_slot": "the server chooses the slot (llama.cpp)",
    "timings_per_token": "/metrics has the timings (llama.cpp)",
    "keep_alive": "the model stays loaded (Ollama)",
    "ttl": "the model stays loaded (LM Studio)",
    "num_ctx": "--max-model-len sets the context (Ollama)",
    "usage": "stream_options.include_usage asks for the usage of a stream (OpenRouter)",
    "provider": "there is one provider (OpenRouter)",
    "route": "there is one model (OpenRouter)",
    "transforms": "prompts are not transformed (OpenRouter)",
    "chat_id": "names the conversation (Open WebUI)",
}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field that would change the answer, unless it has one of `values`. `advice` says what to use instead."""

    advice: str
    values: tuple[Any, ...] = ()

    def accepts(self, value: Any) -> bool:
        return value is None or any(_same(value, accepted) for accepted in self.values)

    @property
    def shown(self) -> str:
        """The accepted values as JSON."""
        return " or ".join(json.dumps(value) for value in (*self.values, None))


def _same(value: Any, other: Any) -> bool:
    """Compares JSON values. Unlike in Python, true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


_USE_STRUCTURED_OUTPUTS = "use structured_outputs"
_TEXT_ONLY = "the model reads and writes text only"
_NO_BEAMS = "beam search is not implemented; use n and temperature"
_TEMPLATE_KWARGS = "set it in chat_template_kwargs, or use reasoning_effort"
_IN_CHAT = "/v1/chat/completions has it"
_NO_SAMPLER = "this sampler is not implemented; use temperature, top_k, top_p and min_p"
_ONE_MODEL = "a server has one model and no adapters; start another server"
_NO_EXTRAS = "the answer cannot contain it"
_USE_LOGIT_BIAS = "use logit_bias with token ids"
_USE_MAX_TOKENS = "use max_tokens"
_USE_ROUTER = "send the request to a router (hotset router), which arranges handoffs"

UNSUPPORTED: Mapping[str, Unsupported] = {
    # OpenAI
    "tools": Unsupported(_IN_CHAT, ([],)),
    "tool_choice": Unsupported(_IN_CHAT, ("none", "auto")),
    "functions": Unsupported("use tools", ([],)),
    "function_call": Unsupported("use tool_choice", ("none", "auto")),
    "modalities": Unsupported(_TEXT_ONLY, (["text"],)),
    "audio": Unsupported(_TEXT_ONLY),
    "prediction": Unsupported("predicted output is not implemented; leave it out, the answer is the same"),
    "moderation": Unsupported("texts are not moderated; use a moderation service"),
    "web_search_options": Unsupported("the server searches nothing; put what you found into a message"),
    "suffix": Unsupported(
        "infilling is not implemented; write the model's own infilling tokens into the prompt", ("",)
    ),
    "previous_response_id": Unsupported("nothing is stored; send the earlier items in input"),
    "conversation": Unsupported("nothing is stored; send the earlier items in input"),
    "background": Unsupported("nothing is stored, so a response could not be fetched later; use stream", (False,)),
    "truncation": Unsupported("a conversation is never cut; leave out old items yourself", ("disabled",)),
    "prompt": Unsupported("/v1/completions has it; other endpoints have messages, or input"),
    "context_management": Unsupported("conversations are not edited; leave out old items yourself", ([],)),
    "image": Unsupported(_TEXT_ONLY, ({},)),
    "access_programs": Unsupported("there are no such programs; leave it out", ({},)),
    # Anthropic
    "container": Unsupported("the server runs no tools"),
    "mcp_servers": Unsupported("the server runs no tools; connect to them yourself and send their tools", ([],)),
    "inference_geo": Unsupported("the server computes where it runs"),
    "speed": Unsupported("there is one speed", ("standard",)),
    "compaction": Unsupported("conversations are not summarized; ask the model for a summary"),
    "fallbacks": Unsupported("a server has one model", ([],)),
    "fallback_credit_token": Unsupported("a server has one model"),
    # vLLM and SGLang
    "echo": Unsupported("/v1/completions has it", (False,)),
    "use_beam_search": Unsupported(_NO_BEAMS, (False,)),
    "length_penalty": Unsupported(_NO_BEAMS, (1.0,)),
    "early_stopping": Unsupported(_NO_BEAMS, (False,)),
    "best_of": Unsupported("use n", (1,)),
    "bad_words": Unsupported(_USE_LOGIT_BIAS, ([],)),
    "allowed_token_ids": Unsupported(_USE_LOGIT_BIAS),
    "logits_processors": Unsupported(_USE_LOGIT_BIAS, ([],)),
    "custom_logit_processor": Unsupported(_USE_LOGIT_BIAS),
    "custom_params": Unsupported(_USE_LOGIT_BIAS, ({},)),
    "logprob_token_ids": Unsupported("use logprobs, or top_logprobs"),
    "return_tokens_as_token_ids": Unsupported("use return_token_ids", (False,)),
    "return_prompt_token_ids": Unsupported("use return_token_ids", (False,)),
    "return_token_offsets": Unsupported("/v1/completions with logprobs has text_offset", (False,)),
    "return_prompt_text": Unsupported("/detokenize returns the text of prompt_token_ids", (False,)),
    "return_hidden_states": Unsupported(_NO_EXTRAS, (False,)),
    "return_routed_experts": Unsupported(_NO_EXTRAS, (False,)),
    "return_cached_tokens_details": Unsupported(_NO_EXTRAS, (False,)),
    "return_spec_tokens_details": Unsupported(_NO_EXTRAS, (False,)),
    "return_meta_info": Unsupported(_NO_EXTRAS, (False,)),
    "return_sampling_mask": Unsupported(_NO_EXTRAS, (False,)),
    "return_assistant_tokens_mask": Unsupported(_NO_EXTRAS, (False,)),
    "return_token_strs": Unsupported("use /detokenize", (False,)),
    "routed_experts_prompt_start": Unsupported(_NO_EXTRAS, (0,)),
    "routed_experts_start_len": Unsupported(_NO_EXTRAS, (0,)),
    "no_stop_trim": Unsupported("use include_stop_str_in_output", (False,)),
    "stop_regex": Unsupported("use stop"),
    "guided_json": Unsupported(_USE_STRUCTURED_OUTPUTS),
    "guided_regex": Unsupported(_USE_STRUCTURED_OUTPUTS),
    "guided_choice": Unsupported(_USE_STRUCTURED_OUTPUTS),
    "guided_grammar": Unsupported(_USE_STRUCTURED_OUTPUTS),
    "guided_decoding_backend": Unsupported(_USE_STRUCTURED_OUTPUTS),
    "guided_whitespace_pattern": Unsupported(_USE_STRUCTURED_OUTPUTS),
    "json_schema": Unsupported(_USE_STRUCTURED_OUTPUTS),
    "regex": Unsupported(_USE_STRUCTURED_OUTPUTS),
    "ebnf": Unsupported(_USE_STRUCTURED_OUTPUTS),
    "grammar": Unsupported(_USE_STRUCTURED_OUTPUTS, ("",)),
    "repetition_detection": Unsupported("use repetition_penalty"),
    "thinking_token_budget": Unsupported(_USE_MAX_TOKENS),
    "truncation_side": Unsupported("the beginning of a prompt is cut; cut its end yourself", ("left",)),
    "documents": Unsupported("put the documents into messages", ([],)),
    "mm_processor_kwargs": Unsupported(_TEXT_ONLY, ({},)),
    "media_io_kwargs": Unsupported(_TEXT_ONLY, ({},)),
    "images_config": Unsupported(_TEXT_ONLY),
    "video_config": Unsupported(_TEXT_ONLY),
    "max_dynamic_patch": Unsupported(_TEXT_ONLY),
    "min_dynamic_patch": Unsupported(_TEXT_ONLY),
    "use_audio_in_video": Unsupported(_TEXT_ONLY, (False,)),
    "prompt_embeds": Unsupported("send the prompt as text or token ids"),
    "input_ids": Unsupported("send token ids as prompt to /v1/completions"),
    "lora_path": Unsupported(_ONE_MODEL),
    "session_params": Unsupported("send the whole conversation"),
    "task": Unsupported("put it into a message"),
    "vllm_xargs": Unsupported("nothing reads it; leave it out", ({},)),
    "kv_transfer_params": Unsupported(_USE_ROUTER, ({},)),
    "ec_transfer_params": Unsupported(_USE_ROUTER, ({},)),
    "bootstrap_host": Unsupported(_USE_ROUTER),
    "bootstrap_port": Unsupported(_USE_ROUTER),
    "bootstrap_room": Unsupported(_USE_ROUTER),
    "nvext": Unsupported("send its members as fields of their own", ({},)),
    # Names that other servers use for fields that Hotset has.
    "extra_key": Unsupported("use cache_salt"),
    "max_new_tokens": Unsupported(_USE_MAX_TOKENS),
    "max_output_tokens": Unsupported(_USE_MAX_TOKENS),
    "max_gen_toks": Unsupported(_USE_MAX_TOKENS),
    "n_predict": Unsupported(_USE_MAX_TOKENS),
    "num_predict": Unsupported(_USE_MAX_TOKENS),
    "max_completion_tokens": Unsupported(_USE_MAX_TOKENS),
    "min_new_tokens": Unsupported("use min_tokens", (0,)),
    "top_logprobs": Unsupported("/v1/chat/completions has it, and /v1/completions has logprobs", (0,)),
    "repeat_penalty": Unsupported("use repetition_penalty", (1.0,)),
    "rep_pen": Unsupported("use repetition_penalty", (1.0,)),
    "do_sample": Unsupported("use temperature 0", (True,)),
    "num_beams": Unsupported(_NO_BEAMS, (1,)),
    "num_return_sequences": Unsupported("use n", (1,)),
    "stop_sequences": Unsupported("use stop", ([],)),
    "until": Unsupported("use stop", ([],)),
    "options": Unsupported("send its members as fields of their own", ({},)),
    "models": Unsupported(_ONE_MODEL, ([],)),
    "input": Unsupported("/v1/responses has it; other endpoints have messages, or prompt"),
    "inputs": Unsupported("use prompt"),
    "images": Unsupported(_TEXT_ONLY, ([],)),
    "image_data": Unsupported(_TEXT_ONLY, ([],)),
    # Samplers of llama.cpp and others.
    "mirostat": Unsupported(_NO_SAMPLER, (0,)),
    "typical_p": Unsupported(_NO_SAMPLER, (1.0,)),
    "tfs_z": Unsupported(_NO_SAMPLER, (1.0,)),
    "tfs": Unsupported(_NO_SAMPLER, (1.0,)),
    "top_a": Unsupported(_NO_SAMPLER, (0,)),
    "dynatemp_range": Unsupported(_NO_SAMPLER, (0,)),
    "dry_multiplier": Unsupported(_NO_SAMPLER, (0,)),
    "xtc_probability": Unsupported(_NO_SAMPLER, (0,)),
    "samplers": Unsupported(_NO_SAMPLER),
    # Reasoning
    "thinking": Unsupported(_TEMPLATE_KWARGS),
    "enable_thinking": Unsupported(_TEMPLATE_KWARGS),
    "think": Unsupported(_TEMPLATE_KWARGS),
    "thinking_budget": Unsupported(_USE_MAX_TOKENS),
    "reasoning": Unsupported(_TEMPLATE_KWARGS, ({},)),
    "include_reasoning": Unsupported(_IN_CHAT, (True,)),
    "separate_reasoning": Unsupported("reasoning is separate in models that mark it; use include_reasoning", (True,)),
    "stream_reasoning": Unsupported("reasoning is streamed as it is generated", (True,)),
    "add_generation_prompt": Unsupported(_IN_CHAT, (True,)),
    "continue_final_message": Unsupported(_IN_CHAT, (False,)),
    "chat_template_kwargs": Unsupported(_IN_CHAT, ({},)),
    "chat_template": Unsupported("a template is a program; start the server with --chat-template"),
}

# Keys of a message. All others are ignored, because clients send back what they received.
UNSUPPORTED_IN_MESSAGES: Mapping[str, Unsupported] = {
    "function_call": Unsupported("use tool_calls"),
    "audio": Unsupported(_TEXT_ONLY),
    "prefix": Unsupported("use continue_final_message", (False,)),
    "partial": Unsupported("use continue_final_message", (False,)),
}


def implemented_fields(body: Mapping[str, Any], implemented: Collection[str]) -> dict[str, Any]:
    """Returns the fields of a request body that Hotset implements, without those that are null.

    Raises UnsupportedField for the first field that must not be ignored.
    """
    for name, value in body.items():
        if name in implemented or name in IGNORED or value is None:
            continue
        if (entry := UNSUPPORTED.get(name)) is None:
            raise UnsupportedField(_unknown(name, implemented), param=name)
        if not entry.accepts(value):
            raise UnsupportedField(unsupported_message(name, entry), param=name)
    return {name: value for name, value in body.items() if name in implemented and value is not None}


def unsupported_message(name: str, entry: Unsupported) -> str:
    exception = f", except as {entry.shown}" if entry.values else ""
    return f"{name} is not supported{exception}; {entry.advice}"


def _unknown(name: str, implemented: Iterable[str]) -> str:
    known = {*implemented, *IGNORED, *UNSUPPORTED}
    match = nearest(name, known) if len(name) <= MAX_NAME_CHARACTERS else None
    return f"{name} is not a field of this endpoint; " + (f"did you mean {match}?" if match else LIST)
