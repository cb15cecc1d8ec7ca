"""Directories of tiny models in the formats of several makers."""

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from shared.models.tiny_tokenizer import SPECIAL_TOKENS, train_tokenizer

TOOLS_TEMPLATE = """{%- if tools %}<|system|># Tools
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>
Answer with <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call><|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
POOLING = {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 128}


def _written(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def _without_tokenizer(source: Path, target: Path) -> Path:
    """A copy of the model in *source* with its configuration and weights only."""
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, target / name)
    return target


def with_vocabulary_and_merges(source: Path, target: Path) -> Path:
    """The format of GPT-2: `vocab.json` and `merges.txt`."""
    made = json.loads(train_tokenizer().to_str())["model"]
    directory = _without_tokenizer(source, target)
    _written(directory / "vocab.json", made["vocab"])
    merges = "\n".join(" ".join(pair) for pair in made["merges"])
    (directory / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    pad, bos, eos, *more = SPECIAL_TOKENS
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": bos, "eos_token": eos,
              "pad_token": pad, "unk_token": pad, "additional_special_tokens": more}  # fmt: skip
    _written(directory / "tokenizer_config.json", config)
    return directory


def with_sentencepiece(source: Path, target: Path) -> Path:
    """The format of Llama 2: `tokenizer.model`."""
    import sentencepiece  # noqa: PLC0415 - installed with vLLM

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=_sentences(), model_writer=model, vocab_size=400, model_type="bpe",
        byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    directory = _without_tokenizer(source, target)
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>",
              "unk_token": "<unk>", "add_bos_token": True}  # fmt: skip
    _written(directory / "tokenizer_config.json", config)
    return directory


def with_tools(source: Path, target: Path) -> Path:
    """The format of Qwen 2.5: a template with tools in a file of its own."""
    shutil.copytree(source, target)
    (target / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    return target


def embedder(source: Path, target: Path) -> Path:
    """The format of sentence-transformers."""
    shutil.copytree(source, target)
    places = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [
        {"idx": idx, "name": str(idx), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, (kind, path) in enumerate(places.items())
    ]
    _written(target / "modules.json", modules)
    _written(target / "1_Pooling" / "config.json", POOLING)
    return target


def _sentences() -> Iterator[str]:
    tokenizer = train_tokenizer()
    for first in range(200):
        yield tokenizer.decode([8 + (first * 7 + step * 13) % 500 for step in range(60)])
