"""Tokenizer of the tiny models: byte-level BPE, trained on text generated in this file."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 512
SPECIAL_TOKENS = (
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
)
"""Special tokens; the id of a token is its position in this tuple."""
BOS_ID = SPECIAL_TOKENS.index("<|bos|>")
EOS_IDS = (SPECIAL_TOKENS.index("<|eos|>"), SPECIAL_TOKENS.index("<|end|>"))
IMAGE_TOKENS = (
    "<fake_token_around_image>",
    "<image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
)
"""Tokens after those of all models, in the vocabulary of models that read images."""
IMAGE_ID = VOCAB_SIZE + IMAGE_TOKENS.index("<image>")

_CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- set role = 'system' if message['role'] == 'developer' else message['role'] %}
    {{- '<|' + role + '|>' + message['content'] + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""

_IMAGE_CHAT_TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- set role = 'system' if message['role'] == 'developer' else message['role'] %}
    {{- '<|' + role + '|>' }}
    {%- if message['content'] is string %}{{ message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- '<image>' if part['type'] == 'image' else part['text'] }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""

_OPENINGS = ("The queue", "A request", "Our engine", "This tenant", "Every token", "The planner")
_VERBS = ("waits for", "is served by", "overtakes", "shares", "measures", "returns to", "leaves")
_SYLLABLES = ("ba", "cor", "den", "fi", "gra", "lo", "mer", "ni", "pel", "qua", "ro", "sti", "tu")
_ENDINGS = (".", "!", ", because time is short.", " - and then once more.", "?\n", ":\n  1, 2, 3\n")


def _sentences(count: int) -> Iterator[str]:
    chance = random.Random(7)  # noqa: S311 - made-up text, no secret
    for _ in range(count):
        words = (
            "".join(chance.choices(_SYLLABLES, k=chance.randint(1, 3)))
            for _ in range(chance.randint(1, 5))
        )
        opening, verb = chance.choice(_OPENINGS), chance.choice(_VERBS)
        yield f"{opening} {verb} {' '.join(words)}{chance.choice(_ENDINGS)}"


def train_tokenizer() -> tokenizers.Tokenizer:
    """Train a tokenizer of `VOCAB_SIZE` entries that can encode any text; deterministic."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(2000), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", BOS_ID)]
    )
    return tokenizer


@cache
def _trained() -> str:
    """The tokenizer of all tiny models of this process: training takes longer than all the rest."""
    return train_tokenizer().to_str()


def write_tokenizer(directory: Path, *, reads_images: bool = False) -> None:
    """
    Write `tokenizer.json` and `tokenizer_config.json`, with a chat template.

    Args:
        directory: Directory of the model.
        reads_images: True to add the tokens of images to the vocabulary and to the template.
    """
    tokenizer = tokenizers.Tokenizer.from_str(_trained())
    if reads_images:
        tokenizer.add_special_tokens(list(IMAGE_TOKENS))
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "chat_template": _IMAGE_CHAT_TEMPLATE if reads_images else _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(config), indent=2)
    )
