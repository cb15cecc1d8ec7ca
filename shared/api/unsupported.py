"""Fields of OpenAI's and vLLM's APIs that would change an answer and are refused by name."""

from collections.abc import Container, Mapping
from typing import Any

import msgspec

from shared.contracts.errors import ContractError

WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "logprobs": (False,),
    "min_p": (0, 0.0),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "n": (1,),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Field -> values with the same meaning as a missing field; null always has this meaning."""

UnsupportedFields = msgspec.defstruct(
    "UnsupportedFields", [(name, Any, None) for name in WITHOUT_EFFECT], frozen=True
)
"""Fields of a body that are not supported; decoding skips all other fields."""


def refuse_unsupported(fields: msgspec.Struct, *, but: Container[str] = ()) -> None:
    """
    Check that the body sets none of the fields that are not supported.

    Args:
        fields: The body, decoded as `UnsupportedFields`.
        but: Fields that the caller supports.

    Raises:
        ContractError: The body sets such a field; the message names the field.
    """
    for name, accepted in WITHOUT_EFFECT.items():
        value = getattr(fields, name)
        # Compared by type as well: `logprobs: 0` requests log-probabilities, `false` does not.
        if (
            value is None
            or name in but
            or any(type(value) is type(each) and value == each for each in accepted)
        ):
            continue
        only = f"; only {msgspec.json.encode(accepted[0]).decode()} is accepted" if accepted else ""
        raise ContractError(
            f"{name} is not supported{only}", code="unsupported_parameter", param=name
        )
